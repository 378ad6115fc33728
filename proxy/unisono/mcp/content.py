"""From what a server answers to text for a model. Pure; nothing that an answer points to is ever fetched."""

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
from unisono.core.tools import ToolOutcome

Block: TypeAlias = TextContent | ImageContent | AudioContent | ResourceLink | EmbeddedResource

CONTROLS: Final = bytes(set(range(32)) - set(b"\b\t\n\f\r"))
ESCAPED: Final = bytes(range(32)) + b'"\\'

SHORT: Final = 200
"""Characters of a name, a type or an address inside a description."""


def to_outcome(result: CallToolResult | InputRequiredResult, most: int) -> ToolOutcome:
    """What a call came to, in at most about `most` bytes of text."""
    if isinstance(result, InputRequiredResult):
        return ToolOutcome("The tool asked for further input, which it cannot be given here.", is_error=True)
    parts = [to_text(block) for block in result.content]
    structured, encoded = _structured(result, most)
    if not any(parts) and encoded:
        parts = [encoded]
    text = "\n".join(part for part in parts if part)
    return ToolOutcome(cut(text, most), result.is_error, structured)


def to_text(block: Block) -> str:
    """A block's text, or in brackets what it is instead."""
    match block:
        case TextContent():
            return block.text
        case ImageContent():
            return f"[image: {_short(block.mime_type)}, {_size(block.data)}]"
        case AudioContent():
            return f"[audio: {_short(block.mime_type)}, {_size(block.data)}]"
        case ResourceLink():
            kind = f", {_short(block.mime_type)}" if block.mime_type else ""
            return f"[resource: {_short(block.name)}, {_short(str(block.uri))}{kind}]"
        case EmbeddedResource():
            return _resource(block.resource)
        case _:
            assert_never(block)


def cut(text: str, most: int) -> str:
    """`text` in at most `most` bytes, and if it was longer, a last line that says so. What JSON adds to
    it is held to half of that, too."""
    encoded = text.encode("utf-8", "replace")
    room = encoded[:most]
    while (spelled := _spelled_out(room)) > most // 2:
        room = room[: len(room) * (most // 2) // spelled]
    if len(room) == len(encoded):
        return encoded.decode("utf-8")
    kept = room.decode("utf-8", "ignore")
    return f"{kept}\n[cut: the result has {len(encoded)} bytes, of which this is the beginning]"


def _spelled_out(text: bytes) -> int:
    """Bytes that JSON adds to UTF-8 text: one for what has a short form, five for other control characters."""
    escaped = len(text) - len(text.translate(None, ESCAPED))
    return escaped + 4 * (len(text) - len(text.translate(None, CONTROLS)))


def _resource(resource: TextResourceContents | BlobResourceContents) -> str:
    if isinstance(resource, TextResourceContents):
        return resource.text
    kind = _short(resource.mime_type or "binary")
    return f"[resource: {_short(str(resource.uri))}, {kind}, {_size(resource.blob)}]"


def _structured(result: CallToolResult, most: int) -> tuple[Json, str]:
    """The server's JSON and its text; nothing when there is none, or more than a model is to read."""
    if result.structured_content is None:
        return None, ""
    content = result.structured_content
    encoded = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    said = encoded.encode("utf-8", "replace")
    if said.decode() != encoded:
        # Half a character can be sent to nobody.
        content = json.loads(said)
    return (content if len(said) <= most else None), encoded


def _size(base64: str) -> str:
    return f"{len(base64) * 3 // 4} bytes"


def _short(text: str) -> str:
    """On one line, and not long: this stands inside a description of ours."""
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[:SHORT]}…"
