"""Schema of a Chat Completions request body, validated field by field.

Each field has an effect, or is accepted without effect and reported in a note, or is rejected by name. A field with its
neutral value (`n: 1`, `echo: false`) is always accepted. Types are strict: a number written as a string is an error.
`inbound` converts the fields and checks rules that concern several fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from unisono.api.client_toolbox import CustomSpec, FunctionSpec, described
from unisono.api.content_parts import ChatFilePart, ContentPart
from unisono.api.field_types import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    NEUTRAL,
    Arguments,
    AtMost,
    Budget,
    Count,
    Either,
    FieldInput,
    Id,
    ModelName,
    OpenModel,
    StopStrings,
    Text,
    ToolName,
    UserLabel,
    invalid_field,
    is_encodable,
    neutral,
    only_neutral,
    refused,
)
from unisono.api.gateway_tools import GatewayOptions
from unisono.api.logprobs import MAX_TOP_LOGPROBS
from unisono.api.media_loading import MediaHistory
from unisono.api.request_options import EFFORTS, SamplingFields, SpelledEffort, to_effort
from unisono.api.structured_outputs import ResponseFormat, StructuredFields
from unisono.api.tool_choice import ChosenFunction, ChosenTools
from unisono.core.conversation import Effort
from unisono.core.generation import ENDOFTEXT, STOP_TOKENS

# Accepted types of a message's content. A tool result may be bare JSON.
Content = str | list[str | ContentPart | ChatFilePart] | list[Any] | dict[str, Any] | None

# Parsed content: a text, or parts. Pydantic only sees the list, because its errors about a union would name the members
# of the union.
if TYPE_CHECKING:
    ParsedContent = str | list[ContentPart]
else:
    ParsedContent = Annotated[list[ContentPart], AtMost(MAX_PARTS)]


def _to_think(value: Any) -> Effort | None:
    if isinstance(value, bool):
        return Effort.MEDIUM if value else Effort.LOW
    return to_effort(value)


def _check_present(value: Any, info: ValidationInfo) -> Any:
    """Return the value. Raise an error if it is missing although `type` names this field."""
    if value is None and info.data.get("type") == info.field_name:
        raise invalid_field("must be an object with the field 'name'")
    return value


class CalledFunction(OpenModel):
    name: ToolName
    arguments: Arguments = ""


class CalledCustom(OpenModel):
    name: ToolName
    input: Text = ""


# Required fields of each kind of call, for the OpenAPI document.
_CALLS: list[Any] = [
    {"properties": {"type": {"const": "function"}, "function": {"type": "object"}}, "required": ["function"]},
    {"properties": {"type": {"const": "custom"}, "custom": {"type": "object"}}, "required": ["type", "custom"]},
]


class ChatToolCall(OpenModel):
    model_config = ConfigDict(json_schema_extra={"anyOf": _CALLS})

    id: Id
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = Field(None, validate_default=True)
    custom: CalledCustom | None = Field(None, validate_default=True)

    _present = field_validator("function", "custom")(_check_present)


class ReasoningDetail(OpenModel):
    text: Text | None = None


# Required fields of each message role, for the OpenAPI document.
_ROLES: list[Any] = [
    {
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": {"type": ["string", "array", "null"]},
        }
    },
    {"properties": {"role": {"const": "tool"}, "tool_call_id": {"type": "string"}}, "required": ["tool_call_id"]},
    {"properties": {"role": {"const": "function"}, "name": {"type": "string"}}, "required": ["name"]},
]


class ChatMessage(OpenModel):
    """One message of any role. `content` is a string, a list of parts, or null.

    The content of a tool result may also be any JSON value.
    """

    model_config = ConfigDict(json_schema_extra={"anyOf": _ROLES})

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[ParsedContent, FieldInput(Content)] = Field(default_factory=list)
    name: Text | None = Field(None, validate_default=True)
    tool_calls: Annotated[list[ChatToolCall], AtMost(MAX_MESSAGES)] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: Id | None = Field(None, validate_default=True)
    refusal: Text | None = None
    phase: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    thinking: Text | None = None
    reasoning_details: Annotated[list[ReasoningDetail], AtMost(MAX_PARTS)] | None = None

    @field_validator("content", mode="wrap")
    @classmethod
    def _parsed(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        # Nearly all contents are plain texts. They are returned at once, without conversion to parts, to save time.
        if isinstance(value, str):
            return value if value.isascii() or is_encodable(value) else handler([{"type": "text", "text": value}])
        if value is None:
            return ""
        # Some frameworks send the result of a tool as bare JSON instead of text.
        if info.data.get("role") in {"tool", "function"} and _is_plain_data(value):
            return orjson.dumps(value).decode()
        if not isinstance(value, list) or len(value) > MAX_PARTS:
            raise invalid_field(f"must be a string, a list of at most {MAX_PARTS:,} text parts, or null")
        return handler([{"type": "text", "text": part} if isinstance(part, str) else part for part in value])

    @field_validator("tool_call_id")
    @classmethod
    def _result_has_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "tool":
            raise invalid_field("must be the id of the tool call that this message answers")
        return value

    @field_validator("name")
    @classmethod
    def _result_has_name(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "function":
            raise invalid_field("must be the name of the function that this message answers")
        return value


def _is_plain_data(value: Any) -> bool:
    """Return True if the content of a tool result is plain JSON data and not a list of parts."""
    if isinstance(value, list):
        return any(not isinstance(part, (str, dict)) for part in value) or any(
            isinstance(part, dict) and not isinstance(part.get("type"), str) for part in value
        )
    return isinstance(value, dict)


class ChatTool(OpenModel):
    """A tool of any kind.

    The fields inside `function` or `custom` may also be fields of the tool itself, as in the Responses API.
    """

    type: Annotated[str, Field(min_length=1, max_length=64)]
    function: FunctionSpec | None = Field(None, validate_default=True)
    custom: CustomSpec | None = Field(None, validate_default=True)
    name: Text | None = None
    tools: Annotated[list[ChatTool], AtMost(MAX_TOOLS)] | None = None

    def unused(self) -> Mapping[str, Any]:
        # An unavailable tool gets one note instead of a note for each field.
        is_available = self.function is not None or self.custom is not None or self.tools is not None
        return (self.model_extra or {}) if is_available else {}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return described(handler(schema), {"function": FunctionSpec, "custom": CustomSpec}, handler)

    @model_validator(mode="before")
    @classmethod
    def _from_flat(cls, value: Any) -> Any:
        if isinstance(value, dict):
            kind = value.get("type")
            if kind in ("function", "custom") and value.get(kind) is None and "name" in value:
                return {"type": kind, kind: {key: inner for key, inner in value.items() if key != "type"}}
        return value

    _present = field_validator("function", "custom")(_check_present)


class ChatStreamOptions(OpenModel):
    include_usage: bool | None = None


class ChatReasoningOptions(OpenModel):
    """Reasoning options in the form of OpenRouter."""

    effort: SpelledEffort = None
    max_tokens: Budget | None = None
    exclude: bool | None = None
    enabled: bool | None = None


def _to_stop_tokens(value: Any) -> Any:
    """Refuse any stop token that does not already end every answer."""
    if isinstance(value, list) and not {*STOP_TOKENS, ENDOFTEXT}.issuperset(
        each for each in value if type(each) is int
    ):
        raise refused("only the stop tokens of the Harmony format are supported; use 'stop' for texts")
    return value


class ChatThinkingOptions(OpenModel):
    """Reasoning options in the form of Anthropic's clients."""

    type: Text | None = None
    budget_tokens: Budget | None = None


