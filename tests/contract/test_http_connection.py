"""Contract of the HTTP connections to backends, against a server that sends given bytes."""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import ssl
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address
from itertools import zip_longest
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from tests.contract.kinds import JOB
from unisono.core.generation import Timeouts
from unisono.core.ports import BackendOptions
from unisono.errors import BackendTimeout
from unisono.net import connection_pool
from unisono.net.connection_faults import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectionFault,
    ConnectionLost,
    ConnectTimeout,
    InvalidResponse,
    PoolClosed,
    ResponseCutShort,
)
from unisono.net.connection_pool import ConnectionPool
from unisono.net.http_connection import MAX_HEAD_BYTES, HttpClientConnection
from unisono.net.http_response import BUFFER_BYTES
from unisono_adapters._http import BackendHttp

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
SIZED = OK + b"Content-Length: 5\r\n\r\nhello"


@dataclass
class Server:
    """Server that sends the next of `answers` for each request, part by part.

    `b""` closes the connection, and None resets it.
    """

    answers: list[list[bytes | None]]
    port: int = 0
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                for part in self.answers.pop(0):
                    if part is None:
                        connection = writer.get_extra_info("socket")
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        writer.transport.abort()
                        return
                    if not part:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed.set()
            writer.close()


@asynccontextmanager
async def serving(*answers: list[bytes | None], tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server([*answers])
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for writer in server.writers:
            writer.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def pool_of(server: Server, scheme: str = "http") -> AsyncIterator[ConnectionPool]:
    pool = ConnectionPool(URL(f"{scheme}://127.0.0.1:{server.port}"))
    try:
        yield pool
    finally:
        pool.close()


async def exchange(pool: ConnectionPool, body: bytearray | None = None, *, once: bool = False) -> tuple[int, bytes]:
    """Send a request and return the status and the body, which is also added to `body`."""
    body = bytearray() if body is None else body
    if once:
        response = await (await pool.connection(5.0)).send(REQUEST, b"").with_head()
    else:
        response = await pool.send(REQUEST, b"", 5.0)
    try:
        while part := await response.read(1 << 20):
            body += part
    finally:
        response.close()
    return response.status, bytes(body)


BODIES: dict[str, tuple[bytes, int, bytes]] = {
    "a length": (SIZED, 200, b"hello"),
    "chunks": (CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", 200, b"hello"),
    "chunk extensions and trailers": (CHUNKED + b"5;a=b\r\nhello\r\n0\r\nX: y\r\nStatus: 1\r\n\r\n", 200, b"hello"),
    "a space after the size of a chunk": (CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n", 200, b"hello"),
    "no body": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "an interim response": (b"HTTP/1.1 103 Early Hints\r\nContent-Length: 1\r\n\r\n" + SIZED, 200, b"hello"),
    "no reason phrase": (b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello"),
    "lines that end in LF": (b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello", 200, b"hello"),
    "an error": (b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\noops", 500, b"oops"),
}


@pytest.mark.parametrize(("sent", "status", "body"), BODIES.values(), ids=BODIES)
async def test_a_response_is_read_and_its_connection_is_reused(sent: bytes, status: int, body: bytes) -> None:
    async with serving([sent], [sent]) as server, pool_of(server) as pool:
        assert await exchange(pool) == (status, body)
        assert await exchange(pool) == (status, body)
        assert server.connections == 1


UNTIL_CLOSED: dict[str, bytes] = {
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\nhello",
    "HTTP/1.1": OK + b"\r\nhello",
    "Connection: close": OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("sent", UNTIL_CLOSED.values(), ids=UNTIL_CLOSED)
async def test_a_connection_that_the_server_closes_is_not_reused(sent: bytes) -> None:
    async with serving([sent, b""], [sent, b""]) as server, pool_of(server) as pool:
        assert await exchange(pool) == (200, b"hello")
        assert await exchange(pool) == (200, b"hello")
        assert server.connections == 2


FAULTS: dict[str, tuple[list[bytes | None], type[ConnectionFault], bytes]] = {
    "closed at once": ([b""], ClosedBeforeResponse, b""),
    "closed inside the head": ([OK, b""], ClosedBeforeResponse, b""),
    "reset at once": ([None], ConnectionLost, b""),
    "closed inside the body": ([OK + b"Content-Length: 9\r\n\r\nhello", b""], ResponseCutShort, b"hello"),
    "closed inside a chunk": ([CHUNKED + b"9\r\nhello", b""], ResponseCutShort, b"hello"),
    "closed between chunks": ([CHUNKED + b"5\r\nhello\r\n", b""], ResponseCutShort, b"hello"),
    "reset inside a body without a length": ([OK + b"\r\nhello", None], ResponseCutShort, b"hello"),
    "not HTTP": ([b"220 smtp.example.org\r\n"], InvalidResponse, b""),
    "HTTP/2": ([b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"], InvalidResponse, b""),
    "an upgrade": ([b"HTTP/1.1 101 X\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\n"], InvalidResponse, b""),
    "two lengths": ([OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"], InvalidResponse, b""),
    "length and chunks": ([OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"], InvalidResponse, b""),
    "a status below 100": ([b"HTTP/1.1 099 X\r\nContent-Length: 2\r\n\r\n{}"], InvalidResponse, b""),
    "a space before a colon": ([OK + b"Content-Length : 9\r\n\r\nhello", b""], ResponseCutShort, b"hello"),
    "a negative length": ([OK + b"Content-Length: -5\r\n\r\n"], InvalidResponse, b""),
    "an invalid chunk": ([CHUNKED + b"5\r\nhello\r\nZ\r\n"], InvalidResponse, b"hello"),
    "an endless head": ([OK, b"X: " + b"y" * (MAX_HEAD_BYTES + 1)], InvalidResponse, b""),
    "an endless extension": ([CHUNKED + b"5;" + b"x" * (MAX_HEAD_BYTES + 1)], InvalidResponse, b""),
    "endless trailers": (
        [CHUNKED + b"5\r\nhello\r\n0\r\n", *(b"X: y\r\n" * 1000 for _ in range(12))],
        InvalidResponse,
        b"hello",
    ),
}


@pytest.mark.parametrize(("sent", "fault", "body"), FAULTS.values(), ids=FAULTS)
async def test_a_fault_follows_all_bytes_before_it(
    sent: list[bytes | None], fault: type[ConnectionFault], body: bytes
) -> None:
    async with serving([*sent], [SIZED]) as server, pool_of(server) as pool:
        received = bytearray()
        with pytest.raises(fault) as caught:
            await exchange(pool, received)
        assert type(caught.value) is fault
        assert received == body
        assert await exchange(pool) == (200, b"hello")
        assert server.connections == 2


# -- reuse


@pytest.mark.parametrize("end", [b"", None], ids=["closed", "reset"])
async def test_a_request_on_a_dead_connection_is_sent_again_once(end: bytes | None) -> None:
    async with serving([SIZED], [end], [SIZED]) as server, pool_of(server) as pool:
        await exchange(pool)
        assert await exchange(pool) == (200, b"hello")
        assert server.connections == 2
    async with serving([SIZED], [end], [end], [SIZED]) as server, pool_of(server) as pool:
        await exchange(pool)
        with pytest.raises((ClosedBeforeResponse, ConnectionLost)):
            await exchange(pool)
        assert server.connections == 2


@pytest.mark.parametrize("end", [b"", None], ids=["closed", "reset"])
async def test_a_request_that_must_not_be_repeated_fails_with_its_connection(end: bytes | None) -> None:
    async with serving([SIZED], [end], [SIZED]) as server, pool_of(server) as pool:
        await exchange(pool, once=True)
        with pytest.raises((ClosedBeforeResponse, ConnectionLost)):
            await exchange(pool, once=True)
        assert (server.connections, len(server.requests)) == (1, 2)
        assert await exchange(pool, once=True) == (200, b"hello")


def send_end(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        sock.shutdown(socket.SHUT_WR)


def send_surplus(descriptor: int) -> None:
    os.write(descriptor, b"surplus")


@pytest.mark.parametrize("send_more", [send_end, send_surplus])
async def test_a_request_that_must_not_be_repeated_needs_a_connection_without_unread_input(
    send_more: Callable[[int], None],
) -> None:
    async with serving([SIZED], [SIZED]) as server, pool_of(server) as pool:
        await exchange(pool, once=True)
        # The event loop reads nothing before the next request.
        send_more(server.writers[0].get_extra_info("socket").fileno())
        assert await exchange(pool, once=True) == (200, b"hello")
        assert (server.connections, len(server.requests)) == (2, 2)


PARTIAL_RESPONSES: dict[str, bytes] = {"the body": CHUNKED + b"5\r\nhello\r\n", "the head": b"HTTP/1.1 200 OK\r\nCont"}


@pytest.mark.parametrize("begun", PARTIAL_RESPONSES.values(), ids=PARTIAL_RESPONSES)
async def test_a_request_whose_response_has_begun_is_not_sent_again(begun: bytes) -> None:
    async with serving([SIZED], [begun, b""], [SIZED]) as server, pool_of(server) as pool:
        await exchange(pool)
        with pytest.raises((ResponseCutShort, ClosedBeforeResponse)):
            await exchange(pool)
        assert len(server.requests) == 2


SURPLUS: dict[str, list[bytes | None]] = {
    "with the response": [SIZED + b"surplus"],
    "a second response": [SIZED + SIZED],
    "after the response": [SIZED, b"surplus"],
}


@pytest.mark.parametrize("sent", SURPLUS.values(), ids=SURPLUS)
async def test_unrequested_bytes_are_not_taken_for_a_response(sent: list[bytes | None]) -> None:
    async with serving([*sent], [SIZED.replace(b"hello", b"world")]) as server, pool_of(server) as pool:
        assert await exchange(pool) == (200, b"hello")
        await asyncio.sleep(0.02)
        assert await exchange(pool) == (200, b"world")
        assert server.connections == 2


# Larger than the system's socket buffers.
LARGE = b"x" * (64 << 20)


@asynccontextmanager
async def partly_read_request() -> AsyncIterator[tuple[ConnectionPool, asyncio.Task[socket.socket]]]:
    """Yield a pool, and the task that accepts its connection and reads the first bytes."""
    loop = asyncio.get_running_loop()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)

        async def accept() -> socket.socket:
            accepted, _ = await loop.sock_accept(listening)
            await loop.sock_recv(accepted, 1024)
            return accepted

        accepting = asyncio.create_task(accept())
        pool = ConnectionPool(URL(f"http://127.0.0.1:{listening.getsockname()[1]}"))
        try:
            yield pool, accepting
        finally:
            pool.close()
            (await accepting).close()


async def is_reset(connection: socket.socket) -> bool:
    """Wait for the end of a connection and return whether the client reset it."""
    try:
        async with asyncio.timeout(5):
            while await asyncio.get_running_loop().sock_recv(connection, 1 << 20):
                pass
    except ConnectionResetError:
        return True
    return False


async def test_the_rest_of_a_request_is_not_sent_after_its_response() -> None:
    async with partly_read_request() as (pool, accepting):
        sending = asyncio.create_task(pool.send(REQUEST, LARGE, 5.0))
        connection = await accepting
        await asyncio.get_running_loop().sock_sendall(connection, SIZED)
        response = await sending
        assert await response.read(100) == b"hello"
        response.close()
        assert await is_reset(connection)


async def test_a_request_fails_if_the_backend_closes_before_it_has_read_all() -> None:
    async with partly_read_request() as (pool, accepting):
        sending = asyncio.create_task(pool.send(REQUEST, LARGE, 5.0))
        connection = await accepting
        connection.shutdown(socket.SHUT_WR)
        with pytest.raises((ClosedBeforeResponse, ConnectionLost)):
            async with asyncio.timeout(5):
                await sending
        assert await is_reset(connection)


async def test_an_unused_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "KEEP_ALIVE_S", 0.05)
    async with serving([SIZED], [SIZED]) as server, pool_of(server) as pool:
        await exchange(pool)
        async with asyncio.timeout(2):
            await server.closed.wait()
        await exchange(pool)
        assert server.connections == 2


@pytest.mark.parametrize("read", [True, False], ids=["begun", "not begun"])
async def test_closing_an_unfinished_response_resets_its_connection(read: bool) -> None:
    async with serving([CHUNKED + b"5\r\nhello\r\n"], [SIZED]) as server, pool_of(server) as pool:
        response = await pool.send(REQUEST, b"", 5.0)
        if read:
            assert await response.read(100) == b"hello"
        response.close()
        response.close()
        async with asyncio.timeout(2):
            await server.closed.wait()
        assert await exchange(pool) == (200, b"hello")


async def test_a_closed_pool_ends_responses_and_refuses_requests() -> None:
    async with serving([CHUNKED + b"5\r\nhello\r\n"]) as server, pool_of(server) as pool:
        response = await pool.send(REQUEST, b"", 5.0)
        assert await response.read(100) == b"hello"
        reading = asyncio.create_task(response.read(100))
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(ConnectionLost):
            await reading
        with pytest.raises(PoolClosed):
            await pool.send(REQUEST, b"", 5.0)


async def test_a_slow_reader_slows_the_backend_down() -> None:
    part = b"x" * 65_536
    async with serving([OK + b"\r\n", *[part] * 1000, b""]) as server, pool_of(server) as pool:
        response = await pool.send(REQUEST, b"", 5.0)
        await asyncio.sleep(0.3)
        assert not server.closed.is_set()
        received = biggest = 0
        while taken := await response.read(BUFFER_BYTES):
            received += len(taken)
            biggest = max(biggest, len(taken))
        response.close()
        assert (received, biggest) == (1000 * len(part), BUFFER_BYTES)


async def test_small_chunks_that_wait_need_little_memory() -> None:
    connection = HttpClientConnection(lambda _: None, lambda _: None)
    connection.connection_made(Transport())
    connection.send(REQUEST, b"")
    connection.data_received(CHUNKED)
    tracemalloc.start()
    try:
        for _ in range(BUFFER_BYTES):
            connection.data_received(b"2\r\nab\r\n")
        assert tracemalloc.get_traced_memory()[0] < 4 * BUFFER_BYTES
    finally:
        tracemalloc.stop()


TIMEOUTS = Timeouts(connect_s=5.0, first_token_s=5.0, silence_s=5.0, total_s=0.1)


async def test_an_expired_time_limit_ends_an_answer_whose_end_has_arrived() -> None:
    events = b"Content-Type: text/event-stream\r\n\r\n" + b"data: x\n\n" * 2000
    async with serving([OK + events, b""]) as server:
        http = BackendHttp(BackendOptions(kind="vllm", model="m", api_base=f"http://127.0.0.1:{server.port}"))
        answer = await http.post("v1/completions", b"{}", replace(JOB, timeouts=TIMEOUTS))
        assert await answer.read()
        await asyncio.sleep(0.2)
        with pytest.raises(BackendTimeout):
            await answer.read()
        answer.close()
        await http.aclose()


# -- connecting


async def test_a_host_is_looked_up_once_for_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = 0
    look_up = ConnectionPool._look_up

    async def counted(pool: ConnectionPool) -> object:
        nonlocal lookups
        lookups += 1
        return await look_up(pool)

    monkeypatch.setattr(ConnectionPool, "_look_up", counted)
    async with serving(*[[SIZED]] * 20) as server, pool_of(server) as pool:
        await asyncio.gather(*(exchange(pool) for _ in range(10)))
        await asyncio.gather(*(exchange(pool) for _ in range(10)))
        assert (lookups, server.connections) == (1, 10)


async def test_failed_connects_raise_connect_failed() -> None:
    async with serving() as server:
        port = server.port
    for url in (f"http://127.0.0.1:{port}", "http://does-not-exist.invalid", f"http://{'a' * 64}.example"):
        with pytest.raises(ConnectFailed):
            await ConnectionPool(URL(url)).send(REQUEST, b"", 5.0)


async def test_a_connection_that_is_not_accepted_in_time_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(connection_pool, "start_connection", hangs)
    with pytest.raises(ConnectTimeout):
        await ConnectionPool(URL("http://127.0.0.1:9")).send(REQUEST, b"", 0.01)


def certificate(folder: Path) -> ssl.SSLContext:
    """Write a self-signed certificate for 127.0.0.1 and return the context of its server."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    names: list[x509.GeneralName] = [x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("gpu.example")]
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "cert.pem").write_bytes(built.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, private, serialization.NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


async def test_tls_needs_a_trusted_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = certificate(tmp_path)
    connection_pool.tls_context.cache_clear()
    try:
        async with serving([SIZED], [SIZED], [SIZED], tls=context) as server:
            async with pool_of(server, "https") as pool:
                with pytest.raises(ConnectFailed):
                    await exchange(pool)
            connection_pool.tls_context.cache_clear()
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
            async with pool_of(server, "https") as pool:
                assert await exchange(pool) == (200, b"hello")
                assert await exchange(pool) == (200, b"hello")
                assert await exchange(pool, once=True) == (200, b"hello")
                assert server.connections == 1
    finally:
        connection_pool.tls_context.cache_clear()


async def test_a_slow_reader_loses_nothing_of_an_answer_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    context, body = certificate(tmp_path), b"x" * 300_000
    connection_pool.tls_context.cache_clear()
    try:
        async with serving([OK + b"\r\n" + body, b""], tls=context) as server, pool_of(server, "https") as pool:
            response = await pool.send(REQUEST, b"", 5.0)
            received = b""
            while part := await response.read(BUFFER_BYTES):
                received += part
                await asyncio.sleep(0.005)
            response.close()
            assert received == body
    finally:
        connection_pool.tls_context.cache_clear()


async def test_a_host_name_may_end_in_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def looked_up(pool: ConnectionPool) -> object:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", server.port))]

    monkeypatch.setattr(ConnectionPool, "_look_up", looked_up)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    context = certificate(tmp_path)
    connection_pool.tls_context.cache_clear()
    try:
        async with serving([SIZED], tls=context) as server:
            pool = ConnectionPool(URL(f"https://gpu.example.:{server.port}"))
            assert await exchange(pool) == (200, b"hello")
            pool.close()
    finally:
        connection_pool.tls_context.cache_clear()


# -- requests

JSON_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
BASES: dict[str, tuple[str, str, str]] = {
    "no path": ("http://127.0.0.1:{port}/v1", "GET /v1/models", ""),
    "a path": ("http://127.0.0.1:{port}/a b/v1/", "GET /a%20b/v1/models", ""),
    "a user": ("http://us%C3%A9r:p%40ss@127.0.0.1:{port}", "GET /v1/models", "Basic dXPDqXI6cEBzcw=="),
}


@pytest.mark.parametrize(("base", "line", "authorization"), BASES.values(), ids=BASES)
async def test_the_request_has_the_path_and_the_credentials_of_the_base(
    base: str, line: str, authorization: str
) -> None:
    async with serving([JSON_OK]) as server:
        http = BackendHttp(BackendOptions(kind="vllm", model="m", api_base=base.format(port=server.port)))
        assert await http.get_json("v1/models") == {}
        await http.aclose()
    first, *lines = server.requests[0].decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if line)
    assert first == f"{line} HTTP/1.1"
    assert headers["Host"] == f"127.0.0.1:{server.port}"
    assert headers.get("Authorization", "") == authorization


# -- boundaries of reads


class Transport(asyncio.Transport):
    """Transport that records whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = self.is_closed = False

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, parts: object) -> None: ...
    def write(self, data: object) -> None: ...
    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def keep(given: list[bytes], read: bytes) -> bool:
    """Store a read; keep waiting if its length is odd."""
    given.append(read)
    return len(read) % 2 > 0


async def read_response(
    reads: list[bytes], limit: int, *, closes: bool, waits: Sequence[bool] = ()
) -> tuple[int, bytes, str]:
    """Return status, body and fault of a response that arrives in these reads, taken after each.

    The reader waits for the bytes of those reads for which `waits` is True.
    """
    transport = Transport()
    connection = HttpClientConnection(lambda _: None, lambda _: None)
    connection.connection_made(transport)
    response = connection.send(REQUEST, b"")
    body = b""
    try:
        for read, is_waiting in zip_longest(reads, waits[: len(reads)], fillvalue=False):
            if is_waiting and response.status and not response.is_readable:
                given: list[bytes] = []
                waiter = response.next_data(partial(keep, given))
                connection.data_received(read)
                body += b"".join(given)
                waiter.cancel()
            else:
                connection.data_received(read)
            if taken := response.read_nowait(limit):
                body += taken
        if closes:
            connection.connection_lost(None)
        while taken := response.read_nowait(limit):
            body += taken
    except ConnectionFault as error:
        return response.status, body, type(error).__name__
    return response.status, body, ""


STREAMS = [answer for answer, _, _ in BODIES.values()] + [
    b"".join(part for part in parts if part) for parts, _, _ in FAULTS.values() if len(parts) < 3
]
STREAMS += [OK + b"Content-Length: 30000\r\n\r\n" + bytes(range(250)) * 120, SIZED * 2]


async def test_a_second_response_in_one_read_is_no_part_of_the_first_one() -> None:
    reads = [SIZED[:-5], b"hello" + SIZED.replace(b"hello", b"world")]
    assert await read_response(reads, 1 << 20, closes=False, waits=[False, True]) == (200, b"hello", "")


@given(
    st.sampled_from(STREAMS),
    st.lists(st.integers(1, 2000), max_size=40),
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 9),
    st.booleans(),
)
def test_read_boundaries_do_not_change_a_response(
    stream: bytes, sizes: list[int], waits: list[bool], limit: int, closes: bool
) -> None:
    reads, rest = [], stream
    for size in sizes:
        reads.append(rest[:size])
        rest = rest[size:]
    expected = asyncio.run(read_response([stream], 1 << 20, closes=closes))
    parts = [read for read in (*reads, rest) if read]
    assert asyncio.run(read_response(parts, limit, closes=closes, waits=waits)) == expected
