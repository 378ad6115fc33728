"""Tests of misbehaving servers: each call has an outcome in time and is sent once."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.wire import Close, Reset, Seen, Sleep, Stall, Step, Write
from tests.mcp.arguments import sent
from tests.mcp.hostile import (
    CACHEABLE,
    EVENTS,
    TOOL,
    Acting,
    Hostile,
    ModernHostile,
    answer,
    event,
    message,
    plain,
    text,
)
from unisono.core.tool_host import ToolTimeouts
from unisono.errors import (
    ToolServerError,
    ToolServerProtocolError,
    ToolServerTimeout,
    ToolServerUnauthorized,
    ToolServerUnavailable,
)
from unisono.mcp import McpHost, McpLimits

SHORT = ToolTimeouts(connect_s=5, list_s=1.5, call_s=1.5)


def result(seen: Seen) -> bytes:
    return message(id=seen.json["id"], result={"content": [{"type": "text", "text": "acted"}]})


HALF_BODY = Write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{")

UNKNOWN_OUTCOMES: dict[str, Acting] = {
    "reset before the headers": lambda seen: [Reset()],
    "close before the headers": lambda seen: [Close()],
    "partial headers": lambda seen: [Write(b"HTTP/1.1 200 O"), Close()],
    "not HTTP": lambda seen: [Write(b"\x00\x01\x02\r\n\r\n"), Close()],
    "partial body": lambda seen: [HALF_BODY, Close()],
    "not JSON": lambda seen: [plain(200, b"<html>")],
    "not a message": lambda seen: [plain(200, b"[]")],
    "NaN": lambda seen: [plain(200, b'{"jsonrpc": "2.0", "id": 1, "result": NaN}')],
    "no result": lambda seen: [answer(seen, {"no response": True})],
    "unknown content type": lambda seen: [answer(seen, {"content": [{"type": "hologram"}]})],
    "number as content": lambda seen: [answer(seen, {"content": 5})],
    "another id": lambda seen: [plain(200, message(id=9999, result={"content": []}))],
    "HTML page": lambda seen: [plain(200, b"<html>", "text/html")],
    "empty 200": lambda seen: [plain(200)],
    "202": lambda seen: [plain(202)],
    "error of a proxy": lambda seen: [plain(502, b"<html>", "text/html")],
    "500": lambda seen: [plain(500)],
    "stream without an answer": lambda seen: [Write(EVENTS), event(message(method="notifications/x")), Close()],
    "empty stream": lambda seen: [Write(EVENTS), Close()],
    "partial event": lambda seen: [Write(EVENTS + b'data: {"json'), Close()],
    "invalid event": lambda seen: [Write(EVENTS), event(b"{{{"), Close()],
    "stream reset": lambda seen: [Write(EVENTS), Reset()],
    "stream that cannot be resumed": lambda seen: [Write(EVENTS), event(b"", id="1", retry="1"), Close()],
    "no response": lambda seen: [Stall()],
    "endless headers": lambda seen: [Write(b"HTTP/1.1 200 OK\r\n"), *[Write(b"X: y\r\n")] * 10, Stall()],
    "compressed": lambda seen: [plain(200, gzip.compress(result(seen)), "application/json", "Content-Encoding: gzip")],
}  # fmt: skip


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("act", UNKNOWN_OUTCOMES.values(), ids=UNKNOWN_OUTCOMES)
async def test_call_without_an_answer_has_an_unknown_outcome_and_is_sent_once(host: McpHost, act: Acting) -> None:
    async with Hostile(act) as hostile:
        server = hostile.server(timeouts=SHORT)
        started = time.monotonic()
        outcome = await host.call(server, "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, True), outcome.text
        assert time.monotonic() - started < 5
        assert len(hostile.calls) == 1
        assert len(outcome.text) < 300
        hostile._act = lambda seen: [text(seen)]
        assert (await host.call(server, "act", sent({}))).text == "acted"


KNOWN_OUTCOMES: dict[str, tuple[Acting, str]] = {
    "protocol error": (
        lambda seen: [plain(200, message(id=seen.json["id"], error={"code": -32602, "message": "wrong"}))],
        "wrong",
    ),
    "error with a status": (
        lambda seen: [plain(400, message(id=seen.json["id"], error={"code": -32602, "message": "wrong"}))],
        "The tool server refused the call: HTTP 400. wrong",
    ),
    "error with the code of a lost connection": (
        lambda seen: [
            Write(EVENTS),
            event(message(id=seen.json["id"], error={"code": -32000, "message": "mine"})),
            Sleep(0.5),
            Close(),
        ],
        "mine",
    ),
    "401": (lambda seen: [plain(401)], "refused"),
    "403": (lambda seen: [plain(403)], "refused"),
    "429": (lambda seen: [plain(429)], "refused"),
    "503": (lambda seen: [plain(503)], "refused"),
    "very long error": (
        lambda seen: [plain(200, message(id=seen.json["id"], error={"code": 1, "message": "x" * 100_000}))],
        "[truncated",
    ),
    "5 MB event": (
        lambda seen: [Write(EVENTS), event(b'{"jsonrpc":"' + b"x" * 5_000_000), Close()],
        "size limit",
    ),
    "oversized answer": (
        lambda seen: [answer(seen, {"content": [{"type": "text", "text": "x" * 3_000_000}]})],
        "size limit",
    ),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("act", "expected"), KNOWN_OUTCOMES.values(), ids=KNOWN_OUTCOMES)
async def test_refusal_is_an_error_with_text_for_the_model(act: Acting, expected: str) -> None:
    host = McpHost(limits=McpLimits(answer_bytes=1 << 20))
    async with Hostile(act) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
        assert outcome.is_error
        assert expected in outcome.text
        assert not outcome.outcome_unknown
        assert len(outcome.text) < 5000
        assert len(hostile.calls) == 1
        await host.aclose()


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
async def test_every_earlier_protocol_revision_is_supported(host: McpHost, version: str) -> None:
    async with Hostile(lambda seen: [text(seen)], version=version) as hostile:
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        assert hostile.calls[0].headers["mcp-protocol-version"] == version


async def test_forgotten_session_is_initialized_again(host: McpHost) -> None:
    def forgetful(seen: Seen) -> Iterable[Step]:
        return [text(seen)] if seen.headers["mcp-session-id"] != "s0" else [plain(404)]

    async with Hostile(forgetful) as hostile:
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        assert [seen.headers["mcp-session-id"] for seen in hostile.calls] == ["s0", "s1"]


async def test_repeatedly_forgotten_session_is_retried_once(host: McpHost) -> None:
    async with Hostile(lambda seen: [plain(404)]) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, False)
        assert len(hostile.calls) == 2


async def test_interrupted_answer_is_resumed_if_it_has_an_event_id(host: McpHost) -> None:
    requests: list[Seen] = []

    def act(seen: Seen) -> Iterable[Step]:
        requests.append(seen)
        return [Write(EVENTS), event(b"", id="7", retry="1"), Close()]

    class Resuming(Hostile):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            if seen.method == "GET" and seen.headers.get("last-event-id") == "7":
                return [Write(EVENTS), event(result(requests[0])), Close()]
            return super()._respond(seen)

    async with Resuming(act) as hostile:
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        assert len(hostile.calls) == 1


@pytest.mark.parametrize("is_listening", [True, False])
async def test_outcome_is_unknown_if_the_answer_cannot_be_resumed(is_listening: bool) -> None:
    """The server answers the attempts to resume with 405, or refuses the connections."""

    def act(seen: Seen) -> Iterable[Step]:
        if not is_listening:
            assert hostile._server is not None
            hostile._server.close()
        return [Write(EVENTS), event(b"", id="7", retry="1"), Close()]

    host = McpHost(limits=McpLimits(reconnect_s=0.01))
    async with Hostile(act) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
        assert len(hostile.calls) == 1
        await host.aclose()


CANCELLATIONS: dict[str, Acting] = {
    "before the headers": lambda seen: [Stall()],
    "within a body": lambda seen: [HALF_BODY, Stall()],
    "within a stream": lambda seen: [Write(EVENTS), event(b"", id="1"), Stall()],
    "within a long stream": lambda seen: [Write(EVENTS), *[event(message(method="notifications/x"))] * 2000, Stall()],
}  # fmt: skip


@pytest.mark.parametrize("act", CANCELLATIONS.values(), ids=CANCELLATIONS)
async def test_cancelled_call_closes_its_connection_and_notifies_the_server(host: McpHost, act: Acting) -> None:
    async with Hostile(act) as hostile:
        call = asyncio.create_task(host.call(hostile.server(), "act", sent({})))
        async with asyncio.timeout(5):
            while not hostile.calls:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        cancelled_at = asyncio.get_running_loop().time()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(5):
            await hostile.calls[0]._gone.wait()
            while "notifications/cancelled" not in hostile.notifications:
                await asyncio.sleep(0.01)
        closed_at = hostile.calls[0].gone_at
        assert closed_at is not None
        assert closed_at - cancelled_at < 0.25


async def test_server_that_ignores_notifications_delays_nothing() -> None:
    host = McpHost(limits=McpLimits(aside_s=0.3))

    class SilentForNotifications(Hostile):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            is_notification = seen.method == "POST" and "id" not in seen.json
            return [Stall()] if is_notification else super()._respond(seen)

    async with SilentForNotifications(lambda seen: [text(seen)]) as hostile:
        started = time.monotonic()
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        assert time.monotonic() - started < 3
        await host.aclose()


NESTED: dict[str, object] = {"type": "object"}
for _ in range(400):
    NESTED = {"type": "object", "properties": {"what the server says": NESTED}}

INVALID_LISTS: dict[str, tuple[Acting, type[ToolServerError]]] = {
    "401": (lambda seen: [plain(401)], ToolServerUnauthorized),
    "500": (lambda seen: [plain(500)], ToolServerError),
    "no tools": (lambda seen: [answer(seen, {"tools": 5})], ToolServerProtocolError),
    "too many tools": (
        lambda seen: [answer(seen, {"tools": [{**TOOL, "name": f"t{index}"} for index in range(600)]})],
        ToolServerProtocolError,
    ),
    "oversized description": (
        lambda seen: [answer(seen, {"tools": [{**TOOL, "description": "x" * 3_000_000}]})],
        ToolServerProtocolError,
    ),
    "schema nested too deeply": (
        lambda seen: [answer(seen, {"tools": [{**TOOL, "inputSchema": NESTED}]})],
        ToolServerProtocolError,
    ),
    "not JSON": (lambda seen: [plain(200, b"{what the server says")], ToolServerProtocolError),
    "HTML page": (lambda seen: [plain(200, b"what the server says", "text/html")], ToolServerProtocolError),
    "repeated cursor": (lambda seen: [answer(seen, {"tools": [TOOL], "nextCursor": "again"})], ToolServerProtocolError),
    "endless pages": (
        lambda seen: [answer(seen, {"tools": [], "nextCursor": f"c{seen.json['id']}"})],
        ToolServerProtocolError,
    ),
    "no response": (lambda seen: [Stall()], ToolServerTimeout),
    "reset": (lambda seen: [Reset()], ToolServerError),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("listing", "error"), INVALID_LISTS.values(), ids=INVALID_LISTS)
async def test_invalid_tool_list_is_an_error_in_time(
    host: McpHost, listing: Acting, error: type[ToolServerError]
) -> None:
    async with Hostile(lambda seen: [text(seen)], listing=listing) as hostile:
        # Only a missing list has to wait for its time limit.
        server = hostile.server(timeouts=ToolTimeouts(list_s=1.5 if error is ToolServerTimeout else 15.0))
        with pytest.raises(error) as raised:
            await host.list_tools(server)
        assert len(raised.value.message) < 400
        assert "what the server says" not in raised.value.message
        hostile._listing = None
        assert [tool.name for tool in (await host.list_tools(server)).tools] == ["act"]


async def test_pages_are_read_in_order_without_unusable_tools(host: McpHost) -> None:
    pages = {None: (["a", "b\nb", ""], "2"), "2": (["c", "a"], "3"), "3": (["d" * 300, "e.f/g"], None)}

    def listing(seen: Seen) -> Iterable[Step]:
        names, after = pages[seen.json.get("params", {}).get("cursor")]
        tools = [{**TOOL, "name": name, "description": f"{name} of {after}"} for name in names]
        return [answer(seen, {"tools": tools, **({"nextCursor": after} if after else {})})]

    async with Hostile(lambda seen: [text(seen)], listing=listing) as hostile:
        listed = await host.list_tools(hostile.server())
        assert [tool.name for tool in listed.tools] == ["a", "c", "e.f/g"]
        assert listed.tools[0].description == "a of 2"


INVALID_TOOLS: list[Any] = [
    *({"name": "bad"}, {"name": "bad", "inputSchema": None}, {"name": "bad", "inputSchema": {}}),
    *({"name": "bad", "inputSchema": {"type": "array"}}, {"inputSchema": {"type": "object"}}, {**TOOL, "name": 5}),
    *("bad", {}),
]
UNUSED_MEMBERS: list[Any] = [
    *({"description": 5}, {"outputSchema": {"type": "array"}}, {"title": 7}, {"icons": [{"src": 5}]}, {"_meta": 1}),
    *({"annotations": {"readOnlyHint": "maybe", "title": 5}}, {"annotations": []}),
]


@pytest.mark.parametrize("server", [Hostile, ModernHostile])
async def test_an_invalid_tool_removes_no_other_tool(host: McpHost, server: type[Hostile]) -> None:
    tools = [*INVALID_TOOLS, *({**TOOL, "name": f"t{at}", **more} for at, more in enumerate(UNUSED_MEMBERS))]
    found = {**(CACHEABLE if server is ModernHostile else {}), "tools": tools}
    async with server(lambda seen: [text(seen)], listing=lambda seen: [answer(seen, found)]) as hostile:
        listed = await host.list_tools(hostile.server())
    assert [tool.name for tool in listed.tools] == [f"t{at}" for at in range(len(UNUSED_MEMBERS))]
    assert len(listed.left_out) == len(INVALID_TOOLS)
    assert {each.reason for each in listed.left_out if each.tool.name == "bad"} == {
        "Its `inputSchema` is not a JSON schema with the type `object`."
    }


async def test_output_schema_is_neither_evaluated_nor_resolved(host: McpHost) -> None:
    """The output schema has a pattern with exponential backtracking and external references."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}, "b": {"$ref": "http://127.0.0.1:9/schema"}},
    }
    tool = {**TOOL, "outputSchema": schema}
    found = {"content": [], "structuredContent": {"a": "a" * 40 + "!", "b": 1}}
    async with Hostile(
        lambda seen: [answer(seen, found)], listing=lambda seen: [answer(seen, {"tools": [tool]})]
    ) as hostile:
        await host.list_tools(hostile.server())
        started = time.monotonic()
        outcome = await host.call(hostile.server(), "act", sent({}))
        assert outcome.structured == found["structuredContent"]
        assert time.monotonic() - started < 1


