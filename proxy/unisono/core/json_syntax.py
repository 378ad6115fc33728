"""JSON syntax check without limits on the length of numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from unisono.core.conversation import Json
from unisono.errors import well_formed

# Lone surrogates in Python text are replaced, because UTF-8 cannot encode them. They occur in command-line arguments
# and environment variables that are not UTF-8, in JSON escapes, and in strings that other code cut inside a character.


def parsed_json(text: str | bytes) -> Any:
    """Parse JSON from a file or a server.

    Raises ValueError if the JSON is invalid or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_well_formed(text: str) -> bool:
    return text.isascii() or well_formed(text) == text


def all_well_formed(value: Json) -> Json:
    """Apply `well_formed` to every text in a value, keys included."""
    match value:
        case str():
            return well_formed(value)
        case list():
            return [all_well_formed(each) for each in value]
        case dict():
            return {well_formed(key): all_well_formed(each) for key, each in value.items()}
        case _:
            return value


# Maximum nesting depth. Text with a greater depth is treated as invalid JSON, so that it need not be read to its end.
MAX_LEVELS: Final = 10_000

# The last alternative matches from a syntax error to the end of the text, so that no unclosed string is read twice.
_TOKEN: Final = re.compile(
    r"""(?P<blanks>[ \t\n\r]++)|(?P<open>[\[{])|(?P<close>[]}])|(?P<comma>,)"""
    r"""|"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*+"(?:[ \t\n\r]*+(?P<name>:)|(?P<text>))"""
    r"""|(?P<scalar>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null)|(?P<fault>.++)""",
    re.DOTALL,
)
# Sets of token kinds that may follow at a position. The kinds are names of groups in `_TOKEN`.
_VALUE: Final = frozenset({"open", "text", "scalar"})
# Kinds that may follow the opening bracket of an array, which may be empty.
_VALUE_OR_END: Final = _VALUE | {"close"}
_NAME: Final = frozenset({"name"})
_NAME_OR_END: Final = _NAME | {"close"}
_COMMA_OR_END: Final = frozenset({"comma", "close"})


def json_kind(text: str) -> type | None:
    """Return the Python type of the JSON value in `text`, None if it is not JSON."""
    try:
        # Numbers are not converted: `int` refuses more than 4,300 digits, and needs quadratic time for fewer.
        value = json.loads(text, parse_int=len, parse_float=len, parse_constant=_refuse)
    except RecursionError:
        return _deep_kind(text)
    except ValueError:
        return None
    return type(value)


def levels(text: str) -> int:
    """Return the nesting depth of JSON, counted up to `MAX_LEVELS` + 1."""
    deepest = level = 0
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "open":
            level += 1
            deepest = max(deepest, level)
        elif token.lastgroup == "close":
            level -= 1
        if level > MAX_LEVELS:
            break
    return deepest


def is_deeper(text: str, limit: int) -> bool:
    """Return whether JSON is nested deeper than `limit`, which is at most `MAX_LEVELS`."""
    # Few texts have so many brackets that the slower count is necessary.
    return text.count("[") + text.count("{") > limit and levels(text) > limit


def leaf_tokens(text: str) -> Iterator[str]:
    """Yield every name, string, number and constant in a JSON text, spelled as in the text."""
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "name":
            yield token[0].rstrip(": \t\n\r")
        elif token.lastgroup in ("text", "scalar"):
            yield token[0]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _deep_kind(text: str) -> type | None:
    """Return the result of `json_kind` without recursion, for at most `MAX_LEVELS` levels."""
    kind: type | None = None
    # Expected closing brackets of the arrays and objects that are still open; the innermost is last.
    ends: list[str] = []
    expected = _VALUE
    for token in _TOKEN.finditer(text):
        group = token.lastgroup
        if group == "blanks":
            continue
        if group not in expected:
            return None
        if group == "name":
            expected = _VALUE
        elif group == "open":
            is_object = token[0] == "{"
            kind = kind or (dict if is_object else list)
            ends.append("}" if is_object else "]")
            expected = _NAME_OR_END if is_object else _VALUE_OR_END
        elif group == "comma" and ends:
            expected = _NAME if ends[-1] == "}" else _VALUE
        elif group == "comma" or (group == "close" and (not ends or ends.pop() != token[0])):
            return None
        else:
            kind = kind or str
            expected = _COMMA_OR_END
        if len(ends) > MAX_LEVELS:
            return None
    return None if ends else kind
