"""Builder of a conversation's history, which places every tool result after its call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from unisono.api.field_types import shortened
from unisono.api.tool_calls import to_gateway_id
from unisono.core.conversation import AssistantCall, AssistantMessage, AssistantReasoning, Item, Phase, ToolResult
from unisono.errors import InvalidRequest


@dataclass(slots=True)
class _Pending:
    """Tool call in the history, with the results that were added so far."""

    call: AssistantCall
    results: list[str]


OUTPUT: Final = (AssistantReasoning, AssistantMessage, _Pending, ToolResult)
# Tool name for a result whose call is missing, if the client does not name the tool.
UNKNOWN_TOOL: Final = "unknown_tool"


class History:
    """Items in the order in which the model must see them.

    A result is placed after its call if both belong to the same exchange. An exchange is a sequence of calls and
    results, which messages or reasoning separate from the next sequence. `notes` are messages to the client. Call
    ids of Messages are converted to the call ids of the gateway.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._entries: list[Item | _Pending] = []
        self._exchange: dict[str, deque[_Pending]] = {}
        self._names: dict[str, str] = {}
        # Errors about results of the current exchange whose call is missing.
        self._orphans: list[InvalidRequest] = []
        # Errors about items of the current exchange that were left out.
        self._left_out: list[InvalidRequest] = []
        # Items that move to the end of the history if the client sends them again, by their key; and those that moved.
        self._movable: dict[object, Item] = {}
        self.moved: list[Item] = []

    def items(self) -> tuple[Item, ...]:
        items: list[Item] = []
        for entry in self._entries:
            if isinstance(entry, _Pending):
                items.append(entry.call)
                items += [ToolResult(entry.call.call_id, entry.call.name, output) for output in entry.results]
            else:
                items.append(entry)
        return tuple(items)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, *items: Item) -> None:
        """Add messages and reasoning. Calls and results after them form a new exchange."""
        self._exchange, self._orphans, self._left_out = {}, [], []
        self.add_within_exchange(*items)

    def add_within_exchange(self, *items: Item) -> None:
        """Add messages and reasoning between calls of one exchange."""
        for item in items:
            self._remove_earlier(item)
        self._entries += items

    def move_if_repeated(self, items: Iterable[Item]) -> None:
        """Remove an item of `items`, which are in the history, when it is added again.

        `items` are pending calls with their reasoning and preambles, for example of a compaction. A client may send
        them again before the first result.
        """
        self._movable = {_repetition_key(item): item for item in items}

    def _remove_earlier(self, item: Item) -> bool:
        """Remove the earlier copy of a repeated item; return whether there was one."""
        earlier = self._movable.pop(_repetition_key(item), None) if self._movable else None
        if earlier is None:
            return False
        self.moved.append(earlier)
        self._entries = [
            entry for entry in self._entries if (entry.call if isinstance(entry, _Pending) else entry) is not earlier
        ]
        return True

    @property
    def has_output(self) -> bool:
        """True if the history contains output of the model or a tool result."""
        return any(isinstance(entry, OUTPUT) for entry in self._entries)

    def clear(self) -> None:
        """Remove all items. `name_of` still knows the removed calls, because results may follow."""
        self._entries = []
        self.add()  # ends the exchange, and with it the errors about its items

    def call(self, call: AssistantCall) -> None:
        if (own_id := to_gateway_id(call.call_id)) != call.call_id:
            call = replace(call, call_id=own_id)
        if self._remove_earlier(call):
            self._exchange.pop(call.call_id, None)
        pending = _Pending(call, [])
        self._names[call.call_id] = call.name
        same = self._exchange.setdefault(call.call_id, deque())
        # If the id of an answered call is reused, the results that follow belong to the new call.
        if len(same) == 1 and same[0].results:
            same.clear()
        same.append(pending)
        self._entries.append(pending)

    def has_call(self, call_id: str) -> bool:
        return to_gateway_id(call_id) in self._names

    def name_of(
        self, call_id: str, param: str, *, sent: str = "", default: str = UNKNOWN_TOOL, missing: str = ""
    ) -> str:
        """Return the name of the tool of the call `call_id`, or `default` if the call is missing.

        If the call is missing, a note tells the client. `param` is the field with the id, and `sent` the id in the
        client's spelling. If the client sent no id, `missing` is the reason to use in the note.
        """
        name = self._names.get(to_gateway_id(call_id))
        if name is not None:
            return name
        missing = missing or f"no earlier tool call has the id '{shortened(sent or call_id)}'"
        self._orphans.append(InvalidRequest(f"'{param}': {missing}; send the call first.", param=param))
        self.notes.append(f"{param}: the model reads this result without its call, because {missing}")
        return default

    def leave_out(self, error: InvalidRequest, reason: str) -> None:
        """Record that an item was left out, with a note for the client.

        `check_results` raises `error` if no other exchange follows the current one.
        """
        self._left_out.append(error)
        self.notes.append(f"{error.param}: no effect, because {reason}")

    # A client that truncates its history may remove a call but keep the call's result. It sends this result with every
    # later request, so an error would end the session for good. The vendors' APIs always return an error.
    #
    # The gateway returns an error only for a mistake that the client can correct in its next request: the last exchange
    # has a result with an unknown id, and either a call in this exchange has no result, or the earlier history is
    # stored in the gateway, where no client truncates it.
    def check_results(self, *, has_stored_history: bool = False) -> None:
        """Raise InvalidRequest for a result or reference in the last exchange that is a mistake.

        `has_stored_history` is True if the gateway has stored the items that precede the request's items.
        """
        if self._left_out:
            raise self._left_out[0]
        if self._orphans and (has_stored_history or self._has_unanswered_call()):
            raise self._orphans[0]

    def _has_unanswered_call(self) -> bool:
        """Return True if a call in the current exchange has no result."""
        return any(not pending.results for same in self._exchange.values() for pending in same)

    def result(self, result: ToolResult) -> None:
        """Add a tool result after its call, or at the end if the exchange has no such call."""
        if (own_id := to_gateway_id(result.call_id)) != result.call_id:
            result = replace(result, call_id=own_id)
        # Later reasoning with the same text is new. Only calls without a result may still be repeated.
        self._movable = {
            key: item
            for key, item in self._movable.items()
            if isinstance(item, AssistantCall) and item.call_id != result.call_id
        }
        same = self._exchange.get(result.call_id)
        if same is None:
            self._entries.append(result)
            return
        # Some clients give every call of a message the same id, or reuse the ids of an earlier message. The results are
        # then in the order of the calls, and surplus results belong to the last call.
        (same.popleft() if len(same) > 1 else same[0]).results.append(result.output)

    def pop_prefill(self) -> str | None:
        """Remove a final answer at the end of the history, and return its text as the prefill.

        Returns None if the last item is not a final answer.
        """
        if self._entries:
            last = self._entries[-1]
            if isinstance(last, AssistantMessage) and last.phase is Phase.FINAL:
                self._entries.pop()
                return last.text
        return None


def _repetition_key(item: Item) -> object:
    """Return the key by which an item that is sent again is recognised, or None."""
    match item:
        case AssistantCall():
            return item.call_id
        case AssistantReasoning() | AssistantMessage():
            return type(item), item.text
        case _:
            return None
