"""Items of `input` and of conversations: one model per kind, selected by `type`.

Agents send all items back, including items that other servers created. Therefore all of OpenAI's kinds are accepted. An
item without content for the model is skipped and reported in a note. Only unknown kinds are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, Union

import orjson
from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, field_validator

from unisono.api.content_parts import TEXT_PARTS, ContentPart, InputFilePart
from unisono.api.field_types import (
    MAX_PARTS,
    MAX_TOOLS,
    Arguments,
    AtMost,
    FieldInput,
    Id,
    OpenModel,
    Text,
    ToolName,
    invalid_field,
)
from unisono.api.responses.configuration_updates import CONFIGURATION_UPDATE, ConfigurationUpdate
from unisono.api.responses.declared_tools import ResponsesTool, tool_echo, without_servers
from unisono.api.responses.items import COMPLETED, Wire

# Prefix of item and event types that Open Responses does not define.
PREFIX = "unisono:"
COMPACTION_TRIGGER = "compaction_trigger"
COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")


def _to_parts(value: Any) -> Any:
    """Convert `content` to a list of parts; it may be a string, null or a list with strings."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if not isinstance(value, list):
        raise invalid_field("must be a string or a list of parts")
    return [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in value]


def _to_output(value: Any) -> Any:
    """Convert a tool's output to parts. Any other JSON becomes the text of a single part."""
    bare = isinstance(value, (dict, int, float)) or (
        isinstance(value, list)
        and any(not isinstance(part, str) and not (isinstance(part, dict) and "type" in part) for part in value)
    )
    return _to_parts(orjson.dumps(value).decode() if bare else value)


def _texts(value: Any) -> tuple[str, ...]:
    """Return the texts in the content of a reasoning item, which may be any JSON value.

    Malformed parts are skipped, so that reasoning from other servers never makes a request fail.
    """
    parts = [value] if isinstance(value, str | dict) else value if isinstance(value, list) else []
    found = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return tuple(text.encode(errors="replace").decode() for text in found if isinstance(text, str))


def _word(value: Any) -> str | None:
    """Return `value` if it is a string, else None. Lone surrogates become question marks."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else None


AnyPart = str | ContentPart | InputFilePart
Parts = Annotated[
    list[ContentPart], AtMost(MAX_PARTS), BeforeValidator(_to_parts), FieldInput(str | list[AnyPart] | None)
]
Output = Annotated[
    list[ContentPart], AtMost(MAX_PARTS), BeforeValidator(_to_output), FieldInput(str | list[AnyPart] | Any)
]
Texts = Annotated[tuple[str, ...], PlainValidator(_texts)]
Word = Annotated[str | None, PlainValidator(_word)]


def _add_type_names(schema: dict[str, Any], model: type[InputItem]) -> None:
    """Add a model's type names to its schema, including those of Open Responses."""
    kinds = [kind for kind, each in KINDS.items() if each is model]
    type_schema = schema["properties"]["type"]
    # An optional field may be null.
    optional = [None] if "default" in type_schema else []
    schema["properties"]["type"] = {"enum": [*kinds, *(PREFIX + kind for kind in kinds), *optional]}


Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ToolStatus: TypeAlias = Literal[Status, "failed", "searching", "generating", "interpreting", "calling"]


class InputItem(OpenModel):
    """Fields common to all items. `id` is the client's id of the item; it is not verified."""

    model_config = ConfigDict(json_schema_extra=_add_type_names)

    type: str
    id: Word = None
    status: ToolStatus | None = None

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value not in KINDS:
            raise invalid_field(f"must be one of {', '.join(sorted(KINDS))}")
        return value


class InputMessage(InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    status: Status | None = None
    content: Parts
    phase: Word = None


class InputAgentMessage(InputItem):
    """A message from one agent to another."""

    author: Text
    recipient: Text
    content: Parts


class InputReasoning(InputItem):
    status: Any = None  # never listed
    content: Texts = ()
    summary: Any = None
    encrypted_content: Word = None


class InputClientCall(InputItem):
    status: Status | None = None
    call_id: Id
    name: ToolName
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,128}$")] | None = None


class InputCall(InputClientCall):
    arguments: Arguments = ""


class InputCustomCall(InputClientCall):
    input: Text = ""


