"""Listener limits over real sockets: header time and size, unread output, valid clients."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import pytest
import uvicorn

from tests.e2e.slow_clients import over_http
from unisono.api.body_limits import ARRIVED_BYTES
from unisono.core.log_rate import RateLimitedWarning
from unisono.server import listener
from unisono.server.listener import connections
from unisono.server.write_timeout import chunk_writer

HEADER_TIMEOUT_S = 0.25
WRITE_TIMEOUT_S = 0.4
KEEP_ALIVE_S = 1
# Response sizes in bytes, more than fits into a small receive buffer.
LARGE_RESPONSES = {"/endless": 10**9, "/large": 1_000_000, "/small": 40_000}


async def app(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Respond with the size of the request body.

    `/slow` takes longer than the header deadline, `/endless` streams, `/unread` does not read the body, `/arrived`
    responds with the size of a body that was complete at the start, and `/headers` with the number of headers.
    `/joined` sends its head together with its body, or alone if `/joined?none` closes the connection without one.
    """
    arrived = scope["state"].get(ARRIVED_BYTES, -1)
    size, more = 0, scope["path"] != "/unread"
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * HEADER_TIMEOUT_S)
    if scope["path"] == "/headers":
        size = len(scope["headers"])
    if scope["path"] == "/arrived":
        size = arrived
    body = str(size).encode().ljust(LARGE_RESPONSES.get(scope["path"], 0) % 10**9)
    if scope["path"] == "/joined":
        writer = chunk_writer(send)
        assert writer is not None
        writer.join_head()
    if scope["path"] == "/endless":
        await endless(receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    if not scope["query_string"]:
        await send({"type": "http.response.body", "body": body})


# Size in bytes of each `/endless` response that has ended.
endless_sizes: list[int] = []


async def endless(receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Stream until the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    disconnect = asyncio.create_task(wait_for_disconnect())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    size = 0
    while not disconnect.done():
        await send({"type": "http.response.body", "body": b"p" * 1000, "more_body": True})
        size += 1000
        await asyncio.sleep(0)
    endless_sizes.append(size)


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    protocol = connections(HEADER_TIMEOUT_S, max_header_bytes=4096, write_timeout_s=WRITE_TIMEOUT_S)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
    )
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n"


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return int(head.split()[1]), await reader.readexactly(int(length))


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.03)


SLOW: dict[str, bytes] = {
    "silence": b"",
    "half a header": b"GET / HTTP/1.1\r\nhost: x",
    "blank lines": b"\r\n" * 200,
    "byte by byte": b"GET / HTTP/1.1\r\nx-header: " + b"a" * 400,
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("data", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize("before", [b"", GET], ids=["first request", "second request"])
async def test_late_headers_get_408_and_close_the_connection(before: bytes, data: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if before:
            writer.write(before)
            assert await read_response(reader) == (200, b"0")
            data = data or b"G"
        drip_task = asyncio.create_task(drip(writer, data))
        async with asyncio.timeout(10 * HEADER_TIMEOUT_S):
            # A byte that arrives after the close resets the connection and discards the response.
            with suppress(ConnectionResetError):
                assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        drip_task.cancel()
        writer.close()


H2C = (
    POST.replace(b"9000", b"3").replace(b"host", b"upgrade: h2c\r\nconnection: Upgrade, HTTP2-Settings\r\nhost")
    + b"abc"
)


@pytest.mark.parametrize("piece", [1, 7, len(H2C) - 2, 1000])
async def test_an_h2c_upgrade_is_ignored(piece: int) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for sent in (H2C, H2C, GET):
            for start in range(0, len(sent), piece):
                writer.write(sent[start : start + piece])
                await asyncio.sleep(0)
            assert await read_response(reader) == (200, b"0" if sent is GET else b"3")
        writer.close()


GARBAGE = b"GET / HTTP/1.1 no\r\n\r\n"


async def test_an_error_for_garbage_never_enters_a_running_response() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"/ ", b"/endless "))
        await reader.readuntil(b"p" * 1000)
        writer.write(GARBAGE)
        async with asyncio.timeout(5):
            assert b"HTTP" not in await reader.readexactly(200_000)
        writer.close()


SLOW_GET = GET.replace(b"/ ", b"/slow ")
FOLLOWING = {"a line break": b"\r\n", "half a request": GET[:20], "a request without its body": POST}


@pytest.mark.parametrize("following", FOLLOWING.values(), ids=FOLLOWING)
async def test_a_response_does_not_depend_on_what_follows_its_request(following: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SLOW_GET)
        await asyncio.sleep(0.05)
        writer.write(following)
        async with asyncio.timeout(5):
            assert await read_response(reader) == (200, b"0")
            if following is FOLLOWING["half a request"]:
                # Its header deadline starts after the response.
                assert (await read_response(reader))[0] == 408
        writer.close()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("following", [b"", *FOLLOWING.values()], ids=["nothing", *FOLLOWING])
@pytest.mark.parametrize("before", [0, 2])
async def test_a_half_closed_client_gets_responses_to_its_complete_requests(before: int, following: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET * before + SLOW_GET + following)
        writer.write_eof()
        async with asyncio.timeout(5):
            assert (await reader.read()).count(b" 200 OK\r\n") == before + 1
        writer.close()


@pytest.mark.parametrize("sent", [GET[:20], POST, POST + b"b" * 8000], ids=["headers", "body", "rest of the body"])
async def test_a_half_closed_client_gets_400_for_an_incomplete_request(sent: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(5):
            assert (await read_response(reader))[0] == 400
        writer.close()


PIPELINED = {
    "a complete request": GET,
    "three requests": GET * 3,
    "half a request": GET[:20],
    "a POST request without its body": POST,
}


@pytest.mark.parametrize("following", PIPELINED.values(), ids=PIPELINED)
async def test_a_disconnect_ends_the_first_of_several_pipelined_requests(following: bytes) -> None:
    endless_sizes.clear()
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"/ ", b"/endless ") + following)
        await reader.readuntil(b"p" * 1000)
        writer.transport.abort()
        async with asyncio.timeout(5):
            while not endless_sizes:
                await asyncio.sleep(0.01)


