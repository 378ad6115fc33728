"""Lines of a stdio tool server, and the requests that unreadable lines answer."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Final

from mcp.shared.dispatcher import coerce_request_id
from mcp_types import RequestId

from unisono.core.frozen import dataclass

# A line may be this many times as long as the size limit. Its excess is read and discarded.
MAX_EXCESS: Final = 16
# Length of the beginning and of the end that are kept of a line that exceeds the size limit.
KEPT_BYTES: Final = 1024

_VERSION: Final = rb'"jsonrpc"\s*:\s*"2\.0"'
_ID: Final = rb'"id"\s*:\s*(\d{1,18}|"[^"\\]{1,64}")'
_OUTCOME: Final = rb'"(?:result|error)"'
_BEGIN: Final = rb"\s*\{\s*(?:" + _VERSION + rb"\s*,\s*)?"
# Servers write `id` before or after the result. A message with another beginning is not an answer, or its kind is
# unknown. The last bracket of a line closes the message, so the member before it is a member of the message.
_BEGINS_WITH_ID: Final = re.compile(_BEGIN + _ID + rb"\s*(?:\}|,\s*" + _OUTCOME + rb")")
_BEGINS_WITH_OUTCOME: Final = re.compile(_BEGIN + _OUTCOME)
_ENDS_WITH_ID: Final = re.compile(_ID + rb"\s*(?:,\s*" + _VERSION + rb"\s*)?\}\s*\Z")


class EndlessLine(Exception):
    """The server wrote a line that exceeds `MAX_EXCESS`."""


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a server; of a line that exceeds the size limit, only the beginning and the end."""

    data: bytes
    is_too_large: bool = False


async def read_line(stream: asyncio.StreamReader, most: int) -> Line:
    """Return the next line, which is empty at the end of the stream.

    `most` is the size limit, which must also be the limit of `stream`. Raises `EndlessLine` if the line does not end.
    """
    begin, end, size = b"", b"", 0
    while True:
        try:
            rest = await stream.readuntil()
        except asyncio.IncompleteReadError as error:
            rest = error.partial
        except asyncio.LimitOverrunError as error:
            piece = await stream.readexactly(error.consumed)
            begin, end, size = begin or piece[:KEPT_BYTES], piece[-KEPT_BYTES:], size + len(piece)
            if size > MAX_EXCESS * most:
                raise EndlessLine from None
            continue
        return Line(begin + (end + rest)[-KEPT_BYTES:], is_too_large=True) if begin else Line(rest)


def answered_request(line: bytes) -> RequestId | None:
    """Return the id of the request that a line answers, even if the line is not a valid message.

    Returns None if the line is not an answer, or if this is uncertain.
    """
    if not line.rstrip().endswith(b"}"):
        return None
    found = _BEGINS_WITH_ID.match(line)
    if found is None and _BEGINS_WITH_OUTCOME.match(line):
        found = _ENDS_WITH_ID.search(line, max(len(line) - KEPT_BYTES, 0))
    return None if found is None else coerce_request_id(json.loads(found[1]))
