"""Connections: shared by those who may share one, closed when nobody uses them, and a token for each that needs one."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from urllib.parse import parse_qs

import pytest

from tests.fakes.wire import Seen, Step, WireServer, Write
from tests.mcp.arguments import sent
from tests.mcp.conftest import Upstream, nobody_left
from tests.mcp.hostile import Hostile, plain, text
from unisono.core.tools import ClientCredentials, Command, ToolServer, ToolTimeouts, ToolTransport
from unisono.errors import InvalidRequest, ToolServerError, ToolServerUnavailable
from unisono.mcp import McpHost, McpLimits
from unisono.mcp.fingerprints import key_of


def greeted(hostile: Hostile) -> int:
    return sum(seen.method == "POST" and seen.json["method"] == "initialize" for seen in hostile.requests)


async def test_one_connection_serves_many_calls(host: McpHost) -> None:
    async with Hostile(lambda seen: [text(seen)]) as hostile:
        server = hostile.server()
        await asyncio.gather(*(host.call(server, "act", sent({})) for _ in range(30)))
        assert greeted(hostile) == 1


ONE = ToolServer("a", "https://a.example/mcp", configured=True)
OTHERS = {
    "the owner": replace(ONE, owner="b"),
    "the address": replace(ONE, url="https://a.example/mcp2"),
    "the transport": replace(ONE, transport=ToolTransport.SSE),
    "a header": replace(ONE, headers={"X-A": "1"}),
    "the authorization": replace(ONE, authorization="t"),
    "who named it": replace(ONE, configured=False),
    "the client": replace(ONE, oauth=ClientCredentials("c", "https://i.example", "s")),
    "its secret": replace(ONE, oauth=ClientCredentials("c", "https://i.example", "t")),
    "the command": replace(ONE, command=Command(("x",))),
    "its environment": replace(ONE, command=Command(("x",), {"A": "1"})),
}


def test_only_equal_servers_share_a_connection() -> None:
    keys = {key_of(server) for server in OTHERS.values()} | {key_of(ONE)}
    assert len(keys) == len(OTHERS) + 1
    assert key_of(replace(ONE, label="b", timeouts=ToolTimeouts(call_s=1), idempotent=frozenset({"x"}))) == key_of(ONE)


async def test_owners_never_share_a_connection(host: McpHost) -> None:
    async with Hostile(lambda seen: [text(seen)]) as hostile:
        for owner in ("a", "b", "a"):
            await host.call(hostile.server(owner=owner), "act", sent({}))
        assert greeted(hostile) == 2


async def test_an_idle_connection_is_closed_and_opened_again_when_needed(host: McpHost) -> None:
    async with Hostile(lambda seen: [text(seen)]) as hostile:
        server = hostile.server(timeouts=ToolTimeouts(idle_s=0.2))
        await host.call(server, "act", sent({}))
        async with asyncio.timeout(5):
            while hostile.open:
                await asyncio.sleep(0.01)
        assert any(seen.method == "DELETE" for seen in hostile.probes)
        # Of the connection nothing is left: no task, no socket, nobody who looks after it.
        async with asyncio.timeout(2):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)
        assert (await host.call(server, "act", sent({}))).text == "acted"
        assert greeted(hostile) == 2


async def test_an_idle_connection_makes_room_and_a_used_one_does_not(upstream: Upstream) -> None:
    host = McpHost(limits=McpLimits(sessions=2))
    server = upstream.server("modern")
    for owner in ("a", "b", "c", "a"):
        assert (await host.call(replace(server, owner=owner), "echo", sent({"text": "hi"}))).text == "hi"
    busy = [
        asyncio.create_task(
            host.call(replace(server, owner=owner), "slow", sent({"seconds": 1, "name": f"room {owner}"}))
        )
        for owner in ("d", "e")
    ]
    for owner in ("d", "e"):
        await upstream.until_noted(f"slow begins room {owner}")
    outcome = await host.call(replace(server, owner="f"), "echo", sent({"text": "hi"}))
    assert (outcome.is_error, outcome.outcome_unknown) == (True, False)
    assert [(await call).text for call in busy] == ["done", "done"]
    await host.aclose()
    nobody_left()


async def test_closing_ends_calls_that_run_and_nobody_is_served_afterwards(upstream: Upstream) -> None:
    host = McpHost()
    calls = [
        asyncio.create_task(host.call(upstream.server(way), "slow", sent({"seconds": 30, "name": f"closed {way}"})))
        for way in ("modern", "legacy", "sse", "stdio")
    ]
    for way in ("modern", "legacy", "sse", "stdio"):
        await upstream.until_noted(f"slow begins closed {way}", 10)
    async with asyncio.timeout(8):
        await host.aclose()
        outcomes = await asyncio.gather(*calls)
    assert all(outcome.outcome_unknown for outcome in outcomes)
    nobody_left()
    with pytest.raises(ToolServerUnavailable):
        await host.list_tools(upstream.server("modern"))
    assert (await host.call(upstream.server("modern"), "echo", sent({"text": "late"}))).is_error


async def test_a_closed_host_that_was_never_used_never_loads_anything(upstream: Upstream) -> None:
    host = McpHost()
    await host.aclose()
    with pytest.raises(ToolServerUnavailable):
        await host.list_tools(upstream.server("modern"))


def test_the_sdk_is_loaded_at_first_use_only() -> None:
    looks = "import sys, unisono.mcp; print(sorted({'mcp', 'mcp_types', 'httpx2', 'anyio', 'jwt'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", looks], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


class Guarded(Hostile):
    """Wants a token, and says who gives them: itself, under `issuer`."""

    def __init__(self, issuer: str = "") -> None:
        super().__init__(lambda seen: [text(seen)])
        self.issuer = issuer
        self.given: list[Seen] = []
        self.expires_s = 3600

    def _respond(self, seen: Seen) -> Iterable[Step]:
        issuer = self.issuer or self.url
        if seen.path.startswith("/.well-known/oauth-protected-resource"):
            about = {"resource": f"{self.url}/mcp", "authorization_servers": [issuer], "scopes_supported": ["tools"]}
            return [plain(200, json.dumps(about).encode())]
        if seen.path.startswith("/.well-known/oauth-authorization-server"):
            itself = {
                "issuer": issuer,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "response_types_supported": ["code"],
                "grant_types_supported": ["client_credentials"],
                "token_endpoint_auth_methods_supported": ["client_secret_basic"],
            }
            return [plain(200, json.dumps(itself).encode())]
        if seen.path == "/token":
            self.given.append(seen)
            token = {"access_token": f"t{len(self.given)}", "token_type": "Bearer", "expires_in": self.expires_s}
            return [plain(200, json.dumps(token).encode())]
        if seen.method == "POST" and seen.headers.get("authorization") != f"Bearer t{len(self.given)}":
            found = f'WWW-Authenticate: Bearer resource_metadata="{self.url}/.well-known/oauth-protected-resource/mcp"'
            return [plain(401, b"", "text/plain", found)]
        return super()._respond(seen)


async def test_client_credentials_get_one_token_for_many_connections(host: McpHost) -> None:
    async with Guarded() as guarded:
        oauth = ClientCredentials("gateway", guarded.url, "canary-secret")
        server = guarded.server(oauth=oauth, timeouts=ToolTimeouts(idle_s=0.2))
        assert (await host.call(server, "act", sent({}))).text == "acted"
        assert (await host.call(server, "act", sent({}))).text == "acted"
        async with asyncio.timeout(5):
            while guarded.open:
                await asyncio.sleep(0.01)
        assert (await host.call(server, "act", sent({}))).text == "acted"
        (asked,) = guarded.given
        form = parse_qs(asked.body.decode())
        assert (form["grant_type"], form["scope"]) == (["client_credentials"], ["tools"])
        shown = base64.b64decode(asked.headers["authorization"].removeprefix("Basic ")).decode()
        assert shown == "gateway:canary-secret"
        assert not [seen for seen in guarded.requests if b"canary-secret" in seen.body]


async def test_credentials_are_shown_to_their_own_issuer_only(host: McpHost) -> None:
    async with Guarded("https://elsewhere.example") as guarded:
        oauth = ClientCredentials("gateway", "https://issuer.example", "canary-secret")
        with pytest.raises(ToolServerError):
            await host.list_tools(guarded.server(oauth=oauth))
        assert guarded.given == []


@pytest.mark.parametrize("field", ['resource_metadata="', '"token_endpoint": "'])
async def test_oauth_metadata_does_not_lead_to_private_addresses(host: McpHost, field: str) -> None:
    """The operator configured the server and the issuer; everything else that their answers name must be public."""

    class Redirecting(Guarded):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            for step in super()._respond(seen):
                assert isinstance(step, Write)
                data = step.data.replace(f"{field}{self.url}".encode(), f"{field}{inside.url}".encode())
                yield replace(step, data=data)

    async with WireServer(lambda seen: [plain(200, b"{}")]) as inside, Redirecting() as guarded:
        oauth = ClientCredentials("gateway", guarded.url, "canary-secret")
        with pytest.raises(ToolServerError):
            await host.list_tools(guarded.server(oauth=oauth))
        assert guarded.requests
        assert inside.requests == []


async def test_an_authorization_beside_client_credentials_is_refused(host: McpHost) -> None:
    oauth = ClientCredentials("gateway", "https://issuer.example", "s")
    with pytest.raises(InvalidRequest):
        await host.list_tools(replace(ONE, oauth=oauth, authorization="t"))
