"""Stop reason and usage of a message, in Anthropic's terms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from unisono.api.messages.server_tools import FETCH, SEARCH, name_of
from unisono.core.events import Compacted, Finished, Ran
from unisono.core.generation import FinishReason, Usage
from unisono.core.recovery_rules import REPETITION
from unisono.engine.interventions.requirements import UNMET_FORM
from unisono.engine.request import GenerationReport

# Share by which the number of generated tokens may be too low, because it is estimated for backends that send text.
GUESS_TOLERANCE: Final = 0.125


@dataclass(slots=True)
class ShownBlocks:
    """Record of the emitted blocks.

    `calls` is the number of emitted client calls, and `cut` is True if one of these calls was truncated.
    `has_server_call` is True if a call of a server tool was emitted. `performed` contains the tool name of each
    successful call of a server tool. `refused` is True if a text violated the required format. `compacted` is the
    compaction before the answer, or None.
    """

    calls: int = 0
    cut: bool = False
    has_server_call: bool = False
    performed: list[str] = field(default_factory=list)
    refused: bool = False
    compacted: Compacted | None = None

    def add_result(self, ran: Ran) -> None:
        # Failed and refused calls are not counted, because Anthropic does not bill them.
        if not ran.outcome.is_error:
            self.performed.append(name_of(ran.item))


def stop_fields(
    finished: Finished, blocks: ShownBlocks, report: GenerationReport, max_tokens: int | None
) -> dict[str, Any]:
    """Return the stop reason of a message, and the two fields that explain the stop reason."""
    reason = _reason(finished, blocks, report, max_tokens)
    details = {"type": "refusal", "category": None, "explanation": report.unmet or None}
    return {
        "stop_reason": reason,
        "stop_sequence": finished.stop_sequence if reason == "stop_sequence" else None,
        "stop_details": details if reason == "refusal" else None,
    }


def _reason(finished: Finished, blocks: ShownBlocks, report: GenerationReport, max_tokens: int | None) -> str:
    if blocks.compacted is not None and blocks.compacted.ends_answer:
        return "compaction"
    if max_tokens == 0:
        return "max_tokens"
    # In order of precedence. The client can run complete calls, regardless of what ended the answer afterwards.
    if blocks.calls and not blocks.cut:
        return "tool_use"
    if finished.stop_sequence is not None:
        return "stop_sequence"
    if finished.paused:
        return "pause_turn"
    if finished.reason is FinishReason.LENGTH or finished.cut_call or blocks.cut:
        return "model_context_window_exceeded" if _is_window_full(finished, report) else "max_tokens"
    # In a stream the text may already be emitted when it turns out to violate its format.
    return "refusal" if blocks.refused or report.unmet == UNMET_FORM else "end_turn"


def _is_window_full(finished: Finished, report: GenerationReport) -> bool:
    """Return True if the answer ended because the context window was full.

    Other causes of a truncated answer are `max_tokens` of the request, a budget, and a stop by the gateway.
    """
    limit = report.facts.window_limit
    if finished.reason is not FinishReason.LENGTH or limit is None or report.unmet or REPETITION in report.recoveries:
        return False
    return finished.usage.completion_tokens >= limit * (1 - GUESS_TOLERANCE)


def _tokens(usage: Usage) -> dict[str, Any]:
    # Here `input_tokens` excludes cached tokens.
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def to_usage(usage: Usage, blocks: ShownBlocks) -> dict[str, Any]:
    """Return the usage of the answer. The usage of a compaction is only in `iterations`."""
    fields = {**_tokens(usage), "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}}
    if (compacted := blocks.compacted) is not None:
        answer = [] if compacted.ends_answer else [{"type": "message", **_tokens(usage)}]
        fields["iterations"] = [{"type": "compaction", **_tokens(compacted.usage)}, *answer]
    if blocks.has_server_call:
        fields["server_tool_use"] = {
            "web_search_requests": blocks.performed.count(SEARCH),
            "web_fetch_requests": blocks.performed.count(FETCH),
        }
    return fields