INVALID_HANDSHAKES: dict[str, tuple[Acting, type[ToolServerError]]] = {
    "401": (lambda seen: [plain(401, b"", "text/plain", "WWW-Authenticate: Bearer")], ToolServerUnauthorized),
    "403": (lambda seen: [plain(403)], ToolServerUnauthorized),
    "404": (lambda seen: [plain(404)], ToolServerUnavailable),
    "HTML page": (lambda seen: [plain(200, b"<html>", "text/html")], ToolServerProtocolError),
    "reset": (lambda seen: [Reset()], ToolServerUnavailable),
    "no response": (lambda seen: [Stall()], ToolServerTimeout),
    "unknown protocol version": (
        lambda seen: [
            answer(
                seen,
                {"protocolVersion": "1999-01-01", "capabilities": {}, "serverInfo": {"name": "a", "version": "1"}},
            )
        ],
        ToolServerProtocolError,
    ),
}


@pytest.mark.parametrize(("handshake", "error"), INVALID_HANDSHAKES.values(), ids=INVALID_HANDSHAKES)
async def test_failed_handshake_is_an_error_in_time(
    host: McpHost, handshake: Acting, error: type[ToolServerError]
) -> None:
    class BrokenHandshake(Hostile):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            return handshake(seen)

    async with BrokenHandshake(lambda seen: []) as hostile:
        started = time.monotonic()
        with pytest.raises(error):
            await host.list_tools(hostile.server(timeouts=replace(SHORT, connect_s=1)))
        assert time.monotonic() - started < 3


