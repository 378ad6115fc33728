"""What happens while the model answers: one lifecycle, Opened, Delta*, Closed, over every kind of item. A call the
gateway makes itself is followed by Ran; a server's tools are Opened, then Listed.

The router emits these from tokens; every surface translates them to its own wire. An item's deltas concatenate to the
text of its Closed. Items never overlap: one is closed before the next opens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from unisono.core.conversation import Json, Phase, Tokens
from unisono.core.generation import FinishReason, Usage
from unisono.core.tool_arguments import ToolArguments
from unisono.core.tools import HostedTool, ToolOutcome


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thoughts. `index` counts items over the whole answer, from 0."""

    index: int


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text: an answer (`final`) or a preamble (`commentary`). An `unfit` one had to be of a form and is not;
    nothing of it was shown before that was known."""

    index: int
    phase: Phase
    unfit: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call for the client. `call_index` counts calls over the whole answer, from 0; `name` is the client's name."""

    index: int
    call_index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class HostedCall:
    """A call of a tool that the gateway runs itself; `server` and `tool` are their own names, `name` the one the model
    knows. Where the model made a name up, `server` may be empty: nothing is run then, and the model is told.

    With `needs_approval` it is not run: the turn ends behind it, and a later one may say that it is. `approval` is the
    id of such a request where this is the call that was agreed to: its message stands in the conversation already, so
    its Closed has no tokens."""

    index: int
    call_id: str
    name: str
    server: str
    tool: str
    needs_approval: bool = False
    approval: str = ""
    arguments: ToolArguments = field(default=ToolArguments("{}"), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """The tools of a server are asked for; `index` counts listings of an answer, from 0."""

    index: int
    server: str


Item: TypeAlias = Reasoning | Text | ToolCall | HostedCall | Listing


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
class Ran:
    """What came of a hosted call, behind its Closed. The batch that holds the Closed is yielded before the call is
    made, and the call is made only when the next batch is asked for: whoever must know that it may have been made
    writes that down in between. `said` is what the model reads, the outcome's text or what stands in its place; `rule`
    is why, where it is something else (see `core.rules.RULES`)."""

    item: HostedCall
    outcome: ToolOutcome
    said: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """A server's tools, behind the Opened of their Listing; or, with `error`, why there are none."""

    item: Listing
    tools: tuple[HostedTool, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Repaired:
    """Something malformed was mended. `rule` is a stable name from `core.rules.RULES`; `position` is the offset,
    in generated tokens, at which it was decided; `dropped` counts characters that reach nobody."""

    rule: str
    position: int
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. `reason` is what stopped the model; `stop_sequence` the client's stop string, when one did.
    `cut_call` says that a tool call was begun and never completed: it was not shown. `paused` says that the answer is
    to go on behind what was said, as soon as its client wants that."""

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    cut_call: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """A part of an answer that a backend gave in OpenAI's own API, as it is handed out: the whole body, or an event of
    a stream. A turn that passes through has no other events, but for Finished."""

    body: Mapping[str, Json]


Event: TypeAlias = Opened | Delta | Closed | Ran | Listed | Repaired | Finished | Passed
