"""Pages of a browser session: their limits and their cursors."""

from __future__ import annotations

import pytest

from unisono.toolservers.browser.visited_pages import (
    MAX_CHARACTERS,
    MAX_PAGES,
    PAGE_CHARACTERS,
    BrowserSession,
    BrowserSessions,
    BrowsingError,
    PageKind,
    VisitedPage,
    lines_of,
)


def visited_page(name: str, size: int = 10) -> VisitedPage:
    return VisitedPage(PageKind.PAGE, name, name, name, ("x" * size,))


def test_old_pages_are_dropped_with_their_cursors() -> None:
    session = BrowserSession()
    cursors = [session.add(visited_page(f"https://a/{number}")) for number in range(MAX_PAGES + 3)]
    assert cursors == list(range(MAX_PAGES + 3))
    assert session.get().url == f"https://a/{MAX_PAGES + 2}"
    assert session.get(3).url == "https://a/3"
    with pytest.raises(BrowsingError, match=rf"Cursor `2` is out of range.*\[3 - {MAX_PAGES + 2}\]"):
        session.get(2)


def test_large_pages_are_dropped_sooner_except_for_the_latest() -> None:
    session = BrowserSession()
    for number in range(5):
        session.add(visited_page(str(number), MAX_CHARACTERS // 2))
    with pytest.raises(BrowsingError):
        session.get(2)
    assert session.get(3).url == "3"
    assert session.get(session.add(visited_page("huge", 2 * MAX_CHARACTERS))).url == "huge"


def test_a_url_refers_to_its_latest_visit() -> None:
    session = BrowserSession()
    session.add(visited_page("https://a/"))
    latest = visited_page("https://a/", 20)
    session.add(latest)
    session.add(VisitedPage(PageKind.FOUND, "https://b/", "https://b/", "", ("x",)))
    assert session.page_from("https://a/") is latest
    assert session.page_from("https://b/") is None


def test_the_least_recently_used_session_is_dropped() -> None:
    sessions = BrowserSessions(2)
    first = sessions.get("first")
    sessions.get("second")
    assert sessions.get("first") is first
    sessions.get("third")
    assert sessions.get("first") is first
    assert len(sessions) == 2


def test_a_long_page_is_truncated_with_a_remark() -> None:
    lines = lines_of("a" * (PAGE_CHARACTERS + 5))
    assert lines[-1] == "[The page was truncated; 5 more characters are left out.]"
    assert sum(map(len, lines)) < PAGE_CHARACTERS + 100
