"""The life of one item as events: added, its parts and deltas, done. Which events a kind has is a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unisono.api.responses.items import Wire, reasoning_part, refusal_part, text_part


@dataclass(frozen=True, slots=True)
class Life:
    """`event` is what the names of an item's delta and done events begin with, `full` the field of the done event that
    has the whole. `part` makes the content part that holds the text; a call has none. `more` stands in both events,
    and the done event repeats the item's `copied` fields."""

    event: str
    full: str
    part: Callable[[str], Wire] | None = None
    more: Mapping[str, object] | None = None
    copied: tuple[str, ...] = ()


TEXT = Life("response.output_text", "text", text_part, {"logprobs": []})
REFUSAL = Life("response.refusal", "refusal", refusal_part)
REASONING = Life("response.reasoning_text", "text", reasoning_part)
ARGUMENTS = Life("response.function_call_arguments", "arguments", copied=("name",))
"""openai-python 2.x cannot do without the name, although the API's own description lists none."""
HOSTED_ARGUMENTS = Life("response.mcp_call_arguments", "arguments")
INPUT = Life("response.custom_tool_call_input", "input")
