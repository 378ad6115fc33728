"""Finish reason of an answer of Chat Completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from unisono.api.client_toolbox import CallForm
from unisono.core.events import Finished
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
