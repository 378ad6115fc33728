"""Field types and validation errors shared by the requests of all API surfaces.

Types are strict: a number written as a string is an error. An unsupported field is accepted if its value has no effect
(`echo: false`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationInfo,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from unisono.core.frozen import dataclass
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

# A bias on these tokens could keep the model from ending a message or a call.
STRUCTURAL_IDS = frozenset({RETURN, CONSTRAIN, CHANNEL, START, END, MESSAGE, CALL, ENDOFTEXT})

# Maximum number of messages. A message takes at least four tokens, so no context window holds more.
MAX_MESSAGES = 20_000
# OpenAI permits 128 tools; agents with several tool servers send more.
MAX_TOOLS = 512
# Maximum number of parts of one message or result.
MAX_PARTS = 20_000
# Maximum number of biased tokens. Every backend applies each bias to every generated token.
MAX_BIASES = 1_024
MAX_PARAMETERS_BYTES = 256 * 1024
MAX_QUOTED_NAME_LENGTH = 128

# Accepted values of unsupported fields: values without effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (None, [], ["text"]),
    "audio": (None,),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True, False),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "include_stop_str_in_output": (None, False),
    "echo": (None, False),
    "prompt_logprobs": (None, 0, False),
    "return_token_ids": (None, False),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "mock_response": (None,),
}

REFUSALS = {
    "modalities": 'only ["text"] is supported; omit this field',
    "audio": "audio output is not supported; omit this field",
    "skip_special_tokens": "special tokens are never part of the text; omit this field, or use /v1/completions",
    "spaces_between_special_tokens": "must be true or false",
    "min_tokens": "a minimum length is not supported; omit this field",
    "ignore_eos": "an answer always ends at a stop token; omit this field",
    "include_stop_str_in_output": "stop strings are never part of the text; omit this field",
    "echo": "the prompt is never repeated; use 'continue_final_message' without 'echo'",
    "prompt_logprobs": "log probabilities of the prompt are not supported; omit this field",
    "return_token_ids": "token ids are not returned; use the inspector, or /v1/completions",
    "use_beam_search": "beam search is not supported; omit this field",
    "length_penalty": "beam search is not supported; omit this field",
    "bad_words": "words cannot be excluded; use 'logit_bias'",
    "allowed_token_ids": "tokens cannot be restricted to a list; use 'logit_bias' or 'structured_outputs'",
    "truncate_prompt_tokens": "a prompt is never cut inside of a message; shorten 'messages'",
    "chat_template": "the gateway renders the prompt in the Harmony format; omit this field",
    "documents": "documents are not supported; put their text into 'messages'",
    "mock_response": "only a model answers here; omit this field, or serve a model with the backend kind `replay`",
}


def refused(reason: str) -> PydanticCustomError:
    """Return the validation error for a valid but unsupported value; `reason` is its text."""
    return PydanticCustomError("unsupported_value", "{reason}", {"reason": reason})


def invalid_field(reason: str) -> PydanticCustomError:
    return PydanticCustomError("invalid_value", "{reason}", {"reason": reason})


@dataclass(frozen=True, slots=True)
class FieldInput:
    """Annotation for a field whose input type differs from its parsed type.

    The input type `form` is evaluated only for the OpenAPI document, so it does not slow down startup.
    """

    form: Any

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self.form).core_schema)


@dataclass(frozen=True, slots=True)
class Either:
    """Annotation for a union of types; `expected` describes the permitted values.

    Without this annotation, an error would name a branch of the union as a part of the field's path.
    """

    expected: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        union = handler(source)
        assert union["type"] == "union"
        return {**union, "custom_error_type": "invalid_value", "custom_error_message": f"must be {self.expected}"}


@dataclass(frozen=True, slots=True)
class AtMost:
    """Annotation for a list or an object with at most `count` members.

    The members are counted before any member is validated, and validation ends at the first invalid member. Pydantic's
    own limit would validate members before it counts them, and would collect all errors, although a client receives
    only the first error. The refusal of a large request could then take longer than an answer.
    """

    count: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members: Any = {**handler(source), "max_length": self.count, "fail_fast": True}
        return core_schema.no_info_before_validator_function(self._counted, members)

    def _counted(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.count:
            raise PydanticCustomError(
                "too_long", "has {actual} members, but the limit is {most}", {"actual": len(value), "most": self.count}
            )
        return value


def is_encodable(text: str) -> bool:
    """Return False if a text contains a lone surrogate, which is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encodable(text: str) -> str:
    # ASCII is always valid, and `isascii` takes constant time.
    if text.isascii() or is_encodable(text):
        return text
    raise invalid_field("contains a lone surrogate, which is not valid Unicode")