class InputCallOutput(InputItem):
    """Result of a call to a function or a custom tool, sent by the client.

    If `call_id` is missing, `name` and `namespace` identify the tool that produced the result.
    """

    status: Status | None = None
    name: Word = None
    namespace: Word = None
    call_id: Id | None = None
    output: Output

    @field_validator("output")
    @classmethod
    def _only_text(cls, value: list[ContentPart]) -> list[ContentPart]:
        if any(part.type not in TEXT_PARTS for part in value):
            raise invalid_field("must be a string or a list of text parts")
        return value


class InputReference(InputItem):
    type: Literal["item_reference"] = "item_reference"
    id: Id


class InputMcpCall(InputItem):
    server_label: Word = None
    name: Word = None
    arguments: Arguments = ""
    output: Output = Field(default_factory=list)
    error: Any = None
    approval_request_id: Word = None


class InputMcpList(InputItem):
    """Earlier tool list of an MCP server. Clients may omit it."""

    server_label: Word = None
    error: Any = None


class InputApprovalRequest(InputItem):
    """A tool call that waits for approval and was not run.

    If a guardrail has masked the arguments, `encrypted_content` contains the arguments for the tool, encrypted.
    """

    server_label: Word = None
    name: Word = None
    arguments: Arguments = ""
    encrypted_content: Word = None


class InputApprovalResponse(InputItem):
    approval_request_id: Id
    approve: bool
    reason: Text | None = None


class InputElicitationRequest(InputApprovalRequest):
    """A tool call that waits for the user's answer to a question of the tool.

    The user answers with an object that matches `requested_schema`, or visits the page `url`. `state` is the tool's own
    state, which the tool receives when the call continues.
    """

    message: Word = None
    mode: Literal["form", "url"] | None = None
    requested_schema: dict[str, Any] | None = None
    url: Word = None
    state: Word = None


class InputElicitationResponse(InputItem):
    """The user's answer to a question of a tool. `content` must match the `requested_schema`."""

    elicitation_request_id: Id
    action: Literal["accept", "decline", "cancel"]
    content: dict[str, Any] | None = None


class InputCodeCall(InputItem):
    code: Word = None
    outputs: Any = None


class InputSealed(InputItem):
    """A compaction: earlier items, encrypted by the server that compacted the conversation."""

    encrypted_content: Word = None


class InputSearch(InputItem):
    """A web search call that the client sends back. It contains no results."""


class InputClientToolCall(InputItem):
    """Call to one of `CLIENT_TOOLS`. `apply_patch` has `operation`; other tools have `action`."""

    call_id: Word = None
    action: Any = None
    operation: Any = None


class InputClientToolOutput(InputItem):
    """Result of a call to one of `CLIENT_TOOLS`. For `local_shell`, `id` is the id of the call."""

    call_id: Word = None
    output: Any = None


class ServerOfItem(OpenModel):
    """MCP server listed in the `tools` of an input item. The server's fields are not validated."""

    type: Literal["mcp"]


class InputAddedTools(InputItem):
    """Tools that the model may call after this item."""

    tools: Annotated[
        list[ResponsesTool],
        AtMost(MAX_TOOLS),
        BeforeValidator(without_servers),
        FieldInput(Annotated[list[ResponsesTool | ServerOfItem], Field(max_length=MAX_TOOLS)]),
    ] = Field(default_factory=list)


class InputSearchCall(InputItem):
    """Search for tools. `call_id` is null if the server ran the search."""

    call_id: Word = None
    arguments: Any = None


class InputSearchOutput(InputAddedTools):
    """Result of a search for tools: the tools that it found."""

    call_id: Word = None


class InputConfiguration(InputItem, ConfigurationUpdate):
    """Settings for the responses after this item."""


class InputTrigger(InputItem):
    """Request to compact the conversation. It has an effect only as the last item."""


class InputSilent(InputItem):
    """Item of a kind that has no content for the model."""


# Kinds without effect: they belong to server tools that the gateway does not have.
SILENT_KINDS = (
    *("file_search_call", "image_generation_call", "computer_call", "computer_call_output"),
    *("program", "program_output", "multi_agent_call", "multi_agent_call_output"),
)

