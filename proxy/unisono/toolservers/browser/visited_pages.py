"""Pages visited in a browser session, by cursor.

A cursor always refers to the page that the model saw with this cursor, even after the URL of the page was read again.
The oldest pages are dropped when a session exceeds its limits. If there are too many sessions, the least recently used
ones are dropped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from unisono.toolservers.browser.text import wrapped

MAX_PAGES: Final = 64
MAX_CHARACTERS: Final = 4_000_000
MAX_SESSIONS: Final = 128
PAGE_CHARACTERS: Final = 1_000_000


class BrowsingError(Exception):
    """Failure of a browser action, with a message for the model."""


class PageKind(StrEnum):
    """Origin of a page."""

    SEARCH = "search"
    PAGE = "page"
    FOUND = "found"


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a link.

    `line` is the 0-based line of that page to which the link leads, or None for the whole page. `title` and `snippet`
    describe the destination.
    """

    url: str
    line: int | None = None
    title: str = ""
    snippet: str = ""


@dataclass(frozen=True, slots=True)
class VisitedPage:
    """Page as displayed to the model.

    `display_url` appears in the header; `url` is the source of the text, for citations. `requested_url` is the query or
    the pattern of a result page.
    """

    kind: PageKind
    url: str
    display_url: str
    title: str
    lines: tuple[str, ...]
    targets: tuple[Target, ...] = ()
    requested_url: str = ""

    @property
    def size(self) -> int:
        return sum(map(len, self.lines)) + sum(len(target.url) + len(target.snippet) for target in self.targets)


def lines_of(text: str) -> tuple[str, ...]:
    """Wrap the text of a page into lines, truncated to `PAGE_CHARACTERS`."""
    if len(text) > PAGE_CHARACTERS:
        left_out = len(text) - PAGE_CHARACTERS
        text = f"{text[:PAGE_CHARACTERS]}\n\n[The page was truncated; {left_out} more characters are left out.]"
    return wrapped(text)


@dataclass(slots=True)
class BrowserSession:
    """Pages of one client. Hold `lock` during a call: calls of a session run one at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _pages: OrderedDict[int, VisitedPage] = field(default_factory=OrderedDict)
    _next: int = 0
    _size: int = 0

    def add(self, page: VisitedPage) -> int:
        """Store a page and return its cursor."""
        cursor = self._next
        self._next += 1
        self._pages[cursor] = page
        self._size += page.size
        while len(self._pages) > 1 and (len(self._pages) > MAX_PAGES or self._size > MAX_CHARACTERS):
            _, oldest = self._pages.popitem(last=False)
            self._size -= oldest.size
        return cursor

    def get(self, cursor: int = -1) -> VisitedPage:
        """Return the page of a cursor; -1 is the latest page.

        Raises `BrowsingError` if there is no such page, or no page at all.
        """
        if not self._pages:
            raise BrowsingError("No pages to access!")
        page = self._pages.get(self._next - 1 if cursor == -1 else cursor)
        if page is None:
            oldest = next(iter(self._pages))
            raise BrowsingError(
                f"Cursor `{cursor}` is out of range. Available cursor indices: [{oldest} - {self._next - 1}]."
            )
        return page

    def page_from(self, url: str) -> VisitedPage | None:
        """Return the stored page that was last read from a URL, or None."""
        for page in reversed(self._pages.values()):
            if page.kind is PageKind.PAGE and page.display_url == url:
                return page
        return None


class BrowserSessions:
    """Sessions by key. Above `most` sessions, the least recently used one is dropped."""

    def __init__(self, most: int = MAX_SESSIONS) -> None:
        self._max_sessions = most
        self._sessions: OrderedDict[str, BrowserSession] = OrderedDict()

    def get(self, key: str) -> BrowserSession:
        session = self._sessions.setdefault(key, BrowserSession())
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return session

    def __len__(self) -> int:
        return len(self._sessions)
