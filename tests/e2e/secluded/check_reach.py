"""Whoever a request or a page names, the packets go where they were judged to go: with names that change their mind,
with redirects, and with what a tool server says in the middle of a session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from mcp.client.client import Client

from tests.e2e.hosting import made
from tests.e2e.responses import ANSWER, THOUGHT, Json, Line, line, refusal
from tests.e2e.secluded.conftest import INSIDE, OUTSIDE, PORT, Names
from tests.e2e.wires import WIRES
from tests.toolservers.running import called, command, text_of

NAMED: Json = {"type": "mcp", "server_label": "far", "require_approval": "never"}
CALL = THOUGHT + "<|channel|>commentary to=functions.far__act <|constrain|>json<|message|>{}<|call|>"
TOOL = {"name": "act", "description": "Acts.", "inputSchema": {"type": "object"}}
ABOUT = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "f", "version": "1"}}
ELSEWHERE = [f"http://{address}:{PORT}/mcp" for address in INSIDE]
STATUSES = (301, 302, 303, 307, 308)

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def outside(answer: Answering) -> AsyncIterator[None]:
    """A server out on the Internet."""

    async def any_way(request: web.Request) -> web.StreamResponse:
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", any_way)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, OUTSIDE, PORT).start()
    try:
        yield
    finally:
        await runner.cleanup()


def moved(status: int, target: str) -> web.Response:
    return web.Response(status=status, headers={"location": target})


async def spoken(request: web.Request, **instead: web.Response) -> web.Response:
    """What a well-behaved tool server answers, but for some methods."""
    if request.method != "POST":
        return web.Response(status=405)
    asked = await request.json()
    method = asked["method"].replace("/", "_")
    if method in instead:
        return instead[method]
    results: Json = {
        "initialize": ABOUT,
        "tools_list": {"tools": [TOOL]},
        "tools_call": {"content": [{"type": "text", "text": "acted"}]},
    }
    if "id" not in asked:
        return web.Response(status=202)
    if method not in results:
        return web.Response(status=400)
    return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": results[method]})


@asynccontextmanager
async def gateway() -> AsyncIterator[Line]:
    allowed = {"host": "*", "ports": [], "plain_http": True}
    async with line(WIRES["vllm"], unisono={"mcp_allowed_hosts": [allowed]}) as here:
        yield here


def at(url: str) -> Json:
    return {"tools": [{**NAMED, "server_url": url}]}


async def test_a_name_that_changes_its_mind_leads_nowhere_inside(names: Names, canaries: list[str]) -> None:
    names.known["fickle.test"] = [OUTSIDE, *INSIDE[:1]]
    async with outside(spoken), gateway() as here:
        here.say(CALL, ANSWER)
        first = await here.whole(**at(f"http://fickle.test:{PORT}/mcp"))
        # It really is reached where it was judged, and only looked up once.
        assert [call["output"] for call in made(first)] == ["acted"]
        assert names.asked == ["fickle.test"]
        # Another way to it is another connection, and that is judged anew.
        here.say(ANSWER)
        answer = await here.post(**at(f"http://fickle.test:{PORT}/other"))
        refusal(answer, 403, "tools.0.server_url", "tool_server_not_allowed")
        assert names.asked == ["fickle.test"] * 2
    assert canaries == []


@pytest.mark.parametrize("address", INSIDE)
async def test_a_name_of_a_place_inside_leads_nowhere(names: Names, canaries: list[str], address: str) -> None:
    names.known["inside.test"] = [address]
    async with gateway() as here:
        for url in (f"http://inside.test:{PORT}/mcp", f"http://inside.test:{PORT}/sse", f"http://{address}:{PORT}/mcp"):
            here.say(ANSWER)
            refusal(await here.post(**at(url)), 403, "tools.0.server_url", "tool_server_not_allowed")
    assert canaries == []


@pytest.mark.parametrize(
    ("status", "moment"),
    [*((status, "tools_call") for status in STATUSES), *((307, each) for each in ("server_discover", "initialize"))],
)
async def test_redirects_of_a_named_server_lead_nowhere(
    names: Names, canaries: list[str], status: int, moment: str
) -> None:
    names.known["far.test"] = [OUTSIDE]
    asked: list[str] = []
    target = ELSEWHERE[STATUSES.index(status) % len(ELSEWHERE)]

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.method)
        return await spoken(request, **{moment: moved(status, target)})

    async with outside(answer), gateway() as here:
        here.say(CALL, ANSWER)
        response = await here.whole(**at(f"http://far.test:{PORT}/mcp"))
        assert [call["output"] for call in made(response)] != ["acted"] or moment == "server_discover"
    assert asked
    assert canaries == []


@pytest.mark.parametrize("status", STATUSES)
async def test_a_redirected_event_stream_leads_nowhere(names: Names, canaries: list[str], status: int) -> None:
    names.known["far.test"] = [OUTSIDE]
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return moved(status, ELSEWHERE[0])

    async with outside(answer), gateway() as here:
        here.say(ANSWER)
        response = await here.whole(**at(f"http://far.test:{PORT}/sse"))
        assert made(response, "mcp_list_tools")[0]["error"]
    assert asked == ["/sse"]
    assert canaries == []


@pytest.mark.parametrize("endpoint", [ELSEWHERE[0], "/moved"])
async def test_an_event_stream_that_says_to_post_elsewhere_leads_nowhere(
    names: Names, canaries: list[str], endpoint: str
) -> None:
    names.known |= {"far.test": [OUTSIDE], "inside.test": [INSIDE[0]]}

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            return moved(307, ELSEWHERE[0])
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(f"event: endpoint\ndata: {endpoint}\n\n".encode())
        await asyncio.sleep(3)
        return stream

    async with outside(answer), gateway() as here:
        here.say(ANSWER)
        response = await here.whole(**at(f"http://far.test:{PORT}/sse"))
        assert made(response, "mcp_list_tools")[0]["error"]
    assert canaries == []


SITES: dict[str, Any] = {
    "a name inside": ("http://inside.test:{port}/", None),
    "a name that changes its mind": ("http://fickle.test:{port}/away", "http://fickle.test:{port}/secret"),
    "an address inside": ("http://169.254.169.254:{port}/latest/meta-data/", None),
    **{
        f"a redirect to {address}": ("http://far.test:{port}/away", f"http://{address}:{{port}}/") for address in INSIDE
    },
    "a redirect to a name inside": ("http://far.test:{port}/away", "http://inside.test:{port}/"),
    "a redirect to another scheme": ("http://far.test:{port}/away", "file:///etc/passwd"),
}


@pytest.mark.parametrize(("url", "target"), SITES.values(), ids=SITES)
async def test_no_page_leads_the_shipped_browser_inside(
    names: Names, canaries: list[str], url: str, target: str | None
) -> None:
    """With a search engine whose results lead there: what it finds is opened by its number and by its address."""
    url = url.format(port=PORT)
    names.known |= {
        "far.test": [OUTSIDE], "inside.test": [INSIDE[0]], "fickle.test": [OUTSIDE, INSIDE[0]], "ok.test": [OUTSIDE],
    }  # fmt: skip
    searched: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/search":
            searched.append(request.query["q"])
            links = (url, f"http://ok.test:{PORT}/ok")
            found = [{"url": link, "title": link, "content": "words"} for link in links]
            return web.json_response({"results": found})
        if request.path == "/away" and target is not None:
            return moved(302, target.format(port=PORT))
        return web.Response(text="<p>All is well.</p>", content_type="text/html")

    engine = f"http://{OUTSIDE}:{PORT}"
    async with (
        outside(answer),
        command("mcp", "serve", "browser", "--searxng", engine, "--port", "0") as (_, lines),
        Client(lines[-1].split()[-1]) as client,
    ):
        assert "ok.test" in text_of(await called(client, "search", query="where"))
        assert searched == ["where"]
        for opened in ({"id": 0}, {"id": url}):
            names.known["fickle.test"] = [OUTSIDE, INSIDE[0]]
            result = await called(client, "open", cursor=0, **opened)
            assert "secret" not in json.dumps([text_of(result)])
        # The way it is meant to be gone works.
        assert "All is well." in text_of(await called(client, "open", id=1, cursor=0))
    assert canaries == []
