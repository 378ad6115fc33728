"""Copies of generation requests with changed options, given by name wherever they belong."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from unisono.engine.request import GenerationRequest

GROUPS = ("answer", "origin", "prompt", "routing", "resumption")


def changed(request: GenerationRequest, **options: Any) -> GenerationRequest:
    """Return a copy of a request with options of the request itself or of any of its groups."""
    for group in GROUPS:
        names = {field.name for field in fields(getattr(request, group))} & options.keys()
        if names:
            values = {name: options.pop(name) for name in names}
            options[group] = replace(options.get(group, getattr(request, group)), **values)
    return replace(request, **options)
