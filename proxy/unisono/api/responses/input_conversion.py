"""Conversion of `input` items to the model's history: the state between two items.

Two functions of `KnownState` read the data of earlier responses: `stored_item` finds an item by its id, and `opened`
decrypts a sealed text. Both functions return None for data of other servers or tenants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from unisono.api.client_toolbox import MAX_NAME
from unisono.api.compaction_summary import ItemSealing, without_tokens
from unisono.api.history_builder import History
from unisono.api.responses.configuration_updates import UNCHANGED, Configuration
from unisono.api.responses.declared_tools import Searcher
from unisono.api.responses.input_items import InputClientToolOutput, InputItem
from unisono.api.responses.server_tools.approval_history import MADE, NOTHING_HOSTED, ServerToolHistory
from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    FunctionTool,
    Item,
    ToolResult,
)
from unisono.core.state_store import StoredItem
from unisono.core.tool_host import ToolNames, ToolQuestion
from unisono.errors import InvalidRequest

_ILLEGAL = re.compile(r"[^A-Za-z0-9_-]")


def nothing_stored(_: str) -> None:
    """Return None for every id or sealed text; used when nothing is stored or sealed."""


def has_sealed(items: Sequence[InputItem]) -> bool:
    """Return True if an item has an encrypted text, so that the encryption key is needed."""
    return any(getattr(item, "encrypted_content", None) for item in items)


def opener(seals: ItemSealing | None, tenant: str) -> Callable[[str], Sequence[Item] | None]:
    """Return a function that decrypts texts of a tenant; without `seals`, it returns None."""
    return nothing_stored if seals is None else partial(seals.open, tenant)


@dataclass(frozen=True, slots=True)
class KnownState:
    """State that a request depends on, read before the conversion.

    `earlier` holds the history before the request's input. `stored_item` finds a stored item by its id, and `opened`
    decrypts a sealed text. `hosted` is the server tool history of earlier items. If `earlier` already contains the
    request's own input, `now` is the server tool history of this input. `configuration` holds the settings that earlier
    `configuration_update` items have set.
    """

    earlier: Sequence[Item] = ()
    stored_item: Callable[[str], StoredItem | None] = nothing_stored
    opened: Callable[[str], Sequence[Item] | None] = nothing_stored
    hosted: ServerToolHistory = NOTHING_HOSTED
    now: ServerToolHistory = NOTHING_HOSTED
    configuration: Configuration = UNCHANGED


@dataclass(slots=True)
class InputConversion:
    """Conversion of the input items of one request to items of the model's history.

    `known` is the state before this request. `item_readers.read` adds the items one at a time and in order, because a
    result refers to an earlier call.
    """

    known: KnownState
    history: History = field(default_factory=History)
    # The model's names for server tools.
    names: ToolNames = field(default_factory=ToolNames)
    # Calls that required approval, by the id of the approval request; and the user's decisions, by the id of the call.
    requests: dict[str, AssistantCall] = field(default_factory=dict)
    answered: dict[str, bool] = field(default_factory=dict)
    # Questions that tools have for the user, by the id of the elicitation request.
    questions: dict[str, ToolQuestion] = field(default_factory=dict)
    # Errors about items that no model output follows.
    refusals: list[InvalidRequest] = field(default_factory=list)
    # Call ids of the client's built-in tools, by the id of the item.
    call_ids: dict[str, str] = field(default_factory=dict)
    search: str = ""  # call id of the last tool search
    configuration: Configuration = UNCHANGED
    searcher: Searcher | None = None  # who searches the request's deferred tools
    # Tools of the request, by name. They replace equally named tools in the input and in earlier items.
    tools: Mapping[str, FunctionTool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.configuration = self.known.configuration
        self.requests |= self.known.hosted.requests
        self.questions |= self.known.hosted.questions
        self.answered |= {decision.call_id: decision.approved for decision in self.known.hosted.decisions}

    @property
    def notes(self) -> list[str]:
        return self.history.notes

    def add(self, items: Sequence[Item]) -> None:
        """Add items of a conversation. Results are matched with their calls."""
        if any(isinstance(item, MADE) for item in items):
            self.refusals.clear()
        for item in items:
            match item:
                case AssistantCall():
                    self.history.call(item)
                case ToolResult():
                    self.history.result(item)
                case AddedTools():
                    # Added within the exchange, because results of parallel calls may follow.
                    self.history.add_within_exchange(item)
                case _:
                    self.history.add(item)

    def leave_out(self, field: str, error: InvalidRequest, reason: str) -> None:
        """Add a note that `field` has no effect, and remember the error.

        `reason` completes the note. `check` raises the error, unless output of the model follows the item.
        """
        self.refusals.append(error)
        self.notes.append(f"{field}: no effect, because {reason}")

    def check(self) -> None:
        """Raise the first error about an item that no model output follows, if there is one."""
        if self.refusals:
            raise self.refusals[0]

    def unnamed(self, param: str) -> str:
        """Return a unique id for a call that the client sent without an id."""
        return f"{param}.{len(self.history)}"

    def hosted_name(self, label: str | None, tool: str) -> str:
        """Return the name that the model sees for a tool in the input; `label` is its MCP server."""
        return self.names.add(label, tool) if label else _ILLEGAL.sub("_", tool)[:MAX_NAME]

    def call_of(self, item: InputClientToolOutput) -> str | None:
        """Return the id of the call that a result belongs to; None for an unknown call."""
        # Clients name the call by its `call_id`, or by the id of its item.
        stored = self.known.stored_item(item.id) if item.id else None
        names = (item.call_id, item.id, self.call_ids.get(item.id or ""), stored and str(stored.wire.get("call_id")))
        return next((name for name in names if name and self.history.has_call(name)), None)

    def has_calls_of(self, items: Sequence[Item]) -> bool:
        """Return True if each result in `items` has its call in `items` or in an approval request."""
        calls = {item.call_id for item in (*items, *self.requests.values()) if isinstance(item, AssistantCall)}
        return all(item.call_id in calls for item in items if isinstance(item, ToolResult))

    def exact(self, item: Item, item_id: str | None) -> Sequence[Item]:
        """Return the stored form of an item, which contains the tokens that the model generated.

        Returns the item unchanged if no stored item has the id `item_id` and the same content.
        """
        # The client may have edited the item without changing its id. The stored tokens are used only for equal
        # content.
        stored = self.known.stored_item(item_id) if item_id else None
        if stored is not None and stored.meaning and without_tokens(stored.meaning[-1]) == without_tokens(item):
            return stored.meaning
        return (item,)