def _to_token_id(value: Any) -> int:
    if not isinstance(value, str) or not (value.isascii() and value.isdigit() and len(value) <= 6):
        raise invalid_field("must be a token id in decimal digits")
    token = int(value)
    if token >= VOCABULARY:
        raise invalid_field(f"must be a token id from 0 to {VOCABULARY - 1}")
    if token in STRUCTURAL_IDS:
        raise refused("is a structural token of the Harmony format, which cannot be biased")
    return token


def _to_arguments(value: Any) -> Any:
    if value is None:
        return ""
    return orjson.dumps(value).decode() if isinstance(value, dict) else value


def _bounded(parameters: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(orjson.dumps(parameters))
    except orjson.JSONEncodeError:
        raise invalid_field("contains a lone surrogate or a value that is not valid JSON") from None
    if size > MAX_PARAMETERS_BYTES:
        raise invalid_field(f"must be a schema of at most {MAX_PARAMETERS_BYTES:,} bytes")
    return parameters


def _to_stops(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_encodable)]
Id = Annotated[Text, Field(min_length=1)]
Stop = Annotated[Text, Field(min_length=1, max_length=4096)]
Stops = Annotated[list[Stop], AtMost(16)]
# Label of a user. Some clients send a number.
UserLabel = Annotated[Text | int, Either("a string or an integer")]
# One stop string, a list of stop strings, or null.
StopStrings = Annotated[Stops, BeforeValidator(_to_stops), FieldInput(Stop | Stops | None)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Arguments = Annotated[Text, BeforeValidator(_to_arguments), FieldInput(str | dict[str, Any] | None)]
Parameters = Annotated[dict[str, Any], AfterValidator(_bounded)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]
# Reasoning budget in tokens; a negative value means no limit.
Budget = Annotated[int, Field(ge=-1, le=2**31 - 1)]


Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=VOCABULARY)]
MinP = Annotated[float, Field(ge=0, le=1)]
# Engines calculate with 32-bit floats, in which a very small penalty becomes 0.
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=10)]
# FastAPI writes limits as floats, which cannot represent 2**63 - 1. Therefore `lt` instead of `le`.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, BeforeValidator(_to_token_id), FieldInput(Annotated[str, Field(pattern=r"^[0-9]{1,6}$")])]
LogitBias = Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], AtMost(MAX_BIASES)]
ModelName = Annotated[Text, Field(min_length=1, max_length=256)]


class OpenModel(BaseModel):
    """Object in a request that may have unknown fields. A note reports fields without effect.

    `FLATTENED` names fields that exist only in the class. In a request, their content is directly in the object. The
    paths in notes omit these names.
    """

    FLATTENED: ClassVar[frozenset[str]] = frozenset()

    # Models are built on first use. `prepare_routes` builds the models of the most frequent routes at startup.
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, hide_input_in_errors=True, defer_build=True)

    def unused(self) -> Mapping[str, Any]:
        """Return the fields of this object that the gateway ignores, with the client's values."""
        return self.__pydantic_extra__ or {}


class QueryModel(OpenModel):
    """Query parameters of a route."""

    # FastAPI gives each parameter an alias. Pydantic warns about the alias if the model is not built yet.
    model_config = ConfigDict(defer_build=False)


def shortened(name: str) -> str:
    """Truncate a client's name or id for an error message, and replace lone surrogates."""
    return name[:MAX_QUOTED_NAME_LENGTH].encode(errors="replace").decode()


def smallest(budgets: Iterable[int | None]) -> int | None:
    """Return the smallest budget; None for no limit. None and negative budgets are no limit."""
    least: int | None = None
    for budget in budgets:
        if budget is not None and budget >= 0 and (least is None or budget < least):
            least = budget
    return least


def only_neutral(name: str) -> Any:
    """Return the Pydantic definition of the unsupported field `name`, which `neutral` validates."""
    return Field(None, json_schema_extra={"enum": [*NEUTRAL[name]]})


def neutral(value: Any, info: ValidationInfo) -> None:
    """Validate an unsupported field: return None for a value that requests nothing, else raise."""
    assert info.field_name is not None
    if value not in NEUTRAL[info.field_name]:
        raise refused(REFUSALS[info.field_name])
