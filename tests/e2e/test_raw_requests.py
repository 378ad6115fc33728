"""Requests byte by byte, as no client library sends them, against one gateway process: each has the answers it should
and no other, nothing of it reaches a backend that should not, and the next client is served."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from tests.e2e.replicas import Replica, replica
from tests.fakes import FakeVllm
from tests.listening import connected
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOON_S = 20.0
BODY = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
IN_CHUNKS = b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
SENT = b"\r\n" + BODY


def post(*headers: bytes, rest: bytes = SENT, version: bytes = b"1.1", path: bytes = b"chat/completions") -> bytes:
    head = b"POST /v1/" + path + b" HTTP/" + version + b"\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"".join(headers) + rest


def get(
    target: bytes, *headers: bytes, version: bytes = b"1.1", method: bytes = b"GET", host: bytes = b"localhost"
) -> bytes:
    return method + b" " + target + b" HTTP/" + version + b"\r\nhost: " + host + b"\r\n" + b"".join(headers) + b"\r\n"


ASKED = post(LENGTH)
ALIVE = get(b"/health/liveliness")
NO_HOST = ALIVE.replace(b"host: localhost\r\n", b"")
WEBSOCKET = (
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"

OPEN, CLOSED = True, False
Case = tuple[bytes, Sequence[int], bool]
"""What is sent, the statuses of what comes back, and whether the connection can be used behind it."""
REFUSED: tuple[Sequence[int], bool] = ((400,), CLOSED)

LENGTHS: dict[str, Case] = {
    "one length": (ASKED, [200], OPEN),
    "the same length twice": (post(LENGTH, LENGTH), *REFUSED),
    "two lengths": (post(LENGTH, b"content-length: 5\r\n"), *REFUSED),
    "a list of lengths": (post(b"content-length: %d, %d\r\n" % (len(BODY), len(BODY))), *REFUSED),
    "a length below zero": (post(b"content-length: -5\r\n"), *REFUSED),
    "a length with a sign": (post(b"content-length: +5\r\n"), *REFUSED),
    "a length in sixteens": (post(b"content-length: 0x5\r\n"), *REFUSED),
    "an empty length": (post(b"content-length:\r\n"), *REFUSED),
    "two numbers in a length": (post(b"content-length: 5 5\r\n"), *REFUSED),
    "a length beyond 64 bits": (post(b"content-length: 99999999999999999999999\r\n"), *REFUSED),
    "a length that is too much": (post(b"content-length: 20971520\r\n"), [413], CLOSED),
    "a length that is too much for a message": (
        post(b"content-length: 20971520\r\n", path=b"messages"),
        [413],
        CLOSED,
    ),
    "length and chunks": (post(LENGTH, CHUNKED, rest=b"\r\n" + IN_CHUNKS), *REFUSED),
    "chunks and length": (post(CHUNKED, LENGTH, rest=b"\r\n" + IN_CHUNKS), *REFUSED),
    "a length spelled with an underscore": (post(b"content_length: 5\r\n", LENGTH), [200], OPEN),
    "a body of a GET": (get(b"/v1/models", b"content-length: 5\r\n") + b"hello", [200], OPEN),
}
CODINGS: dict[str, Case] = {
    "chunks": (post(CHUNKED, rest=b"\r\n" + IN_CHUNKS), [200], OPEN),
    "chunks in capitals": (post(CHUNKED.upper(), rest=b"\r\n" + IN_CHUNKS), [200], OPEN),
    "chunks with extensions": (post(CHUNKED, rest=b"\r\n" + IN_CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)), [200], OPEN),
    "chunks with trailers": (post(CHUNKED, rest=b"\r\n" + IN_CHUNKS[:-2] + b"x-a: b\r\n\r\n"), [200], OPEN),
    "chunks of a GET": (get(b"/v1/models", CHUNKED) + b"5\r\nhello\r\n0\r\n\r\n", [200], OPEN),
    "chunks twice": (post(CHUNKED, CHUNKED, rest=b"\r\n" + IN_CHUNKS), *REFUSED),
    "identity": (post(b"transfer-encoding: identity\r\n"), *REFUSED),
    "chunks inside identity": (post(b"transfer-encoding: chunked, identity\r\n"), *REFUSED),
    "gzip in chunks": (post(b"transfer-encoding: gzip, chunked\r\n", rest=b"\r\n" + IN_CHUNKS), *REFUSED),
    "almost chunks": (post(b"transfer-encoding: xchunked\r\n", rest=b"\r\n" + IN_CHUNKS), *REFUSED),
    "chunks behind a tab": (post(b"transfer-encoding: \x0bchunked\r\n", rest=b"\r\n" + IN_CHUNKS), *REFUSED),
    "a space before the colon": (post(b"transfer-encoding : chunked\r\n", rest=b"\r\n" + IN_CHUNKS), *REFUSED),
    "a chunk of no size": (post(CHUNKED, rest=b"\r\nzz\r\n"), *REFUSED),
    "a chunk below zero": (post(CHUNKED, rest=b"\r\n-1\r\n"), *REFUSED),
    "a chunk beyond 64 bits": (post(CHUNKED, rest=b"\r\nffffffffffffffffff\r\n"), *REFUSED),
    "a chunk longer than it says": (post(CHUNKED, rest=b"\r\n2\r\nabcdef\r\n0\r\n\r\n"), *REFUSED),
    "chunks in bare line feeds": (post(CHUNKED, rest=b"\r\n" + IN_CHUNKS.replace(b"\r\n", b"\n")), *REFUSED),
    "a packed body": (post(b"content-encoding: gzip\r\n", LENGTH), [415], OPEN),
    "another charset": (ASKED.replace(b"json\r\n", b"json; charset=utf-16\r\n", 1), [415], OPEN),
}
HEADERS: dict[str, Case] = {
    "a folded header": (post(b"x-a: 1\r\n 2\r\n", LENGTH), *REFUSED),
    "no name": (post(b": x\r\n", LENGTH), *REFUSED),
    "a space in a name": (post(b"x a: 1\r\n", LENGTH), *REFUSED),
    "a NUL": (post(b"x-a: \0\r\n", LENGTH), *REFUSED),
    "a bare carriage return": (post(b"x-a: 1\r2\r\n", LENGTH), *REFUSED),
    "bare line feeds": (post(LENGTH).replace(b"\r\n", b"\n"), *REFUSED),
    "bytes": (post(b"x-a: \xe9\xff\r\n", LENGTH), [200], OPEN),
    "one that is too long": (post(b"x-a: " + b"y" * 70_000 + b"\r\n", LENGTH), [431], CLOSED),
    "too many": (post(b"x-a: y\r\n" * 300, LENGTH), [431], CLOSED),
    "as many as there may be": (post(b"x-a: y\r\n" * 253, LENGTH), [200], OPEN),
    "a trace that is none": (post(b"traceparent: 00-\r\ntraceparent: x\r\n", LENGTH), [200], OPEN),
    "a key of 5 kB": (post(b"idempotency-key: " + b"x" * 5000 + b"\r\n", LENGTH, path=b"responses"), [400], OPEN),
    "two keys that are one": (post(b"x-api-key: k\r\nauthorization: Bearer k\r\n", LENGTH), [200], OPEN),
    "a message without a bound": (post(LENGTH, path=b"messages"), [400], OPEN),
    "waits to go on": (post(b"expect: 100-continue\r\n", LENGTH), [100, 200], OPEN),
    "expects something else": (post(b"expect: 200-ok\r\n", LENGTH), [200], OPEN),
}
HOSTS: dict[str, Case] = {
    "none": (NO_HOST, *REFUSED),
    "two": (get(b"/v1/models", b"host: localhost\r\n"), *REFUSED),
    "an empty one": (get(b"/v1/models", host=b""), [403], OPEN),
    "another": (get(b"/v1/models", host=b"evil.example"), [403], OPEN),
    "one that begins alike": (get(b"/v1/models", host=b"localhost.evil.example"), [403], OPEN),
    "one with a path": (get(b"/v1/models", host=b"localhost/health/liveliness?"), [403], OPEN),
    "one with a user": (get(b"/v1/models", host=b"localhost@evil.example"), [403], OPEN),
    "this one as an address": (get(b"/v1/models", host=b"[::1]:4000"), [200], OPEN),
}
TARGETS: dict[str, Case] = {
    "an address here": (get(b"http://localhost/v1/models"), [200], OPEN),
    "an address elsewhere": (get(b"http://evil.example/v1/models"), *REFUSED),
    "an address with a user": (get(b"http://localhost@evil.example/v1/models"), *REFUSED),
    "an address without a path": (get(b"http://localhost"), *REFUSED),
    "an address of another kind": (get(b"ftp://localhost/v1/models"), *REFUSED),
    "two slashes": (get(b"//v1/models"), [404], OPEN),
    "two slashes and a host": (get(b"//evil.example/v1/models"), [404], OPEN),
    "two slashes inside": (get(b"/v1//models"), [404], OPEN),
    "dots": (get(b"/nowhere/../v1/models"), [404], OPEN),
    "dots spelled out": (get(b"/nowhere/%2e%2e/v1/models"), [404], OPEN),
    "an id that climbs": (get(b"/v1/responses/..%2f..%2fetc%2fpasswd"), [404], OPEN),
    "NUL spelled out": (get(b"/v1/models%00"), [404], OPEN),
    "NUL in an id": (get(b"/v1/responses/resp_%00"), [404], OPEN),
    "NUL": (get(b"/v1/models\0"), *REFUSED),
    "a line break spelled out": (get(b"/v1/models%0d%0aset-cookie:%20x"), [404], OPEN),
    "backslashes": (get(b"\\v1\\models"), *REFUSED),
    "no slash": (get(b"v1/models"), *REFUSED),
    "a star": (get(b"*"), *REFUSED),
    "a star for options": (get(b"*", method=b"OPTIONS"), [404], OPEN),
    "a tab": (get(b"/v1/a\tb"), *REFUSED),
    "a percent alone": (get(b"/v1/models%"), [404], OPEN),
    "half a character": (get(b"/v1/models/%ff%fe"), [404], OPEN),
    "a surrogate": (get(b"/v1/responses/%ed%a0%80"), [404], OPEN),
    "bytes": (get(b"/v1/\xff"), *REFUSED),
    "a query of bytes": (get(b"/v1/models?%ff&=&&x"), [200], OPEN),
    "an endless number": (get(b"/v1/responses/r?stream=true&starting_after=" + b"9" * 6000), [400], OPEN),
    "a limit below zero": (get(b"/v1/conversations/conv_1/items?limit=-1"), [400], OPEN),
    "a path of 50 kB": (get(b"/" + b"a" * 50_000), [404], OPEN),
    "a path of 70 kB": (get(b"/" + b"a" * 70_000), [431], CLOSED),
}
METHODS: dict[str, Case] = {
    "HEAD": (get(b"/v1/models", method=b"HEAD"), [200], OPEN),
    "PUT": (get(b"/v1/models", method=b"PUT"), [405], OPEN),
    "DELETE": (get(b"/v1/models", method=b"DELETE"), [405], OPEN),
    "TRACE": (get(b"/v1/models", method=b"TRACE"), [405], OPEN),
    "PROPFIND": (get(b"/v1/models", method=b"PROPFIND"), [405], OPEN),
    "CONNECT": (get(b"localhost:4000", method=b"CONNECT"), *REFUSED),
    "one nobody knows": (get(b"/v1/models", method=b"BREW"), *REFUSED),
    "one in small letters": (get(b"/v1/models", method=b"get"), *REFUSED),
    "one of 5 kB": (get(b"/v1/models", method=b"X" * 5000), *REFUSED),
}
VERSIONS: dict[str, Case] = {
    "1.0": (get(b"/health/liveliness", version=b"1.0"), [200], CLOSED),
    "1.0 that would stay": (get(b"/health/liveliness", b"connection: keep-alive\r\n", version=b"1.0"), [200], CLOSED),
    "1.0 without a host": (NO_HOST.replace(b"1.1", b"1.0"), [403], CLOSED),
    "1.0 in chunks": (post(CHUNKED, rest=b"\r\n" + IN_CHUNKS, version=b"1.0"), *REFUSED),
    "1.0 for a WebSocket": (get(b"/v1/responses", WEBSOCKET, version=b"1.0"), *REFUSED),
    "1.2": (get(b"/", version=b"1.2"), *REFUSED),
    "9.9": (get(b"/", version=b"9.9"), *REFUSED),
    "0.9": (get(b"/health/liveliness", version=b"0.9"), *REFUSED),
    "2.0": (get(b"/health/liveliness", version=b"2.0"), *REFUSED),
    "the first line of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", *REFUSED),
    "small letters": (ALIVE.replace(b"HTTP", b"http"), *REFUSED),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10, *REFUSED),
    "empty lines first": (b"\r\n\r\n" + ALIVE, [200], OPEN),
    "a space first": (b" " + ALIVE, *REFUSED),
}
UPGRADES: dict[str, Case] = {
    "HTTP/2 behind a body": (post(H2C, LENGTH), [200], OPEN),
    "HTTP/2 behind chunks": (post(H2C, CHUNKED, rest=b"\r\n" + IN_CHUNKS), [200], OPEN),
    "HTTP/2 without a body": (get(b"/v1/models", H2C), [200], OPEN),
    "HTTP/2 at the end": (post(b"connection: Upgrade, close\r\nupgrade: h2c\r\n", LENGTH), [200], CLOSED),
    "HTTP/2 twice": (post(H2C, LENGTH) * 2, [200, 200], OPEN),
    "a protocol nobody knows": (get(b"/v1/models", b"connection: upgrade\r\nupgrade: foo\r\n"), [200], OPEN),
    "nowhere": (get(b"/v1/nowhere", WEBSOCKET), [404], CLOSED),
    "from another host": (get(b"/v1/responses", WEBSOCKET, host=b"evil.example"), [403], CLOSED),
    "from another origin": (get(b"/v1/responses", WEBSOCKET, b"origin: https://evil.example\r\n"), [403], CLOSED),
    "to an address elsewhere": (get(b"http://evil.example/v1/responses", WEBSOCKET), *REFUSED),
    "a NUL in the path": (get(b"/v1/responses%00", WEBSOCKET), [404], CLOSED),
    "without a key": (get(b"/v1/responses", b"connection: Upgrade\r\nupgrade: websocket\r\n"), *REFUSED),
    "of another version": (get(b"/v1/responses", WEBSOCKET.replace(b"13", b"99")), *REFUSED),
    "with a key that is none": (get(b"/v1/responses", WEBSOCKET.replace(b"dGhl", b"\xe9\xff")), *REFUSED),
    "with two keys": (get(b"/v1/responses", WEBSOCKET, b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"), *REFUSED),
    "with a POST": (post(WEBSOCKET, LENGTH), *REFUSED),
}
ROWS: dict[str, Case] = {
    "two": (ALIVE * 2, [200, 200], OPEN),
    "a thousand": (ALIVE * 1000, [200] * 1000, OPEN),
    "bodies": (ASKED * 3, [200, 200, 200], OPEN),
    "behind one that is refused": (post(b"content-type: text/plain\r\n", LENGTH) + ALIVE, [415, 200], OPEN),
    "behind one that is too large": (post(b"content-length: 20971520\r\n", rest=b"\r\n") + ALIVE, [413], CLOSED),
    "behind the last one": (get(b"/health/liveliness", b"connection: close\r\n") + ALIVE, [200], CLOSED),
    "no HTTP behind one that is not answered yet": (ASKED + b"garbage\r\n\r\n", [200, 400], CLOSED),
    "no HTTP behind several": (ASKED * 3 + b"garbage\r\n\r\n", [200, 200, 200, 400], CLOSED),
    "a body that is longer than it says": (ASKED + b"   ", [200, 400], CLOSED),
    "a line break behind a body": (ASKED + b"\r\n" + ALIVE, [200, 200], OPEN),
    "a broken body behind one that is not answered yet": (
        ASKED + post(CHUNKED, rest=b"\r\nzz\r\n"),
        [200, 400],
        CLOSED,
    ),
    "a broken body behind several": (ASKED + ALIVE + post(CHUNKED, rest=b"\r\nzz\r\n"), [200, 200, 400], CLOSED),
    "endless headers behind one that is not answered yet": (
        ASKED + b"GET / HTTP/1.1\r\nx-a: " + b"y" * 1_000_000,
        [200, 431],
        CLOSED,
    ),
    "a body in place of a refused one that waits to go on": (
        post(b"expect: 100-continue\r\n", b"content-length: 8\r\n", b"content-type: text/plain\r\n", rest=b"\r\n")
        + ASKED,
        [415],
        CLOSED,
    ),
    "a WebSocket behind one that is not answered yet": (ASKED + get(b"/v1/responses", WEBSOCKET), [200, 400], CLOSED),
}
MESSAGES: dict[str, Case] = {
    "two lengths": (post(LENGTH, b"content-length: 5\r\n", path=b"messages"), *REFUSED),
    "a chunk of no size": (post(CHUNKED, rest=b"\r\nzz\r\n", path=b"messages"), *REFUSED),
    "too many headers": (post(b"x-a: y\r\n" * 300, LENGTH, path=b"messages?beta=true"), [431], CLOSED),
    "a header that is too long": (post(b"x-a: " + b"y" * 70_000 + b"\r\n", LENGTH, path=b"messages"), [431], CLOSED),
    "two hosts": (get(b"/v1/messages", b"host: localhost\r\n", method=b"POST"), *REFUSED),
    "an address elsewhere": (get(b"http://evil.example/v1/messages", method=b"POST"), *REFUSED),
    "a letter spelled out": (post(b"host: localhost\r\n", LENGTH, path=b"%6dessages"), *REFUSED),
    "a WebSocket": (get(b"/v1/messages", WEBSOCKET), [404], CLOSED),
    "a WebSocket of a POST": (post(WEBSOCKET, LENGTH, path=b"messages"), *REFUSED),
    "a WebSocket of another version": (get(b"/v1/messages", WEBSOCKET.replace(b"13", b"99")), *REFUSED),
}
ANTHROPIC = re.compile(rb"\S+ (?:http://[^/]*)?/v1/(?:m|%6d)essages[ ?/]")
"""How a request to Anthropic's API begins."""
TABLES = {
    "lengths": LENGTHS,
    "codings": CODINGS,
    "headers": HEADERS,
    "hosts": HOSTS,
    "targets": TARGETS,
    "methods": METHODS,
    "versions": VERSIONS,
    "upgrades": UPGRADES,
    "rows": ROWS,
    "messages": MESSAGES,
}
CASES = {f"{table}: {name}": case for table, cases in TABLES.items() for name, case in cases.items()}


