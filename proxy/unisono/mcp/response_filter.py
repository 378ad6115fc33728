"""Response bodies for the SDK: large JSON messages are trimmed, lone surrogates replaced."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import httpx2

from unisono.core.frozen import dataclass
from unisono.mcp.content import cut
from unisono.mcp.limits import McpLimits
from unisono.mcp.messages import Exchange
from unisono.mcp.tool_lists import replace_invalid_tools

# Trimming of large JSON answers before parsing, so that they cannot block the event loop.
#
# Parsing a few megabytes of tiny values takes seconds, and the model receives at most a few hundred kilobytes. A
# thread scans the bytes. Content over the limits is cut; all other bytes stay unchanged. Invalid JSON stays invalid.

# Answers up to this size parse quickly, regardless of their content.
OFF_LOOP_BYTES: Final = 128 * 1024
# Number of tokens that parse quickly.
QUICK_TOKENS: Final = 20_000
# Maximum JSON tokens of one part of a result, and of each member of the message that has no other limit.
MAX_PART_TOKENS: Final = 1_000
RESULT: Final = b'"result"'
CONTENT: Final = b'"content"'
STRUCTURED: Final = b'"structuredContent"'
TOOLS: Final = b'"tools"'
# Maximum JSON tokens of members with a higher limit, because schemas are long.
MAX_MEMBER_TOKENS: Final = {STRUCTURED: QUICK_TOKENS, TOOLS: 200_000}
# Maximum number of members of an object that are read. Further members are dropped.
MAX_MEMBERS: Final = 256
# Space for the remark that a result was truncated.
REMARK_BYTES: Final = 256
# Replacement for bytes that are not a JSON object. The SDK rejects it as invalid JSON.
NOTHING: Final = b"{"

# An unterminated string extends to the end of the data, so that no byte is scanned twice.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[{}\[\],:]', re.DOTALL)
# An escape in a JSON string: a pair of surrogates, a lone surrogate (the group), or any other.
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_OPEN, _CLOSE, _COMMA, _COLON = frozenset(b"{["), frozenset(b"}]"), ord(","), ord(":")


class TrimLimitReached(Exception):
    """A server's message, or its tool list, has more than `limit` JSON tokens."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Child:
    """Entry of an array (without `key`) or member of an object, as raw bytes.

    `tokens` is the number of its JSON tokens.
    """

    key: bytes
    value: bytes
    tokens: int

    def __bytes__(self) -> bytes:
        return self.key + b":" + self.value if self.key else self.value


async def trim(data: bytes, limits: McpLimits) -> bytes:
    """Return a server's message trimmed to a size that can be parsed quickly.

    Lone surrogates are replaced. Raises `TrimLimitReached` if the message has too many JSON tokens, or a tool list that
    would have to be truncated.
    """
    if len(data) <= OFF_LOOP_BYTES:
        return without_lone_surrogates(data)
    return await asyncio.to_thread(trim_in_thread, data, limits)


def without_lone_surrogates(data: bytes) -> bytes:
    """Replace each lone surrogate in JSON with U+FFFD.

    The SDK rejects a message with a lone surrogate. JavaScript servers send one if they cut a text inside an emoji.
    """
    if b"\\ud" not in data and b"\\uD" not in data:
        return data
    return _ESCAPE.sub(lambda match: match[0] if match[1] is None else rb"\ufffd", data)


def trim_in_thread(data: bytes, limits: McpLimits) -> bytes:
    """Trim a server's message in this thread. Results and errors are those of `trim`."""
    data = without_lone_surrogates(data)
    if sum(map(data.count, (b",", b"{", b"["))) <= QUICK_TOKENS:
        return data
    looked = children(data, limits.looked_through)
    if looked is None:
        return NOTHING
    members, _ = looked
    retained = [member for member in members if member.key == RESULT or member.tokens <= MAX_PART_TOKENS]
    return _object([_result(member, limits) if member.key == RESULT else member for member in retained])


