"""JSON body of a request: read whole, parsed once, and bounded against resource exhaustion.

`body_limits` enforces the byte cap and the deadline. This module limits nesting, the number of values, and the
length of one unbroken run of characters. It also refuses a name that occurs twice in an object, because JSON parsers
disagree on its value.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request

from unisono.api.body_limits import ARRIVED_BYTES
from unisono.api.caller_options import with_options
from unisono.api.end_user_fields import identify_end_user
from unisono.api.error_responses import ClientGone
from unisono.api.path_aliases import PATH_MODEL
from unisono.errors import InvalidRequest

# Size in bytes from which a body is parsed and validated in a thread. With many small values either step may take a
# second.
OFF_LOOP_BYTES = 256 * 1024
# Nesting levels of a body. The recursive checks of values must stay below Python's recursion limit.
MAX_DEPTH = 64
# Maximum number of JSON values. Ten megabytes of `{}` would be 3.5 million objects and 330 MB of memory.
MAX_VALUES = 500_000
# Maximum characters in one run. The tokenizer handles runs of this length in a quarter of a second without blocking
# other requests. From about a million spaces on it fails (measured with tiktoken 0.14).
MAX_RUN = 500_000
RUN_TOO_LONG = f"A run of more than {MAX_RUN:,} letters, symbols or blanks cannot be tokenized; shorten it."

# The tokenizer first cuts text into pieces of letters and marks, of other signs, and of white space. Each class here is
# a little wider than its piece, so no piece crosses its edge.
_RUNS = (re.compile(r"[^\s\d!-/:-@\[-`{-~]*+"), re.compile(r"(?:[^\s\w]|_)*+"), re.compile(r"[\s/]*+"))


# Maximum characters of a name that an error message repeats.
MAX_NAME_LENGTH = 64
# First bytes of bodies in another encoding or compressed, with the reason for the error message.
BEGINNINGS = {
    b"\xff\xfe": "it is encoded in UTF-16; send UTF-8",
    b"\xfe\xff": "it is encoded in UTF-16; send UTF-8",
    b"\x1f\x8b": "it is compressed; add 'Content-Encoding: gzip'",
    b"\x28\xb5\x2f\xfd": "it is compressed; add 'Content-Encoding: zstd'",
}
NO_NUMBER = re.compile(r"NaN|Infinity")

_CONTAINERS: Final = frozenset({dict, list})
Result = TypeVar("Result")


async def read_model_request(request: Request, *user_fields: str) -> dict[str, Any]:
    """Return the body of a request to a model, with the model that its path names.

    Its guardrails and its routing are moved to the caller in the request's state. Raises the errors of `read_json`,
    `identify_end_user` and `with_options`.
    """
    body = await read_json(request)
    if model := request.scope["state"].get(PATH_MODEL):
        body = {**body, "model": model}
    await identify_end_user(request, body, *user_fields)
    return with_options(request, body)


class DirectRequest(Request):
    """Request that reads its body itself. Starlette's generator costs ten more calls."""

    async def body(self) -> bytes:
        if not self._stream_consumed:
            pieces: list[bytes] = []
            while not self._stream_consumed:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._is_disconnected = True
                    raise ClientDisconnect
                pieces.append(message.get("body", b""))
                self._stream_consumed = not message.get("more_body", False)
            self._body = b"".join(pieces)
        return self._body


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object.

    Raises InvalidRequest, ClientGone, and the errors of the layer `BodyLimits`.
    """
    try:
        body = await request.body()
    except ClientDisconnect:
        raise unread_body(request) from None
    return to_object(body) if len(body) <= OFF_LOOP_BYTES else await asyncio.to_thread(to_object, body)


def unread_body(request: Request) -> InvalidRequest | ClientGone:
    """Return the error for a body whose client disconnected before the body was read."""
    # The server drops a body that arrived as a whole if its client leaves before it is read, for example while an API
    # is imported. Such a request is not faulty.
    if ARRIVED_BYTES in request.scope.get("state", {}):
        return ClientGone()
    return InvalidRequest("The connection was closed before the body was complete.")


async def off_loop(work: Callable[[], Result], size: int, bound: int = OFF_LOOP_BYTES) -> Result:
    """Return the result of `work` on a body of `size` bytes.

    Large bodies are handled in a thread.
    """
    return await asyncio.to_thread(work) if size > bound else work()


def to_object(body: bytes) -> dict[str, Any]:
    """Parse the body, which must be a JSON object.

    Raises InvalidRequest for anything else, for a duplicate name, and for a body that exceeds a limit.
    """
    if too_many_values(body):
        raise InvalidRequest(f"The body contains more than {MAX_VALUES:,} JSON values.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {_describe_error(body, error)}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    members = check_depth(value)
    # No string has more characters than the body has bytes.
    if len(body) >= MAX_RUN:
        check_runs(value)
    # Every member has a colon. Colons inside strings are excluded only if there are more colons than members.
    if body.count(b":") > members and _structure(body).count(b":") > members:
        raise _named_twice(body)
    return value


def _describe_error(body: bytes, error: orjson.JSONDecodeError) -> str:
    for beginning, what in BEGINNINGS.items():
        if body.startswith(beginning):
            return what
    if NO_NUMBER.match(error.doc, error.pos):
        return f"NaN and Infinity are not JSON numbers: {error}"
    return str(error)


def _named_twice(body: bytes) -> InvalidRequest:
    """Return the error that names the duplicate name.

    The caller knows that `body` has a duplicate name and is not deeply nested.
    """
    opened = _structure(body).count(b"{")

    def complete(pairs: list[tuple[str, Any]]) -> None:
        nonlocal opened
        opened -= 1
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                shown_name = name[:MAX_NAME_LENGTH]
                # The outermost object is the last one to be complete.
                param = None if opened else shown_name
                raise InvalidRequest(f"The name '{shown_name}' occurs twice in one object.", param=param)
            names.add(name)

    try:
        # No number is read: one of a million digits takes long.
        json.loads(body, object_pairs_hook=complete, parse_int=len, parse_float=len)
    except InvalidRequest as error:
        return error
    return InvalidRequest("A name occurs twice in one object.")


def too_many_values(body: bytes) -> bool:
    """Return True if `body` has too many values, without parsing it."""
    if _count_signs(body) <= MAX_VALUES:
        return False
    # The signs may be inside strings, as in any table of data: count again without the strings.
    bare = _without_escapes(body)
    if bare.count(b'"') > 2 * MAX_VALUES:
        return True
    structure = b"".join(bare.split(b'"')[::2])
    return _count_signs(structure) > MAX_VALUES


def _count_signs(text: bytes) -> int:
    """Return the number of signs that begin or separate values."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _without_escapes(body: bytes) -> bytes:
    """Return `body` with quotes only where strings start and end."""
    # Pairs of backslashes first: in `\\"` the quote ends the string.
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def _structure(body: bytes) -> bytes:
    """Return the bytes outside of strings."""
    return b"".join(_without_escapes(body).split(b'"')[::2])


