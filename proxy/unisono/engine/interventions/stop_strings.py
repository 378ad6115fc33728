"""Stop strings of the client, for which the gateway searches the visible text.

A backend cannot search for stop strings, because it does not know where the body of a message begins. In addition, if a
backend does not report its stop token, the gateway could not tell whether a stop string or the model ended the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.events import Closed, Delta, Event, Item, Opened, Text


class StopStrings:
    """Filter that cuts visible text at the first stop string.

    Text that may be the beginning of a stop string is buffered until more text shows whether it is. No emitted text is
    therefore ever withdrawn. Reasoning and tool calls pass unchanged.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops)) - 1
        self._buffered = ""
        self._emitted: list[str] = []
        self.matched: str | None = None  # the matched stop string; afterwards nothing passes

    def filter(self, events: Sequence[Event]) -> list[Event]:
        """Return the events to emit; if a stop string matched, the last event is Closed."""
        out: list[Event] = []
        for event in events:
            if self.matched is not None:
                break
            match event:
                case Opened(item=Text()):
                    # A stop string cannot begin in one text item and end in the next.
                    self._buffered = ""
                    self._emitted.clear()
                    out.append(event)
                case Delta(item=Text() as item):
                    self._text(item, event.text, out)
                case Closed(item=Text() as item):
                    if self._buffered:
                        out.append(Delta(item, self._buffered))
                    out.append(event)
                case _:
                    out.append(event)
        return out

    def _text(self, item: Item, text: str, out: list[Event]) -> None:
        text = self._buffered + text
        if (met := self._first_in(text)) is not None:
            end, length = met
            self.matched = text[end - length : end]
            self._emit(item, text[: end - length], out)
            out.append(Closed(item, "".join(self._emitted)))
            return
        end = self._undecided_from(text)
        self._buffered = text[end:]
        self._emit(item, text[:end], out)

    def _undecided_from(self, text: str) -> int:
        """Return the start of the longest tail that may be the beginning of a stop string."""
        # There is no table of prefixes: for stop strings of thousands of characters it would take megabytes.
        for at in range(max(0, len(text) - self._longest), len(text)):
            if text[at] in self._firsts and any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)

    def _first_in(self, text: str) -> tuple[int, int] | None:
        """Return the end and the length of the stop string that ends first in `text`, or None.

        If several stop strings end at the same index, the longest is returned.
        """
        # The result is the same as if the text arrived one character at a time. It does not depend on how the network
        # splits the text.
        found = [(at + len(stop), -len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        end, length = min(found)
        return end, -length

    def _emit(self, item: Item, text: str, out: list[Event]) -> None:
        if text:
            self._emitted.append(text)
            out.append(Delta(item, text))
