"""SSRF tests: requests and pages must not reach internal addresses.

They try names whose address changes, redirects, and messages of a tool server within a session.
"""

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
INITIALIZE_RESULT = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "f", "version": "1"},
}
INTERNAL_URLS = [f"http://{address}:{PORT}/mcp" for address in INSIDE]
STATUSES = (301, 302, 303, 307, 308)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def outside(answer: Handler) -> AsyncIterator[None]:
    """Run a server with a public address."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, OUTSIDE, PORT).start()
    try:
        yield
    finally:
        await runner.cleanup()


def moved(status: int, target: str) -> web.Response:
    return web.Response(status=status, headers={"location": target})


async def mcp_response(request: web.Request, **instead: web.Response) -> web.Response:
    """Answer like a correct tool server, except for some methods."""
    if request.method != "POST":
        return web.Response(status=405)
    message = await request.json()
    method = message["method"].replace("/", "_")
    if method in instead:
        return instead[method]
    results: Json = {
        "initialize": INITIALIZE_RESULT,
        "tools_list": {"tools": [TOOL]},
        "tools_call": {"content": [{"type": "text", "text": "acted"}]},
    }
    if "id" not in message:
        return web.Response(status=202)
    if method not in results:
        return web.Response(status=400)
    return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": results[method]})


@asynccontextmanager
async def gateway() -> AsyncIterator[Line]:
    allowed = {"host": "*", "ports": [], "plain_http": True}
    async with line(WIRES["vllm"], unisono={"mcp_allowed_hosts": [allowed]}) as harness:
        yield harness


def at(url: str) -> Json:
    return {"tools": [{**NAMED, "server_url": url}]}


async def test_dns_rebinding_does_not_reach_an_internal_server(names: Names, canaries: list[str]) -> None:
    names.known["fickle.test"] = [OUTSIDE, *INSIDE[:1]]
    async with outside(mcp_response), gateway() as harness:
        harness.say(CALL, ANSWER)
        first = await harness.whole(**at(f"http://fickle.test:{PORT}/mcp"))
        # The server is reached at its checked address, and its name is resolved only once.
        assert [call["output"] for call in made(first)] == ["acted"]
        assert names.asked == ["fickle.test"]
        # Another URL needs another connection, whose address is checked again.
        harness.say(ANSWER)
        answer = await harness.post(**at(f"http://fickle.test:{PORT}/other"))
        refusal(answer, 403, "tools.0.server_url", "tool_server_not_allowed")
        assert names.asked == ["fickle.test"] * 2
    assert canaries == []


@pytest.mark.parametrize("address", INSIDE)
async def test_internal_server_url_is_refused(names: Names, canaries: list[str], address: str) -> None:
    names.known["inside.test"] = [address]
    async with gateway() as harness:
        for url in (f"http://inside.test:{PORT}/mcp", f"http://inside.test:{PORT}/sse", f"http://{address}:{PORT}/mcp"):
            harness.say(ANSWER)
            refusal(await harness.post(**at(url)), 403, "tools.0.server_url", "tool_server_not_allowed")
    assert canaries == []


@pytest.mark.parametrize(
    ("status", "moment"),
    [*((status, "tools_call") for status in STATUSES), *((307, each) for each in ("server_discover", "initialize"))],
)
async def test_tool_server_redirects_are_not_followed_to_internal_addresses(
    names: Names, canaries: list[str], status: int, moment: str
) -> None:
    names.known["far.test"] = [OUTSIDE]
    methods: list[str] = []
    target = INTERNAL_URLS[STATUSES.index(status) % len(INTERNAL_URLS)]

    async def answer(request: web.Request) -> web.StreamResponse:
        methods.append(request.method)
        return await mcp_response(request, **{moment: moved(status, target)})

    async with outside(answer), gateway() as harness:
        harness.say(CALL, ANSWER)
        response = await harness.whole(**at(f"http://far.test:{PORT}/mcp"))
        assert [call["output"] for call in made(response)] != ["acted"] or moment == "server_discover"
    assert methods
    assert canaries == []


@pytest.mark.parametrize("status", STATUSES)
async def test_sse_redirect_is_not_followed_to_an_internal_address(
    names: Names, canaries: list[str], status: int
) -> None:
    names.known["far.test"] = [OUTSIDE]
    paths: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        return moved(status, INTERNAL_URLS[0])

    async with outside(answer), gateway() as harness:
        harness.say(ANSWER)
        response = await harness.whole(**at(f"http://far.test:{PORT}/sse"))
        assert made(response, "mcp_list_tools")[0]["error"]
    assert paths == ["/sse"]
    assert canaries == []


@pytest.mark.parametrize("endpoint", [INTERNAL_URLS[0], "/moved"])
async def test_sse_endpoint_event_cannot_point_to_an_internal_address(
    names: Names, canaries: list[str], endpoint: str
) -> None:
    names.known |= {"far.test": [OUTSIDE], "inside.test": [INSIDE[0]]}

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            return moved(307, INTERNAL_URLS[0])
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(f"event: endpoint\ndata: {endpoint}\n\n".encode())
        await asyncio.sleep(3)
        return stream

    async with outside(answer), gateway() as harness:
        harness.say(ANSWER)
        response = await harness.whole(**at(f"http://far.test:{PORT}/sse"))
        assert made(response, "mcp_list_tools")[0]["error"]
    assert canaries == []


SITES: dict[str, Any] = {
    "internal name": ("http://inside.test:{port}/", None),
    "name with a changing address": ("http://fickle.test:{port}/away", "http://fickle.test:{port}/secret"),
    "internal address": ("http://169.254.169.254:{port}/latest/meta-data/", None),
    **{f"redirect to {address}": ("http://far.test:{port}/away", f"http://{address}:{{port}}/") for address in INSIDE},
    "redirect to an internal name": ("http://far.test:{port}/away", "http://inside.test:{port}/"),
    "redirect to another scheme": ("http://far.test:{port}/away", "file:///etc/passwd"),
}


@pytest.mark.parametrize(("url", "target"), SITES.values(), ids=SITES)
async def test_browser_tool_never_opens_an_internal_page(
    names: Names, canaries: list[str], url: str, target: str | None
) -> None:
    """Results of the search engine point there too. They are opened by number and by address."""
    url = url.format(port=PORT)
    names.known |= {
        "far.test": [OUTSIDE], "inside.test": [INSIDE[0]], "fickle.test": [OUTSIDE, INSIDE[0]], "ok.test": [OUTSIDE],
    }  # fmt: skip
    queries: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/search":
            queries.append(request.query["q"])
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
        assert queries == ["where"]
        for opened in ({"id": 0}, {"id": url}):
            names.known["fickle.test"] = [OUTSIDE, INSIDE[0]]
            result = await called(client, "open", cursor=0, **opened)
            assert "secret" not in json.dumps([text_of(result)])
        # A permitted link works.
        assert "All is well." in text_of(await called(client, "open", id=1, cursor=0))
    assert canaries == []
