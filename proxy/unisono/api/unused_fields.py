"""Notes on the fields of a request that have no effect, for the answer.

Every object in a request is an `OpenModel`, which names its unused fields. If the same field is unused in several
entries of a list, only one note reports it, with the path of the first entry. Otherwise an agent with a hundred tools
would fill the notes with one field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from types import NoneType
from typing import Any, Final

from unisono.api.field_types import OpenModel
from unisono.engine.request import ForcedCalls, GenerationRequest

MAX_NOTES = 32


def without_effect(prefix: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes that the fields have no effect; `prefix` precedes each name in its path.

    Every value except null causes a note, even `false`, 0 and empty values, because these also request something.
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
    """Return the paths of the fields that the notes are about, without duplicates."""
    found = map(_NOTED_FIELD.match, notes)
    return list(dict.fromkeys(match[1] for match in found if match is not None))


def notes_on_prefill(request: GenerationRequest, *, choice_at: str, form_at: str) -> Iterator[str]:
    """Yield notes on requirements that have no effect because the client began the answer.

    `choice_at` is the path of the field for the tool choice, and `form_at` the path of the field for the answer's form.
    """
    if request.conversation.prefill is None:
        return
    if isinstance(request.answer.choice, ForcedCalls):
        yield f"{choice_at}: no call is required, because the client started the answer"
    if request.answer.form is not None:
        yield f"{form_at}: no effect, because the client started the answer"


# Fields with the history. Their items are converted one by one, which adds notes on unused fields of the items.
HISTORIES: Final = frozenset({"messages", "input", "system"})
_INDEX: Final = re.compile(r"\.\d+(?=\.|$)")
# Types of most values, which cannot contain objects. These values are skipped, so that the search of a request with a
# hundred tools takes a millisecond.
_PLAIN: Final = frozenset({NoneType, str, int, float, bool})


def notes_on_unused(request: OpenModel, skipped: Set[str] = HISTORIES) -> Iterator[str]:
    """Yield a note on each unused field of a request and of the objects in it.

    The top-level fields in `skipped` are not searched.
    """
    found: list[str] = []
    _collect(request, "", skipped, found)
    places: dict[str, list[str]] = {}
    for note in found:
        path = note.partition(":")[0]
        places.setdefault(_INDEX.sub("", path), []).append(note)
    for notes in places.values():
        more = len(notes) - 1
        yield f"{notes[0]}, also at {more} more {'place' if more == 1 else 'places'}" if more else notes[0]


def _collect(model: OpenModel, path: str, skipped: Set[str], found: list[str]) -> None:
    """Add notes on the unused fields of an object, and of all objects in it, to `found`.

    `path` is the path of the object; it is empty or ends with a dot.
    """
    if unused := model.unused():
        found += without_effect(path, unused)
    values = model.__dict__
    # Only fields that were sent can contain objects with unknown fields. The set also contains this object's unknown
    # fields, which are not in `values` and therefore skipped.
    sent = [name for name in model.__pydantic_fields_set__ - skipped if type(values.get(name)) not in _PLAIN]
    # Sorted in the order of the fields, because the order of a set varies.
    for name in sorted(sent, key=[*values].index):
        if inner := _objects_in(values[name]):
            step = "" if name in model.FLATTENED else f"{type(model).model_fields[name].alias or name}."
            for key, each in inner:
                _collect(each, f"{path}{step}{key}", frozenset(), found)


def _objects_in(value: Any) -> list[tuple[str, OpenModel]]:
    """Return the objects in a value, each with the part that it adds to the path."""
    if isinstance(value, OpenModel):
        return [("", value)]
    if isinstance(value, list):
        return [(f"{index}.", each) for index, each in enumerate(value) if isinstance(each, OpenModel)]
    # All values of a mapping have the same type, so the first value is enough. A tool's schema contains no objects of
    # this type.
    if isinstance(value, dict) and isinstance(next(iter(value.values()), None), OpenModel):
        return [(f"{str(key)[:64]}.", each) for key, each in value.items()]
    return []
