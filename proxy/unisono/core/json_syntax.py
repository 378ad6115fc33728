"""Whether a text is JSON, without limits on its depth or on the length of its numbers."""

from __future__ import annotations

import json
import re
from typing import Final

_BLANK: Final = re.compile(r"[ \t\n\r]*+")
# A string that is not closed is read to its end once, and then rejected.
_SCALAR: Final = re.compile(
    r""""(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*+(?P<end>")?"""
    r"|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null"
)
_CLOSING: Final = {"[": "]", "{": "}"}


def json_kind(text: str) -> type | None:
    """The Python type of the value that `text` is as JSON, None for text that is not JSON."""
    try:
        # Numbers are not converted: `int` refuses more than 4,300 digits, and needs quadratic time for fewer.
        value = json.loads(text, parse_int=len, parse_float=len, parse_constant=_refuse)
    except RecursionError:
        return _deep_kind(text)
    except ValueError:
        return None
    return type(value)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _deep_kind(text: str) -> type | None:
    """The same for a text of any depth, without recursion."""
    begin = place = _end_of_blanks(text, 0)
    open_: list[str] = []
    while True:
        # A value begins here.
        if text.startswith(("[", "{"), place):
            open_.append(text[place])
            place = _end_of_blanks(text, place + 1)
            if not text.startswith(_CLOSING[open_[-1]], place):
                place = _end_of_name(text, place) if open_[-1] == "{" else place
                if place < 0:
                    return None
                continue
        else:
            place = _end_of_scalar(text, place)
            if place < 0:
                return None
            place = _end_of_blanks(text, place)
        # A value ended here, or a list or an object that is empty.
        while open_ and text.startswith(_CLOSING[open_[-1]], place):
            open_.pop()
            place = _end_of_blanks(text, place + 1)
        if not open_:
            return {"{": dict, "[": list}.get(text[begin], str) if place == len(text) else None
        if not text.startswith(",", place):
            return None
        place = _end_of_blanks(text, place + 1)
        place = _end_of_name(text, place) if open_[-1] == "{" else place
        if place < 0:
            return None


def _end_of_blanks(text: str, place: int) -> int:
    blanks = _BLANK.match(text, place)
    return blanks.end() if blanks is not None else place


def _end_of_scalar(text: str, place: int) -> int:
    """The end of the string, number or literal that begins at `place`, -1 where none does."""
    scalar = _SCALAR.match(text, place)
    if scalar is None or (text.startswith('"', place) and scalar["end"] is None):
        return -1
    return scalar.end()


def _end_of_name(text: str, place: int) -> int:
    """The place of the value of an object's member, -1 where no member begins."""
    end = _end_of_scalar(text, place) if text.startswith('"', place) else -1
    if end < 0:
        return -1
    place = _end_of_blanks(text, end)
    return _end_of_blanks(text, place + 1) if text.startswith(":", place) else -1
