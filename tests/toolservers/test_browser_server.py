"""The browser server with the MCP client of the SDK.

The tests cover expected views, structured content for citations, sessions and hostile pages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from mcp.client.client import Client
from mcp_types import RequestParamsMeta

from tests.toolservers.running import (
    Answer,
    bomb,
    called,
    endless,
    moved,
    page,
    served,
    silent,
    text_of,
    website,
)
from unisono.toolservers.browser.actions import Browser
from unisono.toolservers.browser.searxng import SearxNG
from unisono.toolservers.browser.server import TOOLS, browser_server
from unisono.toolservers.browser.web import Web

GUIDE = """<html><head><title>The guide</title></head><body>
<h1>Setting up</h1>
<p>Install it, then read <a href="/more">more</a> or ask <a href="https://example.org/forum">the forum</a>.</p>
<ul><li>Linux</li><li>macOS</li></ul>
</body></html>"""


@asynccontextmanager
async def browsing(
    pages: dict[str, Answer], found: Any = None, view_tokens: int = 1024, page_s: float = 20.0
) -> AsyncIterator[tuple[Client, str]]:
    """Yield a client of a browser whose web consists of these pages, and the URL of that web."""
    async with website(pages, found) as site:
        web = Web(private=True, page_s=page_s, page_bytes=200_000)
        server = browser_server(Browser(SearxNG(site), [web], view_tokens))
        async with served(server, remembers=True) as url, Client(url) as client:
            yield client, site


async def test_the_tools_are_declared_in_the_trained_form() -> None:
    async with browsing({}) as (client, _):
        listed = (await client.list_tools()).tools
        assert [tool.name for tool in listed] == ["search", "open", "find"]
        assert [tool.description for tool in listed] == [TOOLS[tool.name][0] for tool in listed]
        assert listed[1].input_schema["properties"]["id"] == {"type": ["number", "string"], "default": -1}
        assert client.instructions is not None
        assert (
            "`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`."
            in client.instructions
        )
        assert client.instructions.endswith("sources=web (default: web)")


async def test_search_open_and_find_return_the_trained_form() -> None:
    results = [
        {"url": "SITE/guide", "title": "The guide", "content": "How to set\n it up."},
        {"url": "javascript:alert(1)", "title": "no"},
        "no result at all",
        {"url": "https://example.org/", "title": "Forged 【9†x】", "content": None},
    ]
    async with website({"/guide": page(GUIDE)}) as site:
        host = site.removeprefix("http://")
        found = {
            "results": [r | {"url": r["url"].replace("SITE", site)} if isinstance(r, dict) else r for r in results]
        }
        async with browsing({}, found) as (client, _):
            searched = await called(client, "search", query="set it up", topn=5)
            assert text_of(searched) == (
                "[0] set it up\n"
                "**viewing lines [0 - 5] of 5**\n"
                "\n"
                "L0: \n"
                "L1: URL: \n"
                "L2: # Search Results\n"
                "L3: \n"
                f"L4:   * 【0†The guide†{host}】 How to set it up.\n"
                "L5:   * 【1†Forged 〖9‡x〗†example.org】"
            )
            assert searched.structured_content == {
                "action": "search",
                "cursor": 0,
                "url": "",
                "title": "set it up",
                "lines": {"first": 0, "last": 5, "total": 5},
                "query": "set it up",
                "results": [
                    {"id": 0, "url": f"{site}/guide", "title": "The guide", "snippet": "How to set it up."},
                    {"id": 1, "url": "https://example.org/", "title": "Forged 〖9†x〗", "snippet": ""},
                ],
            }
            opened = await called(client, "open", id=0)
            assert text_of(opened) == (
                f"[1] The guide ({site}/guide)\n"
                "**viewing lines [0 - 7] of 7**\n"
                "\n"
                "L0: \n"
                f"L1: URL: {site}/guide\n"
                "L2: # Setting up\n"
                "L3: \n"
                "L4: Install it, then read 【0†more】 or ask 【1†the forum†example.org】.\n"
                "L5: \n"
                "L6:   * Linux\n"
                "L7:   * macOS"
            )
            assert opened.structured_content == {
                "action": "open",
                "cursor": 1,
                "url": f"{site}/guide",
                "title": "The guide",
                "lines": {"first": 0, "last": 7, "total": 7},
            }
            matched = await called(client, "find", pattern="MORE or ask the", cursor=1)
            assert text_of(matched) == (
                "[2] Find results for text: `more or ask the` in `The guide` "
                f"({site}/guide/find?pattern=more or ask the)\n"
                "**viewing lines [0 - 4] of 4**\n"
                "\n"
                "L0: # 【0†match at L4】\n"
                "L1: Install it, then read more or ask the forum.\n"
                "L2: \n"
                "L3:   * Linux\n"
                "L4:   * macOS"
            )
            facts = matched.structured_content
            assert (facts["url"], facts["pattern"], facts["cursor"]) == (f"{site}/guide", "more or ask the", 2)
            assert [(match["id"], match["line"]) for match in facts["matches"]] == [(0, 4)]
            # A match opens the page near the match.
            assert "L4: Install it" in text_of(await called(client, "open", id=0, cursor=2, num_lines=1))


async def test_empty_results_are_reported_and_cannot_be_searched() -> None:
    async with browsing({"/guide": page(GUIDE)}, {"results": []}) as (client, site):
        assert text_of(await called(client, "search", query="x")).endswith("L4: No results.")
        refused = await called(client, "find", pattern="x")
        assert (refused.is_error, text_of(refused)) == (
            True,
            "Cannot run `find` on search results page or find results page",
        )
        await called(client, "open", id=f"{site}/guide")
        assert "No `find` results for pattern: `zebra`" in text_of(await called(client, "find", pattern="zebra"))


OPENINGS: dict[str, tuple[dict[str, Any], str]] = {
    "number in a string": ({"id": "0", "cursor": 0}, "[1] second"),
    "decimal number": ({"id": 0.0, "cursor": 0.0}, "[1] second"),
    "link in the written form": ({"id": "【0†Second】"}, "[1] second"),
    "other location": ({"loc": 20}, "**viewing lines [20 - "),
    "number of lines": ({"loc": 20, "num_lines": 3}, "**viewing lines [20 - 22] of 52**"),
    "more lines than available": ({"loc": 50, "num_lines": 99}, "**viewing lines [50 - 52] of 52**"),
    "nulls": ({"id": None, "cursor": None, "loc": None, "num_lines": None}, "[1] first"),
    "page source": ({"view_source": True}, "view-source:http"),
    "location after the end": ({"loc": 53}, "Invalid location parameter: `53`. Cannot exceed page maximum of 52."),
    "unknown link": ({"id": 7}, "Invalid link id `7`."),
    "unknown page": ({"cursor": 5}, "Cursor `5` is out of range. Available cursor indices: [0 - 0]."),
    "negative cursor": ({"cursor": -2}, "Cursor `-2` is out of range."),
    "invalid location": ({"loc": "there"}, "Invalid function arguments: `loc`"),
    "invalid link": ({"id": [1]}, "Invalid function arguments: `id`"),
    "file URL": ({"id": "file:///etc/passwd"}, "URLs of this kind cannot be opened"),
    "text": ({"id": "the first link"}, "`the first link` is not a valid URL"),
    "very long URL": ({"id": "https://" + "a" * 5000}, "is not a valid URL"),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("arguments", "expected"), OPENINGS.values(), ids=OPENINGS)
async def test_open_accepts_or_explains_any_arguments(arguments: dict[str, Any], expected: str) -> None:
    lines = "".join(f"<p>line {number}</p>" for number in range(25))
    pages = {
        "/first": page(f"<title>first</title><a href=/second>Second</a>{lines}"),
        "/second": page("<title>second</title>text"),
    }
    async with browsing(pages, view_tokens=100) as (client, site):
        await called(client, "open", id=f"{site}/first")
        result = await called(client, "open", **arguments)
        assert expected in text_of(result)
        assert result.is_error is not text_of(result).startswith("[")


async def test_open_and_find_need_a_visited_page() -> None:
    async with browsing({}) as (client, _):
        for tool, arguments in (("open", {}), ("find", {"pattern": "x"})):
            assert text_of(await called(client, tool, **arguments)) == "No pages to access!"


async def test_a_long_page_is_shown_in_a_window() -> None:
    text = "".join(f"<p>{'word ' * 12}{number}</p>" for number in range(500))
    async with browsing({"/": page(text)}, view_tokens=200) as (client, site):
        view = text_of(await called(client, "open", id=f"{site}/"))
        assert 600 < len(view) < 1100
        whole = await called(client, "open", num_lines=100_000)
        assert len(text_of(whole)) < 8 * 1100
        lines = whole.structured_content["lines"]
        assert text_of(whole).splitlines()[-1].startswith(f"L{lines['last']}: ")
        assert lines["last"] < lines["total"]


async def test_a_cursor_keeps_its_view_when_the_page_changes() -> None:
    visits: list[int] = []

    def changing(request: Any) -> Any:
        visits.append(1)
        return page(f"<p>visit {len(visits)}</p>")(request)

    async with browsing({"/": changing}) as (client, site):
        await called(client, "open", id=f"{site}/")
        await called(client, "open", id=f"{site}/")
        assert "visit 1" in text_of(await called(client, "open", cursor=0))
        assert "visit 2" in text_of(await called(client, "open", cursor=1))
        assert len(visits) == 2


async def test_clients_and_conversations_do_not_share_pages() -> None:
    async with website({"/": page("<p>mine</p>")}) as site:
        server = browser_server(Browser(SearxNG(site), [Web(private=True)]))
        async with served(server, remembers=True) as url, Client(url) as one, Client(url) as other:
            assert one.protocol_version < "2026"
            await called(one, "open", id=f"{site}/")
            assert text_of(await called(other, "open")) == "No pages to access!"
            another = cast(RequestParamsMeta, {"unisono/session": "another conversation"})
            named = await one.call_tool("open", {}, meta=another)
            assert named.is_error is True
            assert "mine" in text_of(await called(one, "open"))


async def test_calls_of_one_session_run_in_order() -> None:
    async def slow(request: Any) -> Any:
        await asyncio.sleep(0.1)
        return page("<p>slow</p>")(request)

    async with browsing({"/slow": slow, "/fast": page("<p>fast</p>")}) as (client, site):
        opened = await asyncio.gather(*(called(client, "open", id=f"{site}/{name}") for name in ("slow", "fast")))
        assert [result.structured_content["cursor"] for result in opened] == [0, 1]


HOSTILE_PAGES: dict[str, tuple[dict[str, Answer], str]] = {
    "endless body": ({"/": endless}, "**viewing lines [0 - "),
    "compression bomb": ({"/": bomb}, "**viewing lines [0 - "),
    "stalled body": ({"/": silent}, "it did not load within 1 s"),
    "redirect loop": ({"/": moved("/")}, "it redirects more than 5 times"),
    "redirect to a file": ({"/": moved("file:///etc/passwd")}, "only http and https URLs can be opened"),
    "redirect with a password": ({"/": moved("http://a:b@127.0.0.1/")}, "URLs with a user name are not allowed"),
    "redirect to an invalid URL": ({"/": moved("http://[")}, "Error fetching URL"),
    "image": ({"/": page("x", "image/png")}, "its content type is `image/png`; only text can be read"),
    "binary content": ({"/": page("a\x00b", "")}, "Error fetching URL"),
    "missing page": ({}, "HTTP status 404"),
    "unknown encoding": ({"/": page("<p>café</p>", "text/html; charset=zlib")}, "café"),
    "slow encoding": ({"/": page("<p>text</p>", "text/html; charset=punycode")}, "text"),
    "Harmony markers": ({"/": page("<p>&lt;|end|&gt; <|call|></p>")}, "L2: <|end|> <|call|>"),
    "scripts": ({"/": page("<script>ignore()</script><p>seen</p>")}, "L2: seen"),
    "title of several lines": ({"/": page("<title>a\n[9] b\n\n</title>c")}, "[0] a [9] b (http"),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("pages", "expected"), HOSTILE_PAGES.values(), ids=HOSTILE_PAGES)
async def test_hostile_pages_are_harmless(pages: dict[str, Answer], expected: str) -> None:
    began = time.monotonic()
    # A busy machine may need a second for a page that loads.
    async with browsing(pages, page_s=1.0 if pages == {"/": silent} else 8.0) as (client, site):
        assert expected in text_of(await called(client, "open", id=f"{site}/"))
    assert time.monotonic() - began < 10


ENGINES: dict[str, tuple[Any, str]] = {
    "not JSON": ("<html>", "the search engine's answer is not JSON"),
    "deeply nested": ("[" * 100_000, "the search engine's answer is not JSON"),
    "no results": ({"error": 1}, "the search engine's answer has no `results` list"),
    "too large": ("x" * 5_000_000, "the search engine's answer has more than 4,194,304 bytes"),
    "no search engine": (None, "the search engine answered with HTTP status 404"),
}


@pytest.mark.parametrize(("found", "expected"), ENGINES.values(), ids=ENGINES)
async def test_a_search_engine_failure_is_a_tool_error(found: Any, expected: str) -> None:
    async with browsing({}, found) as (client, _):
        result = await called(client, "search", query="x")
        assert result.is_error is True
        assert text_of(result) == f"Error during search for `x`: {expected}"


async def test_a_search_engine_without_json_names_the_setting() -> None:
    from aiohttp import web as answers

    async with browsing({"/search": lambda _: answers.Response(status=403)}) as (client, _):
        assert "needs `json` in `search.formats`" in text_of(await called(client, "search", query="x"))
