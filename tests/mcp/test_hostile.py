"""Servers that misbehave at the wire: each call comes to an outcome, in time, once, and the next one is as good."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.fakes.wire import Close, Reset, Seen, Sleep, Stall, Step, Write
from tests.mcp.arguments import sent
from tests.mcp.hostile import EVENTS, TOOL, Acting, Hostile, answer, event, message, plain, text
from unisono.core.tools import ToolTimeouts
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


HALF = Write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{")

UNKNOWN: dict[str, Acting] = {
    "a reset before the head": lambda seen: [Reset()],
    "an end before the head": lambda seen: [Close()],
    "half a head": lambda seen: [Write(b"HTTP/1.1 200 O"), Close()],
    "no HTTP": lambda seen: [Write(b"\x00\x01\x02\r\n\r\n"), Close()],
    "half a body": lambda seen: [HALF, Close()],
    "no JSON": lambda seen: [plain(200, b"<html>")],
    "no message": lambda seen: [plain(200, b"[]")],
    "NaN": lambda seen: [plain(200, b'{"jsonrpc": "2.0", "id": 1, "result": NaN}')],
    "no result": lambda seen: [answer(seen, {"nothing": True})],
    "a result of other kinds": lambda seen: [answer(seen, {"content": [{"type": "hologram"}]})],
    "content that is a number": lambda seen: [answer(seen, {"content": 5})],
    "another id": lambda seen: [plain(200, message(id=9999, result={"content": []}))],
    "a page": lambda seen: [plain(200, b"<html>", "text/html")],
    "an empty 200": lambda seen: [plain(200)],
    "an acceptance": lambda seen: [plain(202)],
    "an error from between": lambda seen: [plain(502, b"<html>", "text/html")],
    "an error of its own": lambda seen: [plain(500)],
    "events that end": lambda seen: [Write(EVENTS), event(message(method="notifications/x")), Close()],
    "no event": lambda seen: [Write(EVENTS), Close()],
    "half an event": lambda seen: [Write(EVENTS + b'data: {"json'), Close()],
    "events of garbage": lambda seen: [Write(EVENTS), event(b"{{{"), Close()],
    "events that break": lambda seen: [Write(EVENTS), Reset()],
    "events that end and cannot be had again": lambda seen: [Write(EVENTS), event(b"", id="1", retry="1"), Close()],
    "no end": lambda seen: [Stall()],
    "a head without end": lambda seen: [Write(b"HTTP/1.1 200 OK\r\n"), *[Write(b"X: y\r\n")] * 10, Stall()],
    "packed": lambda seen: [plain(200, gzip.compress(result(seen)), "application/json", "Content-Encoding: gzip")],
}  # fmt: skip


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("act", UNKNOWN.values(), ids=UNKNOWN)
async def test_a_call_without_an_answer_is_an_unknown_outcome_and_never_repeated(host: McpHost, act: Acting) -> None:
    async with Hostile(act) as hostile:
        server = hostile.server(timeouts=SHORT)
        begun = time.monotonic()
        outcome = await host.call(server, "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, True), outcome.text
        assert time.monotonic() - begun < 5
        assert len(hostile.calls) == 1
        assert len(outcome.text) < 300
        hostile._act = lambda seen: [text(seen)]
        assert (await host.call(server, "act", sent({}))).text == "acted"


KNOWN: dict[str, tuple[Acting, str]] = {
    "an error of the protocol": (
        lambda seen: [plain(200, message(id=seen.json["id"], error={"code": -32602, "message": "wrong"}))],
        "wrong",
    ),
    "an error with a status": (
        lambda seen: [plain(400, message(id=seen.json["id"], error={"code": -32602, "message": "wrong"}))],
        "The tool server refused the call: HTTP 400. wrong",
    ),
    "an error with the code of a lost connection": (
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
    "an endless error": (
        lambda seen: [plain(200, message(id=seen.json["id"], error={"code": 1, "message": "x" * 100_000}))],
        "[truncated",
    ),
    "5 MB in one event": (
        lambda seen: [Write(EVENTS), event(b'{"jsonrpc":"' + b"x" * 5_000_000), Close()],
        "size limit",
    ),
    "an answer that is not taken whole": (
        lambda seen: [answer(seen, {"content": [{"type": "text", "text": "x" * 3_000_000}]})],
        "size limit",
    ),
}


@pytest.mark.parametrize(("act", "words"), KNOWN.values(), ids=KNOWN)
async def test_a_refusal_is_an_error_the_model_can_read(act: Acting, words: str) -> None:
    host = McpHost(limits=McpLimits(answer_bytes=1 << 20))
    async with Hostile(act) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
        assert outcome.is_error
        assert words in outcome.text
        assert not outcome.outcome_unknown
        assert len(outcome.text) < 5000
        assert len(hostile.calls) == 1
        await host.aclose()


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
async def test_every_earlier_revision_is_spoken(host: McpHost, version: str) -> None:
    async with Hostile(lambda seen: [text(seen)], version=version) as hostile:
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        assert hostile.calls[0].headers["mcp-protocol-version"] == version


async def test_a_server_that_forgot_the_session_is_greeted_again(host: McpHost) -> None:
    def forgetful(seen: Seen) -> Iterable[Step]:
        return [text(seen)] if seen.headers["mcp-session-id"] != "s0" else [plain(404)]

    async with Hostile(forgetful) as hostile:
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        assert [seen.headers["mcp-session-id"] for seen in hostile.calls] == ["s0", "s1"]


async def test_a_server_that_always_forgets_is_not_asked_for_ever(host: McpHost) -> None:
    async with Hostile(lambda seen: [plain(404)]) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, False)
        assert len(hostile.calls) == 2


async def test_an_answer_that_broke_off_and_can_be_had_again_is_had_again(host: McpHost) -> None:
    asked: list[Seen] = []

    def act(seen: Seen) -> Iterable[Step]:
        asked.append(seen)
        return [Write(EVENTS), event(b"", id="7", retry="1"), Close()]

    class Resuming(Hostile):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            if seen.method == "GET" and seen.headers.get("last-event-id") == "7":
                return [Write(EVENTS), event(result(asked[0])), Close()]
            return super()._respond(seen)

    async with Resuming(act) as hostile:
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        assert len(hostile.calls) == 1


LEAVING: dict[str, Acting] = {
    "before the head": lambda seen: [Stall()],
    "in a body": lambda seen: [HALF, Stall()],
    "in events": lambda seen: [Write(EVENTS), event(b"", id="1"), Stall()],
    "in endless events": lambda seen: [Write(EVENTS), *[event(message(method="notifications/x"))] * 2000, Stall()],
}  # fmt: skip


@pytest.mark.parametrize("act", LEAVING.values(), ids=LEAVING)
async def test_who_leaves_frees_the_connection_within_a_moment_and_the_server_is_told(
    host: McpHost, act: Acting
) -> None:
    async with Hostile(act) as hostile:
        call = asyncio.create_task(host.call(hostile.server(), "act", sent({})))
        async with asyncio.timeout(5):
            while not hostile.calls:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        left = asyncio.get_running_loop().time()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(5):
            await hostile.calls[0]._gone.wait()
            while "notifications/cancelled" not in hostile.told:
                await asyncio.sleep(0.01)
        gone = hostile.calls[0].gone_at
        assert gone is not None
        assert gone - left < 0.25


async def test_a_server_that_takes_no_notices_holds_nobody_up() -> None:
    host = McpHost(limits=McpLimits(aside_s=0.3))

    class Deaf(Hostile):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            notice = seen.method == "POST" and "id" not in seen.json
            return [Stall()] if notice else super()._respond(seen)

    async with Deaf(lambda seen: [text(seen)]) as hostile:
        begun = time.monotonic()
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        assert time.monotonic() - begun < 3
        await host.aclose()


NESTED: dict[str, object] = {"type": "object"}
for _ in range(400):
    NESTED = {"type": "object", "properties": {"what the server says": NESTED}}

LISTS: dict[str, tuple[Acting, type[ToolServerError]]] = {
    "401": (lambda seen: [plain(401)], ToolServerUnauthorized),
    "500": (lambda seen: [plain(500)], ToolServerError),
    "no tools": (lambda seen: [answer(seen, {"tools": 5})], ToolServerProtocolError),
    "a tool without a name": (lambda seen: [answer(seen, {"tools": [{"inputSchema": {}}]})], ToolServerProtocolError),
    "too many": (
        lambda seen: [answer(seen, {"tools": [{**TOOL, "name": f"t{index}"} for index in range(600)]})],
        ToolServerProtocolError,
    ),
    "too long": (
        lambda seen: [answer(seen, {"tools": [{**TOOL, "description": "x" * 3_000_000}]})],
        ToolServerProtocolError,
    ),
    "too deep": (lambda seen: [answer(seen, {"tools": [{**TOOL, "inputSchema": NESTED}]})], ToolServerProtocolError),
    "no JSON": (lambda seen: [plain(200, b"{what the server says")], ToolServerProtocolError),
    "a page": (lambda seen: [plain(200, b"what the server says", "text/html")], ToolServerProtocolError),
    "in circles": (lambda seen: [answer(seen, {"tools": [TOOL], "nextCursor": "again"})], ToolServerProtocolError),
    "without end": (
        lambda seen: [answer(seen, {"tools": [], "nextCursor": f"c{seen.json['id']}"})],
        ToolServerProtocolError,
    ),
    "never": (lambda seen: [Stall()], ToolServerTimeout),
    "broken": (lambda seen: [Reset()], ToolServerError),
}


@pytest.mark.parametrize(("listing", "error"), LISTS.values(), ids=LISTS)
async def test_a_list_that_cannot_be_had_is_an_error_in_time(
    host: McpHost, listing: Acting, error: type[ToolServerError]
) -> None:
    async with Hostile(lambda seen: [text(seen)], listing=listing) as hostile:
        # Only a list that never comes has to wait for its time limit.
        server = hostile.server(timeouts=ToolTimeouts(list_s=1.5 if error is ToolServerTimeout else 15.0))
        with pytest.raises(error) as raised:
            await host.list_tools(server)
        assert len(raised.value.message) < 400
        assert "what the server says" not in raised.value.message
        hostile._listing = None
        assert [tool.name for tool in (await host.list_tools(server)).tools] == ["act"]


async def test_pages_are_read_in_order_and_tools_nobody_can_name_are_left_out(host: McpHost) -> None:
    pages = {None: (["a", "b\nb", ""], "2"), "2": (["c", "a"], "3"), "3": (["d" * 300, "e.f/g"], None)}

    def listing(seen: Seen) -> Iterable[Step]:
        names, after = pages[seen.json.get("params", {}).get("cursor")]
        tools = [{**TOOL, "name": name, "description": f"{name} of {after}"} for name in names]
        return [answer(seen, {"tools": tools, **({"nextCursor": after} if after else {})})]

    async with Hostile(lambda seen: [text(seen)], listing=listing) as hostile:
        listed = await host.list_tools(hostile.server())
        assert [tool.name for tool in listed.tools] == ["a", "c", "e.f/g"]
        assert listed.tools[0].description == "a of 2"


async def test_a_schema_is_neither_run_nor_followed(host: McpHost) -> None:
    """An output schema with a pattern that takes for ever, and references that lead elsewhere."""
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
        begun = time.monotonic()
        outcome = await host.call(hostile.server(), "act", sent({}))
        assert outcome.structured == found["structuredContent"]
        assert time.monotonic() - begun < 1


GREETINGS: dict[str, tuple[Acting, type[ToolServerError]]] = {
    "401": (lambda seen: [plain(401, b"", "text/plain", "WWW-Authenticate: Bearer")], ToolServerUnauthorized),
    "403": (lambda seen: [plain(403)], ToolServerUnauthorized),
    "404": (lambda seen: [plain(404)], ToolServerUnavailable),
    "a page": (lambda seen: [plain(200, b"<html>", "text/html")], ToolServerProtocolError),
    "a reset": (lambda seen: [Reset()], ToolServerUnavailable),
    "nothing": (lambda seen: [Stall()], ToolServerTimeout),
    "a version nobody knows": (
        lambda seen: [
            answer(
                seen,
                {"protocolVersion": "1999-01-01", "capabilities": {}, "serverInfo": {"name": "a", "version": "1"}},
            )
        ],
        ToolServerProtocolError,
    ),
}


@pytest.mark.parametrize(("greeting", "error"), GREETINGS.values(), ids=GREETINGS)
async def test_a_server_that_cannot_be_greeted_is_an_error_in_time(
    host: McpHost, greeting: Acting, error: type[ToolServerError]
) -> None:
    class Rude(Hostile):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            return greeting(seen)

    async with Rude(lambda seen: []) as hostile:
        begun = time.monotonic()
        with pytest.raises(error):
            await host.list_tools(hostile.server(timeouts=replace(SHORT, connect_s=1)))
        assert time.monotonic() - begun < 3


async def test_a_listener_that_is_always_hung_up_on_does_not_call_back_at_once(host: McpHost) -> None:
    class Short(Hostile):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            if seen.method == "GET":
                return [Write(EVENTS), event(b"", retry="0"), Close()]
            return super()._respond(seen)

    async with Short(lambda seen: [text(seen)]) as hostile:
        await host.call(hostile.server(), "act", sent({}))
        await asyncio.sleep(0.5)
        assert len([seen for seen in hostile.probes if seen.method == "GET"]) <= 2


async def test_no_secret_and_no_content_reaches_the_log(host: McpHost, caplog: pytest.LogCaptureFixture) -> None:
    canaries = ("canary-token", "canary-header", "canary-argument", "canary-result", "canary-query", "canary-error")
    acts: list[Acting] = [
        lambda seen: [text(seen, "canary-result")],
        lambda seen: [plain(200, b"canary-result {")],
        lambda seen: [Write(EVENTS), event(b"canary-error"), Close()],
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


@pytest.mark.slow
async def test_a_result_of_endless_parts_is_read_to_a_bound_and_says_so(host: McpHost) -> None:
    parts = [{"type": "text", "text": f"{number}"} for number in range(50_000)]
    async with Hostile(lambda seen: [answer(seen, {"content": parts})]) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
    most = host.limits.entries
    assert outcome.text.split("\n")[most - 1 :] == [
        f"{most - 1}",
        "[truncated: the result has 50000 parts; only the first ones are included]",
    ]


@pytest.mark.slow
async def test_an_answer_that_takes_long_to_read_is_no_other_answer(
    host: McpHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it holds everybody up, also those who count the time since it came."""
    monkeypatch.setattr("unisono.mcp.session.ANSWER_GRACE_S", 0.02)
    parts = {"content": [], "structuredContent": {"a": [{"b": number} for number in range(200_000)]}}
    async with Hostile(lambda seen: [answer(seen, parts)]) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
    assert outcome.text.startswith('{"a": [{"b": 0},')
    assert not outcome.is_error
