"""Connections over real sockets: slow and endless headers are closed, so are clients that take nothing, and everything
honest is served."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import pytest
import uvicorn

from tests.e2e.slow_clients import over_http
from unisono.server.listener import connections

HEADER_TIMEOUT_S = 0.25
WRITE_TIMEOUT_S = 0.4
KEEP_ALIVE_S = 1
UNTAKEN = {"/endless": 10**9, "/large": 1_000_000, "/small": 40_000}
"""Bytes of answers that a client with a small receive buffer does not take by itself."""


async def app(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Answers with the size of the body; `/slow` takes longer than the header deadline, `/endless` comes in pieces,
    `/unread` does not read the body, and `/headers` tells how many there were."""
    size, more = 0, scope["path"] != "/unread"
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * HEADER_TIMEOUT_S)
    if scope["path"] == "/headers":
        size = len(scope["headers"])
    body = str(size).encode().ljust(UNTAKEN.get(scope["path"], 0) % 10**9)
    if scope["path"] == "/endless":
        await endless(receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


written: list[int] = []
"""Bytes of every endless answer that is over."""


async def endless(receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """Goes on until the client has left."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(left())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    size = 0
    while not leaving.done():
        await send({"type": "http.response.body", "body": b"p" * 1000, "more_body": True})
        size += 1000
        await asyncio.sleep(0)
    written.append(size)


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


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
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


@pytest.mark.parametrize("data", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize("before", [b"", GET], ids=["first request", "second request"])
async def test_headers_that_do_not_come_in_time_end_the_connection(before: bytes, data: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if before:
            writer.write(before)
            assert await answer(reader) == (200, b"0")
            data = data or b"G"
        dripping = asyncio.create_task(drip(writer, data))
        async with asyncio.timeout(10 * HEADER_TIMEOUT_S):
            # A byte that came behind the end resets the connection, and takes the answer along.
            with suppress(ConnectionResetError):
                assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        dripping.cancel()
        writer.close()


H2C = (
    POST.replace(b"9000", b"3").replace(b"host", b"upgrade: h2c\r\nconnection: Upgrade, HTTP2-Settings\r\nhost")
    + b"abc"
)


@pytest.mark.parametrize("piece", [1, 7, len(H2C) - 2, 1000])
async def test_who_asks_for_another_protocol_is_answered_in_this_one(piece: int) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for sent in (H2C, H2C, GET):
            for start in range(0, len(sent), piece):
                writer.write(sent[start : start + piece])
                await asyncio.sleep(0)
            assert await answer(reader) == (200, b"0" if sent is GET else b"3")
        writer.close()


GARBAGE = b"GET / HTTP/1.1 no\r\n\r\n"


async def test_what_is_no_http_never_gets_into_an_answer() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"/ ", b"/endless "))
        await reader.readuntil(b"p" * 1000)
        writer.write(GARBAGE)
        async with asyncio.timeout(5):
            assert b"HTTP" not in await reader.readexactly(200_000)
        writer.close()


SLOW_GET = GET.replace(b"/ ", b"/slow ")
BEHIND = {"a line break": b"\r\n", "half a request": GET[:20], "a request without its body": POST}


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
async def test_a_response_does_not_depend_on_what_follows_its_request(behind: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SLOW_GET)
        await asyncio.sleep(0.05)
        writer.write(behind)
        async with asyncio.timeout(5):
            assert await answer(reader) == (200, b"0")
            if behind is BEHIND["half a request"]:
                # Its deadline begins behind the response.
                assert (await answer(reader))[0] == 408
        writer.close()


@pytest.mark.parametrize("behind", [b"", *BEHIND.values()], ids=["nothing", *BEHIND])
@pytest.mark.parametrize("before", [0, 2])
async def test_a_half_closed_client_gets_the_responses_to_its_whole_requests(before: int, behind: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET * before + SLOW_GET + behind)
        writer.write_eof()
        async with asyncio.timeout(5):
            assert (await reader.read()).count(b" 200 OK\r\n") == before + 1
        writer.close()


@pytest.mark.parametrize("sent", [GET[:20], POST, POST + b"b" * 8000], ids=["headers", "body", "rest of the body"])
async def test_a_half_closed_client_reads_that_its_request_is_incomplete(sent: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(5):
            assert (await answer(reader))[0] == 400
        writer.close()


PIPELINED = {"a whole request": GET, "several": GET * 3, "half a request": GET[:20], "without its body": POST}


@pytest.mark.parametrize("behind", PIPELINED.values(), ids=PIPELINED)
async def test_a_client_that_leaves_ends_the_first_of_its_pipelined_requests(behind: bytes) -> None:
    written.clear()
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"/ ", b"/endless ") + behind)
        await reader.readuntil(b"p" * 1000)
        writer.transport.abort()
        async with asyncio.timeout(5):
            while not written:
                await asyncio.sleep(0.01)


async def test_endless_headers_end_the_connection() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nx-header: " + b"a" * 8192)
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_a_slow_answer_is_not_a_slow_request() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"/ ", b"/slow "))
        assert await answer(reader) == (200, b"0")
        writer.write(GET)
        assert await answer(reader) == (200, b"0")
        writer.close()


async def test_a_slow_or_large_body_is_not_the_headers_business() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"b" * 8000)
        await asyncio.sleep(2 * HEADER_TIMEOUT_S)
        writer.write(b"b" * 1000)
        assert await answer(reader) == (200, b"9000")
        writer.close()


CHUNKED = b"POST /headers HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_trailers_are_no_headers() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for trailers in (b"", b"authorization: Bearer x\r\nx-api-key: x\r\n"):
            writer.write(CHUNKED + b"1\r\na\r\n0\r\n" + trailers + b"\r\n")
            assert await answer(reader) == (200, b"2")
        writer.close()


BETWEEN = {
    "trailers": b"0\r\n" + b"a: b\r\n" * 200_000,
    "one trailer": b"0\r\na: " + b"b" * 1_000_000,
    "an extension of a chunk": b"1;a=" + b"b" * 1_000_000,
}


@pytest.mark.parametrize("sent", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("path", [b"/headers", b"/unread"], ids=["read", "answered before"])
async def test_what_is_endless_behind_the_headers_ends_the_connection(path: bytes, sent: bytes) -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED.replace(b"/headers", path))
        if path == b"/unread":
            assert await answer(reader) == (200, b"0")
        writer.write(sent)
        # Ended at once, and not when a deadline is over; what came behind the end resets the connection.
        with suppress(ConnectionResetError):
            async with asyncio.timeout(5):
                said = await reader.read()
                assert said.startswith(b"HTTP/1.1 431 ") if path == b"/headers" else said == b""
        writer.close()


async def test_chunks_of_one_byte_are_a_body_like_any() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(CHUNKED.replace(b"/headers", b"/") + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n")
        assert await answer(reader) == (200, b"20000")
        writer.close()


async def test_a_body_that_nobody_reads_has_to_come_in_time() -> None:
    async with listening() as port:
        unread = POST.replace(b"/ ", b"/unread ")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(unread)
        assert await answer(reader) == (200, b"0")
        writer.write(b"b" * 9000 + GET)
        assert await answer(reader) == (200, b"0")
        # Neither deadline is left over from what came before.
        await asyncio.sleep(2 * HEADER_TIMEOUT_S)
        writer.write(unread)
        assert await answer(reader) == (200, b"0")
        dripping = asyncio.create_task(drip(writer, b"b" * 400))
        async with asyncio.timeout(10 * HEADER_TIMEOUT_S):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        dripping.cancel()
        writer.close()


async def test_pipelined_requests_are_all_answered() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET * 3 + POST + b"b" * 9000 + GET)
        assert [await answer(reader) for _ in range(5)] == [(200, size) for size in (b"0", b"0", b"0", b"9000", b"0")]
        writer.close()


async def test_an_idle_connection_is_kept_until_its_keep_alive_ends() -> None:
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        assert await answer(reader) == (200, b"0")
        await asyncio.sleep(3 * HEADER_TIMEOUT_S)
        writer.write(GET)
        assert await answer(reader) == (200, b"0")
        writer.close()


STUCK = {
    "amid a stream": GET.replace(b"/ ", b"/endless "),
    "amid a large answer": GET.replace(b"/ ", b"/large "),
    "behind the last answer": GET.replace(b"/ ", b"/small ").replace(b"host", b"connection: close\r\nhost"),
    "behind an answer": GET.replace(b"/ ", b"/small "),
    "in a row of answers": GET.replace(b"/ ", b"/small ") * 20,
}


@pytest.mark.parametrize("asked", STUCK.values(), ids=STUCK)
async def test_a_client_that_takes_nothing_loses_its_connection(asked: bytes) -> None:
    written.clear()
    async with listening() as port:
        client = await over_http(f"http://127.0.0.1:{port}", asked)
        await client.cut_off(within_s=KEEP_ALIVE_S + 3 * WRITE_TIMEOUT_S)
        await client.end()
        if b"endless" in asked:
            await asyncio.sleep(0.05)
            assert len(written) == 1
            assert written[0] < 150_000


async def test_a_client_that_takes_little_at_a_time_keeps_its_connection() -> None:
    loop = asyncio.get_running_loop()
    async with listening() as port:
        client = await over_http(f"http://127.0.0.1:{port}", GET.replace(b"/ ", b"/endless "))
        until = loop.time() + 4 * WRITE_TIMEOUT_S
        while loop.time() < until:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                assert await loop.sock_recv(client.sock, 4096)
            await asyncio.sleep(WRITE_TIMEOUT_S / 20)
        await client.end()