async def test_closed_event_stream_is_not_reopened_immediately(host: McpHost) -> None:
    class ClosingStream(Hostile):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            if seen.method == "GET":
                return [Write(EVENTS), event(b"", retry="0"), Close()]
            return super()._respond(seen)

    async with ClosingStream(lambda seen: [text(seen)]) as hostile:
        await host.call(hostile.server(), "act", sent({}))
        await asyncio.sleep(0.5)
        assert len([seen for seen in hostile.probes if seen.method == "GET"]) <= 2


async def test_log_contains_no_secrets_and_no_content(host: McpHost, caplog: pytest.LogCaptureFixture) -> None:
    canaries = ("canary-token", "canary-header", "canary-argument", "canary-result", "canary-query", "canary-error")
    invalid_notification = message(method="notifications/progress", params={"progress": "canary-error"})
    acts: list[Acting] = [
        lambda seen: [text(seen, "canary-result")],
        lambda seen: [plain(200, b"canary-result {")],
        lambda seen: [Write(EVENTS), event(b"canary-error"), Close()],
        lambda seen: [Write(EVENTS), event(invalid_notification), event(result(seen)), Close()],
        lambda seen: [Reset()],
    ]
    with caplog.at_level(logging.DEBUG):
        async with Hostile(acts[0]) as hostile:
            server = replace(
                hostile.server(authorization="canary-token", headers={"X-Key": "canary-header"}, timeouts=SHORT),
                url=f"{hostile.url}/mcp?key=canary-query",
            )
            for act in acts:
                hostile._act = act
                await host.call(server, "act", sent({"secret": "canary-argument"}))
            assert hostile.calls[0].headers["authorization"] == "Bearer canary-token"
            assert "canary-argument" in json.dumps(hostile.calls[0].json)
        await host.aclose()
    assert not [canary for canary in canaries if canary in caplog.text]
    assert "canary" not in repr(server).replace("canary-query", "")