# Built-in tools that the client runs.
CLIENT_TOOLS = ("shell", "local_shell", "apply_patch")

KINDS: Mapping[str, type[InputItem]] = {
    "message": InputMessage,
    "agent_message": InputAgentMessage,
    "reasoning": InputReasoning,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "custom_tool_call": InputCustomCall,
    "custom_tool_call_output": InputCallOutput,
    "item_reference": InputReference,
    "mcp_call": InputMcpCall,
    "mcp_list_tools": InputMcpList,
    "mcp_approval_request": InputApprovalRequest,
    "mcp_approval_response": InputApprovalResponse,
    "mcp_elicitation_request": InputElicitationRequest,
    "mcp_elicitation_response": InputElicitationResponse,
    "code_interpreter_call": InputCodeCall,
    "web_search_call": InputSearch,
    **dict.fromkeys(COMPACTIONS, InputSealed),
    COMPACTION_TRIGGER: InputTrigger,
    CONFIGURATION_UPDATE: InputConfiguration,
    "additional_tools": InputAddedTools,
    "tool_search_call": InputSearchCall,
    "tool_search_output": InputSearchOutput,
    **dict.fromkeys(SILENT_KINDS, InputSilent),
    **dict.fromkeys((f"{tool}_call" for tool in CLIENT_TOOLS), InputClientToolCall),
    **dict.fromkeys((f"{tool}_call_output" for tool in CLIENT_TOOLS), InputClientToolOutput),
}


def to_input_item(value: Any) -> InputItem:
    """Parse an item by its type.

    An item without a type is a reference if it has an id and no role. Otherwise it is a message.
    """
    if not isinstance(value, dict):
        raise invalid_field("must be an object")
    kind = value.get("type")
    if kind is None:
        kind = "message" if "role" in value or "id" not in value else "item_reference"
        value = {**value, "type": kind}
    kind = kind.removeprefix(PREFIX) if isinstance(kind, str) else kind
    model = KINDS.get(kind, InputItem) if isinstance(kind, str) else InputItem
    return model.model_validate({**value, "type": kind})


AnyKind: Any = Union[tuple(dict.fromkeys(KINDS.values()))]  # noqa: UP007 - of a tuple that is made here
GivenItem: TypeAlias = Annotated[InputItem, PlainValidator(to_input_item), FieldInput(AnyKind)]


def to_listed(item: InputItem) -> Wire:
    """Return a client's item in the form that item lists contain.

    Fields that strict clients require are added. Text parts get the type that belongs to the role of the message.
    """
    if isinstance(item, InputReasoning):
        parts = [{"type": "reasoning_text", "text": text} for text in item.content]
        summary = item.summary if isinstance(item.summary, list) else []
        sealed = {"encrypted_content": item.encrypted_content} if item.encrypted_content else {}
        return {"type": "reasoning", "summary": summary, "content": parts, **sealed}
    # Items are listed as the client sent them, plus the fields that the SDKs require.
    wire = item.model_dump(mode="json", exclude_none=True, by_alias=True)
    match item.type:
        case "message":
            wire["content"] = [_part(part, wire["role"]) for part in wire["content"]]
        case "agent_message":
            wire["content"] = [_part(part, "user") for part in wire["content"]]
        case "function_call_output" | "custom_tool_call_output" | "mcp_call":
            wire["output"] = "".join(part.get("text") or "" for part in wire.get("output", ()))
        case "local_shell_call_output":
            # The item's `id` is the only link to its call, but the stored item gets a new id.
            wire["call_id"] = wire.get("call_id") or wire.get("id")
    if isinstance(item, InputAddedTools):
        wire["tools"] = [tool_echo(tool) for tool in item.tools]
    if isinstance(item, InputSearchCall | InputSearchOutput):
        wire.setdefault("execution", "client" if item.call_id else "server")
    return {"status": COMPLETED, **wire}


def _part(part: Wire, role: str) -> Wire:
    """Return a content part with the text type that OpenAI uses for messages of `role`."""
    if part["type"] == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal") or ""}
    if part["type"] not in ("text", "input_text", "output_text"):
        return part
    if role == "assistant":
        return {"type": "output_text", "text": part["text"], "annotations": part.get("annotations") or []}
    return {"type": "input_text", "text": part["text"]}
