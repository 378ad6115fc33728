"""Notes on the fields of a request that have no effect, found in the whole validated body.

Every object of a request is an `OpenModel`, which names its unused fields. A note has the path of the first place. An
agent with a hundred tools would otherwise fill the notes with one field.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, Final

from unisono.api.field_types import OpenModel
from unisono.api.request_options import without_effect

# Histories are read item by item, with notes of their own.
HISTORIES: Final = frozenset({"messages", "input", "system"})
_INDEX: Final = re.compile(r"\.\d+(?=\.|$)")


def notes_on_unused(request: OpenModel, skipped: Collection[str] = HISTORIES) -> Iterator[str]:
    """Yield a note on each unused field of a request and of the objects in it.

    The fields in `skipped` are not read.
    """
    places: dict[str, list[str]] = {}
    for note in _notes(request, "", skipped):
        path = note.partition(":")[0]
        places.setdefault(_INDEX.sub("", path), []).append(note)
    for notes in places.values():
        more = len(notes) - 1
        yield f"{notes[0]}, also at {more} more {'place' if more == 1 else 'places'}" if more else notes[0]


def _notes(model: OpenModel, path: str, skipped: Collection[str] = ()) -> Iterator[str]:
    yield from without_effect(path, model.unused())
    for name, value in model.__dict__.items():
        if isinstance(value, OpenModel | list | dict) and name not in skipped:
            step = "" if name in model.FLATTENED else f"{type(model).model_fields[name].alias or name}."
            yield from _notes_within(value, f"{path}{step}")


def _notes_within(value: Any, path: str) -> Iterator[str]:
    """Yield the notes on an object, or on the objects in a list or a map.

    `path` is empty or ends with a dot.
    """
    if isinstance(value, OpenModel):
        yield from _notes(value, path)
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, OpenModel):
            yield from _notes(inner, f"{path}{str(key)[:64]}.")
