"""Contract of every backend for failures: the matching error, and no finish reason."""

from __future__ import annotations

import gzip
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.contract.dialects import Broken, Dialect
from tests.contract.kinds import (
    HTTP_KINDS,
    JOB,
    KEY,
    KINDS,
    FullBacklog,
    Kind,
    backend_at,
    close_steps,
    collect,
    collect_until_failure,
)
from tests.fakes import (
    Refusal,
    Reset,
    WireServer,
    Write,
    close_at,
    half_event_at,
    inject_at,
    reset_at,
    vllm_context_error,
    without_done,
)
from unisono.core.generation import Timeouts
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    ContextTooLong,
    Symptom,
)

# Failures


# Placeholder for the content type of the kind's own streams.
STREAM_TYPE = ""

REFUSALS: dict[str, tuple[Refusal, type[Exception]]] = {
    "500": (Refusal(500, b'{"error": {"message": "boom"}}'), BackendError),
    "502 HTML": (Refusal(502, b"<html>Bad Gateway</html>", "text/html"), BackendError),
    "503": (Refusal(503), BackendOverloaded),
    "503 with an impossible date": (
        Refusal(503, headers={"Retry-After": "Mon, 01 Jan 2024 00:00:00 +99999999999999999999"}),
        BackendOverloaded,
    ),
    "429": (Refusal(429, b'{"error": "slow down"}', headers={"Retry-After": "7"}), BackendOverloaded),
    "400": (Refusal(400, b'{"error": {"message": "temperature must be non-negative"}}'), BackendRejected),
    "422": (Refusal(422, b'{"detail": [{"loc": ["body"]}]}'), BackendRejected),
    "context": (vllm_context_error(), ContextTooLong),
    "401": (Refusal(401, b'{"error": "Unauthorized"}'), BackendUnavailable),
    "403": (Refusal(403, b"no"), BackendUnavailable),
    "404": (Refusal(404, b'{"error": "mx.array: something"}'), BackendError),
    "redirect": (Refusal(307, headers={"Location": "http://127.0.0.1:9/"}), BackendProtocolError),
    "no content": (Refusal(204), BackendProtocolError),
    "HTML in a 200": (Refusal(200, b"<html>Welcome to nginx</html>", "text/html"), BackendProtocolError),
    "HTML as an event stream": (Refusal(200, b"<html>\n\nWelcome\n\n</html>", STREAM_TYPE), BackendProtocolError),
    "JSON in a 200": (Refusal(200, b'{"choices": []}'), BackendProtocolError),
    "error in a 200": (Refusal(200, b'{"error": {"message": "boom"}}'), BackendProtocolError),
    "error object of 2023 in a 200": (
        Refusal(200, b'{"object": "error", "message": "boom", "code": 500}'),
        BackendError,
    ),
    "empty 200": (Refusal(200, b"", STREAM_TYPE), BackendProtocolError),
    "gzip": (Refusal(200, b"\x1f\x8b", STREAM_TYPE, {"Content-Encoding": "gzip"}), BackendProtocolError),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("refusal", "expected"), REFUSALS.values(), ids=REFUSALS)
async def test_response_that_is_not_a_stream_raises_the_matching_error(
    wired: Kind, refusal: Refusal, expected: type[Exception], tmp_path: Path
) -> None:
    response = refusal if refusal.content_type else replace(refusal, content_type=wired.dialect.content_type)
    async with wired.serve(tmp_path, script=lambda request: response) as (backend, _):
        chunks, error = await collect_until_failure(backend)
    assert chunks == []
    assert type(error) is expected


async def test_compressed_error_body_is_not_decompressed(wired: Kind, tmp_path: Path) -> None:
    body = gzip.compress(b'{"error": {"message": "unpacked"}}')
    refusal = Refusal(400, body, headers={"Content-Encoding": "gzip"})
    async with wired.serve(tmp_path, script=lambda request: refusal) as (backend, _):
        with pytest.raises(BackendRejected) as caught:
            await collect(backend)
    assert "unpacked" not in caught.value.message


# Codes of errors that reject the request before the answer. During the answer, they are failures of the backend,
# because a backend that has begun its answer has accepted the request.
ACCUSATIONS = (400, 404, 413, 422)


def error_with(code: int) -> bytes:
    return b'{"error": {"message": "the engine failed", "type": "BadRequestError", "code": %d}}' % code


def broken_streams(dialect: Dialect) -> Broken:
    """Return malformed events for every kind, in the framing of the kind."""
    frame = dialect.frame
    return {
        "RST": (reset_at(2), BackendProtocolError),
        "FIN": (close_at(2), BackendProtocolError),
        "FIN within an event": (half_event_at(2), BackendProtocolError),
        "no end event": (without_done, BackendProtocolError),
        "not JSON": (inject_at(2, frame(b"{garbage")), BackendProtocolError),
        "not UTF-8": (inject_at(2, frame(b'{"choices": [{"text": "\xff\xfe"}]}')), BackendProtocolError),
        "NaN": (inject_at(2, frame(b'{"choices": [{"text": "", "logprobs": NaN}]}')), BackendProtocolError),
        "not an object": (inject_at(2, frame(b"[1, 2]")), BackendProtocolError),
        "deeply nested JSON": (inject_at(2, frame(b"[" * 100_000)), BackendProtocolError),
        "10 MB line": (inject_at(2, frame(b"x" * (10 * 2**20 + 1)).rstrip()), BackendProtocolError),
        "error event": (inject_at(2, frame(b'{"error": {"message": "x", "code": 500}}')), BackendError),
        **{f"error event with {code}": (inject_at(2, frame(error_with(code))), BackendError) for code in ACCUSATIONS},
        "error event for the context": (
            inject_at(2, frame(b'{"error": {"message": "the maximum context length is 9 tokens", "code": 400}}')),
            ContextTooLong,
        ),
        "error event with text": (inject_at(2, frame(b'{"error": "out of memory"}')), BackendProtocolError),
    }


