"""Lookup of the pages that the browser returned, to resolve citations and links.

A citation names a page by its cursor, the number that the browser gave the page. The address and the title of a page
are read from the tool's structured result if there is one, otherwise from the header of the result's text. Stored
results of earlier responses have only the text. The header contains the decoded address, so the exact address is taken
from the stored item of the call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, Final

from unisono.api.responses.items import Wire
from unisono.core.conversation import Json
from unisono.core.frozen import dataclass

_HEADER = re.compile(r"\A\[(\d{1,9})\] (.{0,4000})\n\*\*viewing lines")
# Title and address in a header. A decoded address may contain spaces.
_TITLE = re.compile(r"(.*) \(([a-z][a-z0-9+.-]*:\S.*)\)")
_LINK_LINE = re.compile(r"^L(\d{1,9}):.*?【(\d{1,9})†", re.MULTILINE)
_CITED = re.compile(r"【(\d{1,9})†(?:L(\d{1,9})(?:-L?(\d{1,9}))?)?[^【】]{0,200}】")
_FOUND: Final = "Find results for text: `"
# Suffix of the address of a search within a page. A citation of such a result refers to the page itself.
_PLACE = re.compile(r"/find\?pattern=[^/]*\Z")
# Maximum length of a citation in characters. A bracket that is not closed within this length does not start a citation.
_MAX_CITATION_LENGTH: Final = 256


@dataclass(frozen=True, slots=True)
class CitedPage:
    """Page that the browser returned, which may be a list of search results.

    `results` maps the number of a search result to its address and title. `lines` maps a 0-based line number, at which
    a search result begins, to the number of this result.
    """

    url: str
    title: str
    results: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    lines: Mapping[int, int] = field(default_factory=dict)

    def cited(self, line: int) -> tuple[str, str] | None:
        """Return the address and title of the source of a 0-based line; None if it is unknown."""
        if self.url:
            return self.url, self.title
        above = [at for at in self.lines if at <= line]
        return self.results.get(self.lines[max(above)]) if above else None


def _searched_title(title: str) -> str | None:
    """Return the title of the searched page; None if `title` is not that of a search in a page."""
    if not (title.startswith(_FOUND) and title.endswith("`") and "\n" not in title):
        return None
    _, separator, page = title.removeprefix(_FOUND).removesuffix("`").rpartition("` in `")
    return page if separator else None


class CitedPages:
    """Pages that the browser returned in a conversation, by cursor.

    `outputs` are the texts of earlier browser results, oldest first, each with the address of its page, or "".
    """

    def __init__(self, outputs: Iterable[tuple[str, str]] = ()) -> None:
        self._pages: dict[int, CitedPage] = {}
        self._last: int | None = None
        for text, url in outputs:
            self.add_result(text, {"url": url})

    def __bool__(self) -> bool:
        return bool(self._pages)

    def add_result(self, output: str, facts: Json = None) -> None:
        """Add a browser result with the text `output` and the structured content `facts` (or None)."""
        header = _HEADER.match(output)
        page_facts: Mapping[str, Any] = facts if isinstance(facts, dict) else {}
        cursor = page_facts.get("cursor", header and int(header[1]))
        if not isinstance(cursor, int):
            return
        named = _TITLE.fullmatch(header[2]) if header is not None else None
        shown_title, shown_url = named.groups() if named is not None else (header[2] if header is not None else "", "")
        # With spaces, the decoded address is not the address of the page.
        url = _text(page_facts.get("url")) or ("" if " " in shown_url else shown_url)
        title = _text(page_facts.get("title")) or shown_title
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
        """Return the page of a cursor, or the newest page if the cursor is missing or negative."""
        if isinstance(cursor, int) and cursor >= 0:
            return self._pages.get(cursor)
        return None if self._last is None else self._pages.get(self._last)

    def annotation(self, cited: re.Match[str], at: int) -> Wire | None:
        """Return the annotation of a citation; None if the cited source is unknown.

        `cited` is a match in a section of the answer's text. `at` is the 0-based position at which this section begins.
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
    """Parser for the citations in streamed text, which finds each citation when its end arrives."""

    def __init__(self, pages: CitedPages) -> None:
        self._pages = pages
        self._pending = ""
        self._position = 0

    def feed(self, text: str) -> list[Wire]:
        """Read a piece of the text; return an annotation for each citation that ends in the piece."""
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