async def test_too_large_headers_get_431() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nx-header: " + b"a" * 8192)
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_a_slow_response_does_not_trigger_the_header_deadline() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"/ ", b"/slow "))
        assert await read_response(reader) == (200, b"0")
        writer.write(GET)
        assert await read_response(reader) == (200, b"0")
        writer.close()


async def test_a_slow_large_body_does_not_trigger_the_header_limits() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"b" * 8000)
        await asyncio.sleep(2 * HEADER_TIMEOUT_S)
        writer.write(b"b" * 1000)
        assert await read_response(reader) == (200, b"9000")
        writer.close()


CHUNKED = b"POST /headers HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_trailers_are_not_added_to_the_headers() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for trailers in (b"", b"authorization: Bearer x\r\nx-api-key: x\r\n"):
            writer.write(CHUNKED + b"1\r\na\r\n0\r\n" + trailers + b"\r\n")
            assert await read_response(reader) == (200, b"2")
        writer.close()


ARRIVALS = [(b"abc", b"", b"3"), (b"ab", b"c", b"-1"), (b"", b"abc", b"-1")]


@pytest.mark.parametrize(("first", "rest", "arrived"), ARRIVALS)
async def test_only_a_body_that_arrived_whole_is_reported_as_arrived(first: bytes, rest: bytes, arrived: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /arrived HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n" + first)
        if rest:
            await asyncio.sleep(0.1)
            writer.write(rest)
        assert await read_response(reader) == (200, arrived)
        writer.close()


ENDLESS_FRAMING = {
    "trailers": b"0\r\n" + b"a: b\r\n" * 200_000,
    "a long trailer": b"0\r\na: " + b"b" * 1_000_000,
    "a chunk extension": b"1;a=" + b"b" * 1_000_000,
}


@pytest.mark.parametrize("sent", ENDLESS_FRAMING.values(), ids=ENDLESS_FRAMING)
@pytest.mark.parametrize("path", [b"/headers", b"/unread"], ids=["body read", "body unread"])
async def test_endless_trailers_or_chunk_extensions_close_the_connection(path: bytes, sent: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED.replace(b"/headers", path))
        if path == b"/unread":
            assert await read_response(reader) == (200, b"0")
        writer.write(sent)
        # The connection closes at once instead of at a deadline. Input after the close resets it.
        with suppress(ConnectionResetError):
            async with asyncio.timeout(5):
                response = await reader.read()
                assert response.startswith(b"HTTP/1.1 431 ") if path == b"/headers" else response == b""
        writer.close()


async def test_a_body_in_chunks_of_one_byte_is_accepted() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED.replace(b"/headers", b"/") + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n")
        assert await read_response(reader) == (200, b"20000")
        writer.close()


async def test_an_unread_body_has_a_deadline() -> None:
    async with listening() as port:
        unread = POST.replace(b"/ ", b"/unread ")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(unread)
        assert await read_response(reader) == (200, b"0")
        writer.write(b"b" * 9000 + GET)
        assert await read_response(reader) == (200, b"0")
        # No deadline of an earlier request is still running.
        await asyncio.sleep(2 * HEADER_TIMEOUT_S)
        writer.write(unread)
        assert await read_response(reader) == (200, b"0")
        drip_task = asyncio.create_task(drip(writer, b"b" * 400))
        async with asyncio.timeout(10 * HEADER_TIMEOUT_S):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        drip_task.cancel()
        writer.close()


async def test_pipelined_requests_are_all_answered() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET * 3 + POST + b"b" * 9000 + GET)
        assert [await read_response(reader) for _ in range(5)] == [
            (200, size) for size in (b"0", b"0", b"0", b"9000", b"0")
        ]
        writer.close()


