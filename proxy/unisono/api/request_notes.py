"""Notes in an answer on fields of the request that were accepted without effect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from unisono.engine.request import GenerationRequest

MAX_NOTES = 32


def without_effect(prefix: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on fields without effect.

    Every value except null causes a note. `false`, 0 and empty values are not ignored, because they request something.
    """
    return (f"{prefix}{name[:64]}: no effect" for name, value in fields.items() if value is not None)


# Key in the request's state for its notes. The header and the metric are made from these notes.
NOTES: Final = "notes"
# Key in the request's state for notes about headers of the request.
HEADER_NOTES: Final = "header_notes"
MAX_HEADER_FIELDS: Final = 16
# A note begins with the path of its field.
_NOTED_FIELD: Final = re.compile(r"([A-Za-z0-9_.-]{1,100}): ")


def noted_fields(notes: Iterable[str]) -> list[str]:
    """Return the paths of the fields that the notes are about, each once."""
    found = map(_NOTED_FIELD.match, notes)
    return list(dict.fromkeys(match[1] for match in found if match is not None))


def notes_on_prefill(request: GenerationRequest, fields: Mapping[str, object]) -> Iterator[str]:
    """Yield notes on fields that have no effect because the client started the answer itself."""
    if request.conversation.prefill is not None:
        yield from (
            f"{name}: no effect, because the client started the answer" for name, value in fields.items() if value
        )
