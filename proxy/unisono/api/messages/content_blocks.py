"""Content blocks of a request: one model per kind, selected by `type`.

Agents send back the whole conversation, including blocks from other servers. All of Anthropic's kinds of blocks are
accepted. A block that the model cannot read is left out, and a note tells the client. Only unknown kinds, and media in
the newest user message, are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import orjson
from pydantic import BeforeValidator, Field, PlainValidator, field_validator

from unisono.api.content_parts import MEDIA_PARTS, DocumentPart, join
from unisono.api.field_types import MAX_PARTS, AtMost, FieldInput, Id, OpenModel, Text, ToolName, invalid_field, refused
from unisono.api.input_files import quoted_file

# Types of document sources that are files and not text.
FILES: Final = frozenset({"base64", "url", "file"})
TOOL_REMOVAL: Final = "tool_removal"
# Separator between blocks that form one text.
BETWEEN: Final = "\n\n"


AnyContent: Final = FieldInput(str | list[DocumentPart | dict[str, Any] | str] | None)


class ContentBlock(OpenModel):
    """Fields common to all blocks. `cache_control` is accepted and has no effect."""

    type: str

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value in MEDIA_PARTS and value not in KINDS:
            raise refused(f"'{value}' is not accepted: the model does not support {MEDIA_PARTS[value]} input")
        if value not in KINDS:
            raise invalid_field(f"must be one of {', '.join(sorted(KINDS))}")
        return value


class TextBlock(ContentBlock):
    text: Text


class ThinkingBlock(ContentBlock):
    thinking: Text
    signature: Text


class RedactedBlock(ContentBlock):
    data: Text


class ToolUseBlock(ContentBlock):
    id: Id
    name: ToolName
    input: dict[str, Any]


class ServerUseBlock(ContentBlock):
    """A call of a server tool. The server that generated the answer also ran the tool."""

    id: Id
    name: ToolName
    input: dict[str, Any]

    @property
    def mcp_server(self) -> str:
        """Label of the MCP server to which the tool belongs; "" for a builtin tool."""
        label = (self.model_extra or {}).get("server_name")
        return label if isinstance(label, str) else ""


class ServerResultBlock(ContentBlock):
    """The result of a server tool call. The form of `content` depends on the tool.

    The `content` of a search without hits is empty. Its sealed result is therefore in `encrypted_content` of the block.
    """

    tool_use_id: Id
    content: Any = None
    encrypted_content: Any = None


class SearchResultBlock(ContentBlock):
    source: Text
    title: Text
    content: Annotated[list[TextBlock], AtMost(MAX_PARTS)]


class BlockSource(OpenModel):
    type: Literal["text", "content"]
    data: Text = ""
    # `to_blocks` and `GivenBlock` are defined below, because documents and results contain blocks themselves.
    content: Annotated[
        list[GivenBlock], AtMost(MAX_PARTS), BeforeValidator(lambda value: to_blocks(value)), AnyContent
    ] = Field(default_factory=list)

    @field_validator("type", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        if isinstance(value, str) and value in FILES:
            raise refused(f"'{value}' is not accepted: use a source of type 'text' or 'content'")
        return value


class DocumentBlock(ContentBlock):
    source: BlockSource
    title: Text | None = None
    context: Text | None = None


class ToolResultBlock(ContentBlock):
    tool_use_id: Id
    content: Annotated[
        list[GivenBlock], AtMost(MAX_PARTS), BeforeValidator(lambda value: to_blocks(value)), AnyContent
    ] = Field(default_factory=list)
    is_error: bool | None = None


class ToolReferenceBlock(ContentBlock):
    """A deferred tool that a tool search of the client found."""

    tool_name: Text


class CompactionBlock(ContentBlock):
    """A summary of the earlier conversation, or null if there is none.

    In a block from this gateway, `encrypted_content` contains all items that replace the conversation.
    """

    content: Text | None = None
    encrypted_content: Text | None = None
    tool_changes: Annotated[list[GivenBlock], AtMost(MAX_PARTS)] | None = None


class ChangedTool(OpenModel):
    """A tool that is added or removed: its name, the name of its server, or its definition."""

    name: Text | None = None
    server_name: Text | None = None
    definition: Any = None


class ToolChangeBlock(ContentBlock):
    """A tool that the model may call, or must not call, after this block."""

    tool: ChangedTool

    @property
    def tool_name(self) -> str:
        return ".".join(filter(None, (self.tool.server_name, self.tool.name)))


class BrowserStateBlock(ContentBlock):
    """The tabs of the client's browser after a call, and the changes that the call made."""

    tabs: list[Any]
    state_changes: list[Any] | None = None