def check_depth(value: dict[str, Any]) -> int:
    """Check how deeply a value is nested; return the total number of members of its objects.

    Raises InvalidRequest if it is nested too deeply.
    """
    members = 0
    # Level by level, because a recursive check would itself exceed the recursion limit.
    nodes: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for node in nodes:
            if isinstance(node, dict):
                members += len(node)
                children += node.values()
            else:
                children += node
        nodes = [child for child in children if type(child) in _CONTAINERS]
        if not nodes:
            return members
    raise InvalidRequest(f"The body is nested more than {MAX_DEPTH} levels deep.")


def check_runs(value: dict[str, Any]) -> None:
    """Raise InvalidRequest for a string that the tokenizer cannot process."""
    stack: list[tuple[Any, tuple[Any, ...]]] = [(value, ())]
    while stack:
        node, path = stack.pop()
        if isinstance(node, str):
            if has_piece_of_length(node, MAX_RUN):
                where = _field_path(path)
                raise InvalidRequest(f"'{where}': {RUN_TOO_LONG}", param=where)
            continue
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            # Other values need no check. A body may have hundreds of thousands of them.
            if isinstance(child, (dict, list)) or (isinstance(child, str) and len(child) >= MAX_RUN):
                stack.append((child, (path, key)))


def _field_path(path: tuple[Any, ...]) -> str:
    steps: list[str] = []
    while path:
        path, key = path
        steps.append(str(key)[:64])
    return ".".join(reversed(steps))


def has_piece_of_length(text: str, length: int) -> bool:
    """Return True if `length` consecutive characters of `text` may form one tokenizer piece."""
    # A run of this length covers one of every `length` positions. Only these are checked, in both directions, so the
    # time is linear.
    for middle in range(length - 1, len(text), length):
        before = text[middle - length + 1 : middle][::-1]
        for pattern in _RUNS:
            ahead = pattern.match(text, middle, middle + length)
            match = pattern.match(before)
            if ahead and ahead.end() > middle and match and ahead.end() - middle + match.end() >= length:
                return True
    return False
