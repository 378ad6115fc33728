"""Approval rules for tool calls: rules in the request, combined with the operator's rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from unisono.api.field_types import OpenModel, Text, invalid_field
from unisono.core.tool_approvals import Approval, ToolFilter

MAX_NAMES = 1024
ToolNames = Annotated[list[Text], Field(max_length=MAX_NAMES)]


class FilterSpec(OpenModel):
    tool_names: ToolNames | None = None
    read_only: bool | None = None

    @model_validator(mode="after")
    def _is_not_empty(self) -> FilterSpec:
        # An empty filter matches everything. As `never` it would disable approval for all tools by accident.
        if self.tool_names is None and self.read_only is None:
            raise invalid_field("must contain 'tool_names' or 'read_only'")
        return self

    def filter(self) -> ToolFilter:
        return ToolFilter(None if self.tool_names is None else frozenset(self.tool_names), self.read_only)


class ApprovalSpec(OpenModel):
    """Approval rules of a request.

    Calls to tools that match `always` need approval; calls to tools that match `never` do not. `word` is set instead of
    both filters if the client sends the string `always` or `never`, which applies to all tools.
    """

    always: FilterSpec | None = None
    never: FilterSpec | None = None
    word: SkipJsonSchema[str | None] = None

    def approval(self) -> Approval:
        if self.word is not None:
            return Approval(always=ToolFilter()) if self.word == "always" else Approval(otherwise=False)
        always = None if self.always is None else self.always.filter()
        never = None if self.never is None else self.never.filter()
        approval = Approval(always, never)
        return Approval(always=ToolFilter()) if approval == Approval() else approval


def to_approval(value: Any) -> Any:
    """Convert `require_approval` to the fields of `ApprovalSpec`, before validation.

    Raises PydanticCustomError for an unknown word.
    """
    if isinstance(value, str):
        if value not in ("always", "never"):
            raise invalid_field("must be 'always', 'never' or an object with tool filters")
        return {"word": value}
    if isinstance(value, dict):
        return {name: inner for name, inner in value.items() if name != "word"}
    return value


def to_filter(value: Any) -> Any:
    """Convert a list of tool names to the fields of `FilterSpec`, before validation."""
    return {"tool_names": value} if isinstance(value, list) else value


def combined_approval(operator: Approval, requested: ApprovalSpec | None) -> Approval:
    """Combine approval rules: either side can require approval.

    Without any rule, every call requires approval.
    """
    if requested is None:
        return operator
    # `Approval()` means that the operator has set no rule. Otherwise a request can only add approvals.
    approval = requested.approval()
    return approval if operator == Approval() else replace(approval, second=operator)