class SilentBlock(ContentBlock):
    """A block that contains nothing for the model."""


# All kinds of blocks.
KINDS: Final[Mapping[str, type[ContentBlock]]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "search_result": SearchResultBlock,
    "document": DocumentBlock,
    "server_tool_use": ServerUseBlock,
    "web_search_tool_result": ServerResultBlock,
    "web_fetch_tool_result": ServerResultBlock,
    "code_execution_tool_result": ServerResultBlock,
    "bash_code_execution_tool_result": ServerResultBlock,
    "text_editor_code_execution_tool_result": ServerResultBlock,
    "tool_search_tool_result": ServerResultBlock,
    "advisor_tool_result": ServerResultBlock,
    "mcp_tool_use": ServerUseBlock,
    "mcp_tool_result": ServerResultBlock,
    "compaction": CompactionBlock,
    "tool_reference": ToolReferenceBlock,
    "tool_addition": ToolChangeBlock,
    TOOL_REMOVAL: ToolChangeBlock,
    "browser_state": BrowserStateBlock,
    "mcp_tool_listing": SilentBlock,
    "fallback": SilentBlock,
}


def to_block(value: Any) -> ContentBlock:
    if isinstance(value, str):
        value = {"type": "text", "text": value}
    if not isinstance(value, dict):
        raise invalid_field("must be an object")
    kind = value.get("type")
    # The base class refuses unknown kinds, with a list of the known ones.
    model = KINDS.get(kind, ContentBlock) if isinstance(kind, str) else ContentBlock
    return model.model_validate(value)


def to_blocks(value: Any) -> Any:
    """Convert content, which may be a string, a list or null, to a list of blocks."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}] if value else []
    if not isinstance(value, list):
        raise invalid_field("must be a string or a list of blocks")
    return value


GivenBlock: TypeAlias = Annotated[ContentBlock, PlainValidator(to_block)]
Content: TypeAlias = Annotated[list[GivenBlock], AtMost(MAX_PARTS), BeforeValidator(to_blocks), AnyContent]

BlockSource.model_rebuild()
DocumentBlock.model_rebuild()
ToolResultBlock.model_rebuild()
CompactionBlock.model_rebuild()


def text_of(blocks: Iterable[tuple[str, ContentBlock]], notes: list[str]) -> str:
    """Return the text of blocks that are not calls.

    `blocks` contains each block after its path in the request. For a block without text, a note is added to `notes`.
    """
    texts: list[str] = []
    for at, block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case SearchResultBlock():
                text = join((part.text for part in block.content), BETWEEN, param=at)
                texts.append(f"{block.title}\n{block.source}\n{text}")
            case DocumentBlock():
                texts.append(_document(at, block, notes))
            case CompactionBlock() if block.content:
                texts.append(block.content)
            case BrowserStateBlock():
                texts.append(orjson.dumps(block.model_dump(include={"tabs", "state_changes"})).decode())
            case ToolReferenceBlock():
                texts.append(f"Found: {block.tool_name}")
            case SilentBlock():
                notes.append(f"{at}: no effect")
            case _:
                notes.append(f"{at}: no effect, because a block of type '{block.type}' has no text here")
    return join(texts, BETWEEN, param="messages")


def _document(at: str, block: DocumentBlock, notes: list[str]) -> str:
    inner = [(f"{at}.source.content.{place}", part) for place, part in enumerate(block.source.content)]
    text = quoted_file(block.title or "", block.source.data or text_of(inner, notes))
    return join([block.context or "", text], "\n", param=at)


def has_citations(blocks: Iterable[tuple[str, ContentBlock]]) -> bool:
    return any((block.model_extra or {}).get("citations") for _, block in blocks)
