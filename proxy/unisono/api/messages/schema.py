"""Schema of a Messages request body, validated field by field.

Every field is honoured, accepted without effect and reported in a note, or refused with an error that names the field.
Types are strict: a number written as a string is an error. `inbound` interprets the fields, and checks rules that
concern several fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from unisono.api.field_types import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    AtMost,
    Budget,
    FieldInput,
    ModelName,
    OpenModel,
    Parameters,
    Stops,
    Text,
    ToolName,
    invalid_field,
)
from unisono.api.gateway_tools import GatewayOptions
from unisono.api.media_loading import MediaHistory
from unisono.api.media_replacement import HistoryFields
from unisono.api.messages.client_tools import client_tool
from unisono.api.messages.content_blocks import Content, TextBlock
from unisono.api.messages.context_management_schema import CompactEdit, CompactionOptions, ContextEdits
from unisono.api.messages.mcp_servers import TOOLSET, McpServerParam, ToolsetFields
from unisono.api.request_options import SamplingFields, SpelledEffort

# Type of a client's own tool.
CUSTOM = "custom"
# Beginning of the types of tools that search for other tools.
SEARCH_PREFIX = "tool_search_tool_"


# Maximum tokens of an answer. With 0, the request only fills the backend's prompt cache.
TokenLimit = Annotated[int, Field(ge=0)]


class MessageParam(OpenModel):
    """A message. A system message may contain settings alone, without `content`."""

    role: Literal["user", "assistant", "system"]
    content: Content = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.role != "system" and "content" not in self.model_fields_set:
            raise invalid_field(f"'content' is required for a message of the role '{self.role}'")
        return self


class MessagesTool(ToolsetFields):
    """A tool of any kind. A tool without a type is one that the client itself has defined."""

    type: Annotated[
        str, Field(min_length=1, max_length=64), BeforeValidator(lambda value: value or CUSTOM), FieldInput(str | None)
    ] = CUSTOM
    name: ToolName | None = Field(None, validate_default=True)
    description: Text | None = None
    input_schema: Parameters | None = Field(None, validate_default=True)
    strict: bool | None = None
    defer_loading: bool | None = None

    def unused(self) -> Mapping[str, Any]:
        own = self.settings
        if self.type == CUSTOM:
            return own
        declared = {"description": self.description, "input_schema": self.input_schema, "strict": self.strict}
        if (client := client_tool(self.type)) is not None:
            return {name: value for name, value in (own | declared).items() if name not in client.settings}
        if self.type == TOOLSET or self.type.startswith(SEARCH_PREFIX):
            name = {"name": self.name} if self.type == TOOLSET else {}
            return {**own, **declared, **name, "defer_loading": self.defer_loading}
        # `notes_on` yields the notes on tools that the gateway runs. For an unavailable tool, one note reports the tool
        # as a whole.
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        """Fields that only certain kinds of tools have.

        `cache_control` is omitted, because backends cache every prompt.
        """
        return {name: value for name, value in (self.model_extra or {}).items() if name != "cache_control"}

    @field_validator("name", "input_schema")
    @classmethod
    def _check_present(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == CUSTOM:
            raise invalid_field("is required for a tool of type 'custom'")
        return value

    @model_validator(mode="after")
    def _check_toolset(self) -> Self:
        if self.type == TOOLSET and self.mcp_server_name is None:
            raise invalid_field("'mcp_server_name' is required for a tool of type 'mcp_toolset'")
        return self


class ChoiceSpec(OpenModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = Field(None, validate_default=True)
    disable_parallel_tool_use: bool | None = None

    @field_validator("name")
    @classmethod
    def _check_present(cls, value: Any, info: ValidationInfo) -> Any:
        if not value and info.data.get("type") == "tool":
            raise invalid_field("is required when 'type' is 'tool'")
        return value


class MessagesThinkingOptions(OpenModel):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Budget | None = None
    display: Literal["summarized", "omitted"] | None = None


class FormatSpec(OpenModel):
    type: Literal["json_schema"]
    schema_: Parameters = Field(alias="schema")


class OutputOptions(OpenModel):
    effort: SpelledEffort = None
    format: FormatSpec | None = None


class Metadata(OpenModel):
    user_id: Text | None = None


def _to_system(value: Any) -> Any:
    if value is None:
        return []
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class MessagesInput(SamplingFields, MediaHistory):
    """Model, messages, tools and output options of a request."""

    FIELDS = HistoryFields("messages", "system", merges=True)

    model: ModelName
    max_tokens: TokenLimit | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1), AtMost(MAX_MESSAGES)]
    system: Annotated[
        list[TextBlock], AtMost(MAX_PARTS), BeforeValidator(_to_system), FieldInput(str | list[TextBlock] | None)
    ] = Field(default_factory=list)
    tools: Annotated[list[MessagesTool], AtMost(MAX_TOOLS)] | None = None
    tool_choice: ChoiceSpec | None = None
    mcp_servers: list[McpServerParam] | None = None
    thinking: MessagesThinkingOptions | None = None
    output_config: OutputOptions | None = None
    output_format: FormatSpec | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    context_management: ContextEdits | None = None
    compaction: CompactionOptions | None = None
    cache_control: Any = None
    thread: Any = None
    unisono: GatewayOptions | None = None

    @property
    def toolsets(self) -> dict[int, MessagesTool]:
        """Tools of the type `mcp_toolset` by their position in `tools`."""
        return {position: tool for position, tool in enumerate(self.tools or ()) if tool.type == TOOLSET}

    @property
    def compact_edit(self) -> CompactEdit | None:
        edits = self.context_management.edits if self.context_management is not None else ()
        return next((edit for edit in edits if isinstance(edit, CompactEdit)), None)


class MessagesRequest(MessagesInput):
    """A request for an answer. Unlike a request to count tokens, it must contain `max_tokens`."""

    max_tokens: TokenLimit
