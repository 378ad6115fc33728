"""Usage of a message, in Anthropic's terms."""

from __future__ import annotations

from typing import Any

from unisono.api.messages.server_tools import FETCH, SEARCH
from unisono.api.messages.stop_reason import ShownBlocks
from unisono.core.generation import Usage


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
