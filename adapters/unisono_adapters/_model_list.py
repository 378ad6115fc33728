"""Served models and their context windows, from a server's OpenAI-compatible model list."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from unisono.core.probe import Check, Finding, Probe
from unisono.errors import BackendProtocolError
from unisono_adapters._http import BackendHttp
from unisono_adapters._probe import Subject, examine

_NAME: Final = re.compile(r"[\w.:-]+(?:/[\w.:-]+)?")


async def model_list(wire: BackendHttp) -> Mapping[str, int | None]:
    """Return the names of the served models, and the context window of each.

    A context window is in tokens, or None if it is unknown. Raises BackendError or a subclass.
    """
    listed = await wire.get_json("v1/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list):
        raise BackendProtocolError("the backend's model list has an unknown format")
    lengths: dict[str, int | None] = {}
    for model in models:
        if isinstance(model, dict) and isinstance(name := model.get("id"), str):
            length = model.get("max_model_len")
            lengths[name] = length if type(length) is int and length > 0 else None
    return lengths


async def examine_served(subject: Subject, model: str, served: Collection[str]) -> Probe:
    """Probe a backend that serves the models `served`.

    If `model` is not one of these models, the only finding is that it is not served, and nothing else is checked.
    """
    if model not in served:
        return Probe(subject.claims, (replace(_not_served(served), remedy=subject.remedies.get(Check.MODEL, "")),))
    found = await examine(subject)
    return replace(found, findings=(Finding(Check.MODEL, ok=True), *found.findings))


def _not_served(served: Iterable[str]) -> Finding:
    """Return the finding that the configured model is not served.

    The finding lists up to three served models. Names that look like file paths are left out.
    """
    names = [name for name in served if _NAME.fullmatch(name)]
    detail = f"It does not serve the configured model. It serves: {', '.join(names[:3])}." if names else ""
    return Finding(Check.MODEL, ok=False, detail=detail)
