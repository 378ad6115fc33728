"""Responses that are sent before the request body was read must reach every kind of client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx2
import pytest
import pytest_asyncio
from multidict import CIMultiDict

from tests.e2e.gateway import config_of, gateway
from tests.e2e.keyed import ring, with_keys
from tests.fakes import FakeVllm, VllmScript, stall_at
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_BODY = 1024 * 1024
MAX_CONNECTIONS = 24
CHUNK = 64 * 1024
MB = 1024 * 1024
CHAT = "/v1/chat/completions"
REPETITIONS = 40
# An idle machine needs 20 ms.
FREED_WITHIN_S = 2.0
ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hello there.<|return|>")


@dataclass(frozen=True)
class Case:
    """A reason to refuse a request.

    `key` is the name of a key of the site. `headers` are sent in addition.
    """

    status: int
    size: int = 8 * MB
    path: str = CHAT
    key: str = "good"
    headers: tuple[tuple[str, str], ...] = ()
    crowded: bool = False
    type: str = "application/json"


CASES: Mapping[str, Case] = {
    "413": Case(413),
    "400 two hosts": Case(400, headers=(("host", "a.example"), ("host", "b.example"))),
    "401": Case(401, key="wrong"),
    "404": Case(404, size=MAX_BODY, path="/v1/nothing"),
    "415": Case(415, size=MAX_BODY, type="text/plain"),
    "429": Case(429, size=MAX_BODY, key="limited"),
    "431": Case(431, headers=tuple((f"x-{number}", "x") for number in range(300))),
    "503": Case(503, crowded=True),
}


@dataclass(frozen=True)
class Site:
    url: str
    keys: Mapping[str, str]
    fake: FakeVllm

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def headers(self, case: Case) -> list[tuple[str, str]]:
        named = [("authorization", f"Bearer {self.keys[case.key]}"), ("content-type", case.type)]
        return [*named, *case.headers]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    address = f"sqlite://{tmp_path_factory.mktemp('state')}/state.db"
    async with FakeVllm() as fake:
        config = with_keys(config_of(f"vllm@{fake.url}"), address)
        config["unisono"] |= {
            "max_body_bytes": MAX_BODY,
            "max_connections": MAX_CONNECTIONS,
            "failed_authentication": {"max_per_minute": 0},
        }
        async with gateway(config) as running, ring(address) as keys:
            _, good = await keys.issue()
            _, limited = await keys.issue(limits=KeyLimits(token_budget=1))
            harness = Site(running.url, {"good": good, "limited": limited, "wrong": "sk-wrong"}, fake)
            await running.post(CHAT, BODY, authorization=f"Bearer {limited}")
            yield harness


BODY = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()


def body_of(case: Case) -> bytes:
    """Return a valid request of `case.size` bytes; trailing blanks change nothing."""
    return BODY + b" " * (case.size - len(BODY))


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), CHUNK):
        yield body[at : at + CHUNK]


Ask = Callable[[Site, Case, bool], Awaitable[tuple[int, Any]]]


async def with_raw_socket(site: Site, case: Case, chunked: bool) -> tuple[int, Any]:
    """Send the whole request before reading, as most libraries do."""
    reader, writer = await asyncio.open_connection(*site.address)
    try:
        lines = [f"{name}: {value}" for name, value in site.headers(case)]
        lines += [] if any(name == "host" for name, _ in case.headers) else ["host: localhost"]
        lines += ["transfer-encoding: chunked" if chunked else f"content-length: {case.size}"]
        writer.write("\r\n".join([f"POST {case.path} HTTP/1.1", *lines, "", ""]).encode())
        async for piece in pieces(body_of(case)):
            writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n" if chunked else piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if chunked else b"")
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), json.loads(await reader.readexactly(int(length.partition(b":")[2])))
    finally:
        writer.close()


async def with_httpx(site: Site, case: Case, chunked: bool) -> tuple[int, Any]:
    async with httpx2.AsyncClient(trust_env=False) as client:
        body: Any = pieces(body_of(case)) if chunked else body_of(case)
        answer = await client.post(site.url + case.path, content=body, headers=site.headers(case))
        return answer.status_code, answer.json()


async def with_aiohttp(site: Site, case: Case, chunked: bool) -> tuple[int, Any]:
    headers = CIMultiDict(site.headers(case))
    if not chunked:
        headers["content-length"] = str(case.size)
    async with (
        aiohttp.ClientSession() as session,
        session.post(site.url + case.path, data=pieces(body_of(case)), headers=headers) as answer,
    ):
        return answer.status, await answer.json()


CLIENTS: Mapping[str, Ask] = {"raw": with_raw_socket, "httpx": with_httpx, "aiohttp": with_aiohttp}
# The libraries send only one Host header.
TABLE = [(client, case) for case in CASES for client in CLIENTS if client == "raw" or case != "400 two hosts"]


@asynccontextmanager
async def crowd(site: Site, case: Case) -> AsyncIterator[None]:
    """Open as many idle connections as the gateway allows, if the case needs them."""
    async with AsyncExitStack() as stack:
        for _ in range(MAX_CONNECTIONS if case.crowded else 0):
            _, writer = await asyncio.open_connection(*site.address)
            stack.callback(writer.close)
            # After an answered request, the connection is open and counted.
            writer.write(b"GET /health/liveness HTTP/1.1\r\nhost: x\r\n\r\n")
        yield


async def refused(site: Site, case: Case, ask: Ask, chunked: bool, times: int) -> None:
    outcomes: list[Any] = []
    async with crowd(site, case):
        for _ in range(times):
            try:
                async with asyncio.timeout(20):
                    status, body = await ask(site, case, chunked)
                outcomes.append(status if body["error"]["code"] else body)
            except (OSError, httpx2.HTTPError, aiohttp.ClientError, EOFError) as error:
                outcomes.append(repr(error))
    assert outcomes == [case.status] * times


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("client", "case"), TABLE)
async def test_early_response_reaches_the_client(site: Site, client: str, case: str) -> None:
    await refused(site, CASES[case], CLIENTS[client], client == "raw", 1)


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize(("client", "case"), TABLE)
async def test_early_response_is_never_lost_in_many_requests(site: Site, client: str, case: str, chunked: bool) -> None:
    await refused(site, CASES[case], CLIENTS[client], chunked, REPETITIONS)


HEALTH = {
    "liveness": "/health/liveness",
    "readiness": "/health/readiness",
    "query": "/health/liveness?probe=1",
    "encoded letter": "/health/live%6eess",
    "absolute URL": "http://localhost/health/liveness",
    "encoded absolute URL": "http://localhost/health%2Fliveness?probe=1",
}
OTHERS = {
    "other path": "/v1/models",
    "health in the query": "/v1/models?/health/liveness",
    "health in a fragment": "/v1/models#/health/liveness",
    "parent of health": "/health/liveness/../../v1/models",
    "health as a subpath": "/v1/health/liveness",
}


async def status_of(site: Site, target: str) -> tuple[int, bool]:
    """Send a GET; return its status and whether the connection is closed."""
    reader, writer = await asyncio.open_connection(*site.address)
    try:
        writer.write(f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        return int(head.split()[1]), b"connection: close" in head
    finally:
        writer.close()


@pytest.mark.parametrize("target", HEALTH.values(), ids=HEALTH)
async def test_health_is_answered_at_the_connection_limit(site: Site, target: str) -> None:
    async with crowd(site, CASES["503"]):
        assert await status_of(site, target) == (200, True)


@pytest.mark.parametrize("target", OTHERS.values(), ids=OTHERS)
async def test_other_paths_get_503_at_the_connection_limit(site: Site, target: str) -> None:
    async with crowd(site, CASES["503"]):
        assert await status_of(site, target) == (503, True)


# Clients that close their sending direction


HALF_CLOSED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
    "responses": ("/v1/responses", {"input": "Hi", "store": False}),
    "messages": ("/v1/messages", {"max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}),
}


def request_of(site: Site, surface: str, *, stream: bool) -> bytes:
    path, fields = HALF_CLOSED[surface]
    body = json.dumps({"model": "gpt-oss", "stream": stream, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {site.keys['good']}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def slow_script(site: Site) -> None:
    site.fake.requests.clear()
    site.fake.script = lambda _: VllmScript(tokens=ANSWER, first_delay_s=0.3)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("surface", HALF_CLOSED)
async def test_half_closed_client_gets_its_answer(site: Site, surface: str, stream: bool) -> None:
    slow_script(site)
    reader, writer = await asyncio.open_connection(*site.address)
    writer.write(request_of(site, surface, stream=stream))
    writer.write_eof()
    async with asyncio.timeout(20):
        received = await reader.read()
    writer.close()
    interim, _, answer = received.partition(b"\r\n\r\n")
    assert interim == b"HTTP/1.1 100 Continue"
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"Hello" in answer
    assert answer.endswith(b"0\r\n\r\n" if stream else b"}")


DISCONNECTS = {"whole": (False, 0), "stream": (True, 0), "started stream": (True, 5)}


@pytest.mark.parametrize(("stream", "stall"), DISCONNECTS.values(), ids=DISCONNECTS)
@pytest.mark.parametrize("surface", HALF_CLOSED)
async def test_client_disconnect_frees_the_backend(site: Site, surface: str, stream: bool, stall: int) -> None:
    assert await freed_after_s(site, request_of(site, surface, stream=stream), stall) < FREED_WITHIN_S


async def freed_after_s(site: Site, request: bytes, stall: int) -> float:
    """Disconnect a client; return the seconds until the gateway disconnects from the backend.

    The backend stalls at token `stall`.
    """
    site.fake.requests.clear()
    site.fake.script = lambda _: VllmScript(tokens=ANSWER, faults=(stall_at(stall),))
    reader, writer = await asyncio.open_connection(*site.address)
    writer.write(request)
    if stall:
        await reader.readuntil(b"\n\n")
    await site.fake.asked(within=20)
    writer.close()
    disconnected = asyncio.get_running_loop().time()
    return await site.fake.gone(within=20) - disconnected


# Requests without a body


async def test_header_flood_gets_a_431_response(site: Site) -> None:
    flood = b"".join(b"x-header-%09d: 1234567890\r\n" % number for number in range(2 * MB // 32))
    reader, writer = await asyncio.open_connection(*site.address)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n")
    for at in range(0, len(flood), CHUNK):
        writer.write(flood[at : at + CHUNK])
        await writer.drain()
    writer.write(b"\r\n")
    async with asyncio.timeout(20):
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    writer.close()


async def test_refusal_instead_of_100_continue_closes_the_connection(site: Site) -> None:
    for status in ("413", "401", "404"):
        case = CASES[status]
        reader, writer = await asyncio.open_connection(*site.address)
        lines = [f"{name}: {value}" for name, value in site.headers(case)]
        head = [f"POST {case.path} HTTP/1.1", "host: x", "expect: 100-continue", f"content-length: {case.size}"]
        writer.write("\r\n".join([*head, *lines, "", ""]).encode())
        async with asyncio.timeout(20):
            received = await reader.read()
        assert received.startswith(b"HTTP/1.1 %d " % case.status)
        assert b"connection: close" in received
        writer.close()
