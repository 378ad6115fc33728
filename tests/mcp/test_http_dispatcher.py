"""Tests of plain HTTP exchanges with servers of protocol version 2026-07-28, and of the SDK's transport beside them."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from mcp.client import Client, ClientSession
from mcp.shared.inbound import decode_header_value

from tests.fakes.wire import Close, Reset, Seen, Stall, Step, Write
from tests.mcp.arguments import sent
from tests.mcp.conftest import assert_no_tasks_left
from tests.mcp.hostile import (
    CACHEABLE,
    COMPLETE,
    EVENTS,
    TOOL,
    Acting,
    Hostile,
    ModernHostile,
    answer,
    id_of,
    message,
    plain,
)
from unisono.core.tool_host import ToolServer, ToolTimeouts
from unisono.errors import ToolServerError
from unisono.mcp import McpHost, McpLimits
from unisono.mcp.session import McpSession
from unisono.net.http_connection import HttpClientConnection
from unisono.net.ssrf_guard import AllowedHost, SsrfGuard

PART = {"type": "text", "text": "acted"}
WORDS = {**COMPLETE, "content": [PART]}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = Write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")


@pytest.fixture(params=["exchange", "SDK"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with plain exchanges, and with the SDK's transport."""

    @asynccontextmanager
    async def session_of_the_client(_: McpSession, client: Client) -> AsyncIterator[ClientSession]:
        yield client.session

    if request.param == "SDK":
        monkeypatch.setattr(McpSession, "_session_for_requests", session_of_the_client)
        # This transport waits for an answer that never comes.
        monkeypatch.setattr("unisono.mcp.session.ANSWER_GRACE_S", 0.02)


def result(seen: Seen, found: Any = None, **more: Any) -> bytes:
    return message(**{"id": id_of(seen), "result": found or WORDS, **more})


def acted(seen: Seen) -> Write:
    return answer(seen, WORDS)


def error(seen: Seen, code: int = -32602) -> bytes:
    return message(id=id_of(seen), error={"code": code, "message": "wrong"})


def chunks(data: bytes, size: int) -> list[Step]:
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return [CHUNKED, *[Write(b"%x\r\n%s\r\n" % (len(part), part)) for part in parts], Write(b"0\r\n\r\n")]


def events(*datas: bytes, begin: bytes = b"", end: bytes = b"\n\n", kind: bytes = b"") -> list[Step]:
    """Return the steps for a stream of events; `kind` follows the media type of its head."""
    head = EVENTS.replace(b"stream\r\n", b"stream" + kind + b"\r\n")
    return [Write(head + begin), *[Write(b"data: " + data + end) for data in datas], Close()]


def progress(seen: Seen, done: object = 1, **more: object) -> bytes:
    return message(
        method="notifications/progress", params={"progressToken": id_of(seen), "progress": done, "message": "", **more}
    )


ANSWERED = (False, False, "acted")
UNKNOWN = (True, True, "may or may not have run")