def children(container: bytes, most: int, *, keep: int = MAX_MEMBERS) -> tuple[list[Child], int] | None:
    """Return the first `keep` children of a JSON object or array, and the number of all of them.

    Returns None for any other value. The bytes are scanned, not parsed. Raises `TrimLimitReached` for more than `most`
    JSON tokens: strings, brackets, commas and colons.
    """
    found: list[Child] = []
    key, begin, depth, tokens, count = b"", 0, 0, 0, 0
    for number, match in enumerate(_TOKEN.finditer(container)):
        if number >= most:
            raise TrimLimitReached(most)
        at = match.start()
        mark = container[at]
        if mark in _OPEN:
            depth += 1
            if depth == 1:
                begin = at + 1
        elif mark in _CLOSE:
            depth -= 1
        if depth == 0 or (depth == 1 and mark == _COMMA):
            if count < keep and (value := container[begin:at].strip()):
                found.append(Child(key, value, tokens))
            count += at > begin
            key, begin, tokens = b"", at + 1, 0
            if depth == 0:
                return (found, count) if mark in _CLOSE else None
        elif depth == 1 and mark == _COLON:
            key, begin = container[begin:at].strip(), at + 1
        tokens += 1
    return None


def _result(result: Child, limits: McpLimits) -> Child:
    looked = children(result.value, limits.looked_through) if result.value.startswith(b"{") else None
    if looked is None:
        return Child(result.key, result.value if result.tokens <= MAX_PART_TOKENS else b"null", 0)
    members, _ = looked
    retained: list[Child] = []
    parts: list[Child] = []
    structured = b""
    for member in members:
        if member.key == CONTENT:
            parts = _parts(member, limits)
        elif member.key == STRUCTURED and member.tokens > QUICK_TOKENS:
            structured = member.value
        elif member.tokens <= MAX_MEMBER_TOKENS.get(member.key, MAX_PART_TOKENS):
            retained.append(member)
        elif member.key == TOOLS:
            # A truncated list of tools would be used as if it were complete.
            raise TrimLimitReached(MAX_MEMBER_TOKENS[TOOLS])
    if structured and not parts:
        # The model receives this text if there is no other content, truncated to its beginning.
        parts = [_text(cut(structured.decode("utf-8", "replace"), limits.output_bytes - REMARK_BYTES))]
    if any(member.key == CONTENT for member in members) or parts:
        retained.append(Child(CONTENT, b"[" + b",".join(map(bytes, parts)) + b"]", 0))
    return Child(result.key, _object(retained), 0)


def _parts(content: Child, limits: McpLimits) -> list[Child]:
    """Return the parts of a result that are within the limits.

    If parts are left out, the last element is a remark that says so.
    """
    found, count = children(content.value, limits.looked_through, keep=limits.entries) or ([], 0)
    retained = [part for part in found if part.tokens <= MAX_PART_TOKENS]
    if len(retained) < count:
        retained.append(_text(f"[truncated: the result has {count} parts; only the first ones are included]"))
    return retained


def _text(text: str) -> Child:
    return Child(b"", json.dumps({"type": "text", "text": text}).encode(), 0)


def _object(members: Sequence[Child]) -> bytes:
    return b"{" + b",".join(map(bytes, members)) + b"}"


def shorten(result: dict[str, Any], entries: int) -> None:
    """Limit a result to about `entries` content parts, or a tool list to about `entries` tools.

    Invalid tools are replaced by stubs. The SDK reads each entry several times, which blocks the event loop.
    """
    for field in ("content", "tools"):
        found = result.get(field)
        # A result that was truncated before has one more entry, the remark about it.
        if isinstance(found, list) and len(found) > entries + 1:
            result[field] = found[:entries]
            if field == "content":
                text = f"[truncated: the result has {len(found)} parts; only the first ones are included]"
                result[field].append({"type": "text", "text": text})
    replace_invalid_tools(result)


def too_large(most: int, unit: str = "bytes") -> str:
    return f"the answer exceeds the size limit of {most:,} {unit}"


