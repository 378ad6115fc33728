"""Field names for reasoning in answers."""

from __future__ import annotations

from enum import StrEnum


class ReasoningField(StrEnum):
    """Field name for reasoning. Clients disagree, so the default is both."""

    BOTH = "both"
    REASONING = "reasoning"
    REASONING_CONTENT = "reasoning_content"
    NONE = "none"

    @property
    def names(self) -> tuple[str, ...]:
        return REASONING_NAMES[self]


REASONING_NAMES: dict[ReasoningField, tuple[str, ...]] = {
    ReasoningField.BOTH: ("reasoning", "reasoning_content"),
    ReasoningField.REASONING: ("reasoning",),
    ReasoningField.REASONING_CONTENT: ("reasoning_content",),
    ReasoningField.NONE: (),
}
