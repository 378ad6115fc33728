"""Tests of the session pool: shared and idle connections, closing, and OAuth tokens."""

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
from tests.mcp.conftest import Upstream, assert_no_tasks_left
from tests.mcp.hostile import Hostile, plain, text
from unisono.core.tool_host import ClientCredentials, Command, ToolServer, ToolTimeouts, ToolTransport
from unisono.errors import InvalidRequest, ToolServerError, ToolServerUnavailable
from unisono.mcp import McpHost, McpLimits
from unisono.mcp.fingerprints import key_of


def initialize_count(hostile: Hostile) -> int:
    return sum(seen.method == "POST" and seen.json["method"] == "initialize" for seen in hostile.requests)


async def test_calls_share_one_connection(host: McpHost) -> None:
    async with Hostile(lambda seen: [text(seen)]) as hostile:
        server = hostile.server()
        await asyncio.gather(*(host.call(server, "act", sent({})) for _ in range(30)))
        assert initialize_count(hostile) == 1


SERVER = ToolServer("a", "https://a.example/mcp", configured=True)
OTHERS = {
    "owner": replace(SERVER, owner="b"),
    "address": replace(SERVER, url="https://a.example/mcp2"),
    "transport": replace(SERVER, transport=ToolTransport.SSE),
    "header": replace(SERVER, headers={"X-A": "1"}),
    "authorization": replace(SERVER, authorization="t"),
    "source of the entry": replace(SERVER, configured=False),
    "OAuth client": replace(SERVER, oauth=ClientCredentials("c", "https://i.example", "s")),
    "OAuth secret": replace(SERVER, oauth=ClientCredentials("c", "https://i.example", "t")),
    "command": replace(SERVER, command=Command(("x",))),
    "environment": replace(SERVER, command=Command(("x",), {"A": "1"})),
}


def test_only_equal_servers_share_a_connection() -> None:
    keys = {key_of(server) for server in OTHERS.values()} | {key_of(SERVER)}
    assert len(keys) == len(OTHERS) + 1
    assert key_of(replace(SERVER, label="b", timeouts=ToolTimeouts(call_s=1), idempotent=frozenset({"x"}))) == key_of(
        SERVER
    )


async def test_owners_do_not_share_a_connection(host: McpHost) -> None:
    async with Hostile(lambda seen: [text(seen)]) as hostile:
        for owner in ("a", "b", "a"):
            await host.call(hostile.server(owner=owner), "act", sent({}))
        assert initialize_count(hostile) == 2


async def test_idle_connection_is_closed_and_reopened_when_needed(host: McpHost) -> None:
    async with Hostile(lambda seen: [text(seen)]) as hostile:
        server = hostile.server(timeouts=ToolTimeouts(idle_s=0.2))
        await host.call(server, "act", sent({}))
        async with asyncio.timeout(5):
            while hostile.open:
                await asyncio.sleep(0.01)
        assert any(seen.method == "DELETE" for seen in hostile.probes)
        # The connection leaves no task and no socket.
        async with asyncio.timeout(2):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)
        assert (await host.call(server, "act", sent({}))).text == "acted"
        assert initialize_count(hostile) == 2


async def test_idle_connection_is_evicted_but_a_used_one_is_not(upstream: Upstream) -> None:
    host = McpHost(limits=McpLimits(sessions=2))
    server = upstream.server("modern")
    for owner in ("a", "b", "c", "a"):
        assert (await host.call(replace(server, owner=owner), "echo", sent({"text": "hi"}))).text == "hi"
    running_calls = [
        asyncio.create_task(
            host.call(replace(server, owner=owner), "slow", sent({"seconds": 1, "name": f"room {owner}"}))
        )
        for owner in ("d", "e")
    ]
    for owner in ("d", "e"):
        await upstream.until_noted(f"slow begins room {owner}")
    outcome = await host.call(replace(server, owner="f"), "echo", sent({"text": "hi"}))
    assert (outcome.is_error, outcome.outcome_unknown) == (True, False)
    assert [(await call).text for call in running_calls] == ["done", "done"]
    await host.aclose()
    assert_no_tasks_left()


async def test_replaced_connections_make_room() -> None:
    host = McpHost(limits=McpLimits(sessions=2))
    async with Hostile(lambda seen: [plain(404)]) as hostile:
        for _ in range(4):
            assert "HTTP 404" in (await host.call(hostile.server(), "act", sent({}))).text
        await host.aclose()


async def test_closing_the_host_ends_running_calls_and_refuses_new_ones(upstream: Upstream) -> None:
    host = McpHost()
    calls = [
        asyncio.create_task(
            host.call(upstream.server(transport), "slow", sent({"seconds": 30, "name": f"closed {transport}"}))
        )
        for transport in ("modern", "legacy", "sse", "stdio")
    ]
    for transport in ("modern", "legacy", "sse", "stdio"):
        await upstream.until_noted(f"slow begins closed {transport}", 10)
    async with asyncio.timeout(8):
        await host.aclose()
        outcomes = await asyncio.gather(*calls)
    assert all(outcome.outcome_unknown for outcome in outcomes)
    assert_no_tasks_left()
    with pytest.raises(ToolServerUnavailable):
        await host.list_tools(upstream.server("modern"))
    assert (await host.call(upstream.server("modern"), "echo", sent({"text": "late"}))).is_error


