"""Events of an answer. Every kind of item has one lifecycle: Opened, Delta*, Closed.

A call that the gateway makes itself is followed by Ran. The tool list of a server is Opened, then Listed.

The router emits these events from tokens; every API surface translates them to its wire format. An item's deltas
concatenate to the text of its Closed. Items never overlap: one is closed before the next opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import groupby
from typing import TypeAlias

from unisono.core.conversation import Item as ConversationItem
from unisono.core.conversation import Json, Phase, Tokens
from unisono.core.elicitation import ToolQuestion
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason, Usage
from unisono.core.server_tool_arguments import ToolArguments
from unisono.core.tools import HostedTool, ToolOutcome


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning item. `index` is the item's number among all items of the answer, from 0."""

    index: int


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text: an answer (`final`) or a preamble (`commentary`).

    `unfit` marks a text that violates the required answer form. None of it was emitted before the violation was known.
    """

    index: int
    phase: Phase
    unfit: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call for the client.

    `call_index` counts calls over the whole answer, from 0; `name` is the client's name for the tool.
    """

    index: int
    call_index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class HostedCall:
    """Call of a tool that the gateway runs itself.

    `server` and `tool` are their own names, `name` is the one the model uses. If the model invented a name, `server`
    may be empty: nothing is run, and the model gets an error as the result.

    A call with `needs_approval` is not run: the turn ends after it, and a later turn may approve it. For an approved
    call, `approval` is the id of its approval request. Its message is already in the conversation, so its Closed has
    no tokens. A call with a `question` needs an answer of the user instead of an approval.
    """

    index: int
    call_id: str
    name: str
    server: str
    tool: str
    needs_approval: bool = False
    approval: str = ""
    arguments: ToolArguments = field(default=ToolArguments("{}"), compare=False, repr=False)
    question: ToolQuestion | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """Request for the tools of a server; `index` counts listings of an answer, from 0."""

    index: int
    server: str


# Every kind of item has a branch in each API surface; `assert_never` there makes mypy report a kind that is missing.
Item: TypeAlias = Reasoning | Text | ToolCall | HostedCall | Listing


# -- events
# The lifecycle of an item is Opened, then any number of Deltas, then Closed. Nothing is emitted for an item before
# its Opened or after its Closed.


@dataclass(frozen=True, slots=True)
class Opened:
    item: Item


# Not frozen: creating a frozen instance takes three times as long, once per token. Nothing may change an instance, as
# `unsafe_hash` requires.
@dataclass(slots=True, unsafe_hash=True)
class Delta:
    item: Item
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """End of an item; `complete` is False for an item that was cut off.

    `tokens` is the item's whole Harmony message as a later prompt may contain it, from `<|start|>` to its terminator,
    repaired where necessary. It is empty if the message was cut off.
    """

    item: Item
    text: str
    tokens: Tokens = ()
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a server tool call, emitted after its Closed.

    The batch that holds the Closed is yielded before the call is made. The call is made only when the next batch is
    requested. A consumer can therefore record in between that the call may have been made. `text_for_model` is the
    outcome's text or a replacement for it. `rule` names the reason for a replacement (see
    `core.recovery_rules.RULES`).
    """

    item: HostedCall
    outcome: ToolOutcome
    text_for_model: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """Tools of a server, emitted after the Opened of their Listing.

    `error` states why there are none.
    """

    item: Listing
    tools: tuple[HostedTool, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Repaired:
    """Repair of malformed output.

    `rule` is a stable name from `core.recovery_rules.RULES`. `position` is the offset of the decision, in generated
    tokens. `dropped` counts characters that were discarded.
    """

    rule: str
    position: int
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Compacted:
    """Compaction of the conversation before its answer; no other event precedes it.

    `items` replace the conversation. If the model wrote no `summary`, the conversation is answered as it was. `usage`
    is that of the summary. With `ends_answer`, the answer contains nothing else.
    """

    items: tuple[ConversationItem, ...]
    summary: str
    usage: Usage
    ends_answer: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of an answer.

    `reason` states why the model stopped; `stop_sequence` is the client's stop string that ended the answer, if one
    did. `cut_call` is True if a tool call was begun but not completed; that call was not emitted. `paused` is True if
    the answer can be continued on the client's request.
    """

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    cut_call: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """Part of a pass-through answer: the whole body, or one event of a stream.

    It is emitted unchanged. A pass-through answer has no other events except Finished.
    """

    body: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class PassedBytes:
    """Part of a pass-through answer that is not JSON; `media_type` is the server's."""

    data: bytes
    media_type: str


# Events other than a part of an item's text.
WholeEvent: TypeAlias = Opened | Closed | Ran | Listed | Repaired | Compacted | Finished | Passed | PassedBytes
Event: TypeAlias = WholeEvent | Delta


def join_deltas(batch: Sequence[Event]) -> Sequence[Event]:
    """Return the events of a batch; adjacent deltas of one item become one."""
    if len(batch) < 2:
        return batch
    joined: list[Event] = []
    for item, run in groupby(batch, lambda event: event.item if isinstance(event, Delta) else None):
        if item is None:
            joined += run
        else:
            joined.append(Delta(item, "".join(event.text for event in run if isinstance(event, Delta))))
    return joined
