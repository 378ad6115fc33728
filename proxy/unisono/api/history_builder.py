"""A conversation's history while it is gathered: every result goes behind its call, whatever order they came in."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from unisono.api.field_types import shortened
from unisono.core.conversation import AssistantCall, AssistantMessage, AssistantReasoning, Item, Phase, ToolResult
from unisono.errors import InvalidRequest

_HEADER = re.compile(
    r"\s*(?:<\|start\|>assistant)?<\|channel\|>(analysis|commentary|final)\s*(?:<\|constrain\|>\w+\s*)?<\|message\|>"
)
_TERMINATOR = re.compile(r"<\|(?:end|return|call)\|>|(?=<\|(?:start|channel)\|>)|\Z")


@dataclass(slots=True)
class _Pending:
    """A call of the history with what answers it so far."""

    call: AssistantCall
    results: list[str]


class History:
    """Items in the order the model must see them. Results go behind their calls when both belong to one exchange: the
    calls and results between two other things that were said."""

    def __init__(self) -> None:
        self._entries: list[Item | _Pending] = []
        self._exchange: dict[str, deque[_Pending]] = {}
        self._names: dict[str, str] = {}

    def __iter__(self) -> Iterator[Item]:
        for entry in self._entries:
            if isinstance(entry, _Pending):
                yield entry.call
                yield from (ToolResult(entry.call.call_id, entry.call.name, output) for output in entry.results)
            else:
                yield entry

    def __len__(self) -> int:
        return len(self._entries)

    def say(self, *items: Item) -> None:
        """Messages and reasoning; whatever is said ends an exchange."""
        self._exchange = {}
        self._entries += items

    def say_beside(self, *items: Item) -> None:
        """Messages and reasoning between calls of one exchange."""
        self._entries += items

    def call(self, call: AssistantCall) -> None:
        pending = _Pending(call, [])
        self._names[call.call_id] = call.name
        self._exchange.setdefault(call.call_id, deque()).append(pending)
        self._entries.append(pending)

    def name_of(self, call_id: str, param: str, given: str = "") -> str:
        """The tool that was called under that id. Raises InvalidRequest, naming `param`, when none was; `given` is the
        id as the client spells it."""
        name = self._names.get(call_id)
        if name is None:
            raise InvalidRequest(
                f"'{param}': nothing before it is a tool call with the id '{shortened(given or call_id)}'.", param=param
            )
        return name

    def result(self, result: ToolResult) -> None:
        """What came of a call. One whose call is not there, or was in an earlier exchange, stays where it is."""
        same = self._exchange.get(result.call_id)
        if same is None:
            self._entries.append(result)
            return
        # Some clients give every call of a message the same id: then the results come in the calls' order, and what is
        # too many belongs to the last.
        (same.popleft() if len(same) > 1 else same[0]).results.append(result.output)

    def take_prefill(self) -> str | None:
        """The last visible answer, taken out of the history: the model goes on from it."""
        if self._entries:
            last = self._entries[-1]
            if isinstance(last, AssistantMessage) and last.phase is Phase.FINAL:
                self._entries.pop()
                return last.text
        return None


def split_markers(text: str, visible: Phase) -> list[Item]:
    """An assistant's text as items. A client that once showed raw Harmony sends it back as content: the leading
    messages of such a text become what they were, and whatever does not begin like one is text."""
    items: list[Item] = []
    position = 0
    while header := _HEADER.match(text, position):
        end = _TERMINATOR.search(text, header.end())
        assert end is not None
        body, position = text[header.end() : end.start()], end.end()
        match header[1]:
            case "analysis":
                items += [AssistantReasoning(body)] if body else []
            case "commentary":
                items += [AssistantMessage(body, Phase.COMMENTARY)] if body else []
            case _:
                rest = body + text[position:]
                return [*items, AssistantMessage(rest, visible)] if rest else items
    rest = text[position:]
    return [*items, AssistantMessage(rest, visible)] if rest else items
