"""What a Chat Completions request may hold: the shape of the body, judged field by field.

Every field is honoured, accepted without effect and noted, or refused by name. A field with its neutral value (`n: 1`,
`logprobs: false`) is always accepted. Types are strict: a number written as a string is a mistake, not a number. What
concerns several fields at once, and all meaning, is for `inbound`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from unisono.core.conversation import Effort
from unisono.core.generation import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    ENDOFTEXT,
    MESSAGE,
    RETURN,
    START,
    VOCABULARY,
)

EFFORTS = {
    "none": Effort.LOW,
    "minimal": Effort.LOW,
    "low": Effort.LOW,
    "medium": Effort.MEDIUM,
    "high": Effort.HIGH,
    "xhigh": Effort.HIGH,
    "max": Effort.HIGH,
}
"""Every spelling of an effort in use anywhere, and what gpt-oss knows of it."""

STRUCTURAL_IDS = frozenset({RETURN, CONSTRAIN, CHANNEL, START, END, MESSAGE, CALL, ENDOFTEXT})

MAX_MESSAGES = 20_000
"""A message takes at least four tokens, so no window holds more of them than this; looking at each takes time."""
MAX_TOOLS = 512
MAX_PARAMETERS_BYTES = 256 * 1024
MAX_STOPS = 16

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
REASONING_PARTS = frozenset({"thinking", "reasoning", "reasoning_text"})
MEDIA_PARTS = {
    "image_url": "image",
    "image": "image",
    "input_image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "file": "file",
    "input_file": "file",
    "document": "file",
    "video_url": "video",
    "video": "video",
}
"""Kinds of parts that are no text, and what they carry."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "modalities": (None, [], ["text"]),
    "audio": (None,),
}
"""Refused fields, with the values that ask for nothing."""

REFUSALS = {
    "logprobs": "log probabilities are not available; leave it out or send false",
    "top_logprobs": "log probabilities are not available; leave it out or send 0",
    "modalities": 'only ["text"] is supported',
    "audio": "audio output is not supported",
}


def refused(reason: str) -> PydanticCustomError:
    """A value this gateway understands and does not support."""
    return PydanticCustomError("unsupported_value", "{reason}", {"reason": reason})