async def test_too_many_pipelined_requests_are_refused_after_the_first_responses() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET * (listener.MAX_PIPELINED + 1000))
        async with asyncio.timeout(10):
            received = await reader.read()
        statuses = [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]]
        assert listener.MAX_PIPELINED < len(statuses) < 1000
        assert statuses == [b"200"] * (len(statuses) - 1) + [b"400"]
        writer.close()


JOINED = {
    "a body": (b"GET /joined HTTP/1.1", b"0"),
    "a head without a body": (b"HEAD /joined HTTP/1.1", b""),
    "a response that breaks off": (b"GET /joined?none HTTP/1.1", b""),
}


@pytest.mark.parametrize(("line", "body"), JOINED.values(), ids=JOINED)
async def test_a_head_that_waits_for_its_body_is_always_sent(line: bytes, body: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(line + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"content-length: 1" in head
        assert rest == body
        writer.close()


async def test_a_head_and_its_body_are_sent_in_one_write() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(b"GET /joined HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.read(10_000)).endswith(b"\r\n\r\n0")
        writer.write(GET)
        assert await read_response(reader) == (200, b"0")
        writer.close()


async def test_an_idle_connection_outlives_the_header_deadline() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert await read_response(reader) == (200, b"0")
        await asyncio.sleep(3 * HEADER_TIMEOUT_S)
        writer.write(GET)
        assert await read_response(reader) == (200, b"0")
        writer.close()


STALLED = {
    "during a stream": GET.replace(b"/ ", b"/endless "),
    "during a large response": GET.replace(b"/ ", b"/large "),
    "after the last response": GET.replace(b"/ ", b"/small ").replace(b"host", b"connection: close\r\nhost"),
    "after a response": GET.replace(b"/ ", b"/small "),
    "during pipelined responses": GET.replace(b"/ ", b"/small ") * 20,
}


@pytest.mark.parametrize("sent", STALLED.values(), ids=STALLED)
async def test_a_client_that_reads_nothing_is_disconnected(sent: bytes) -> None:
    endless_sizes.clear()
    async with listening() as port:
        client = await over_http(f"http://127.0.0.1:{port}", sent)
        await client.cut_off(within_s=KEEP_ALIVE_S + 3 * WRITE_TIMEOUT_S)
        await client.end()
        if b"endless" in sent:
            await asyncio.sleep(0.05)
            assert len(endless_sizes) == 1
            assert endless_sizes[0] < 150_000


async def test_a_client_that_reads_slowly_stays_connected() -> None:
    loop = asyncio.get_running_loop()
    async with listening() as port:
        client = await over_http(f"http://127.0.0.1:{port}", GET.replace(b"/ ", b"/endless "))
        until = loop.time() + 4 * WRITE_TIMEOUT_S
        while loop.time() < until:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                assert await loop.sock_recv(client.sock, 4096)
            await asyncio.sleep(WRITE_TIMEOUT_S / 20)
        await client.end()


async def test_refused_requests_are_logged_once_per_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = RateLimitedWarning(logging.getLogger("unisono.server.listener"))
    monkeypatch.setattr(listener, "REFUSED_REQUESTS", warning)
    async with listening() as port:
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await reader.read()
            writer.close()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage() == "A request from 127.0.0.1 was refused with 400: The request is not valid HTTP."
