"""Reasoning summaries: selection of sentences from the reasoning, and stream events.

Each reasoning item has one summary part. A sentence ends at its punctuation or at the end of its line. The summary
consists of the first sentences that fit, unchanged. A sentence that is longer than the limit of the whole summary is
omitted. If every sentence is too long, the summary is the beginning of the first long sentence, cut after a word and
marked with "…". The same text always has the same summary, however the text is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from io import StringIO
from typing import Any

from unisono.api.responses.items import INCOMPLETE, Wire

CUT_MARK = "…"
PUNCTUATION, CLOSING = ".!?…", "\"'”’»)]*_`"
CJK_PUNCTUATION, CJK_CLOSING = "。！？", "」』”’）】"
MARKS = PUNCTUATION + CLOSING + CJK_PUNCTUATION + CJK_CLOSING
# The character after a sentence is part of the rule: until it arrives, the end of the sentence is unknown. The
# quantifiers are possessive and start at the beginning of a run, so that a long run of periods costs linear time.
SENTENCE_END = re.compile(
    rf"(?<![{PUNCTUATION}])[{PUNCTUATION}]++[{re.escape(CLOSING)}]*+(?=\s)"
    rf"|(?<![{CJK_PUNCTUATION}])[{CJK_PUNCTUATION}]++[{CJK_CLOSING}]*+(?=[^{re.escape(MARKS)}])"
    r"|(?=\n)"
)
# Words whose period does not end a sentence.
ABBREVIATIONS = frozenset({"e.g.", "i.e.", "vs.", "cf.", "approx.", "resp.", "mr.", "mrs.", "ms.", "dr."})
OPENING = "\"'“‘«([*_`"
ITEM_NUMBER = re.compile(r"\d{1,3}\.")


class SummarySentences:
    """Summary of a text that arrives in pieces. It has at most `limit` characters."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._summary = StringIO()
        self._length = 0
        self._is_full = False
        # Text after the last sentence, and the position in it up to which no sentence ends.
        self._pending = ""
        self._searched = 0
        # What separates the next sentence from the last one: a new line, a blank or nothing.
        self._separator = ""
        # Beginning of the first sentence that was too long.
        self._too_long = ""

    @property
    def text(self) -> str:
        """The summary so far."""
        return self._summary.getvalue()

    def feed(self, text: str) -> str:
        """Read the next piece of the text. Return the text to append to the summary."""
        if self._is_full:
            return ""
        length = self._length
        self._pending += text
        if not text.strip(MARKS):
            return ""  # wait for other text: a search after each mark of a long run would be slow
        while not self._is_full and self._read_sentence():
            pass
        return self.text[length:]

    def end(self, *, is_complete: bool) -> str:
        """Finish the summary. Return the text to append to it.

        The last sentence of a complete text may lack its punctuation. If the text is not complete, its last sentence is
        omitted.
        """
        length = self._length
        last = self._pending.strip()
        if not self._is_full and last and is_complete:
            self._add(last)
        beginning = self._too_long or last
        if not self._length and beginning:
            self._append(_cut(beginning, self._limit))
        self._is_full = True
        return self.text[length:]

    def _read_sentence(self) -> bool:
        """Read one sentence of the pending text. Return False if its end has not arrived."""
        text = self._pending.lstrip()
        blanks = self._pending[: len(self._pending) - len(text)]
        if blanks:
            self._separator = "\n" if "\n" in self._separator + blanks else " "
        self._searched = max(0, self._searched - len(blanks))
        self._pending = text
        for end in SENTENCE_END.finditer(text, self._searched):
            sentence = text[: end.end()].rstrip()
            if not _has_no_end(sentence):
                self._pending, self._searched = text[end.end() :], 0
                self._add(sentence)
                return True
        # Only the marks at the end of the text can become the end of a sentence.
        self._searched = len(text.rstrip(MARKS))
        return False

    def _add(self, sentence: str) -> None:
        if len(sentence) > self._limit:
            self._too_long = self._too_long or sentence[: self._limit]
            return
        separator = self._separator if self._length else ""
        if self._length + len(separator) + len(sentence) > self._limit:
            self._is_full = True
            self._pending = ""
            return
        self._append(separator + sentence)
        self._separator = ""

    def _append(self, text: str) -> None:
        self._summary.write(text)
        self._length += len(text)


def _has_no_end(sentence: str) -> bool:
    """Return True if the last period belongs to an abbreviation or to the number of a list item."""
    last_word = sentence.rpartition(" ")[2].lstrip(OPENING).lower()
    return last_word in ABBREVIATIONS or ITEM_NUMBER.fullmatch(sentence) is not None


def _cut(text: str, limit: int) -> str:
    """Cut a text after a whole word and append "…"; the result has at most `limit` characters."""
    words = text[: limit - len(CUT_MARK)]
    whole_words, blank, _ = words.rpartition(" ")
    return (whole_words.rstrip() if blank else words) + CUT_MARK


def summarize(text: str, limit: int, *, is_complete: bool = True) -> str:
    """Return the summary of a whole text."""
    sentences = SummarySentences(limit)
    sentences.feed(text)
    sentences.end(is_complete=is_complete)
    return sentences.text


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