# A line ends in one of three ways; an empty line ends an event.
_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
# Number of bytes of events after which other tasks run. Each event is counted with at least `MIN_EVENT_BYTES`, because
# the SDK takes up to a tenth of a millisecond for an empty event.
BYTES_PER_TURN: Final = 64 * 1024
MIN_EVENT_BYTES: Final = 4 * 1024
# Fields of an event other than its data. If a field is repeated, the last value applies.
_FIELDS: Final = frozenset({b"event", b"id", b"retry"})
_WITHOUT_LINES: Final = bytes.maketrans(b"\r\n", b"  ")
# Longest alternative first, so that CRLF counts as one line end.
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class ResponseRefused(httpx2.StreamError):
    """A response that is rejected or a request that is not sent; the message gives the reason."""


class _Body(httpx2.AsyncByteStream):
    """Response body that reads `inner`; subclasses trim the messages in it within `limits`."""

    def __init__(self, inner: httpx2.AsyncByteStream, exchange: Exchange, limits: McpLimits) -> None:
        self._inner = inner
        self._chunks = aiter(inner)
        self._exchange = exchange
        self._limits = limits

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _trim(self, data: bytes) -> bytes:
        try:
            return await trim(data, self._limits)
        except TrimLimitReached as error:
            self._exchange.is_too_large = True
            self._exchange.problem = too_large(error.limit, "JSON tokens")
            raise ResponseRefused(self._exchange.problem) from None


class WholeBody(_Body):
    """Body that is one message; calls the exchange's `on_complete` callback after it was read."""

    _is_read = False

    async def __anext__(self) -> bytes:
        if not self._is_read:
            self._is_read = True
            return await self._trim(b"".join([chunk async for chunk in self._chunks]))
        if self._exchange.on_complete is not None:
            self._exchange.on_complete()
        raise StopAsyncIteration


class EventStreamBody(_Body):
    """Body with one message in each event.

    An event that exceeds the size limit is passed on untrimmed, and the SDK rejects it.
    """

    def __init__(self, inner: httpx2.AsyncByteStream, exchange: Exchange, limits: McpLimits) -> None:
        super().__init__(inner, exchange, limits)
        self._buffer = bytearray()
        self._ready: deque[bytes] = deque()
        self._unpaused = 0
        self._is_complete = False

    async def __anext__(self) -> bytes:
        while not self._ready:
            if self._is_complete:
                raise StopAsyncIteration
            try:
                await self._feed(await anext(self._chunks))
            except StopAsyncIteration:
                self._is_complete = True
                self._ready.append(bytes(self._buffer))
        event = self._ready.popleft()
        # One read may contain thousands of events, and the SDK skips empty events without letting other tasks run.
        self._unpaused += max(len(event), MIN_EVENT_BYTES)
        if self._unpaused >= BYTES_PER_TURN:
            self._unpaused = 0
            await asyncio.sleep(0)
        return event

    async def _feed(self, chunk: bytes) -> None:
        # The end of an event may be split between two chunks.
        looked_at = max(len(self._buffer) - 3, 0)
        self._buffer += chunk
        begin = 0
        for end in _EVENT_END.finditer(self._buffer, looked_at):
            event = bytes(self._buffer[begin : end.end()])
            is_small = len(event) <= OFF_LOOP_BYTES
            self._ready.append(without_lone_surrogates(event) if is_small else await self._trim_event(event))
            begin = end.end()
        if len(self._buffer) - begin > self._limits.answer_bytes:
            # With line breaks, the SDK might parse millions of lines before it rejects the event.
            self._ready.append(bytes(self._buffer.translate(_WITHOUT_LINES)))
            begin = len(self._buffer)
        self._buffer = self._buffer[begin:]

    async def _trim_event(self, event: bytes) -> bytes:
        """Return the event with trimmed data on one line."""
        others, data = await asyncio.to_thread(fields_of, event)
        return b"\n".join([*others, b"data: " + await self._trim(data), b"", b""])


def fields_of(event: bytes) -> tuple[list[bytes], bytes]:
    """Return the lines of an event for all known fields except `data`, and its data on one line."""
    lines = _LINE_END.split(event)
    others = {name: line for line in lines if (name := line.partition(b":")[0]) in _FIELDS}
    data = (line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
    # In JSON a line break stands between two values, so a space is equivalent.
    return list(others.values()), b" ".join(data)
