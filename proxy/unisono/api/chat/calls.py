"""Tool calls in answers of Chat Completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.api.client_toolbox import CallForm
from unisono.core.events import ToolCall


def has_room(calls: Sequence[CallForm], form: CallForm) -> bool:
    """Return True if a message with calls of the forms `calls` can contain another of `form`.

    A call in the legacy form must be the only call of its message.
    """
    return not calls or CallForm.LEGACY not in (calls[0], form)


def to_call(item: ToolCall, arguments: str, form: CallForm) -> dict[str, Any]:
    """Return a complete call as an entry of `tool_calls`.

    In the legacy form, returns the value of `function_call`.
    """
    match form:
        case CallForm.CUSTOM:
            custom = {"name": item.name, "input": arguments}
            return {"id": item.call_id, "type": "custom", "custom": custom}
        case CallForm.LEGACY:
            return {"name": item.name, "arguments": arguments}
        case _:  # the other forms are functions here
            return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}