def _to_thinking(value: Any) -> Any:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


class TemplateOptions(OpenModel):
    reasoning_effort: SpelledEffort = None
    thinking_budget: Budget | None = None


class ChatInput(MediaHistory):
    """Model, messages, tools and output options of a request."""

    model: ModelName
    messages: Annotated[list[ChatMessage], Field(min_length=1), AtMost(MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None
    tools: Annotated[list[ChatTool], AtMost(MAX_TOOLS)] | None = None
    tool_choice: ChosenTools = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionSpec], AtMost(MAX_TOOLS)] | None = None
    function_call: ChosenFunction = None
    response_format: ResponseFormat | None = None
    reasoning_effort: SpelledEffort = None
    reasoning: ChatReasoningOptions | None = None
    think: Annotated[
        Effort | None, BeforeValidator(_to_think), WithJsonSchema({"enum": [True, False, *EFFORTS, None]})
    ] = None
    chat_template_kwargs: TemplateOptions | None = None
    output_config: ChatReasoningOptions | None = None
    thinking: Annotated[
        ChatThinkingOptions | None, BeforeValidator(_to_thinking), FieldInput(ChatThinkingOptions | bool | None)
    ] = None
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    reasoning_budget: Budget | None = None
    include_reasoning: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    web_search_options: dict[str, Any] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop_token_ids: Annotated[list[int] | None, BeforeValidator(_to_stop_tokens)] = None
    stop: StopStrings = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=16)] | None = None


class ChatRequest(SamplingFields, StructuredFields, ChatInput):
    """Body of a Chat Completions request.

    If several fields are invalid, only the first error is reported. The fields of the last base class are validated
    first, so errors in the fields of ChatInput come first.
    """

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    modalities: Any = only_neutral("modalities")
    audio: Any = only_neutral("audio")
    skip_special_tokens: Any = only_neutral("skip_special_tokens")
    spaces_between_special_tokens: Any = only_neutral("spaces_between_special_tokens")
    min_tokens: Any = only_neutral("min_tokens")
    ignore_eos: Any = only_neutral("ignore_eos")
    include_stop_str_in_output: Any = only_neutral("include_stop_str_in_output")
    echo: Any = only_neutral("echo")
    prompt_logprobs: Any = only_neutral("prompt_logprobs")
    return_token_ids: Any = only_neutral("return_token_ids")
    use_beam_search: Any = only_neutral("use_beam_search")
    length_penalty: Any = only_neutral("length_penalty")
    bad_words: Any = only_neutral("bad_words")
    allowed_token_ids: Any = only_neutral("allowed_token_ids")
    truncate_prompt_tokens: Any = only_neutral("truncate_prompt_tokens")
    chat_template: Any = only_neutral("chat_template")
    documents: Any = only_neutral("documents")
    mock_response: Any = only_neutral("mock_response")
    # `api.routing_fields` reads and removes these before the body is validated.
    fallbacks: list[Annotated[str | dict[str, Any], Either("a model name or an object")]] | None = None
    disable_fallbacks: bool | None = None
    num_retries: int | None = None
    max_retries: int | None = None
    prompt_cache_key: Annotated[Text, Field(max_length=512)] | None = None
    # Recorded as the end user of the request.
    user: UserLabel | None = None
    safety_identifier: UserLabel | None = None
    unisono: GatewayOptions | None = None

    _neutral = field_validator(*NEUTRAL, mode="before")(neutral)
