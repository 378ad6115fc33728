"""Filter that separates server tool calls from the other events of an answer.

The calls can then be emitted one by one, each with its outcome. The remaining items are renumbered, so that the
client's indices have no gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from unisono.core.conversation import AssistantCall, Phase
from unisono.core.conversation import Item as Said
from unisono.core.events import Closed, Delta, Event, HostedCall, Item, Listing, Opened, Reasoning, Text, ToolCall
from unisono.engine.server_tools.tools import OfferedServerTools, ServerToolCall
from unisono.engine.steps import to_said


class ServerToolFilter:
    """Filter for the events of one answer.

    With `parallel_calls` False, it keeps one call of the client; server tool calls do not count.
    """

    def __init__(self, tools: OfferedServerTools, *, parallel_calls: bool) -> None:
        self._tools = tools
        self._parallel_calls = parallel_calls
        self._open: Item | None = None
        self._calls = 0
        self.items = 0  # items emitted so far, which is the next item's index
        self.held: list[ServerToolCall] = []  # complete calls of server tools in the current step
        self.said: list[Said] = []  # all items of the current step, including server tool calls
        self.answered = False  # text on `final` was emitted in the current step

    def begin(self) -> None:
        """Begin another step."""
        self.held, self.said, self.answered = [], [], False

    def drop_calls(self) -> None:
        """Discard the server tool calls of the current step, which are not run."""
        dropped = {call.call_id for call in self.held}
        self.said = [item for item in self.said if not (isinstance(item, AssistantCall) and item.call_id in dropped)]
        self.held = []

    def sift(self, events: Sequence[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            match event:
                case Opened(item):
                    self._open = self._shown(item)
                    if self._open is not None:
                        out.append(Opened(self._open))
                case Delta(_, text):
                    if self._open is not None:
                        out.append(Delta(self._open, text))
                case Closed():
                    self._closed(event, out)
                case _:
                    out.append(event)
        return out

    def _shown(self, item: Item) -> Item | None:
        """Return the item as it is emitted; None if it is not emitted."""
        match item:
            case ToolCall():
                if item.name in self._tools or (self._calls and not self._parallel_calls):
                    return None
                return replace(item, index=self.items, call_index=self._calls)
            case Reasoning() | Text():
                return replace(item, index=self.items)
            case HostedCall() | Listing():
                return item
            case _:
                assert_never(item)

    def _closed(self, closed: Closed, out: list[Event]) -> None:
        item = closed.item
        whole_or_text = closed.complete or not isinstance(item, ToolCall)
        if whole_or_text and (said := to_said(closed)) is not None:
            self.said.append(said)
        if self._open is not None:
            out.append(replace(closed, item=self._open))
            self.items += 1
            self._calls += isinstance(item, ToolCall)
            self.answered = self.answered or (isinstance(item, Text) and item.phase is Phase.FINAL)
        elif isinstance(item, ToolCall) and item.name in self._tools and closed.complete:
            self.held.append(ServerToolCall(item.call_id, item.name, closed.text, closed.tokens))
        self._open = None