ANSWERS: dict[str, tuple[Acting, tuple[bool, bool, str]]] = {
    "one body": (lambda seen: [acted(seen)], ANSWERED),
    "bytes": (lambda seen: [Write(bytes([byte])) for byte in acted(seen).data], ANSWERED),
    "chunks of one byte": (lambda seen: chunks(result(seen), 1), ANSWERED),
    "body until the end of the connection": (lambda seen: [Write(HEAD + b"\r\n" + result(seen)), Close()], ANSWERED),
    "interim response": (lambda seen: [Write(b"HTTP/1.1 103 Early Hints\r\n\r\n"), acted(seen)], ANSWERED),
    "id as text": (lambda seen: [plain(200, result(seen, id=str(id_of(seen))))], ANSWERED),
    "status 201": (lambda seen: [plain(201, result(seen))], ANSWERED),
    "other JSON type": (lambda seen: [plain(200, result(seen), "application/json-rpc; charset=utf-8")], ANSWERED),
    "header outside ASCII": (lambda seen: [plain(200, result(seen), "application/json", "X-City: Köln")], ANSWERED),
    "events": (lambda seen: events(result(seen)), ANSWERED),
    "events with CRLF": (lambda seen: events(result(seen), end=b"\r\n\r\n"), ANSWERED),
    "events with CR": (lambda seen: events(result(seen), b"{}", end=b"\r\r"), ANSWERED),
    "events in bytes": (
        lambda seen: [Write(EVENTS), *[Write(bytes([byte])) for byte in b"data: %s\r\n\r\n" % result(seen)], Close()],
        ANSWERED,
    ),
    "event with a header outside ASCII": (
        lambda seen: events(result(seen), kind="\r\nX-City: Köln".encode()),
        ANSWERED,
    ),
    "comments, an id and other events": (
        lambda seen: events(result(seen), begin=b": wait\n\nid: 7\nretry: 1\n\nevent: other\ndata: {{{\n\n"),
        ANSWERED,
    ),
    "event over several lines": (lambda seen: events(result(seen).replace(b", ", b",\ndata: ")), ANSWERED),
    "event with another id": (lambda seen: events(result(seen, id=77)), ANSWERED),
    "requests and notifications of the server": (
        lambda seen: events(
            message(id=5, method="ping"),
            message(id=6, method="elicitation/create", params={"message": "a", "requestedSchema": {}}),
            message(method="notifications/other"),
            message(method="notifications/cancelled", params={"requestId": id_of(seen)}),
            result(seen),
        ),
        ANSWERED,
    ),
    "error of the tool": (lambda seen: [answer(seen, {**WORDS, "isError": True})], (True, False, "acted")),
    "protocol error": (lambda seen: [plain(200, error(seen))], (True, False, "wrong")),
    "protocol error with the code of a lost connection": (
        lambda seen: [plain(200, error(seen, -32000))],
        (True, False, "wrong"),
    ),
    "protocol error in an event": (lambda seen: events(error(seen)), (True, False, "wrong")),
    "protocol error with a status": (lambda seen: [plain(400, error(seen))], (True, False, "HTTP 400. wrong")),
    "protocol error without an id": (
        lambda seen: [plain(400, message(id=None, error={"code": -32600, "message": "wrong"}))],
        (True, False, "HTTP 400. wrong"),
    ),
    "400": (lambda seen: [plain(400)], (True, False, "HTTP 400")),
    "401": (lambda seen: [plain(401, b"<html>", "text/html")], (True, False, "HTTP 401")),
    "429": (lambda seen: [plain(429)], (True, False, "HTTP 429")),
    "503": (lambda seen: [plain(503)], (True, False, "HTTP 503")),
    "301": (
        lambda seen: [plain(301, b"", "text/html", "Location: http://127.0.0.2/secret")],
        (True, False, "refused the call: HTTP 301."),
    ),
    "303": (lambda seen: [plain(303, b"", "text/html", "Location: /elsewhere")], (True, False, "HTTP 303.")),
    "304": (lambda seen: [plain(304)], (True, False, "HTTP 304.")),
    "many parts": (lambda seen: [answer(seen, {**COMPLETE, "content": [PART] * 1_500})], (False, False, "1500 parts")),
    "many parts in an event": (
        lambda seen: events(result(seen, {**COMPLETE, "content": [PART] * 1_500})),
        (False, False, "1500 parts"),
    ),
    "oversized body": (lambda seen: [plain(200, b" " * 300_000)], (True, False, "size limit")),
    "oversized event": (lambda seen: events(b" " * 300_000), (True, False, "size limit")),
    "endless events": (
        lambda seen: events(*[message(method="notifications/x" + "x" * 150_000)] * 9),
        (True, False, "size limit"),
    ),
    "question that cannot be asked": (
        lambda seen: [
            answer(seen, {"resultType": "input_required", "inputRequests": {"a": {"method": "roots/list"}}})
        ],
        (True, False, "requested input"),
    ),
    "202": (lambda seen: [plain(202)], UNKNOWN),
    "204": (lambda seen: [Write(b"HTTP/1.1 204 No Content\r\n\r\n")], UNKNOWN),
    "500": (lambda seen: [plain(500)], UNKNOWN),
    "502 with a protocol error": (lambda seen: [plain(502, error(seen, -32603))], UNKNOWN),
    "empty body": (lambda seen: [plain(200)], UNKNOWN),
    "HTML page": (lambda seen: [plain(200, b"<html>", "text/html")], UNKNOWN),
    "not JSON": (lambda seen: [plain(200, b"{what the server says")], UNKNOWN),
    "not UTF-8": (lambda seen: [plain(200, result(seen).replace(b"acted", b"\xff"))], UNKNOWN),
    "half of a surrogate pair": (
        lambda seen: [plain(200, result(seen).replace(b"acted", b"acted\\ud800"))],
        (False, False, "acted\ufffd"),
    ),
    "half of a surrogate pair in an event": (
        lambda seen: events(result(seen).replace(b"acted", b"\\ud83d\\ud83d\\ude00")),
        (False, False, "\ufffd😀"),
    ),
    "deep nesting": (lambda seen: [plain(200, b"[" * 100_000 + b"]" * 100_000)], UNKNOWN),
    "batch": (lambda seen: [plain(200, b"[" + result(seen) + b"]")], UNKNOWN),
    "another id": (lambda seen: [plain(200, result(seen, id=77))], UNKNOWN),
    "no id": (lambda seen: [plain(200, message(result=WORDS))], UNKNOWN),
    "huge id": (lambda seen: [plain(200, result(seen).replace(b'"id": ', b'"id": ' + b"7" * 5_000))], UNKNOWN),
    "request": (lambda seen: [plain(200, message(id=id_of(seen), method="ping"))], UNKNOWN),
    "invalid result": (lambda seen: [answer(seen, {**COMPLETE, "content": 5})], UNKNOWN),
    "compressed": (
        lambda seen: [plain(200, gzip.compress(result(seen)), "application/json", "Content-Encoding: gzip")],
        UNKNOWN,
    ),
    "close before the head": (lambda seen: [Close()], UNKNOWN),
    "reset before the head": (lambda seen: [Reset()], UNKNOWN),
    "close in the head": (lambda seen: [Write(HEAD), Close()], UNKNOWN),
    "close in the body": (lambda seen: [Write(acted(seen).data[:-1]), Close()], UNKNOWN),
    "close in the chunks": (lambda seen: [*chunks(result(seen), 9)[:-1], Close()], UNKNOWN),
    "not HTTP": (lambda seen: [Write(b"\0\1\2\r\n\r\n"), Close()], UNKNOWN),
    "no event": (lambda seen: events(), UNKNOWN),
    "event without its end": (lambda seen: events(result(seen), end=b"\n"), UNKNOWN),
    "event that is not JSON": (lambda seen: events(b"{what the server says"), UNKNOWN),
    "reset in the events": (lambda seen: [Write(EVENTS), Reset()], UNKNOWN),
}  # fmt: skip


