"""Headers a tool server is sent: what its entry says, nothing that is somebody else's business."""

from __future__ import annotations

import json

import pytest

from tests.mcp.arguments import sent
from tests.mcp.conftest import Upstream
from unisono.core.tool_arguments import read_arguments
from unisono.core.tools import ToolServer
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
    "an underscore": {"X_Key": "1"},
    "a space in the name": {"X Key": "1"},
    "a colon in the name": {"X:Key": "1"},
    "no name": {"": "1"},
    "a line in the name": {"X-A\r\nHost": "1"},
    "a line in the value": {"X-A": "1\r\nHost: inside"},
    "a bare line feed": {"X-A": "1\nHost: inside"},
    "a null": {"X-A": "1\0"},
    "not ASCII": {"X-A": "é"},
    "the same twice": {"X-A": "1", "x-a": "2"},
    "too many": {f"X-{index}": "1" for index in range(33)},
    "too long": {"X-A": "1" * 9000},
}  # fmt: skip


@pytest.mark.parametrize("headers", REFUSED.values(), ids=REFUSED)
def test_what_is_not_the_entrys_to_set_is_refused_without_repeating_it(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_headers(headers, None)
    assert "inside" not in refused.value.message


@pytest.mark.parametrize("authorization", ["", "a\r\nHost: b", "é", " padded", "a" * 9000])
def test_an_authorization_that_cannot_be_sent_is_refused(authorization: str) -> None:
    with pytest.raises(InvalidRequest):
        check_headers({}, authorization)


def test_an_authorization_given_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        check_headers({"Authorization": "Bearer a"}, "b")


OURS = {"accept", "accept-encoding", "connection", "content-length", "content-type", "host", "user-agent",
        "mcp-method", "mcp-name", "mcp-protocol-version"}  # fmt: skip


async def test_an_argument_that_a_tool_wants_in_a_header_is_repeated_there(host: McpHost, upstream: Upstream) -> None:
    number = "7" * 4_000
    arguments = read_arguments("", f'{{"place":"north","number":{number}}}')
    outcome = await host.call(upstream.server("modern"), "mirrored", arguments)
    assert outcome.text == f"north {number}"


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ({}, {}),
        ({"headers": {"X-Team": "blue"}}, {"x-team": "blue"}),
        ({"authorization": "token-1"}, {"authorization": "Bearer token-1"}),
        ({"authorization": "Basic abc"}, {"authorization": "Basic abc"}),
        ({"headers": {"Authorization": "Bearer own"}}, {"authorization": "Bearer own"}),
    ],
    ids=["nothing", "a header", "a token", "a scheme", "its own header"],
)
async def test_a_server_sees_what_its_entry_says_and_nothing_else(
    host: McpHost,
    upstream: Upstream,
    entry: dict[str, object],
    shown: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    server: ToolServer = upstream.server("modern", **entry)
    seen = json.loads((await host.call(server, "headers", sent({}))).text)
    assert {name: value for name, value in seen.items() if name not in OURS} == shown
    assert seen["user-agent"] == "unisono"
    assert seen["accept-encoding"] == "identity"