@dataclass
class Site:
    running: Replica
    fake: FakeVllm

    @property
    def port(self) -> int:
        return int(self.running.url.rpartition(":")[2])

    @property
    def generations(self) -> int:
        return sum(seen.path.endswith("/completions") for seen in self.fake.requests)


@dataclass
class Heard:
    """One answer off a connection."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


@dataclass
class Talk:
    """Reads answers one by one; `heads` says of each whether it answers a HEAD."""

    reader: asyncio.StreamReader
    heard: list[Heard] = field(default_factory=list)

    async def answer(self, *, bare: bool = False) -> Heard:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        found = Heard(int(lines[0].split()[1]), headers)
        if found.status >= 200 and not bare:
            found.body = await self._body(headers)
        self.heard.append(found)
        return found

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            return await self.reader.read()
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    done = load_encoding().encode_marked("<|channel|>final<|message|>Done.<|return|>")
    async with FakeVllm(tokens=done) as fake:
        entry = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": fake.url}}
        config = {"model_list": [entry], "store": {"url": "memory://"}}
        async with replica(tmp_path_factory.mktemp("gateway"), config) as running:
            yield Site(running, fake)
            assert not re.search(r'"level": "(warning|error)".*(uvicorn|unisono.api)', running.log)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("case", CASES)
async def test_bytes_have_the_answers_they_should_and_no_other(site: Site, case: str) -> None:
    sent, statuses, stays = CASES[case]
    before = site.generations
    async with asyncio.timeout(SOON_S), connected(site.port) as (reader, writer):
        talk = Talk(reader)
        writer.write(sent)
        for status in statuses:
            answer = await talk.answer(bare=sent.startswith(b"HEAD"))
            assert answer.status == status, answer
            if status >= 400:
                assert answer.headers["content-type"] == "application/json"
                named = {"details"} if ANTHROPIC.match(sent) else {"param", "code"}
                assert set(json.loads(answer.body)["error"]) == {"message", "type"} | named
        if stays:
            writer.write(ALIVE)
            assert (await talk.answer()).body == b'{"status":"alive"}'
        else:
            assert await ended(reader)
    assert site.generations - before <= sent.count(BODY)
    assert site.generations == before or 200 in statuses or not statuses
    async with asyncio.timeout(SOON_S), connected(site.port) as (reader, writer):
        writer.write(ASKED)
        assert (await Talk(reader).answer()).status == 200


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether nothing comes any more; what was still being sent resets the connection."""
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_an_answer_to_http_1_0_has_no_chunks(site: Site) -> None:
    body = BODY[:-1] + b', "stream": true}'
    async with asyncio.timeout(SOON_S), connected(site.port) as (reader, writer):
        writer.write(post(b"content-length: %d\r\n" % len(body), rest=b"\r\n" + body, version=b"1.0"))
        answer = await Talk(reader).answer()
        assert answer.status == 200
        assert "transfer-encoding" not in answer.headers
        assert answer.body.startswith(b"data: {")
        assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_no_header_of_a_client_reaches_a_backend(site: Site) -> None:
    hostile = (
        b"x-forwarded-for: 1.2.3.4\r\nx-forwarded-host: evil.example\r\nforwarded: for=1.2.3.4\r\ncookie: a=b\r\n"
        b"x-api-key: sk-client\r\nauthorization: Bearer sk-client\r\nproxy-authorization: Basic eA==\r\n"
        b"x-request-id: mine\r\nuser-agent: evil\r\naccept: */*\r\nte: trailers\r\nbaggage: a=b\r\n"
        b"openai-organization: evil\r\nx-anything: evil\r\n"
    )
    seen = []
    for headers in ((LENGTH,), (hostile, LENGTH)):
        async with asyncio.timeout(SOON_S), connected(site.port) as (reader, writer):
            writer.write(post(*headers))
            assert (await Talk(reader).answer()).status == 200
        seen.append(site.fake.requests[-1].headers)
    plain, attacked = seen
    assert attacked.keys() == plain.keys()
    assert {name for name in plain if attacked[name] != plain[name]} <= {"x-request-id"}
    assert "mine" not in attacked["x-request-id"]
