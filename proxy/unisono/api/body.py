"""JSON body of a request: reading, parsing, and limits against resource exhaustion.

The module `body_limits` limits the size and enforces the deadline. This module limits nesting, the number of values,
and the length of a run of characters that the tokenizer must process as one piece. It also refuses a name that occurs
twice in an object, because JSON parsers disagree on which of the two values applies.
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
# A body with one of these words may contain regular expressions or grammars. `\u00` is included, because an escape may
# hide a word, as in `\u0067rammar`.
COMPILED_WORDS: Final = (b"pattern", b"grammar", b"regex", b"ebnf", b"\\u00")
# Maximum nesting levels of a body. A schema may have 64 levels (`schemas.check_schema`), each of which needs up to two
# levels of the body. Later checks of the values are recursive and must not reach Python's recursion limit of 1,000, and
# orjson writes at most 254 levels.
MAX_DEPTH = 160
# Maximum number of steps of a path in an error message.
MAX_PATH_STEPS = 8
# Maximum number of JSON values. Ten megabytes of `{}` would be 3.5 million objects and 330 MB of memory.
MAX_VALUES = 500_000
# Maximum characters in one unbroken run, for example of letters or of blanks. The tokenizer handles a run of this
# length in a quarter of a second without blocking other requests. It fails at about a million spaces (measured with
# tiktoken 0.14).
MAX_RUN = 500_000
RUN_TOO_LONG = f"A run of more than {MAX_RUN:,} letters, symbols or blanks cannot be tokenized; shorten it."

# The tokenizer first splits text into pieces. A piece has either letters and marks, or symbols, or white space. Each
# pattern here matches a few more characters than the pieces of one kind contain, so a match is never shorter than the
# piece at that position.
_RUNS = (re.compile(r"[^\s\d!-/:-@\[-`{-~]*+"), re.compile(r"(?:[^\s\w]|_)*+"), re.compile(r"[\s/]*+"))


# Maximum characters of a name that an error message repeats.
MAX_NAME_LENGTH = 64
# First bytes of bodies that are compressed or not in UTF-8, with the reason for the error message.
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
    """Return the body of a request to a model, without its guardrails and routing options.

    A model in the path replaces the body's `model`. One of `user_fields` names the end user. The guardrails, the
    routing options, and the limits of the end user are added to the caller in the request's state. Raises the errors of
    `read_json`, `identify_end_user` and `with_options`.
    """
    body = await read_json(request)
    if model := request.scope["state"].get(PATH_MODEL):
        body = {**body, "model": model}
    await identify_end_user(request, body, *user_fields)
    return with_options(request, body)


class DirectRequest(Request):
    """Request that reads its body without Starlette's generator, which saves ten function calls."""

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

    Raises InvalidRequest for an invalid body, and the error that `unread_body` returns if the client disconnects before
    the body is read. The middleware `BodyLimits` can raise further errors.
    """
    try:
        body = await request.body()
    except ClientDisconnect:
        raise unread_body(request) from None
    return to_object(body) if len(body) <= OFF_LOOP_BYTES else await asyncio.to_thread(to_object, body)


def unread_body(request: Request) -> InvalidRequest | ClientGone:
    """Return the error to raise if the client disconnected before its body was read."""
    # The server drops even a complete body if the client disconnects before the body is read, for example while the
    # modules of an API are imported. Such a request is not faulty.
    if ARRIVED_BYTES in request.scope.get("state", {}):
        return ClientGone()
    return InvalidRequest("The connection was closed before the body was complete.")


async def off_loop(work: Callable[[], Result], size: int, bound: int = OFF_LOOP_BYTES) -> Result:
    """Call `work`, which handles `size` bytes, and return its result.

    If `size` exceeds `bound` (in bytes), `work` runs in a thread.
    """
    return await asyncio.to_thread(work) if size > bound else work()


def work_size(body: bytes) -> int:
    """Return the size of a body in bytes, for `off_loop`.

    If the body may contain regular expressions or grammars, the result exceeds `OFF_LOOP_BYTES`, so that `off_loop`
    uses a thread. The time to compile expressions does not depend on the size of the body: 100 small expressions may
    take half a second.
    """
    may_compile = len(body) <= OFF_LOOP_BYTES and any(word in body for word in COMPILED_WORDS)
    return OFF_LOOP_BYTES + 1 if may_compile else len(body)


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
    # Each member has one colon outside strings, so more colons than members mean that a name occurs twice. The first
    # count includes colons inside strings. Only if it is too high, the slower second count excludes them.
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
    """Return the error that reports the duplicate name in `body`.

    `body` must be valid JSON with a duplicate name, within the nesting limit.
    """
    opened = _structure(body).count(b"{")

    def complete(pairs: list[tuple[str, Any]]) -> None:
        nonlocal opened
        opened -= 1
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                shown_name = name[:MAX_NAME_LENGTH]
                # Objects are completed from the inside out: only the last one has top-level fields.
                param = None if opened else shown_name
                raise InvalidRequest(f"The name '{shown_name}' occurs twice in one object.", param=param)
            names.add(name)

    try:
        # `len` avoids the conversion of numbers, because a number of a million digits takes long to convert.
        json.loads(body, object_pairs_hook=complete, parse_int=len, parse_float=len)
    except InvalidRequest as error:
        return error
    return InvalidRequest("A name occurs twice in one object.")


def too_many_values(body: bytes) -> bool:
    """Return True if `body` has too many values, without parsing it."""
    if _count_signs(body) <= MAX_VALUES:
        return False
    # The commas and brackets may be inside strings, for example in CSV data: count again without the strings.
    bare = _without_escapes(body)
    if bare.count(b'"') > 2 * MAX_VALUES:
        return True
    structure = b"".join(bare.split(b'"')[::2])
    return _count_signs(structure) > MAX_VALUES


def _count_signs(text: bytes) -> int:
    """Return the number of commas and opening brackets, which separate or begin values."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _without_escapes(body: bytes) -> bytes:
    """Return `body` without escaped quotes: each remaining quote starts or ends a string."""
    # Pairs of backslashes are removed first, because in `\\"` the quote ends the string.
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def _structure(body: bytes) -> bytes:
    """Return the bytes of a JSON text that are outside its strings."""
    return b"".join(_without_escapes(body).split(b'"')[::2])