def wrong(reason: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", "{reason}", {"reason": reason})


def _encodable(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise wrong("holds a lone surrogate, which is not valid Unicode") from None
    return text


def _to_effort(value: Any) -> Effort | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in EFFORTS:
        raise wrong(f"must be one of {', '.join(EFFORTS)}")
    return EFFORTS[value]


def _to_think(value: Any) -> Effort | None:
    if isinstance(value, bool):
        return Effort.MEDIUM if value else Effort.LOW
    return _to_effort(value)


def _to_token_id(value: Any) -> int:
    if not isinstance(value, str) or not (value.isascii() and value.isdigit() and len(value) <= 6):
        raise wrong("must be a token id in decimal")
    token = int(value)
    if token >= VOCABULARY:
        raise wrong(f"must be a token id from 0 to {VOCABULARY - 1}")
    if token in STRUCTURAL_IDS:
        raise refused("is a structural token of the Harmony format, which cannot be biased")
    return token


def _to_arguments(value: Any) -> Any:
    if value is None:
        return ""
    return orjson.dumps(value).decode() if isinstance(value, dict) else value


def _to_stops(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _bounded(parameters: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(orjson.dumps(parameters))
    except orjson.JSONEncodeError:
        raise wrong("holds a value that is not valid JSON or a lone surrogate") from None
    if size > MAX_PARAMETERS_BYTES:
        raise wrong(f"is a schema of more than {MAX_PARAMETERS_BYTES:,} bytes")
    return parameters


Text = Annotated[str, AfterValidator(_encodable)]
Id = Annotated[Text, Field(min_length=1)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Arguments = Annotated[Text, BeforeValidator(_to_arguments)]
Parameters = Annotated[dict[str, Any], AfterValidator(_bounded)]
SpelledEffort = Annotated[Effort | None, BeforeValidator(_to_effort)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]


class Open(BaseModel):
    """An object that may hold more than is known here; what is more has no effect and is noted."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, hide_input_in_errors=True)


class Part(Open):
    type: str
    text: Text | None = Field(None, validate_default=True)
    thinking: Text | None = None
    refusal: Text | None = None

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in MEDIA_PARTS:
            raise refused(f"'{value}' is not possible: the model does not support {MEDIA_PARTS[value]} input")
        if value not in TEXT_PARTS | REASONING_PARTS | {"refusal"}:
            raise wrong("must be 'text' or 'refusal'")
        return value

    @field_validator("text")
    @classmethod
    def _present(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("type") in TEXT_PARTS:
            raise wrong("must be a string")
        return value


class CalledFunction(Open):
    name: ToolName
    arguments: Arguments = ""


class CalledCustom(Open):
    name: ToolName
    input: Text = ""


class Call(Open):
    id: Id
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = Field(None, validate_default=True)
    custom: CalledCustom | None = Field(None, validate_default=True)

    @field_validator("function", "custom")
    @classmethod
    def _present(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == info.field_name:
            raise wrong("must be an object with the call's name")
        return value


class ReasoningDetail(Open):
    text: Text | None = None


class Message(Open):
    """One message of any role. `content` becomes a list of parts, whichever form it came in."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: list[Part] = []
    name: Text | None = Field(None, validate_default=True)
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: Id | None = Field(None, validate_default=True)
    refusal: Text | None = None
    phase: Text | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    thinking: Text | None = None
    reasoning_details: list[ReasoningDetail] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _to_parts(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return []
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if info.data.get("role") in {"tool", "function"} and _is_plain_data(value):
            return [{"type": "text", "text": orjson.dumps(value).decode()}]
        if not isinstance(value, list):
            raise wrong("must be a string, a list of text parts, or null")
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]

    @field_validator("tool_call_id")
    @classmethod
    def _result_has_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "tool":
            raise wrong("must name the call this message answers")
        return value

    @field_validator("name")
    @classmethod
    def _result_has_name(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "function":
            raise wrong("must name the function this message answers for")
        return value


def _is_plain_data(value: Any) -> bool:
    """Whether a tool's content is its result as bare JSON, and not a list of parts."""
    if isinstance(value, list):
        return any(not isinstance(part, (str, dict)) for part in value) or any(
            isinstance(part, dict) and not isinstance(part.get("type"), str) for part in value
        )
    return isinstance(value, dict)


class FunctionSpec(Open):
    name: ToolName
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class CustomSpec(Open):
    name: ToolName
    description: Text | None = None


class ToolSpec(Open):
    """A tool of any kind. A function or custom tool may also come flat, as the Responses API has it."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    function: FunctionSpec | None = Field(None, validate_default=True)
    custom: CustomSpec | None = Field(None, validate_default=True)
    name: Text | None = None
    tools: list[ToolSpec] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_flat(cls, value: Any) -> Any:
        if isinstance(value, dict):
            kind = value.get("type")
            if kind in {"function", "custom"} and value.get(kind) is None and "name" in value:
                return {"type": kind, kind: {key: inner for key, inner in value.items() if key != "type"}}
        return value

    @field_validator("function", "custom")
    @classmethod
    def _present(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == info.field_name:
            raise wrong("must be an object with the tool's name")
        return value


class StreamOptions(Open):
    include_usage: bool | None = None


class ReasoningOptions(Open):
    effort: SpelledEffort = None


class TemplateOptions(Open):
    reasoning_effort: SpelledEffort = None


class ChatRequest(Open):
    model: Annotated[Text, Field(min_length=1, max_length=256)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionSpec], Field(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: SpelledEffort = None
    reasoning: ReasoningOptions | None = None
    think: Annotated[Effort | None, BeforeValidator(_to_think)] = None
    chat_template_kwargs: TemplateOptions | None = None
    output_config: ReasoningOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Annotated[
        list[Annotated[Text, Field(min_length=1, max_length=4096)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(_to_stops),
    ] = []
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=VOCABULARY)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[Annotated[int, BeforeValidator(_to_token_id)], Annotated[float, Field(ge=-100, le=100)]] | None = (
        None
    )
    logprobs: Any = None
    top_logprobs: Any = None
    modalities: Any = None
    audio: Any = None

    @field_validator("logprobs", "top_logprobs", "modalities", "audio", mode="before")
    @classmethod
    def _neutral(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if value not in NEUTRAL[info.field_name]:
            raise refused(REFUSALS[info.field_name])
        return None

    @field_validator("tool_choice", "function_call", mode="before")
    @classmethod
    def _unforced(cls, value: Any) -> Any:
        if value is not None and value not in ("none", "auto"):
            raise refused("only 'auto' and 'none' are supported in this version; forcing a tool follows")
        return value

    @field_validator("response_format")
    @classmethod
    def _plain(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") != "text":
            raise refused("only {'type': 'text'} is supported in this version; JSON answers follow")
        return value
