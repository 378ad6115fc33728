"""What happens while the model answers: one lifecycle, Opened, Delta*, Closed, over three kinds of item.

The router emits these from tokens; every surface translates them to its own wire. An item's deltas concatenate to the
text of its Closed. Items never overlap: one is closed before the next opens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from unisono.core.conversation import Phase, Tokens
from unisono.core.generation import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thoughts. `index` counts items over the whole answer, from 0."""

    index: int


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text: an answer (`final`) or a preamble (`commentary`)."""

    index: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call for the client. `call_index` counts calls over the whole answer, from 0; `name` is the client's name."""

    index: int
    call_index: int
    call_id: str
    name: str


Item: TypeAlias = Reasoning | Text | ToolCall


@dataclass(frozen=True, slots=True)
class Opened:
    item: Item


@dataclass(frozen=True, slots=True)
class Delta:
    item: Item
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """`tokens` is the item's whole Harmony message as it may stand in a later prompt, from `<|start|>` to its
    terminator, repaired where it had to be; empty when the message was cut. `complete` is False for a cut item.
    """

    item: Item
    text: str
    tokens: Tokens = ()
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Repaired:
    """Something malformed was mended. `rule` is a stable name from `harmony.grammar.RULES`; `position` is the offset,
    in generated tokens, at which it was decided; `dropped` counts characters that reach nobody."""

    rule: str
    position: int
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. `reason` is what stopped the model; `stop_sequence` the client's stop string, when one did.
    `cut_call` says that a tool call was begun and never completed: it was not shown."""

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    cut_call: bool = False


Event: TypeAlias = Opened | Delta | Closed | Repaired | Finished