def check_depth(value: dict[str, Any]) -> int:
    """Check how deeply a body is nested, and return the number of members of all its objects.

    Raises InvalidRequest if the body has more than `MAX_DEPTH` levels.
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
    raise _nested_too_deeply(value)


def _nested_too_deeply(value: dict[str, Any]) -> InvalidRequest:
    """Return the error that names the field with more than `MAX_DEPTH` levels."""
    level, path = 1, ""
    pending: list[tuple[int, str, Any]] = [(level, path, value)]
    while level <= MAX_DEPTH:
        level, path, node = pending.pop()
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            if type(child) in _CONTAINERS:
                step = f"{'.' * (level > 1)}{str(name)[:MAX_NAME_LENGTH]}" if level <= MAX_PATH_STEPS else ""
                pending.append((level + 1, path + step, child))
    return InvalidRequest(
        f"'{path}' is nested too deeply: a body may have at most {MAX_DEPTH} levels. "
        "Reduce the nesting, or send this value as text that contains JSON.",
        param=path,
    )


def check_runs(value: dict[str, Any]) -> None:
    """Raise InvalidRequest if a string has a character run that is too long for the tokenizer."""
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
    # A run of `length` characters always includes one of the positions `length - 1`, `2 * length - 1` and so on. Only
    # these positions are checked, in both directions, so the time is linear.
    for middle in range(length - 1, len(text), length):
        before = text[middle - length + 1 : middle][::-1]
        for pattern in _RUNS:
            ahead = pattern.match(text, middle, middle + length)
            match = pattern.match(before)
            if ahead and ahead.end() > middle and match and ahead.end() - middle + match.end() >= length:
                return True
    return False
