"""Arguments of a server tool call: the text to send, its members, a digest for comparisons.

The text is sent as the model wrote it, without being parsed and written again. Python does not convert integers of more
than 4,300 digits, and its JSON parser and writer support only about a thousand levels of nesting.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import field
from hashlib import sha256
from typing import Final, NoReturn

from unisono.core.conversation import Json
from unisono.core.frozen import dataclass
from unisono.core.json_syntax import MAX_LEVELS, json_kind, leaf_tokens, levels

# Maximum nesting depth of arguments whose members are read.
MAX_MEMBER_LEVELS: Final = 200
# Maximum number of digits of an integer that is read.
MAX_MEMBER_DIGITS: Final = 4_000
# Maximum number of characters of a number that an error quotes.
QUOTED_CHARACTERS: Final = 40

NOT_AN_OBJECT: Final = "they are not a JSON object"

# Built-in tool whose calls contain code instead of JSON.
PYTHON: Final = "python"
# Argument of that tool for the code.
CODE: Final = "code"


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """Parsed arguments of a tool call.

    `text` is the JSON object to send to the tool. `problem` is the reason why the arguments are invalid; `text` is then
    `{}` and must not be sent. `members` are the members of the object. Integers of more than `MAX_MEMBER_DIGITS` digits
    are None in `members`. If the nesting is deeper than `MAX_MEMBER_LEVELS`, `members` is empty. Calls to one tool with
    equal arguments have the same `digest`.
    """

    text: str
    members: Mapping[str, Json] = field(default_factory=dict, repr=False)
    digest: str = ""
    problem: str = ""


def read_arguments(tool: str, text: str) -> ToolArguments:
    """Parse the arguments that the model wrote for `tool`; an empty text is an empty object.

    For the tool `python`, the text is code, unless it is a JSON object that contains the code.
    """
    try:
        return _code(tool, text) if tool == PYTHON else _object(tool, text)
    except json.JSONDecodeError as error:
        return ToolArguments("{}", digest=_digest(tool, text), problem=f"{NOT_AN_OBJECT}: {error}")
    except ValueError as error:
        return ToolArguments("{}", digest=_digest(tool, text), problem=str(error))


def _code(tool: str, text: str) -> ToolArguments:
    """Wrap code in a JSON object, unless it is wrapped already.

    Raises ValueError if the code contains a lone surrogate.
    """
    try:
        found = _object(tool, text)
    except ValueError:
        found = ToolArguments("{}")
    if found.members.keys() == {CODE} and isinstance(found.members[CODE], str):
        return found
    _check_characters(text)
    sent = _canonical({CODE: text})
    return ToolArguments(sent, {CODE: text}, _digest(tool, sent))


def _object(tool: str, text: str) -> ToolArguments:
    """Parse a JSON object.

    Raises ValueError if the text is not a JSON object, contains a lone surrogate, or is nested too deeply. The error's
    message is the rest of a sentence about the arguments, such as "they are not a JSON object".
    """
    text = text.strip() or "{}"
    depth = levels(text) if text.count("[") + text.count("{") > MAX_MEMBER_LEVELS else 0
    if depth > MAX_LEVELS:
        raise ValueError(f"they are nested deeper than {MAX_LEVELS:,} levels")
    if depth > MAX_MEMBER_LEVELS:
        _check_deep(text)
        return ToolArguments(text, digest=_digest(tool, text))
    long: list[str] = []

    def integer(digits: str) -> int | None:
        if len(digits) <= MAX_MEMBER_DIGITS:
            return int(digits)
        long.append(digits)
        return None

    value = json.loads(text, parse_int=integer, parse_float=_finite, parse_constant=_refuse)
    if not isinstance(value, dict):
        raise ValueError(f"{NOT_AN_OBJECT} but another JSON value")  # noqa: TRY004 - the text is wrong
    canonical = _canonical(value)
    _check_characters(canonical)
    return ToolArguments(text, value, _digest(tool, text if long else canonical))


def _check_deep(text: str) -> None:
    """Check an object that is nested too deeply for the parser.

    Raises ValueError if the text is not a JSON object or has lone surrogates.
    """
    if json_kind(text) is not dict:
        raise ValueError(f"{NOT_AN_OBJECT}: a bracket, a comma or a quote is missing or wrong")
    for leaf in leaf_tokens(text):
        if leaf.startswith('"'):
            _check_characters(json.loads(leaf))
        else:
            json.loads(leaf, parse_int=len, parse_float=_finite)


def _check_characters(text: str) -> None:
    """Raise ValueError if the text contains a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"they contain {half}, which is half of a surrogate pair and not a character") from None


def _finite(text: str) -> float:
    """Convert a number; raise ValueError if it is out of the range of double-precision floats.

    Most JSON parsers would read such a number as infinity.
    """
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:QUOTED_CHARACTERS]} is out of range; the limit is 1.8e308")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _canonical(arguments: Mapping[str, Json]) -> str:
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _digest(tool: str, text: str) -> str:
    return sha256(f"{tool}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()
