"""Tool calls in answers of Chat Completions, and the finish reason that they imply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

from unisono.api.client_toolbox import CallForm
from unisono.core.events import Finished, ToolCall
from unisono.core.generation import FinishReason

# Finish reason of an answer with calls, by the form of its calls.
CALLED = {CallForm.FUNCTION: "tool_calls", CallForm.CUSTOM: "tool_calls", CallForm.LEGACY: "function_call"}


def to_finish_reason(finished: Finished, calls: Sequence[CallForm], *, has_truncated_call: bool = False) -> str:
    """Return the finish reason.

    `calls` holds the forms of the complete calls in the answer. `has_truncated_call` is true if the client received a
    truncated call.
    """
    # A complete call decides the reason even if the answer was cut after it, because the client can run the call.
    if calls and not has_truncated_call:
        return CALLED[calls[0]]
    if finished.cut_call or has_truncated_call:
        return "length"
    match finished.reason:
        case FinishReason.STOP:
            return "stop"
        case FinishReason.LENGTH:
            return "length"
        case _:
            assert_never(finished.reason)


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
