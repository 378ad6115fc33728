"""Schemas of a Responses request body and of the queries for stored objects.

Each field has an effect, or is accepted without effect and reported in a note, or is rejected by name. `inbound`
converts the fields and checks rules that concern several fields. The items of `input` are in `input_items`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from unisono.api.answer_types import ABSENT
from unisono.api.field_types import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AtMost,
    Budget,
    Count,
    FieldInput,
    Id,
    ModelName,
    OpenModel,
    QueryModel,
    Text,
    invalid_field,
    neutral,
    only_neutral,
    refused,
)
from unisono.api.logprobs import MAX_TOP_LOGPROBS
from unisono.api.media_loading import MediaHistory
from unisono.api.media_replacement import HistoryFields
from unisono.api.request_options import SamplingFields, SpelledEffort
from unisono.api.responses.declared_tools import ResponsesTool
from unisono.api.responses.input_items import GivenItem, InputTrigger
from unisono.api.structured_outputs import TextFormat
from unisono.api.tool_choice import ChoiceMode, ChosenTools

ENCRYPTED_REASONING = "reasoning.encrypted_content"
SOURCES = "web_search_call.action.sources"
OUTPUTS = "code_interpreter_call.outputs"
LOGPROBS = "message.output_text.logprobs"
# Accepted values of `include`, and whether each has an effect. The values without effect belong to items that the
# gateway never creates.
INCLUDABLE = {
    ENCRYPTED_REASONING: True,
    "file_search_call.results": False,
    "web_search_call.results": False,
    SOURCES: True,
    "message.input_image.image_url": False,
    "computer_call_output.output.image_url": False,
    OUTPUTS: True,
    LOGPROBS: True,
}

# OpenAI's minimum of `compact_threshold`, in tokens.
MIN_COMPACT_THRESHOLD = 1_000
MAX_ENTRIES = 16
MAX_METADATA = 16
MetadataKey = Annotated[Text, Field(max_length=64)]
Metadata = Annotated[dict[MetadataKey, Annotated[Text, Field(max_length=512)]], AtMost(MAX_METADATA)]
Label = Annotated[Text, Field(max_length=512)]


Summary = Literal["auto", "concise", "detailed", "none"]


class ResponsesReasoningOptions(OpenModel):
    effort: SpelledEffort = None
    max_tokens: Budget | None = None
    summary: Summary | None = None
    # OpenAI's deprecated name of `summary`.
    generate_summary: Summary | None = None


class TextOptions(OpenModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(OpenModel):
    include_obfuscation: bool | None = None

    def unused(self) -> Mapping[str, Any]:
        # Events are never obfuscated.
        return {**(self.model_extra or {}), "include_obfuscation": self.include_obfuscation or None}


class CompactionEntry(OpenModel):
    """Compaction of the conversation when the prompt has `compact_threshold` tokens."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, Field(ge=MIN_COMPACT_THRESHOLD)] | None = None


class ConversationRef(OpenModel):
    id: Id