BROKEN = [
    pytest.param(KINDS[kind], broken, expected, id=f"{kind}: {name}")
    for kind in HTTP_KINDS
    for name, (broken, expected) in {**broken_streams(KINDS[kind].dialect), **KINDS[kind].dialect.broken}.items()
]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("wired", "broken", "expected"), BROKEN)
async def test_broken_stream_raises_an_error_and_has_no_finish_reason(
    wired: Kind, broken: Any, expected: type[Exception], tmp_path: Path
) -> None:
    async with wired.serve(tmp_path, faults=(broken,)) as (backend, fake):
        chunks, error = await collect_until_failure(backend)
        assert type(error) is expected
        assert all(chunk.finish is None for chunk in chunks)
        delivered = wired.delivered(chunks)
        assert wired.answer[: len(delivered)] == delivered
        # The broken stream does not affect the next request.
        fake.script = lambda request: Refusal(429)
        assert type((await collect_until_failure(backend))[1]) is BackendOverloaded


async def test_error_event_before_the_output_rejects_the_request(wired: Kind, tmp_path: Path) -> None:
    early = inject_at(0, wired.dialect.frame(error_with(400)))
    async with wired.serve(tmp_path, faults=(early,)) as (backend, _):
        chunks, error = await collect_until_failure(backend)
    assert chunks == []
    assert type(error) is BackendRejected


async def test_output_before_a_disconnect_is_delivered(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, per_chunk=1, delay_s=0.005, faults=(reset_at(5),)) as (backend, _):
        chunks, error = await collect_until_failure(backend)
    assert wired.delivered(chunks) == (wired.answer[:5] if wired.live else "")
    assert isinstance(error, BackendError)


GARBAGE = {
    "not HTTP": [Write(b"SSH-2.0-OpenSSH_9.9\r\n")],
    "endless headers": [Write(b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000)],
    "two content lengths": [Write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n")],
    "invalid chunk size": [
        Write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
    ],
    "immediate FIN": [],
    "immediate RST": [Reset()],
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("steps", GARBAGE.values(), ids=GARBAGE)
async def test_response_that_is_not_http_is_a_backend_error(wired: Kind, steps: list[Any]) -> None:
    async with WireServer(lambda seen: [*steps, *close_steps()]) as server:
        backend = backend_at(wired, server)
        chunks, error = await collect_until_failure(backend)
        with pytest.raises(BackendError):
            await backend.probe()
        await backend.aclose()
    assert chunks == []
    assert isinstance(error, BackendError)


async def test_closed_port_is_unavailable(wired: Kind) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    backend = backend_at(wired, f"http://127.0.0.1:{port}")
    with pytest.raises(BackendUnavailable) as caught:
        await collect(backend)
    assert caught.value.symptom is Symptom.NO_CONNECTION
    with pytest.raises(BackendUnavailable):
        await backend.probe()
    await backend.aclose()


async def test_unknown_host_is_unavailable(wired: Kind) -> None:
    backend = backend_at(wired, "http://no-such-host.invalid:1")
    with pytest.raises(BackendUnavailable) as caught:
        await collect(backend)
    assert caught.value.symptom is Symptom.NO_CONNECTION
    await backend.aclose()


async def test_connection_not_accepted_in_time_is_a_timeout(wired: Kind) -> None:
    with FullBacklog() as address:
        backend = backend_at(wired, address)
        _, error = await collect_until_failure(backend, replace(JOB, timeouts=Timeouts(connect_s=0.1)))
        await backend.aclose()
    assert type(error) is BackendTimeout
    assert error.symptom is Symptom.NO_CONNECTION


BREAKS = {"immediate FIN": close_steps(), "immediate RST": [Reset()]}


@pytest.mark.parametrize("steps", BREAKS.values(), ids=BREAKS)
async def test_disconnect_after_the_request_has_the_symptom_disconnected(wired: Kind, steps: list[Any]) -> None:
    async with WireServer(lambda seen: steps) as server:
        backend = backend_at(wired, server)
        _, error = await collect_until_failure(backend)
        await backend.aclose()
    assert isinstance(error, BackendError)
    assert error.symptom is Symptom.DISCONNECTED


async def test_overload_error_has_the_retry_after_time(wired: Kind, tmp_path: Path) -> None:
    refusal = Refusal(503, headers={"Retry-After": "7"})
    async with wired.serve(tmp_path, script=lambda request: refusal) as (backend, _):
        with pytest.raises(BackendOverloaded) as caught:
            await collect(backend)
    assert caught.value.retry_after_s == 7.0


async def test_errors_reveal_neither_the_key_nor_the_address(wired: Kind, tmp_path: Path) -> None:
    for status in (400, 401, 403, 404, 429, 500):
        body = orjson.dumps({"error": {"message": f"bad key {KEY}\n\x1b[31m"}})
        refusal = Refusal(status, body)
        async with wired.serve(tmp_path, script=lambda request, refusal=refusal: refusal) as (backend, fake):
            _, error = await collect_until_failure(backend)
            assert isinstance(error, BackendError)
            for message in (error.message, str(error.__cause__)):
                assert KEY not in message
                assert "\x1b" not in message
                assert str(fake.port) not in message
