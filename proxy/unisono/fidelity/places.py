"""Places of an answer's tokens: the kind of message, and the part of it, of each token."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from unisono.core.generation import CALL, CHANNEL, CONSTRAIN, END, FIRST_SPECIAL, MESSAGE, RETURN, START
from unisono.harmony.encoding import Encoding


class Place(StrEnum):
    # Special tokens.
    MARKER = "marker"
    # Roles, channels, recipients and content types.
    HEADER = "header"
    ANALYSIS = "analysis"
    COMMENTARY = "commentary"
    FINAL = "final"
    # Body of a message on an unknown channel, or without a channel.
    OTHER = "other"


BODIES = (Place.ANALYSIS, Place.COMMENTARY, Place.FINAL)
# Markers that a header follows.
HEADER_FOLLOWS = frozenset({START, CHANNEL, CONSTRAIN, END, RETURN, CALL})


def places_of(encoding: Encoding, tokens: Sequence[int], before: Sequence[int] = ()) -> list[Place]:
    """Return the place of each token of an answer. `before` are the last tokens of its prompt."""
    begin = max((at for at, token in enumerate(before) if token == START), default=0)
    known = [*before[begin:], *tokens]
    places: list[Place] = []
    header: list[int] = []
    body: Place | None = None
    for token in known:
        if token < FIRST_SPECIAL:
            places.append(body or Place.HEADER)
            if body is None:
                header.append(token)
            continue
        places.append(Place.MARKER)
        if token == MESSAGE:
            body = _body_of(encoding.decode(header))
            header = []
        elif token in HEADER_FOLLOWS:
            body = None
            # The channel or the recipient follows these markers; `<|constrain|>` only continues the header.
            header = [] if token != CONSTRAIN else header
    return places[len(known) - len(tokens) :]


def _body_of(header: str) -> Place:
    first = header.split(maxsplit=1)[:1]
    return next((place for place in BODIES if first == [place.value]), Place.OTHER)
