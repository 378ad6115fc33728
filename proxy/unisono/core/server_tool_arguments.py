"""Arguments of a server tool call: the text to send, its members, a digest for comparisons.

The text is sent as the model wrote it: Python converts no integer of more than 4,300 digits, and its JSON readers and
writers support about a thousand levels of nesting.
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

# Maximum nesting of arguments whose members are read.
MAX_MEMBER_LEVELS: Final = 200
# Maximum digits of an integer that is read.
MAX_MEMBER_DIGITS: Final = 4_000
# Maximum characters of a number quoted in an error.
QUOTED_CHARACTERS: Final = 40

NOT_AN_OBJECT: Final = "they are not a JSON object"

PYTHON: Final = "python"
# Trained tool whose body is code instead of JSON, and the argument for the code.
CODE: Final = "code"


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """Parsed arguments of a tool call.

    `text` is the JSON object to send to the tool. `problem` says why the arguments are invalid; `text` is then `{}`
    and must not be sent. `members` are the members of the object: integers of more than `MAX_MEMBER_DIGITS` digits are
    None in it, and it is empty if the nesting is deeper than `MAX_MEMBER_LEVELS`. `digest` is equal for calls of one
    tool with equal arguments.
    """

    text: str
    members: Mapping[str, Json] = field(default_factory=dict, repr=False)
    digest: str = ""
    problem: str = ""


def read_arguments(tool: str, text: str) -> ToolArguments:
    """Parse the arguments that the model wrote for `tool`; an empty text is an empty object.

    For `python` every text is code, unless it is an object that holds the code.
    """
    try:
        return _code(tool, text) if tool == PYTHON else _object(tool, text)
    except json.JSONDecodeError as error:
        return ToolArguments("{}", digest=_digest(tool, text), problem=f"{NOT_AN_OBJECT}: {error}")
    except ValueError as error:
        return ToolArguments("{}", digest=_digest(tool, text), problem=str(error))


def _code(tool: str, text: str) -> ToolArguments:
    """Wrap code in an object, unless it is in one. Raises ValueError for lone surrogates."""
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

    Raises ValueError for any other text, and for an object with lone surrogates or nested too deeply. The message
    completes a sentence about the arguments.
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
    """Convert a number; raise ValueError if it exceeds a double.

    Most readers would take it as infinity.
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
