"""Notes in an answer on request fields that were accepted without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unisono.engine.request import GenerationRequest

MAX_NOTES = 32
# Values of fields without effect that need no note, because they request nothing.
SILENT: tuple[Any, ...] = (None, False, "", [], {})


def without_effect(prefix: str, fields: Mapping[str, Any]) -> Iterator[str]:
    return (f"{prefix}{name[:64]}: no effect" for name, value in fields.items() if value not in SILENT)


def notes_on_prefill(request: GenerationRequest, fields: Mapping[str, object]) -> Iterator[str]:
    """Yield notes on fields that have no effect because the client started the answer itself."""
    if request.conversation.prefill is not None:
        yield from (
            f"{name}: no effect, because the client started the answer" for name, value in fields.items() if value
        )