def test_every_logger_of_the_sdk_is_silent() -> None:
    loggers = {
        found.name: found
        for name, module in [*sys.modules.items()]
        if name.partition(".")[0] in ("mcp", "mcp_types", "httpx2", "httpcore2")
        and isinstance(found := getattr(module, "logger", None), logging.Logger)
    }
    assert loggers
    assert [name for name, found in loggers.items() if found.isEnabledFor(logging.ERROR)] == []


@pytest.mark.slow
async def test_result_with_too_many_parts_is_truncated_with_a_note(host: McpHost) -> None:
    parts = [{"type": "text", "text": f"{number}"} for number in range(50_000)]
    async with Hostile(lambda seen: [answer(seen, {"content": parts})]) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
    max_parts = host.limits.entries
    assert outcome.text.split("\n")[max_parts - 1 :] == [
        f"{max_parts - 1}",
        "[truncated: the result has 50000 parts; only the first ones are included]",
    ]


@pytest.mark.slow
async def test_answer_that_is_slow_to_parse_is_accepted(host: McpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing blocks the event loop, which also delays the timer that waits for the answer."""
    monkeypatch.setattr("unisono.mcp.session.ANSWER_GRACE_S", 0.02)
    parts = {"content": [], "structuredContent": {"a": [{"b": number} for number in range(200_000)]}}
    async with Hostile(lambda seen: [answer(seen, parts)]) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
    assert outcome.text.startswith('{"a": [{"b": 0},')
    assert not outcome.is_error
