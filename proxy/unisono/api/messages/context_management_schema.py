"""Schema of `context_management` and `compaction` in a Messages request.

Each kind of edit has a model. The names and defaults are Anthropic's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, field_validator

from unisono.api.field_types import Count, Either, FieldInput, OpenModel, Text, invalid_field

MAX_EDITS: Final = 16
ALL: Final = "all"


class InputTokenCount(OpenModel):
    type: Literal["input_tokens"]
    value: Count


class ClearTrigger(OpenModel):
    type: Literal["input_tokens", "tool_uses"]
    value: Count


class KeptToolUses(OpenModel):
    type: Literal["tool_uses"]
    value: Annotated[int, Field(ge=0)]


class KeptThinking(OpenModel):
    """Number of newest turns that keep their thinking. For type `all`, every turn keeps its own."""

    type: Literal["thinking_turns", "all"]
    value: Count | None = Field(None, validate_default=True)

    @field_validator("value")
    @classmethod
    def _check_present(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("type") == "thinking_turns":
            raise invalid_field("is required when 'type' is 'thinking_turns'")
        return value


class ClearToolUses(OpenModel):
    """Replacement of old tool results, and optionally of the arguments of their calls."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: ClearTrigger = ClearTrigger(type="input_tokens", value=100_000)
    keep: KeptToolUses = KeptToolUses(type="tool_uses", value=3)
    clear_at_least: InputTokenCount | None = None
    exclude_tools: list[Text] | None = None
    clear_tool_inputs: Annotated[bool | list[Text], Either("true, false, or a list of tool names")] | None = None

    @property
    def trigger_tokens(self) -> int:
        return self.trigger.value if self.trigger.type == "input_tokens" else 0

    @property
    def least_tokens(self) -> int:
        return self.clear_at_least.value if self.clear_at_least is not None else 0


class ClearThinking(OpenModel):
    """Removal of the reasoning of old turns."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[
        KeptThinking,
        BeforeValidator(lambda value: {"type": ALL} if value == ALL else value),
        FieldInput(KeptThinking | Literal["all"]),
    ] = KeptThinking(type="thinking_turns", value=1)

    trigger_tokens: ClassVar[int] = 0
    least_tokens: ClassVar[int] = 0


class CompactEdit(OpenModel):
    """Compaction of a conversation when its prompt reaches a number of tokens, the `trigger`."""

    type: Literal["compact_20260112"]
    trigger: InputTokenCount | None = None
    pause_after_compaction: bool | None = None
    instructions: Text | None = None


class CompactionOptions(OpenModel):
    """Request for a summary of the conversation instead of an answer."""

    type: Literal["summarize"]
    instructions: Text | None = None


Edit: TypeAlias = ClearToolUses | ClearThinking | CompactEdit

EDITS: Final[Mapping[str, type[Edit]]] = {
    "clear_tool_uses_20250919": ClearToolUses,
    "clear_thinking_20251015": ClearThinking,
    "compact_20260112": CompactEdit,
}


class UnknownEdit(OpenModel):
    type: str

    @field_validator("type")
    @classmethod
    def _refuse(cls, value: str) -> str:
        raise invalid_field(f"must be one of {', '.join(EDITS)}")


def to_edit(value: Any) -> Any:
    if not isinstance(value, dict):
        raise invalid_field("must be an object")
    kind = value.get("type")
    return (EDITS.get(kind, UnknownEdit) if isinstance(kind, str) else UnknownEdit).model_validate(value)


GivenEdit: TypeAlias = Annotated[Edit, PlainValidator(to_edit), FieldInput(Edit)]


class ContextEdits(OpenModel):
    edits: Annotated[list[GivenEdit], Field(max_length=MAX_EDITS)] = Field(default_factory=list)
