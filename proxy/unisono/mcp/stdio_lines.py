"""Reading of lines from a stdio tool server, and detection of the requests that they answer."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Final

from mcp.shared.dispatcher import coerce_request_id
from mcp_types import RequestId

from unisono.core.frozen import dataclass

# Maximum length of a line that is read to its end, as a multiple of the size limit for answers.
MAX_EXCESS: Final = 16
# If a line exceeds the size limit, only this many bytes of its beginning and of its end are kept.
KEPT_BYTES: Final = 1024

_VERSION: Final = rb'"jsonrpc"\s*:\s*"2\.0"'
_ID: Final = rb'"id"\s*:\s*(\d{1,18}|"[^"\\]{1,64}")'
_OUTCOME: Final = rb'"(?:result|error)"'
_BEGIN: Final = rb"\s*\{\s*(?:" + _VERSION + rb"\s*,\s*)?"
# Servers write `id` before or after the result. If a message begins with any other member, it is not treated as an
# answer. The last brace of a line closes the message, so an `id` just before this brace belongs to the message itself.
_BEGINS_WITH_ID: Final = re.compile(_BEGIN + _ID + rb"\s*(?:\}|,\s*" + _OUTCOME + rb")")
_BEGINS_WITH_OUTCOME: Final = re.compile(_BEGIN + _OUTCOME)
_ENDS_WITH_ID: Final = re.compile(_ID + rb"\s*(?:,\s*" + _VERSION + rb"\s*)?\}\s*\Z")


class EndlessLine(Exception):
    """The server wrote a line that is longer than `MAX_EXCESS` times the size limit."""


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a server.

    If the line exceeds the size limit, `is_too_large` is True, and `data` contains only its beginning and its end.
    """

    data: bytes
    is_too_large: bool = False


async def read_line(stream: asyncio.StreamReader, most: int) -> Line:
    """Return the next line, which is empty at the end of the stream.

    `most` is the size limit in bytes, which must also be the limit of `stream`. Raises `EndlessLine` if the line is
    longer than `MAX_EXCESS` times this limit.
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
