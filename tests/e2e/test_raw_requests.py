"""Raw HTTP requests, as no client library sends them, against one gateway process.

Each case gets exactly its expected responses, reaches a backend only if it should, and leaves the gateway able to
serve the next client.
"""

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

REQUEST_TIMEOUT_S = 20.0
BODY = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKED_BODY = b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
SENT_BODY = b"\r\n" + BODY


def post(*headers: bytes, rest: bytes = SENT_BODY, version: bytes = b"1.1", path: bytes = b"chat/completions") -> bytes:
    head = b"POST /v1/" + path + b" HTTP/" + version + b"\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"".join(headers) + rest


def get(
    target: bytes, *headers: bytes, version: bytes = b"1.1", method: bytes = b"GET", host: bytes = b"localhost"
) -> bytes:
    return method + b" " + target + b" HTTP/" + version + b"\r\nhost: " + host + b"\r\n" + b"".join(headers) + b"\r\n"


CHAT_REQUEST = post(LENGTH)
HEALTH_REQUEST = get(b"/health/liveliness")
NO_HOST = HEALTH_REQUEST.replace(b"host: localhost\r\n", b"")
WEBSOCKET = (
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"

OPEN, CLOSED = True, False
# Bytes to send, expected statuses, and whether the connection stays usable.
Case = tuple[bytes, Sequence[int], bool]
REFUSED: tuple[Sequence[int], bool] = ((400,), CLOSED)

LENGTHS: dict[str, Case] = {
    "one content length": (CHAT_REQUEST, [200], OPEN),
    "duplicate content length": (post(LENGTH, LENGTH), *REFUSED),
    "conflicting content lengths": (post(LENGTH, b"content-length: 5\r\n"), *REFUSED),
    "content length list": (post(b"content-length: %d, %d\r\n" % (len(BODY), len(BODY))), *REFUSED),
    "negative content length": (post(b"content-length: -5\r\n"), *REFUSED),
    "content length with a sign": (post(b"content-length: +5\r\n"), *REFUSED),
    "hexadecimal content length": (post(b"content-length: 0x5\r\n"), *REFUSED),
    "empty content length": (post(b"content-length:\r\n"), *REFUSED),
    "two numbers in a content length": (post(b"content-length: 5 5\r\n"), *REFUSED),
    "content length beyond 64 bits": (post(b"content-length: 99999999999999999999999\r\n"), *REFUSED),
    "excessive content length": (post(b"content-length: 20971520\r\n"), [413], CLOSED),
    "excessive content length for Messages": (
        post(b"content-length: 20971520\r\n", path=b"messages"),
        [413],
        CLOSED,
    ),
    "content length and chunked": (post(LENGTH, CHUNKED, rest=b"\r\n" + CHUNKED_BODY), *REFUSED),
    "chunked and content length": (post(CHUNKED, LENGTH, rest=b"\r\n" + CHUNKED_BODY), *REFUSED),
    "content_length with an underscore": (post(b"content_length: 5\r\n", LENGTH), [200], OPEN),
    "GET with a body": (get(b"/v1/models", b"content-length: 5\r\n") + b"hello", [200], OPEN),
}
CODINGS: dict[str, Case] = {
    "chunked": (post(CHUNKED, rest=b"\r\n" + CHUNKED_BODY), [200], OPEN),
    "chunked in capitals": (post(CHUNKED.upper(), rest=b"\r\n" + CHUNKED_BODY), [200], OPEN),
    "chunk extensions": (post(CHUNKED, rest=b"\r\n" + CHUNKED_BODY.replace(b"\r\n", b";a=b\r\n", 1)), [200], OPEN),
    "trailers": (post(CHUNKED, rest=b"\r\n" + CHUNKED_BODY[:-2] + b"x-a: b\r\n\r\n"), [200], OPEN),
    "chunked GET": (get(b"/v1/models", CHUNKED) + b"5\r\nhello\r\n0\r\n\r\n", [200], OPEN),
    "chunked twice": (post(CHUNKED, CHUNKED, rest=b"\r\n" + CHUNKED_BODY), *REFUSED),
    "identity": (post(b"transfer-encoding: identity\r\n"), *REFUSED),
    "chunked before identity": (post(b"transfer-encoding: chunked, identity\r\n"), *REFUSED),
    "gzip before chunked": (post(b"transfer-encoding: gzip, chunked\r\n", rest=b"\r\n" + CHUNKED_BODY), *REFUSED),
    "unknown transfer coding": (post(b"transfer-encoding: xchunked\r\n", rest=b"\r\n" + CHUNKED_BODY), *REFUSED),
    "chunked after a vertical tab": (
        post(b"transfer-encoding: \x0bchunked\r\n", rest=b"\r\n" + CHUNKED_BODY),
        *REFUSED,
    ),
    "chunked after a no-break space": (
        post(b"transfer-encoding: \xa0chunked\r\n", rest=b"\r\n" + CHUNKED_BODY),
        *REFUSED,
    ),
    "space before the colon": (post(b"transfer-encoding : chunked\r\n", rest=b"\r\n" + CHUNKED_BODY), *REFUSED),
    "invalid chunk size": (post(CHUNKED, rest=b"\r\nzz\r\n"), *REFUSED),
    "negative chunk size": (post(CHUNKED, rest=b"\r\n-1\r\n"), *REFUSED),
    "chunk size beyond 64 bits": (post(CHUNKED, rest=b"\r\nffffffffffffffffff\r\n"), *REFUSED),
    "chunk longer than its size": (post(CHUNKED, rest=b"\r\n2\r\nabcdef\r\n0\r\n\r\n"), *REFUSED),
    "chunked with bare line feeds": (post(CHUNKED, rest=b"\r\n" + CHUNKED_BODY.replace(b"\r\n", b"\n")), *REFUSED),
    "plain body declared as gzip": (post(b"content-encoding: gzip\r\n", LENGTH), [400], OPEN),
    "unknown content coding": (post(b"content-encoding: br\r\n", LENGTH), [415], OPEN),
    "another charset": (CHAT_REQUEST.replace(b"json\r\n", b"json; charset=utf-16\r\n", 1), [415], OPEN),
}
HEADERS: dict[str, Case] = {
    "folded header": (post(b"x-a: 1\r\n 2\r\n", LENGTH), *REFUSED),
    "no name": (post(b": x\r\n", LENGTH), *REFUSED),
    "space in a name": (post(b"x a: 1\r\n", LENGTH), *REFUSED),
    "NUL": (post(b"x-a: \0\r\n", LENGTH), *REFUSED),
    "bare carriage return": (post(b"x-a: 1\r2\r\n", LENGTH), *REFUSED),
    "bare line feeds": (post(LENGTH).replace(b"\r\n", b"\n"), *REFUSED),
    "non-ASCII bytes": (post(b"x-a: \xe9\xff\r\n", LENGTH), [200], OPEN),
    "header too long": (post(b"x-a: " + b"y" * 70_000 + b"\r\n", LENGTH), [431], CLOSED),
    "too many headers": (post(b"x-a: y\r\n" * 300, LENGTH), [431], CLOSED),
    "maximum number of headers": (post(b"x-a: y\r\n" * 253, LENGTH), [200], OPEN),
    "invalid traceparent": (post(b"traceparent: 00-\r\ntraceparent: x\r\n", LENGTH), [200], OPEN),
    "idempotency key of 5 kB": (
        post(b"idempotency-key: " + b"x" * 5000 + b"\r\n", LENGTH, path=b"responses"),
        [400],
        OPEN,
    ),
    "the same API key in two headers": (post(b"x-api-key: k\r\nauthorization: Bearer k\r\n", LENGTH), [200], OPEN),
    "Messages without max_tokens": (post(LENGTH, path=b"messages"), [400], OPEN),
    "expect 100-continue": (post(b"expect: 100-continue\r\n", LENGTH), [100, 200], OPEN),
    "unknown expectation": (post(b"expect: 200-ok\r\n", LENGTH), [200], OPEN),
}
HOSTS: dict[str, Case] = {
    "no host": (NO_HOST, *REFUSED),
    "two hosts": (get(b"/v1/models", b"host: localhost\r\n"), *REFUSED),
    "empty host": (get(b"/v1/models", host=b""), [403], OPEN),
    "foreign host": (get(b"/v1/models", host=b"evil.example"), [403], OPEN),
    "host with an allowed prefix": (get(b"/v1/models", host=b"localhost.evil.example"), [403], OPEN),
    "host with a path": (get(b"/v1/models", host=b"localhost/health/liveliness?"), [403], OPEN),
    "host with a user": (get(b"/v1/models", host=b"localhost@evil.example"), [403], OPEN),
    "loopback address": (get(b"/v1/models", host=b"[::1]:4000"), [200], OPEN),
}
TARGETS: dict[str, Case] = {
    "absolute URL of this host": (get(b"http://localhost/v1/models"), [200], OPEN),
    "absolute URL of a foreign host": (get(b"http://evil.example/v1/models"), *REFUSED),
    "absolute URL with a user": (get(b"http://localhost@evil.example/v1/models"), *REFUSED),
    "absolute URL without a path": (get(b"http://localhost"), *REFUSED),
    "absolute URL with another scheme": (get(b"ftp://localhost/v1/models"), *REFUSED),
    "two slashes": (get(b"//v1/models"), [404], OPEN),
    "two slashes and a host": (get(b"//evil.example/v1/models"), [404], OPEN),
    "two slashes inside": (get(b"/v1//models"), [404], OPEN),
    "dots": (get(b"/nowhere/../v1/models"), [404], OPEN),
    "encoded dots": (get(b"/nowhere/%2e%2e/v1/models"), [404], OPEN),
    "path traversal in an id": (get(b"/v1/responses/..%2f..%2fetc%2fpasswd"), [404], OPEN),
    "encoded NUL": (get(b"/v1/models%00"), [404], OPEN),
    "encoded NUL in an id": (get(b"/v1/responses/resp_%00"), [404], OPEN),
    "NUL": (get(b"/v1/models\0"), *REFUSED),
    "encoded line break": (get(b"/v1/models%0d%0aset-cookie:%20x"), [404], OPEN),
    "backslashes": (get(b"\\v1\\models"), *REFUSED),
    "no slash": (get(b"v1/models"), *REFUSED),
    "asterisk": (get(b"*"), *REFUSED),
    "asterisk for OPTIONS": (get(b"*", method=b"OPTIONS"), [404], OPEN),
    "tab": (get(b"/v1/a\tb"), *REFUSED),
    "lone percent sign": (get(b"/v1/models%"), [404], OPEN),
    "incomplete UTF-8": (get(b"/v1/models/%ff%fe"), [404], OPEN),
    "encoded surrogate": (get(b"/v1/responses/%ed%a0%80"), [404], OPEN),
    "non-ASCII bytes": (get(b"/v1/\xff"), *REFUSED),
    "query of encoded bytes": (get(b"/v1/models?%ff&=&&x"), [200], OPEN),
    "very long number": (get(b"/v1/responses/r?stream=true&starting_after=" + b"9" * 6000), [400], OPEN),
    "negative limit": (get(b"/v1/conversations/conv_1/items?limit=-1"), [400], OPEN),
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
    "unknown method": (get(b"/v1/models", method=b"BREW"), *REFUSED),
    "method in small letters": (get(b"/v1/models", method=b"get"), *REFUSED),
    "method of 5 kB": (get(b"/v1/models", method=b"X" * 5000), *REFUSED),
}
VERSIONS: dict[str, Case] = {
    "1.0": (get(b"/health/liveliness", version=b"1.0"), [200], CLOSED),
    "1.0 with keep-alive": (get(b"/health/liveliness", b"connection: keep-alive\r\n", version=b"1.0"), [200], CLOSED),
    "1.0 without a host": (NO_HOST.replace(b"1.1", b"1.0"), [403], CLOSED),
    "1.0 with chunked body": (post(CHUNKED, rest=b"\r\n" + CHUNKED_BODY, version=b"1.0"), *REFUSED),
    "1.0 for a WebSocket": (get(b"/v1/responses", WEBSOCKET, version=b"1.0"), *REFUSED),
    "1.2": (get(b"/", version=b"1.2"), *REFUSED),
    "9.9": (get(b"/", version=b"9.9"), *REFUSED),
    "0.9": (get(b"/health/liveliness", version=b"0.9"), *REFUSED),
    "2.0": (get(b"/health/liveliness", version=b"2.0"), *REFUSED),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", *REFUSED),
    "protocol in small letters": (HEALTH_REQUEST.replace(b"HTTP", b"http"), *REFUSED),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10, *REFUSED),
    "empty lines first": (b"\r\n\r\n" + HEALTH_REQUEST, [200], OPEN),
    "leading space": (b" " + HEALTH_REQUEST, *REFUSED),
}
UPGRADES: dict[str, Case] = {
    "h2c with a body": (post(H2C, LENGTH), [200], OPEN),
    "h2c with a chunked body": (post(H2C, CHUNKED, rest=b"\r\n" + CHUNKED_BODY), [200], OPEN),
    "h2c without a body": (get(b"/v1/models", H2C), [200], OPEN),
    "h2c with close": (post(b"connection: Upgrade, close\r\nupgrade: h2c\r\n", LENGTH), [200], CLOSED),
    "h2c twice": (post(H2C, LENGTH) * 2, [200, 200], OPEN),
    "unknown protocol": (get(b"/v1/models", b"connection: upgrade\r\nupgrade: foo\r\n"), [200], OPEN),
    "WebSocket on an unknown path": (get(b"/v1/nowhere", WEBSOCKET), [404], CLOSED),
    "WebSocket with a foreign host": (get(b"/v1/responses", WEBSOCKET, host=b"evil.example"), [403], CLOSED),
    "WebSocket from a foreign origin": (
        get(b"/v1/responses", WEBSOCKET, b"origin: https://evil.example\r\n"),
        [403],
        CLOSED,
    ),
    "WebSocket with a foreign absolute URL": (get(b"http://evil.example/v1/responses", WEBSOCKET), *REFUSED),
    "WebSocket with a NUL in the path": (get(b"/v1/responses%00", WEBSOCKET), [404], CLOSED),
    "WebSocket without a key": (get(b"/v1/responses", b"connection: Upgrade\r\nupgrade: websocket\r\n"), *REFUSED),
    "WebSocket of another version": (get(b"/v1/responses", WEBSOCKET.replace(b"13", b"99")), *REFUSED),
    "WebSocket with an invalid key": (get(b"/v1/responses", WEBSOCKET.replace(b"dGhl", b"\xe9\xff")), *REFUSED),
    "WebSocket with two keys": (
        get(b"/v1/responses", WEBSOCKET, b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"),
        *REFUSED,
    ),
    "WebSocket with a POST": (post(WEBSOCKET, LENGTH), *REFUSED),
}
PIPELINES: dict[str, Case] = {
    "two requests": (HEALTH_REQUEST * 2, [200, 200], OPEN),
    "a hundred requests": (HEALTH_REQUEST * 100, [200] * 100, OPEN),
    "requests with bodies": (CHAT_REQUEST * 3, [200, 200, 200], OPEN),
    "after a rejected request": (post(b"content-type: text/plain\r\n", LENGTH) + HEALTH_REQUEST, [415, 200], OPEN),
    "after a request that is too large": (
        post(b"content-length: 20971520\r\n", rest=b"\r\n") + HEALTH_REQUEST,
        [413],
        CLOSED,
    ),
    "after connection close": (get(b"/health/liveliness", b"connection: close\r\n") + HEALTH_REQUEST, [200], CLOSED),
    "garbage after an unanswered request": (CHAT_REQUEST + b"garbage\r\n\r\n", [200, 400], CLOSED),
    "garbage after several requests": (CHAT_REQUEST * 3 + b"garbage\r\n\r\n", [200, 200, 200, 400], CLOSED),
    "body longer than its content length": (CHAT_REQUEST + b"   ", [200, 400], CLOSED),
    "line break after a body": (CHAT_REQUEST + b"\r\n" + HEALTH_REQUEST, [200, 200], OPEN),
    "invalid body after an unanswered request": (
        CHAT_REQUEST + post(CHUNKED, rest=b"\r\nzz\r\n"),
        [200, 400],
        CLOSED,
    ),
    "invalid body after several requests": (
        CHAT_REQUEST + HEALTH_REQUEST + post(CHUNKED, rest=b"\r\nzz\r\n"),
        [200, 200, 400],
        CLOSED,
    ),
    "endless headers after an unanswered request": (
        CHAT_REQUEST + b"GET / HTTP/1.1\r\nx-a: " + b"y" * 1_000_000,
        [200, 431],
        CLOSED,
    ),
    "request instead of a rejected body after 100-continue": (
        post(b"expect: 100-continue\r\n", b"content-length: 8\r\n", b"content-type: text/plain\r\n", rest=b"\r\n")
        + CHAT_REQUEST,
        [415],
        CLOSED,
    ),
    "WebSocket after an unanswered request": (CHAT_REQUEST + get(b"/v1/responses", WEBSOCKET), [200, 400], CLOSED),
}
MESSAGES: dict[str, Case] = {
    "conflicting content lengths": (post(LENGTH, b"content-length: 5\r\n", path=b"messages"), *REFUSED),
    "invalid chunk size": (post(CHUNKED, rest=b"\r\nzz\r\n", path=b"messages"), *REFUSED),
    "too many headers": (post(b"x-a: y\r\n" * 300, LENGTH, path=b"messages?beta=true"), [431], CLOSED),
    "header too long": (post(b"x-a: " + b"y" * 70_000 + b"\r\n", LENGTH, path=b"messages"), [431], CLOSED),
    "two hosts": (get(b"/v1/messages", b"host: localhost\r\n", method=b"POST"), *REFUSED),
    "absolute URL of a foreign host": (get(b"http://evil.example/v1/messages", method=b"POST"), *REFUSED),
    "encoded letter in the path": (post(b"host: localhost\r\n", LENGTH, path=b"%6dessages"), *REFUSED),
    "WebSocket": (get(b"/v1/messages", WEBSOCKET), [404], CLOSED),
    "WebSocket with a POST": (post(WEBSOCKET, LENGTH, path=b"messages"), *REFUSED),
    "WebSocket of another version": (get(b"/v1/messages", WEBSOCKET.replace(b"13", b"99")), *REFUSED),
}
# Matches a request line of Anthropic's API.
ANTHROPIC_REQUEST = re.compile(rb"\S+ (?:http://[^/]*)?/v1/(?:m|%6d)essages[ ?/]")
TABLES = {
    "lengths": LENGTHS,
    "codings": CODINGS,
    "headers": HEADERS,
    "hosts": HOSTS,
    "targets": TARGETS,
    "methods": METHODS,
    "versions": VERSIONS,
    "upgrades": UPGRADES,
    "pipelines": PIPELINES,
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
class RawResponse:
    """A response as read from a connection."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


@dataclass
class ResponseReader:
    """Read responses one by one and collect them in `responses`."""

    reader: asyncio.StreamReader
    responses: list[RawResponse] = field(default_factory=list)

    async def next_response(self, *, without_body: bool = False) -> RawResponse:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        response = RawResponse(int(lines[0].split()[1]), headers)
        if response.status >= 200 and not without_body:
            response.body = await self._body(headers)
        self.responses.append(response)
        return response

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
    tokens = load_encoding().encode_marked("<|channel|>final<|message|>Done.<|return|>")
    async with FakeVllm(tokens=tokens) as fake:
        entry = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": fake.url}}
        config = {"model_list": [entry], "store": {"url": "memory://"}}
        async with replica(tmp_path_factory.mktemp("gateway"), config) as running:
            yield Site(running, fake)
            assert not re.search(r'"level": "(warning|error)".*(uvicorn|unisono.api)', running.log)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("case", CASES)
async def test_a_raw_request_gets_exactly_the_expected_responses(site: Site, case: str) -> None:
    request, statuses, stays_open = CASES[case]
    before = site.generations
    async with asyncio.timeout(REQUEST_TIMEOUT_S), connected(site.port) as (reader, writer):
        connection = ResponseReader(reader)
        writer.write(request)
        for status in statuses:
            response = await connection.next_response(without_body=request.startswith(b"HEAD"))
            assert response.status == status, response
            if status >= 400:
                assert response.headers["content-type"] == "application/json"
                error_fields = {"details"} if ANTHROPIC_REQUEST.match(request) else {"param", "code"}
                assert set(json.loads(response.body)["error"]) == {"message", "type"} | error_fields
        if stays_open:
            writer.write(HEALTH_REQUEST)
            assert (await connection.next_response()).body == b'{"status":"alive"}'
        else:
            assert await is_closed(reader)
    assert site.generations - before <= request.count(BODY)
    assert site.generations == before or 200 in statuses or not statuses
    async with asyncio.timeout(REQUEST_TIMEOUT_S), connected(site.port) as (reader, writer):
        writer.write(CHAT_REQUEST)
        assert (await ResponseReader(reader).next_response()).status == 200


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server closed the connection; unread data may cause a reset."""
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_a_response_to_http_1_0_is_not_chunked(site: Site) -> None:
    body = BODY[:-1] + b', "stream": true}'
    async with asyncio.timeout(REQUEST_TIMEOUT_S), connected(site.port) as (reader, writer):
        writer.write(post(b"content-length: %d\r\n" % len(body), rest=b"\r\n" + body, version=b"1.0"))
        response = await ResponseReader(reader).next_response()
        assert response.status == 200
        assert "transfer-encoding" not in response.headers
        assert response.body.startswith(b"data: {")
        assert response.body.endswith(b"data: [DONE]\n\n")


async def test_no_client_header_reaches_a_backend(site: Site) -> None:
    hostile_headers = (
        b"x-forwarded-for: 1.2.3.4\r\nx-forwarded-host: evil.example\r\nforwarded: for=1.2.3.4\r\ncookie: a=b\r\n"
        b"x-api-key: sk-client\r\nauthorization: Bearer sk-client\r\nproxy-authorization: Basic eA==\r\n"
        b"x-request-id: mine\r\nuser-agent: evil\r\naccept: */*\r\nte: trailers\r\nbaggage: a=b\r\n"
        b"openai-organization: evil\r\nx-anything: evil\r\n"
    )
    backend_headers = []
    for headers in ((LENGTH,), (hostile_headers, LENGTH)):
        async with asyncio.timeout(REQUEST_TIMEOUT_S), connected(site.port) as (reader, writer):
            writer.write(post(*headers))
            assert (await ResponseReader(reader).next_response()).status == 200
        backend_headers.append(site.fake.requests[-1].headers)
    expected, actual = backend_headers
    assert actual.keys() == expected.keys()
    assert {name for name in expected if actual[name] != expected[name]} <= {"x-request-id"}
    assert "mine" not in actual["x-request-id"]