async def assert_called_once(act: Acting, is_error: bool, is_unknown: bool, words: str) -> None:
    host = McpHost(limits=McpLimits(answer_bytes=200_000))
    async with ModernHostile(act) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (is_error, is_unknown), outcome.text
        assert words in outcome.text
        assert not [word for word in ("127.0.0.", "://", "what the server says") if word in outcome.text]
        assert len(hostile.calls) == 1
        hostile._act = lambda seen: [acted(seen)]
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        await host.aclose()
    assert_no_tasks_left()


@pytest.mark.sampled(one_in=3)
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("act", "expected"), ANSWERS.values(), ids=ANSWERS)
async def test_answer_has_the_same_outcome_on_both_paths(act: Acting, expected: tuple[bool, bool, str]) -> None:
    await assert_called_once(act, *expected)


# The SDK's transport loses these answers, or its session.
EXCHANGES: dict[str, tuple[Acting, tuple[bool, bool, str]]] = {
    "two answers": (lambda seen: [Write(acted(seen).data + acted(seen).data)], ANSWERED),
    "bytes after the answer": (lambda seen: [Write(acted(seen).data + b"more")], ANSWERED),
    "event in a charset": (lambda seen: events(result(seen), kind=b"; charset=base64"), ANSWERED),
    "event with an id, and no result": (lambda seen: [Write(EVENTS + b"id: 7\ndata:\n\n"), Close()], UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize(("act", "expected"), EXCHANGES.values(), ids=EXCHANGES)
async def test_answer_to_a_plain_exchange(act: Acting, expected: tuple[bool, bool, str]) -> None:
    await assert_called_once(act, *expected)


STALLS: dict[str, list[Step]] = {
    "before the head": [],
    "in the head": [Write(HEAD)],
    "in the body": [Write(HEAD + b"Content-Length: 900\r\n\r\n{")],
    "in the events": [Write(EVENTS), *[Write(b": wait\n\n")] * 20],
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("steps", STALLS.values(), ids=STALLS)
async def test_call_ends_at_its_deadline_and_closes_its_connection(host: McpHost, steps: list[Step]) -> None:
    async with ModernHostile(lambda seen: [*steps, Stall()]) as hostile:
        server = hostile.server(timeouts=ToolTimeouts(call_s=0.2))
        await host.list_tools(server)
        outcome = await host.call(server, "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
        await asyncio.wait_for(hostile.calls[0]._gone.wait(), 5)
        assert len(hostile.calls) == 1


@pytest.mark.parametrize("steps", STALLS.values(), ids=STALLS)
async def test_cancelled_call_closes_its_connection_at_once(
    host: McpHost, monkeypatch: pytest.MonkeyPatch, steps: list[Step]
) -> None:
    is_sent, has_begun, receive = asyncio.Event(), asyncio.Event(), HttpClientConnection.data_received

    def act(seen: Seen) -> Iterable[Step]:
        is_sent.set()
        return [*steps, Stall()]

    def noticed(connection: HttpClientConnection, data: bytes) -> None:
        receive(connection, data)
        has_begun.set()

    async with ModernHostile(act) as hostile:
        await host.list_tools(hostile.server())
        monkeypatch.setattr(HttpClientConnection, "data_received", noticed)
        call = asyncio.create_task(host.call(hostile.server(), "act", sent({})))
        await asyncio.wait_for((has_begun if steps else is_sent).wait(), 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(hostile.calls[0]._gone.wait(), 5)
        assert hostile.notifications == []


async def test_call_is_not_sent_again_after_its_reused_connection_broke(host: McpHost) -> None:
    async with ModernHostile(lambda seen: [acted(seen)]) as hostile:
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        hostile._act = lambda seen: [Close()]
        outcome = await host.call(hostile.server(), "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
        assert [seen.connection for seen in hostile.calls] == [hostile.calls[0].connection] * 2


async def test_many_calls_are_sent_once_each(host: McpHost) -> None:
    async with ModernHostile(lambda seen: [acted(seen)]) as hostile:
        server = hostile.server(concurrent=200)
        outcomes = await asyncio.gather(*(host.call(server, "act", sent({"call": call})) for call in range(200)))
        assert {outcome.text for outcome in outcomes} == {"acted"}
        assert sorted(seen.json["params"]["arguments"]["call"] for seen in hostile.calls) == list(range(200))


class Moved(ModernHostile):
    """Server that has moved lists and calls to another path."""

    status = 307

    def _respond(self, seen: Seen) -> Iterable[Step]:
        if seen.path == "/mcp" and b"server/discover" not in seen.body:
            return [plain(self.status, b"", "text/plain", "Location: /mcp/")]
        return super()._respond(seen)


@pytest.mark.parametrize("status", [307, 308])
async def test_redirected_requests_go_through_the_transport_of_the_sdk(host: McpHost, status: int) -> None:
    async with Moved(lambda seen: [acted(seen)]) as hostile:
        hostile.status = status
        assert [tool.name for tool in (await host.list_tools(hostile.server())).tools] == ["act"]
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        # The list was sent as a plain exchange first; the call was not.
        assert [seen.path for seen in hostile.requests] == ["/mcp", *["/mcp"] * 2, "/mcp/", "/mcp", "/mcp/"]
        assert len(hostile.calls) == 1


async def test_call_through_the_transport_of_the_sdk_is_known_to_be_sent(host: McpHost) -> None:
    async with Moved(lambda seen: [Reset()]) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
        assert len(hostile.calls) == 1


async def test_redirect_of_a_server_from_a_request_is_not_followed() -> None:
    rule = AllowedHost("127.0.0.1", frozenset(), plain_http=True, private=True)
    host = McpHost(guard=SsrfGuard([rule]))
    async with Moved(lambda seen: [acted(seen)]) as hostile:
        server = ToolServer("a", f"{hostile.url}/mcp")
        with pytest.raises(ToolServerError, match="redirect, which is not followed"):
            await host.list_tools(server)
        outcome = await host.call(server, "act", sent({}))
        assert (outcome.is_error, outcome.text) == (True, "The tool server refused the call: HTTP 307.")
        assert {seen.path for seen in hostile.requests} == {"/mcp"}
        await host.aclose()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("code", [None, -32000, -32600, -32022])
async def test_older_version_after_a_restart_is_negotiated_for_the_next_call(host: McpHost, code: int | None) -> None:
    def older(seen: Seen) -> Iterable[Step]:
        if "mcp-session-id" in seen.headers:
            return [answer(seen, {"content": [PART]})]
        return [plain(400, b"" if code is None else error(seen, code))]

    async with ModernHostile(lambda seen: [acted(seen)]) as hostile:
        server = hostile.server()
        assert (await host.call(server, "act", sent({}))).text == "acted"
    successor = Hostile(older)
    successor.at_port = int(server.url.split(":")[2].split("/")[0])
    async with successor:
        outcome = await host.call(server, "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, False)
        assert "HTTP 400" in outcome.text
        assert (await host.call(server, "act", sent({}))).text == "acted"
        assert len(successor.calls) == 2


async def test_refused_arguments_do_not_end_the_session(host: McpHost) -> None:
    async with ModernHostile(lambda seen: [plain(400, error(seen))]) as hostile:
        for _ in range(3):
            assert "wrong" in (await host.call(hostile.server(), "act", sent({}))).text
        assert [b"server/discover" in seen.body for seen in hostile.requests] == [True, False, False, False]


async def test_only_the_checked_addresses_are_dialled() -> None:
    """The name does not exist, and nothing listens on the first address."""

    async def resolver(host: str, port: int) -> Sequence[str]:
        return ("127.0.0.2", "127.0.0.1")

    rule = AllowedHost("tools.invalid", frozenset(), plain_http=True, private=True)
    host = McpHost(guard=SsrfGuard([rule], resolver))
    async with ModernHostile(lambda seen: [acted(seen)]) as hostile:
        server = ToolServer("a", f"http://tools.invalid:{hostile.port}/mcp")
        assert (await host.call(server, "act", sent({}))).text == "acted"
        assert hostile.calls[0].headers["host"] == f"tools.invalid:{hostile.port}"
        assert hostile.connections == 2
        await host.aclose()


URLS = {
    "escapes": "http://127.0.0.1:{port}/m%2fc%41p/%2e%2e/%7E|?key=a%2Fb%41&c=%zz",
    "empty query": "http://127.0.0.1:{port}/mcp?",
    "no path": "http://127.0.0.1:{port}",
    "user and password": "http://us%40er:pa%3Ass@127.0.0.1:{port}/mcp",
}


@pytest.mark.parametrize("url", URLS.values(), ids=URLS)
async def test_calls_have_the_path_and_the_headers_of_the_handshake(host: McpHost, url: str) -> None:
    async with ModernHostile(lambda seen: [acted(seen)]) as hostile:
        server = hostile.server(headers={"X-Team": "blue"}, authorization="token")
        server = replace(server, url=url.format(port=hostile.port))
        assert (await host.call(server, "act", sent({}))).text == "acted"
        handshake, call = hostile.requests
        of_a_request = {"mcp-method", "mcp-name", "content-length", "connection"}
        assert call.path == handshake.path
        assert {name: value for name, value in call.headers.items() if name not in of_a_request} == {
            name: value for name, value in handshake.headers.items() if name not in of_a_request
        }


async def test_names_outside_ascii_are_encoded_in_headers(host: McpHost) -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string", "x-mcp-header": "Place"}}}
    name = "grüße\r\nX-Other: 1"
    listed = {**CACHEABLE, "tools": [{**TOOL, "name": name, "inputSchema": schema}]}
    async with ModernHostile(lambda seen: [acted(seen)], listing=lambda seen: [answer(seen, listed)]) as hostile:
        await host.list_tools(hostile.server())
        assert (await host.call(hostile.server(), name, sent({"place": "Köln"}))).text == "acted"
        headers = hostile.calls[0].headers
        assert decode_header_value(headers["mcp-name"]) == name
        assert decode_header_value(headers["mcp-param-place"]) == "Köln"
        assert "x-other" not in headers


async def test_valid_progress_is_reported_in_order(host: McpHost) -> None:
    def act(seen: Seen) -> Iterable[Step]:
        token = id_of(seen)
        return events(
            progress(seen, 1),
            progress(seen, 2.5, total=3, message="half"),
            progress(seen, 3, progressToken=str(token)),
            *[
                progress(seen, 4, progressToken=other)
                for other in (token + 1, True, float(token), [token], "7" * 5_000)
            ],
            *[progress(seen, done) for done in ("5", True, None, 10**400)],
            message(method="notifications/progress"),
            result(seen),
        )

    reported: list[tuple[float, float | None, str]] = []
    async with ModernHostile(act) as hostile:
        outcome = await host.call(hostile.server(), "act", sent({}), progress=lambda *step: reported.append(step))
    assert outcome.text == "acted"
    assert reported == [(1.0, None, ""), (2.5, 3.0, "half"), (3.0, None, "")]


async def test_failure_to_report_progress_does_not_end_the_call(host: McpHost) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    async with ModernHostile(lambda seen: events(progress(seen), result(seen))) as hostile:
        assert (await host.call(hostile.server(), "act", sent({}), progress=fail)).text == "acted"


@pytest.mark.usefixtures("path")
async def test_change_of_tools_during_a_call_is_noticed(host: McpHost) -> None:
    changed = message(method="notifications/tools/list_changed")
    listings: list[Seen] = []

    def listing(seen: Seen) -> Iterable[Step]:
        listings.append(seen)
        return [answer(seen, {**CACHEABLE, "tools": [TOOL]})]

    async with ModernHostile(lambda seen: events(changed, result(seen)), listing=listing) as hostile:
        for _ in range(2):
            await host.list_tools(hostile.server())
        assert len(listings) == 1
        assert (await host.call(hostile.server(), "act", sent({}))).text == "acted"
        await host.list_tools(hostile.server())
        assert len(listings) == 2
