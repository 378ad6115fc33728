"""A large answer without what nobody reads, before it is read: a few megabytes of tiny values keep an event loop busy
for seconds, and a model is shown a few hundred kilobytes of them.

The bytes are walked through off the loop, where others get their turn in between. What is over the bounds is cut off
as it is written; everything else stays byte for byte. Nothing here is a judge of JSON: what is none stays none.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unisono.mcp.content import cut
from unisono.mcp.limits import McpLimits

OFF_LOOP_BYTES: Final = 128 * 1024
"""What is smaller is read in a moment whatever is in it."""
FEW: Final = 20_000
"""So many tokens are read in a moment."""
MOST_IN_PART: Final = 1_000
"""Tokens of one part of a result, and of what is beside the parts."""
RESULT: Final = b'"result"'
CONTENT: Final = b'"content"'
STRUCTURED: Final = b'"structuredContent"'
TOOLS: Final = b'"tools"'
MOST_BESIDE: Final = {STRUCTURED: FEW, TOOLS: 200_000}
"""Tokens of what a result holds besides, where that is more than of a part: schemas are long."""
KEPT: Final = 256
"""Members of an object that are seen."""
REMARK_BYTES: Final = 256
NOTHING: Final = b"{"
"""What stands for bytes that are no message."""

# A string without its end goes to the end of all: nothing in it is looked at twice.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[{}\[\],:]', re.DOTALL)
_OPEN, _CLOSE, _COMMA, _COLON = frozenset(b"{["), frozenset(b"}]"), ord(","), ord(":")


class TrimLimitReached(Exception):
    """The answer holds more than is even looked through."""


@dataclass(frozen=True, slots=True)
class Child:
    """An entry of an array (without `key`) or a member of an object, as it is written."""

    key: bytes
    value: bytes
    tokens: int

    def __bytes__(self) -> bytes:
        return self.key + b":" + self.value if self.key else self.value


async def light(data: bytes, limits: McpLimits) -> bytes:
    """A message of a server that can be read in a moment. Raises `TrimLimitReached`."""
    if len(data) <= OFF_LOOP_BYTES:
        return data
    return await asyncio.to_thread(lightened, data, limits)


def lightened(data: bytes, limits: McpLimits) -> bytes:
    """The same on the spot. Raises `TrimLimitReached`."""
    if sum(map(data.count, (b",", b"{", b"["))) <= FEW:
        return data
    looked = children(data, limits.looked_through)
    if looked is None:
        return NOTHING
    members, _ = looked
    kept = [member for member in members if member.key == RESULT or member.tokens <= MOST_IN_PART]
    return _object([_result(member, limits) if member.key == RESULT else member for member in kept])


def children(container: bytes, most: int, *, keep: int = KEPT) -> tuple[list[Child], int] | None:
    """What is directly inside an object or an array, the first `keep` of it, and how many there are; None for what is
    neither. Raises `TrimLimitReached` when there are more than `most` tokens in all."""
    found: list[Child] = []
    key, begin, depth, tokens, count = b"", 0, 0, 0, 0
    for number, match in enumerate(_TOKEN.finditer(container)):
        if number >= most:
            raise TrimLimitReached
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
        return Child(result.key, result.value if result.tokens <= MOST_IN_PART else b"null", 0)
    members, _ = looked
    kept: list[Child] = []
    parts: list[Child] = []
    shown = b""
    for member in members:
        if member.key == CONTENT:
            parts = _parts(member, limits)
        elif member.key == STRUCTURED and member.tokens > FEW:
            shown = member.value
        elif member.tokens <= MOST_BESIDE.get(member.key, MOST_IN_PART):
            kept.append(member)
        elif member.key == TOOLS:
            # Half a list is none.
            raise TrimLimitReached
    if shown and not parts:
        # It is what the model is shown where there is nothing else, and then its beginning.
        parts = [_text(cut(shown.decode("utf-8", "replace"), limits.output_bytes - REMARK_BYTES))]
    if any(member.key == CONTENT for member in members) or parts:
        kept.append(Child(CONTENT, b"[" + b",".join(map(bytes, parts)) + b"]", 0))
    return Child(result.key, _object(kept), 0)


def _parts(content: Child, limits: McpLimits) -> list[Child]:
    """The parts of a result, as many as are read."""
    found, count = children(content.value, limits.looked_through, keep=limits.entries) or ([], 0)
    kept = [part for part in found if part.tokens <= MOST_IN_PART]
    if len(kept) < count:
        kept.append(_text(f"[cut: the result has {count} parts, of which these are the first]"))
    return kept


def _text(text: str) -> Child:
    return Child(b"", json.dumps({"type": "text", "text": text}).encode(), 0)


def _object(members: Sequence[Child]) -> bytes:
    return b"{" + b",".join(map(bytes, members)) + b"}"
