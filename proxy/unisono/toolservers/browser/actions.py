"""Browser actions `search`, `open` and `find`.

Each action takes the model's arguments and returns a `View`: text in the format that the model was trained on, and the
same facts as data for citations. Failures raise `BrowsingError`, whose message is for the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from unisono.toolservers.browser.html_text import domain_of, read_html
from unisono.toolservers.browser.page_sources import Document, PageReader, SearchEngine, SearchResult
from unisono.toolservers.browser.text import cleaned, display, link, numbered, one_line, window, without_links
from unisono.toolservers.browser.visited_pages import (
    BrowserSession,
    BrowsingError,
    PageKind,
    Target,
    VisitedPage,
    lines_of,
)

# Names, defaults and error texts of the actions are those of the reference tool that gpt-oss was trained with. The
# model reacts to them as it was trained.
VIEW_TOKENS: Final = 1024
MAX_RESULTS: Final = 20
MAX_MATCHES: Final = 50
FOUND_LINES: Final = 4
LINES_BEFORE: Final = 4
MAX_QUERY_LENGTH: Final = 2000
MAX_URL_LENGTH: Final = 4096
DISPLAYED_URL_LENGTH: Final = 1024
SNIPPET: Final = 1000
VIEW_SOURCE: Final = "view-source:"
# Limit of a view with an explicit number of lines, as a multiple of the usual size.
WIDEST: Final = 8


@dataclass(frozen=True, slots=True)
class View:
    """Result of an action.

    `text` is for the model. `facts` is JSON: action, cursor, url, title, displayed lines, and either the query with its
    results or the pattern with its matches.
    """

    text: str
    facts: dict[str, Any]


class Browser:
    """Browser shared by all sessions.

    `view_tokens` limits the size of a view, in estimated tokens. If the model requests a number of lines, the limit is
    `WIDEST` times as high.
    """

    def __init__(self, searching: SearchEngine, readings: Sequence[PageReader], view_tokens: int = VIEW_TOKENS) -> None:
        self.search_source = searching
        self._page_readers = tuple(readings)
        self._view_tokens = view_tokens

    async def search(self, session: BrowserSession, query: str, topn: int = 10) -> View:
        """Search and return the results as a page."""
        query_line = one_line(query, MAX_QUERY_LENGTH)
        if not query_line:
            raise BrowsingError("`query` is empty")
        try:
            results = await self.search_source.search(query_line, max(1, min(topn, MAX_RESULTS)))
        except BrowsingError as error:
            raise BrowsingError(f"Error during search for `{one_line(query_line)}`: {error}") from error
        page = results_page(query_line, results)
        return self._view(session, page, "search", 0)

    async def open(
        self,
        session: BrowserSession,
        id: int | str = -1,
        cursor: int = -1,
        loc: int = -1,
        num_lines: int = -1,
        view_source: bool = False,
    ) -> View:
        """Display a link's destination, a URL, or a different position of an open page.

        `id` is the number of a link on the page of `cursor`, or a URL, or -1 for this page itself. `cursor` -1 is the
        latest page. `loc` and `num_lines` select the displayed lines; -1 means the default. Raises `BrowsingError`.
        """
        line: int | None = None
        if isinstance(id, str):
            page = await self._read(address(id), view_source)
        else:
            # A number is that of a link on an open page. With -1, a different part of the page itself is displayed.
            page = session.get(cursor)
            if id >= 0:
                if id >= len(page.targets):
                    raise BrowsingError(f"Invalid link id `{id}`.")
                line, url = page.targets[id].line, page.targets[id].url
                known = None if view_source else session.page_from(url)
                page = known or await self._read(url, view_source)
            elif view_source and page.kind is PageKind.PAGE:
                page = await self._read(page.url, view_source)
        # If the link leads to a line, some lines before it are displayed too.
        if loc < 0:
            loc = 0 if line is None else line - LINES_BEFORE if line > LINES_BEFORE else line
        return self._view(session, page, "open", loc, num_lines)

    async def find(self, session: BrowserSession, pattern: str, cursor: int = -1) -> View:
        """Find `pattern` in a page, ignoring case, and return the matches as a page."""
        page = session.get(cursor)
        if page.kind is not PageKind.PAGE:
            raise BrowsingError("Cannot run `find` on search results page or find results page")
        if not pattern.strip() or len(pattern) > MAX_QUERY_LENGTH:
            raise BrowsingError(f"`pattern` must have 1 to {MAX_QUERY_LENGTH} characters")
        # A page can have megabytes of text, so the search runs in a thread.
        found = await asyncio.to_thread(found_page, page, cleaned(pattern).lower())
        return self._view(session, found, "find", 0)

    async def aclose(self) -> None:
        await self.search_source.aclose()
        for reading in self._page_readers:
            await reading.aclose()

    async def _read(self, url: str, source: bool) -> VisitedPage:
        source = source or url.startswith(VIEW_SOURCE)
        url = url.removeprefix(VIEW_SOURCE)
        short_url = one_line(url, DISPLAYED_URL_LENGTH)
        reading = next((reading for reading in self._page_readers if reading.reads(url)), None)
        if reading is None:
            raise BrowsingError(f"Error fetching URL `{short_url}`: URLs of this kind cannot be opened")
        try:
            document = await reading.read(url)
        except BrowsingError as error:
            raise BrowsingError(f"Error fetching URL `{short_url}`: {error}") from error
        return await asyncio.to_thread(document_page, document, source)

    def _view(self, session: BrowserSession, page: VisitedPage, action: str, loc: int, num_lines: int = -1) -> View:
        last = len(page.lines) - 1
        if loc > last:
            raise BrowsingError(f"Invalid location parameter: `{loc}`. Cannot exceed page maximum of {last}.")
        has_line_limit = num_lines > 0
        tokens = self._view_tokens * (WIDEST if has_line_limit else 1)
        end = window(page.lines, loc, tokens, num_lines if has_line_limit else None)
        cursor = session.add(page)
        lines = (loc, end - 1, last)
        body = numbered(page.lines[loc:end], loc)
        text = display(cursor, page.title, one_line(unquote(page.display_url), DISPLAYED_URL_LENGTH), body, lines)
        return View(text, facts(action, cursor, page, lines))


def address(id: str) -> str:
    """Return the URL that the model means. Raises `BrowsingError` for text that is not a URL."""
    url = id.strip()
    if not url or len(url) > MAX_URL_LENGTH or any(character.isspace() for character in url):
        raise BrowsingError(f"`{one_line(url)}` is not a valid URL")
    scheme, colon, _ = url.removeprefix(VIEW_SOURCE).partition(":")
    # `example.com/path` and `example.com:8080` have no scheme; the usual one is assumed.
    bare = not colon or "." in scheme or "/" in scheme
    return f"https://{url}" if bare else url


def results_page(query: str, results: Sequence[SearchResult]) -> VisitedPage:
    """Return search results as a page with one numbered link per result."""
    items: list[str] = []
    targets: list[Target] = []
    for result in results:
        title = one_line(result.title) or one_line(result.url)
        snippet = one_line(result.snippet, SNIPPET)
        domain = link(len(targets), title, cleaned(domain_of(result.url)))
        items.append(f"  * {domain} {snippet}".rstrip())
        targets.append(Target(result.url, None, title, snippet))
    text = "\nURL: \n# Search Results\n\n" + ("\n".join(items) or "No results.")
    return VisitedPage(PageKind.SEARCH, "", "", one_line(query), lines_of(text), tuple(targets), query)


def document_page(document: Document, source: bool = False) -> VisitedPage:
    """Return a document as a page.

    With `source`, the HTML source is displayed instead of its text. The conversion is slow for large documents.
    """
    shown_url = VIEW_SOURCE + document.url if source else document.url
    title, links = document.title, tuple[str, ...]()
    if document.is_html and not source:
        read = read_html(document.text, document.url)
        title, text, links = read.title or title, read.text, read.links
    else:
        text = cleaned(document.text)
    title = one_line(title) or one_line(domain_of(document.url)) or one_line(unquote(urlsplit(document.url).path))
    targets = tuple(map(Target, links))
    lines = lines_of(f"\nURL: {one_line(shown_url, DISPLAYED_URL_LENGTH)}\n{text}")
    return VisitedPage(PageKind.PAGE, document.url, shown_url, title, lines, targets)


def found_page(page: VisitedPage, pattern: str) -> VisitedPage:
    """Return a page that lists the matches of `pattern` in `page` as numbered links.

    `pattern` must be lower case. Each match is displayed with the lines after it.
    """
    lines = without_links(page.lines)
    parts: list[str] = []
    targets: list[Target] = []
    at = 0
    # Matches do not overlap: the lines of one match are not searched again.
    while at < len(lines) and len(targets) < MAX_MATCHES:
        if pattern not in lines[at].lower():
            at += 1
            continue
        snippet = "\n".join(lines[at : at + FOUND_LINES])
        parts.append(f"# {link(len(targets), f'match at L{at}')}\n{snippet}")
        targets.append(Target(page.display_url, at, page.title, snippet))
        at += FOUND_LINES
    short_pattern = one_line(pattern)
    text = "\n\n".join(parts) or f"No `find` results for pattern: `{short_pattern}`"
    url = f"{page.display_url}/find?pattern={quote(pattern)}"
    title = f"Find results for text: `{short_pattern}` in `{page.title}`"
    return VisitedPage(PageKind.FOUND, page.url, url, title, lines_of(text), tuple(targets), pattern)


def facts(action: str, cursor: int, page: VisitedPage, lines: tuple[int, int, int]) -> dict[str, Any]:
    """Return the facts that a gateway needs for citations and for reporting the action."""
    first, last, total = lines
    content: dict[str, Any] = {
        "action": action,
        "cursor": cursor,
        "url": page.url,
        "title": page.title,
        "lines": {"first": first, "last": last, "total": total},
    }
    if page.kind is PageKind.SEARCH:
        content["query"] = page.requested_url
        content["results"] = [
            {"id": number, "url": target.url, "title": target.title, "snippet": target.snippet}
            for number, target in enumerate(page.targets)
        ]
    elif page.kind is PageKind.FOUND:
        content["pattern"] = page.requested_url
        content["matches"] = [
            {"id": number, "line": target.line, "text": target.snippet} for number, target in enumerate(page.targets)
        ]
    return content
