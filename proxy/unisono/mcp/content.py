"""Conversion of a tool server's answer into text for the model.

Performs no I/O: resources to which an answer links are never fetched.
"""

from __future__ import annotations

import json
from typing import Final, TypeAlias, assert_never

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    InputRequiredResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from unisono.core.conversation import Json
from unisono.core.tool_host import ToolOutcome

Block: TypeAlias = TextContent | ImageContent | AudioContent | ResourceLink | EmbeddedResource

CONTROLS: Final = bytes(set(range(32)) - set(b"\b\t\n\f\r"))
ESCAPED: Final = bytes(range(32)) + b'"\\'

# Maximum length, in characters, of a name, type or address inside a description.
SHORT: Final = 200


def to_outcome(result: CallToolResult | InputRequiredResult, most: int) -> ToolOutcome:
    """Convert a call's result into an outcome; a text of more than `most` bytes is truncated."""
    if isinstance(result, InputRequiredResult):
        return ToolOutcome("The tool requested input that this gateway cannot provide.", is_error=True)
    parts = [to_text(block) for block in result.content]
    structured, encoded = _structured(result, most)
    if not any(parts) and encoded:
        parts = [encoded]
    text = "\n".join(part for part in parts if part)
    return ToolOutcome(cut(text, most), result.is_error, structured)


def to_text(block: Block) -> str:
    """Return a block's text, or a description in brackets for a block that is not text."""
    match block:
        case TextContent():
            return block.text
        case ImageContent():
            return f"[image: {_one_short_line(block.mime_type)}, {_size(block.data)}]"
        case AudioContent():
            return f"[audio: {_one_short_line(block.mime_type)}, {_size(block.data)}]"
        case ResourceLink():
            kind = f", {_one_short_line(block.mime_type)}" if block.mime_type else ""
            return f"[resource: {_one_short_line(block.name)}, {_one_short_line(str(block.uri))}{kind}]"
        case EmbeddedResource():
            return _resource(block.resource)
        case _:
            assert_never(block)


def cut(text: str, most: int) -> str:
    """Truncate `text` to `most` bytes of UTF-8, and add a line that reports the truncation.

    The text is truncated further if JSON escaping would add more than half of `most` bytes.
    """
    encoded = text.encode("utf-8", "replace")
    room = encoded[:most]
    while (spelled := _escaped_bytes(room)) > most // 2:
        room = room[: len(room) * (most // 2) // spelled]
    if len(room) == len(encoded):
        return encoded.decode("utf-8")
    prefix = room.decode("utf-8", "ignore")
    return f"{prefix}\n[truncated: the result has {len(encoded)} bytes; only its beginning is included]"


def _escaped_bytes(text: bytes) -> int:
    """Count the bytes that JSON escaping adds to UTF-8 text.

    One byte for a character with a short escape, five for any other control character.
    """
    escaped = len(text) - len(text.translate(None, ESCAPED))
    return escaped + 4 * (len(text) - len(text.translate(None, CONTROLS)))


def _resource(resource: TextResourceContents | BlobResourceContents) -> str:
    if isinstance(resource, TextResourceContents):
        return resource.text
    kind = _one_short_line(resource.mime_type or "binary")
    return f"[resource: {_one_short_line(str(resource.uri))}, {kind}, {_size(resource.blob)}]"


def _structured(result: CallToolResult, most: int) -> tuple[Json, str]:
    """Return the structured content of a result, and this content as JSON text.

    If the text has more than `most` bytes, the content is returned as None. The text is always complete. A result
    without structured content yields None and "".
    """
    if result.structured_content is None:
        return None, ""
    content = result.structured_content
    encoded = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    data = encoded.encode("utf-8", "replace")
    if data.decode() != encoded:
        # A lone surrogate cannot be encoded as UTF-8.
        content = json.loads(data)
    return (content if len(data) <= most else None), encoded


def _size(base64: str) -> str:
    # Padding characters encode no data.
    return f"{len(base64.rstrip('=')) * 3 // 4} bytes"


def _one_short_line(text: str) -> str:
    """Collapse `text` to one short line for use inside a generated description."""
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[:SHORT]}…"
