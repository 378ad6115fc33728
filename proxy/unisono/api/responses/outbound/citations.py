"""Pages returned by the browser, by cursor, to resolve citations and links.

The address and title of a page are read from the tool's structured result, or else from the header of the view. Results
of earlier responses have only the header, but lead to the same page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, Final

from unisono.api.responses.items import Wire
from unisono.core.conversation import Json
from unisono.core.frozen import dataclass

_HEADER = re.compile(r"\A\[(\d{1,9})\] (.*?)(?: \((\S+)\))?\n\*\*viewing lines")
_LINK_LINE = re.compile(r"^L(\d{1,9}):.*?【(\d{1,9})†", re.MULTILINE)
_CITED = re.compile(r"【(\d{1,9})†(?:L(\d{1,9})(?:-L?(\d{1,9}))?)?[^【】]{0,200}】")
_FOUND: Final = "Find results for text: `"
# Suffix of the address of a search within a page. A citation of such a result refers to the page itself.
_PLACE = re.compile(r"/find\?pattern=[^/]*\Z")
# Maximum length of a citation in characters. A bracket that is not closed within this length does not start a citation.
_MAX_CITATION_LENGTH: Final = 256


@dataclass(frozen=True, slots=True)
class CitedPage:
    """View of a page.

    `results` maps numbers of search results to addresses and titles. `lines` maps lines of the view to result
    numbers.
    """

    url: str
    title: str
    results: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    lines: Mapping[int, int] = field(default_factory=dict)

    def cited(self, line: int) -> tuple[str, str] | None:
        """Return the address and the title of the source of a line; None if unknown."""
        if self.url:
            return self.url, self.title
        above = [at for at in self.lines if at <= line]
        return self.results.get(self.lines[max(above)]) if above else None


def _searched_title(title: str) -> str | None:
    """Return the title of the page that was searched; None for any other view."""
    if not (title.startswith(_FOUND) and title.endswith("`") and "\n" not in title):
        return None
    _, separator, page = title.removeprefix(_FOUND).removesuffix("`").rpartition("` in `")
    return page if separator else None


class CitedPages:
    """Browser views of a conversation. `outputs` are earlier browser results, oldest first."""

    def __init__(self, outputs: Iterable[str] = ()) -> None:
        self._pages: dict[int, CitedPage] = {}
        self._last: int | None = None
        for text in outputs:
            self.add_result(text)

    def __bool__(self) -> bool:
        return bool(self._pages)

    def add_result(self, output: str, facts: Json = None) -> None:
        """Add a result of the browser. `facts` is its structured content, if any."""
        header = _HEADER.match(output)
        page_facts: Mapping[str, Any] = facts if isinstance(facts, dict) else {}
        cursor = page_facts.get("cursor", header and int(header[1]))
        if not isinstance(cursor, int):
            return
        url = _text(page_facts.get("url")) or (header[3] if header is not None else "") or ""
        title = _text(page_facts.get("title")) or (header[2] if header is not None else "")
        if (searched := _searched_title(title)) is not None:
            title, url = searched, _PLACE.sub("", url)
        results = page_facts.get("results")
        found = {
            result["id"]: (_text(result.get("url")), _text(result.get("title")))
            for result in (results if isinstance(results, list) else ())
            if isinstance(result, dict) and isinstance(result.get("id"), int)
        }
        lines = {int(line): int(number) for line, number in _LINK_LINE.findall(output)} if found else {}
        self._pages[cursor] = CitedPage(url, title, found, lines)
        self._last = cursor

    def get(self, cursor: Json) -> CitedPage | None:
        """Return the page of a cursor, or the newest page if there is no cursor."""
        if isinstance(cursor, int) and cursor >= 0:
            return self._pages.get(cursor)
        return None if self._last is None else self._pages.get(self._last)

    def annotation(self, cited: re.Match[str], at: int) -> Wire | None:
        """Return the annotation of a citation; None if the cited source is unknown.

        `at` is the number of characters before the searched text.
        """
        page = self._pages.get(int(cited[1]))
        source = page and page.cited(int(cited[2] or 0))
        if not source or not source[0]:
            return None
        return {
            "type": "url_citation",
            "start_index": at + cited.start(),
            "end_index": at + cited.end(),
            "url": source[0],
            "title": source[1],
        }


class Citations:
    """Finder of the citations in a streamed text. A citation is found when its end arrives."""

    def __init__(self, pages: CitedPages) -> None:
        self._pages = pages
        self._pending = ""
        self._position = 0

    def feed(self, text: str) -> list[Wire]:
        """Return the annotations of the citations that `text` completes."""
        if not self._pending and "【" not in text:
            self._position += len(text)
            return []
        pending = self._pending + text
        end = 0
        found: list[Wire] = []
        for cited in _CITED.finditer(pending):
            end = cited.end()
            if (annotation := self._pages.annotation(cited, self._position)) is not None:
                found.append(annotation)
        begin = pending.rfind("【", end)
        cut = begin if begin >= 0 and len(pending) - begin <= _MAX_CITATION_LENGTH else len(pending)
        self._pending = pending[cut:]
        self._position += cut
        return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