async def test_unused_host_that_was_closed_refuses_requests(upstream: Upstream) -> None:
    host = McpHost()
    await host.aclose()
    with pytest.raises(ToolServerUnavailable):
        await host.list_tools(upstream.server("modern"))


def test_sdk_is_imported_at_first_use() -> None:
    program = (
        "import sys, unisono.mcp; print(sorted({'mcp', 'mcp_types', 'httpx2', 'anyio', 'jwt'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


class OAuthServer(Hostile):
    """Server that requires a token and serves the OAuth metadata and tokens of `issuer` itself."""

    def __init__(self, issuer: str = "") -> None:
        super().__init__(lambda seen: [text(seen)])
        self.issuer = issuer
        self.token_requests: list[Seen] = []
        self.expires_s = 3600

    def _respond(self, seen: Seen) -> Iterable[Step]:
        issuer = self.issuer or self.url
        if seen.path.startswith("/.well-known/oauth-protected-resource"):
            resource_metadata = {
                "resource": f"{self.url}/mcp",
                "authorization_servers": [issuer],
                "scopes_supported": ["tools"],
            }
            return [plain(200, json.dumps(resource_metadata).encode())]
        if seen.path.startswith("/.well-known/oauth-authorization-server"):
            metadata = {
                "issuer": issuer,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "response_types_supported": ["code"],
                "grant_types_supported": ["client_credentials"],
                "token_endpoint_auth_methods_supported": ["client_secret_basic"],
            }
            return [plain(200, json.dumps(metadata).encode())]
        if seen.path == "/token":
            self.token_requests.append(seen)
            token = {
                "access_token": f"t{len(self.token_requests)}",
                "token_type": "Bearer",
                "expires_in": self.expires_s,
            }
            return [plain(200, json.dumps(token).encode())]
        if seen.method == "POST" and seen.headers.get("authorization") != f"Bearer t{len(self.token_requests)}":
            challenge = (
                f'WWW-Authenticate: Bearer resource_metadata="{self.url}/.well-known/oauth-protected-resource/mcp"'
            )
            return [plain(401, b"", "text/plain", challenge)]
        return super()._respond(seen)


async def test_client_credentials_get_one_token_for_all_connections(host: McpHost) -> None:
    async with OAuthServer() as oauth_server:
        oauth = ClientCredentials("gateway", oauth_server.url, "canary-secret")
        server = oauth_server.server(oauth=oauth, timeouts=ToolTimeouts(idle_s=0.2))
        assert (await host.call(server, "act", sent({}))).text == "acted"
        assert (await host.call(server, "act", sent({}))).text == "acted"
        async with asyncio.timeout(5):
            while oauth_server.open:
                await asyncio.sleep(0.01)
        assert (await host.call(server, "act", sent({}))).text == "acted"
        (token_request,) = oauth_server.token_requests
        form = parse_qs(token_request.body.decode())
        assert (form["grant_type"], form["scope"]) == (["client_credentials"], ["tools"])
        credentials = base64.b64decode(token_request.headers["authorization"].removeprefix("Basic ")).decode()
        assert credentials == "gateway:canary-secret"
        assert not [seen for seen in oauth_server.requests if b"canary-secret" in seen.body]


async def test_credentials_are_sent_only_to_their_issuer(host: McpHost) -> None:
    async with OAuthServer("https://elsewhere.example") as oauth_server:
        oauth = ClientCredentials("gateway", "https://issuer.example", "canary-secret")
        with pytest.raises(ToolServerError):
            await host.list_tools(oauth_server.server(oauth=oauth))
        assert oauth_server.token_requests == []


@pytest.mark.parametrize("field", ['resource_metadata="', '"token_endpoint": "'])
async def test_oauth_metadata_cannot_refer_to_private_addresses(host: McpHost, field: str) -> None:
    """Only the server and the issuer are configured.

    Every other address in their responses must be public.
    """

    class Redirecting(OAuthServer):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            for step in super()._respond(seen):
                assert isinstance(step, Write)
                data = step.data.replace(f"{field}{self.url}".encode(), f"{field}{private_server.url}".encode())
                yield replace(step, data=data)

    async with WireServer(lambda seen: [plain(200, b"{}")]) as private_server, Redirecting() as oauth_server:
        oauth = ClientCredentials("gateway", oauth_server.url, "canary-secret")
        with pytest.raises(ToolServerError):
            await host.list_tools(oauth_server.server(oauth=oauth))
        assert oauth_server.requests
        assert private_server.requests == []


async def test_authorization_beside_client_credentials_is_refused(host: McpHost) -> None:
    oauth = ClientCredentials("gateway", "https://issuer.example", "s")
    with pytest.raises(InvalidRequest):
        await host.list_tools(replace(SERVER, oauth=oauth, authorization="t"))