def _to_items(value: Any) -> Any:
    """Convert `input` to a list of items. A string is a user message."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid_field("must be a string or a list of items")
    return value


def _to_reference(value: Any) -> Any:
    return {"id": value} if isinstance(value, str) else value


Items = Annotated[list[GivenItem], AtMost(MAX_MESSAGES)]
Input = Annotated[Items, BeforeValidator(_to_items), FieldInput(str | Items | None)]
Included = Annotated[str, Field(json_schema_extra={"enum": [*INCLUDABLE]})]


class ResponsesInput(MediaHistory):
    """All fields of a Responses request except the sampling fields."""

    FIELDS = HistoryFields("input")

    model: ModelName
    input: Input = Field(default_factory=list)
    instructions: Text | None = None
    tools: Annotated[list[ResponsesTool], AtMost(MAX_TOOLS)] | None = None
    tool_choice: ChosenTools = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    max_output_tokens: Count | None = None
    reasoning: ResponsesReasoningOptions | None = None
    text: TextOptions | None = None
    include: Annotated[list[Included], AtMost(64)] | None = None
    store: bool | None = None
    previous_response_id: Id | None = None
    conversation: Annotated[
        ConversationRef | None, BeforeValidator(_to_reference), FieldInput(ConversationRef | Id | None)
    ] = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    context_management: Annotated[list[CompactionEntry], AtMost(MAX_ENTRIES)] | None = None
    prompt_cache_key: Label | None = None
    safety_identifier: Label | None = None
    user: Label | None = None
    prompt: Any = Field(None, json_schema_extra={"type": "null"})

    @field_validator("prompt")
    @classmethod
    def _no_templates(cls, value: Any) -> Any:
        if value is not None:
            raise refused("prompt templates are not supported; use 'instructions' and 'input'")
        return value

    @field_validator("include")
    @classmethod
    def _includable(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in INCLUDABLE:
                raise invalid_field(f"unknown value {name[:64]!r}; must be one of {', '.join(INCLUDABLE)}")
        return value

    @property
    def stored(self) -> bool:
        """True if the response is to be stored, which is also OpenAI's default."""
        return self.store is not False

    @property
    def has_no_calls(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.mode is ChoiceMode.NONE

    @property
    def form(self) -> TextFormat | None:
        """Answer format that `text.format` requires; None if the field is not set."""
        return self.text.format if self.text else None

    @property
    def summary(self) -> str | None:
        """Kind of the reasoning summaries, such as `auto`; None if no summaries are requested."""
        options = self.reasoning or ResponsesReasoningOptions()
        kind = options.summary or options.generate_summary
        return None if kind == "none" else kind

    @property
    def is_compaction(self) -> bool:
        """True if the answer is a compaction of the conversation."""
        return bool(self.input) and isinstance(self.input[-1], InputTrigger)

    @property
    def seals_reasoning(self) -> bool:
        return ENCRYPTED_REASONING in (self.include or ())


class ResponsesRequest(SamplingFields, ResponsesInput):
    """Body of a Responses request.

    If several fields are invalid, only the first error is reported. Fields of the last base class are validated first.
    """

    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    modalities: Any = only_neutral("modalities")
    audio: Any = only_neutral("audio")

    _neutral = field_validator("modalities", "audio", mode="before")(neutral)

    @property
    def logprobs(self) -> int | None:
        """Number of alternative tokens to report; None if log probabilities are not requested."""
        return self.top_logprobs or 0 if self.top_logprobs or LOGPROBS in (self.include or ()) else None


MAX_PAGE = 100
DEFAULT_PAGE = 20


def _to_limit(value: Any) -> int:
    """Parse the query parameter `limit`, the page size."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 3:
        limit = int(value)
        if 1 <= limit <= MAX_PAGE:
            return limit
    raise invalid_field(f"must be a number from 1 to {MAX_PAGE}")


MAX_EVENT_DIGITS = 15


def _to_event(value: Any) -> int:
    """Parse `starting_after`, the number of the last event that the client has received."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= MAX_EVENT_DIGITS:
        return int(value)
    raise invalid_field(f"must be the number of an event: 1 to {MAX_EVENT_DIGITS} digits")


def _to_flag(value: Any) -> bool:
    if value in ("true", "false"):
        return bool(value == "true")
    raise invalid_field("must be true or false")


Limit = Annotated[int, BeforeValidator(_to_limit), FieldInput(Annotated[int, Field(ge=1, le=MAX_PAGE)])]
EventNumber = Annotated[
    int, BeforeValidator(_to_event), FieldInput(Annotated[int, Field(ge=0, lt=10**MAX_EVENT_DIGITS)])
]


class ItemQuery(QueryModel):
    """Query for items. OpenAI's `include` has no effect, because all fields are always returned."""

    include: list[Included] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _join_includes(cls, query: Any) -> Any:
        # Clients name the parameter `include` or `include[]`. A single value of `include[]` arrives as a string.
        bracketed = query.pop("include[]", [])
        bracketed = [bracketed] if isinstance(bracketed, str) else bracketed
        return {**query, "include": [*query.get("include", ()), *bracketed]}

    @field_validator("include")
    @classmethod
    def _includable(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in INCLUDABLE:
                raise invalid_field(f"unknown value {name[:64]!r}; must be one of {', '.join(INCLUDABLE)}")
        return value


class PageQuery(ItemQuery):
    after: str = ABSENT
    limit: Limit = DEFAULT_PAGE
    order: Literal["asc", "desc"] = "desc"


class ResponseQuery(ItemQuery):
    """Query for a whole response, or for its events after number `starting_after`."""

    stream: Annotated[bool, BeforeValidator(_to_flag)] = False
    starting_after: EventNumber = ABSENT
