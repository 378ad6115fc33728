"""Tests of request headers to tool servers: those of the entry, and none of other parties."""

from __future__ import annotations

import json

import pytest

from tests.mcp.arguments import sent
from tests.mcp.conftest import Upstream
from unisono.core.server_tool_arguments import read_arguments
from unisono.core.tool_host import ToolServer
from unisono.errors import InvalidRequest
from unisono.mcp import McpHost, check_headers

REFUSED = {
    name: {name: "value"}
    for name in (
        "Host", "Connection", "Keep-Alive", "TE", "Trailer", "Transfer-Encoding", "Upgrade", "Content-Length",
        "Content-Type", "Content-Encoding", "Accept", "Accept-Encoding", "Cookie", "Set-Cookie", "Origin", "Referer",
        "User-Agent", "Forwarded", "X-Forwarded-For", "X-Real-IP", "Proxy-Authorization", "Proxy-Connection",
        "Mcp-Session-Id", "MCP-Protocol-Version", "Last-Event-ID", "Sec-Fetch-Site", "Expect", "Via",
        "X-HTTP-Method-Override",
    )
} | {
    "underscore": {"X_Key": "1"},
    "space in the name": {"X Key": "1"},
    "colon in the name": {"X:Key": "1"},
    "no name": {"": "1"},
    "line break in the name": {"X-A\r\nHost": "1"},
    "line break in the value": {"X-A": "1\r\nHost: inside"},
    "line feed in the value": {"X-A": "1\nHost: inside"},
    "NUL": {"X-A": "1\0"},
    "not ASCII": {"X-A": "é"},
    "duplicate": {"X-A": "1", "x-a": "2"},
    "too many": {f"X-{index}": "1" for index in range(33)},
    "too long": {"X-A": "1" * 9000},
}  # fmt: skip


@pytest.mark.parametrize("headers", REFUSED.values(), ids=REFUSED)
def test_forbidden_header_is_refused_without_its_value(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_headers(headers, None)
    assert "inside" not in error.value.message


@pytest.mark.parametrize("authorization", ["", "a\r\nHost: b", "é", " padded", "a" * 9000])
def test_invalid_authorization_is_refused(authorization: str) -> None:
    with pytest.raises(InvalidRequest):
        check_headers({}, authorization)


def test_duplicate_authorization_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        check_headers({"Authorization": "Bearer a"}, "b")


GATEWAY_HEADERS = {"accept", "accept-encoding", "connection", "content-length", "content-type", "host", "user-agent",
        "mcp-method", "mcp-name", "mcp-protocol-version"}  # fmt: skip


async def test_argument_is_repeated_in_the_header_of_its_schema(host: McpHost, upstream: Upstream) -> None:
    number = "7" * 4_000
    arguments = read_arguments("", f'{{"place":"north","number":{number}}}')
    outcome = await host.call(upstream.server("modern"), "mirrored", arguments)
    assert outcome.text == f"north {number}"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({}, {}),
        ({"headers": {"X-Team": "blue"}}, {"x-team": "blue"}),
        ({"authorization": "token-1"}, {"authorization": "Bearer token-1"}),
        ({"authorization": "Basic abc"}, {"authorization": "Basic abc"}),
        ({"headers": {"Authorization": "Bearer own"}}, {"authorization": "Bearer own"}),
    ],
    ids=["no headers", "header", "token", "token with a scheme", "Authorization header"],
)
async def test_server_gets_only_the_headers_of_its_entry(
    host: McpHost,
    upstream: Upstream,
    entry: dict[str, object],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    server: ToolServer = upstream.server("modern", **entry)
    received = json.loads((await host.call(server, "headers", sent({}))).text)
    assert {name: value for name, value in received.items() if name not in GATEWAY_HEADERS} == expected
    assert received["user-agent"] == "unisono"
    assert received["accept-encoding"] == "identity"
