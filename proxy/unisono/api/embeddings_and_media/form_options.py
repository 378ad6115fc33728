"""Gateway options in multipart forms: routing, guardrails and tags, as in JSON bodies.

A list or an object may be sent in one part as JSON, such as `["a"]` in the part `fallbacks`. Or each value of the list
or object has its own part, and the part's name has brackets, as in the OpenAI SDK: `fallbacks[]`, `metadata[tags][]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from unisono.api.caller_options import GUARDRAILS
from unisono.api.routing_fields import FIELDS, TAG_OBJECTS
from unisono.core.frozen import dataclass
from unisono.core.passthrough_request import GATEWAY_FIELDS
from unisono.errors import InvalidRequest

# Fields that may contain options of the gateway. Options of the gateway are not forwarded to the backend.
OPTIONS: Final = FIELDS | GATEWAY_FIELDS | {"mock_response", GUARDRAILS, *TAG_OBJECTS}
_NAME: Final = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")
_KEY: Final = re.compile(r"\[([^\[\]]*)\]")
MAX_DEPTH: Final = 3


@dataclass(frozen=True, slots=True)
class OptionPart:
    """Part of a form that may contain options of the gateway.

    `field` and `keys` are read from the part's name: `metadata[tags]` has the field `metadata` and the key `tags`.
    `text` is the content of the part, and `head` its boundary and headers as bytes.
    """

    field: str
    keys: tuple[str, ...]
    text: str
    head: bytes


def option_field(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the field and keys in the name of a part; None if the field cannot have options."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in OPTIONS:
        return None
    return match[1], tuple(_KEY.findall(match[2]))


def read_options(parts: Iterable[OptionPart]) -> dict[str, Any]:
    """Return the values of the parts, as the fields of a JSON body.

    Raises InvalidRequest if a name has too many keys, or if the parts of a field contradict each other.
    """
    body: dict[str, Any] = {}
    for part in parts:
        if len(part.keys) > MAX_DEPTH:
            raise _invalid(part.field, f"must have at most {MAX_DEPTH} keys in brackets")
        value = part.text if part.keys else _value(part.text)
        _insert(body, (part.field, *part.keys), value, part.field)
    return body


def remaining_parts(parts: Iterable[OptionPart], body: Mapping[str, Any], rest: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the bytes of the parts to forward to the backend.

    `body` holds the fields of all `parts`. `rest` holds the same fields without the options of the gateway.
    """
    rewritten: set[str] = set()
    for part in parts:
        left = rest.get(part.field)
        if left is None or part.field in GATEWAY_FIELDS:
            continue
        if left == body[part.field]:
            yield part.head + part.text.encode() + b"\r\n"
        elif part.field not in rewritten:
            rewritten.add(part.field)
            yield _rewritten(part, left)


def _rewritten(part: OptionPart, left: Any) -> bytes:
    """Return a part that contains `left`, the rest of a field's value, as JSON.

    This part replaces all parts of the field, so its name is the name of the field without keys in brackets.
    """
    own_name = re.compile(rb'name="[^"]*"')
    head = own_name.sub(b'name="%b"' % part.field.encode(), part.head, count=1)
    return head + json.dumps(left).encode() + b"\r\n"


def _value(text: str) -> Any:
    """Parse a text as JSON; return the text itself if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _insert(target: Any, path: tuple[str, ...], value: Any, field: str) -> None:
    """Put a value at a path in `target`; an empty key in the path appends to a list.

    Raises InvalidRequest if the parts of a field contradict each other.
    """
    key, *rest = path
    if rest:
        empty: Any = [] if rest[0] == "" else {}
        if key == "":
            raise _invalid(field, "is a list of lists or objects; send it as JSON")
        inner = target.setdefault(key, empty)
        if type(inner) is not type(empty):
            raise _invalid(field, "is sent in two different forms, such as a value and a list; use one form")
        _insert(inner, tuple(rest), value, field)
    elif key == "":
        target.append(value)
    elif key in target:
        raise _invalid(field, "occurs twice; send it once")
    else:
        target[key] = value


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{field}': it {problem}.", param=field)
