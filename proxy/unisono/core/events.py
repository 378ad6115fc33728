"""Events of an answer.

The router derives these events from tokens, and every API surface translates the events to its wire format. The answer
consists of items. The events of an item are Opened, any number of Deltas, and Closed. There are two additions: a call
that the gateway runs itself also has a Ran event after its Closed event, and the tool list of a server has Opened and
Listed instead. The concatenated deltas of an item are the text of its Closed event. Items never overlap: each item is
closed before the next item is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import groupby
from typing import TypeAlias

from unisono.core.conversation import Item as ConversationItem
from unisono.core.conversation import Json, Phase, Tokens
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason, Usage
from unisono.core.server_tool_arguments import ToolArguments
from unisono.core.tool_host import HostedTool, ToolOutcome, ToolQuestion


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning item; `index` is the 0-based number of the item among all items of the answer."""

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
    """Call to a tool that the client runs.

    `call_index` is the 0-based number of the call among the answer's calls of this type. `name` is the client's name
    for the tool.
    """

    index: int
    call_index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class HostedCall:
    """Call to a tool that the gateway runs itself.

    `server` is the label of the tool server, `tool` is the server's name for the tool, and `name` is the name that the
    model uses. If the model invented the name, `server` may be empty. Nothing is then run, and the model gets an error
    as the result.

    A call with `needs_approval` is not run. The turn ends after the call, and a later turn may approve the call. For an
    approved call, `approval` is the id of its approval request. The message of an approved call is already in the
    conversation, so its Closed event has no tokens. A call with a `question` needs an answer of the user instead of an
    approval. If a hook has changed the arguments of a call that waits for the user, `sealed` contains the call twice,
    encrypted: with the changed and with the original arguments.
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
    sealed: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """Tool list of a server; `index` is its 0-based number among the lists of the answer."""

    index: int
    server: str


# Every kind of item has a branch in each API surface; `assert_never` there makes mypy report a kind that is missing.
Item: TypeAlias = Reasoning | Text | ToolCall | HostedCall | Listing


# -- events
# See the module's docstring for the order of the events of an item.


@dataclass(frozen=True, slots=True)
class Opened:
    item: Item


# Not frozen, because one instance is created per token, and creating a frozen instance takes three times as long. No
# code may change an instance, as `unsafe_hash` requires.
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
    """Result of a server tool call, emitted after the Closed event of the call.

    The batch with the Closed event is yielded before the call runs. The call runs only when the next batch is
    requested. In between, a consumer can therefore record that the call may have run. `text_for_model` is the text of
    the outcome, or a text that replaces it. `rule` is the name of the recovery that is reported for this call, if any
    (see `core.recovery_rules.RULES`).
    """

    item: HostedCall
    outcome: ToolOutcome
    text_for_model: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """Tools of a server, emitted after the Opened event of their Listing.

    `error` is the reason why the server could not list its tools, else None.
    """

    item: Listing
    tools: tuple[HostedTool, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Repaired:
    """Repair of malformed output.

    `rule` is a stable name from `core.recovery_rules.RULES`. `position` is the number of tokens that the model had
    generated in the answer when the repair was decided. `dropped` is the number of discarded characters.
    """

    rule: str
    position: int
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Compacted:
    """Compaction of the conversation before its answer; no other event precedes it.

    `items` replace the conversation. If `summary` is empty, the model wrote no summary, and the original conversation
    is answered. `usage` is the usage of generating the summary. `ends_answer`: the answer contains nothing else.
    """

    items: tuple[ConversationItem, ...]
    summary: str
    usage: Usage
    ends_answer: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of an answer.

    `reason` states why the generation stopped. `stop_sequence` is the client's stop string that ended the answer, or
    None. `cut_call` is True if the answer ends inside a tool call; this call was not emitted. `paused` is True if the
    client can continue the answer in another request.
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
    """Part of a pass-through answer that is not JSON; `media_type` is as the server sent it."""

    data: bytes
    media_type: str


# All events except `Delta`.
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
