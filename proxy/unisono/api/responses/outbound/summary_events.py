"""Events of reasoning summaries: one part per reasoning item, made of sentences of its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unisono.api.responses.items import INCOMPLETE, Wire
from unisono.api.responses.outbound.summary_sentences import SummarySentences

PREFIX = "response.reasoning_summary_"
PART_ADDED, PART_DONE = f"{PREFIX}part.added", f"{PREFIX}part.done"
DELTA, DONE = f"{PREFIX}text.delta", f"{PREFIX}text.done"
# Maximum characters of the summary of one reasoning item, by the values of `reasoning.summary`.
SUMMARY_CHARS: Mapping[str | None, int] = {None: 0, "auto": 600, "concise": 600, "detailed": 2_400}


def summary_part(text: str) -> Wire:
    return {"type": "summary_text", "text": text}


def first_event(item: Wire) -> tuple[str, Wire]:
    """Return the event that starts a summary. `item` has the id and index of the item."""
    return PART_ADDED, {**item, "summary_index": 0, "part": summary_part("")}


def delta_event(item: Wire, text: str) -> tuple[str, Wire]:
    return DELTA, {**item, "summary_index": 0, "delta": text}


def last_events(item: Wire, text: str, status: str) -> Iterator[tuple[str, Wire]]:
    """Yield the events that end a summary. `status` is the status of the reasoning item."""
    # A part has a status only if its generation was interrupted.
    about_end = {"status": INCOMPLETE} if status == INCOMPLETE else {}
    yield DONE, {**item, "summary_index": 0, "text": text}
    yield PART_DONE, {**item, "summary_index": 0, "part": summary_part(text), **about_end}


class SummaryEvents:
    """Summary of an open reasoning item, written as events while the reasoning arrives.

    `add` writes an event from its name and its fields. `item` has the id and index of the item. `limit` is the maximum
    length of the summary in characters.
    """

    def __init__(self, add: Callable[[str, Mapping[str, Any]], None], item: Wire, limit: int) -> None:
        self._add = add
        self._item = item
        self._sentences = SummarySentences(limit)

    @property
    def parts(self) -> list[Wire]:
        """Parts for the `summary` of the item; empty if the summary has no text."""
        return [summary_part(self._sentences.text)] if self._sentences.text else []

    def feed(self, text: str) -> None:
        """Read the next piece of the reasoning, and write the sentences that it completes."""
        is_first = not self._sentences.text
        self._write(self._sentences.feed(text), is_first=is_first)

    def end(self, status: str) -> None:
        """Write the end of the summary. `status` is the status of the reasoning item."""
        is_first = not self._sentences.text
        self._write(self._sentences.end(is_complete=status != INCOMPLETE), is_first=is_first)
        if self._sentences.text:
            for name, body in last_events(self._item, self._sentences.text, status):
                self._add(name, body)

    def _write(self, sentences: str, *, is_first: bool) -> None:
        if not sentences:
            return
        if is_first:
            self._add(*first_event(self._item))
        self._add(*delta_event(self._item, sentences))
