"""Compressed request bodies: accepted, bounded, and refused with a clear error."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import threading
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from random import Random

import pytest
import pytest_asyncio
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.gateway import Answer
from tests.e2e.responses import Line, line
from tests.e2e.wires import WIRES
from unisono.api.body_decompression import CODINGS, MAX_MEMBERS, PIECE_BYTES, ContentCoding, Unpacking
from unisono.errors import BodyTooLarge, InvalidRequest

MAX_BODY = 4 * 1024 * 1024
BODY = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi " * 300}]}).encode()
PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
# A compressor that does not know the size of its input declares its whole window.
_COMPRESSOR = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
WIDE = _COMPRESSOR.compress(BODY) + _COMPRESSOR.flush()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Line]:
    async with line(WIRES["vllm"], unisono={"max_body_bytes": MAX_BODY}) as running:
        yield running


async def send(harness: Line, body: bytes, coding: str, path: str = "/v1/chat/completions") -> Answer:
    return await harness.gateway.post(path, body, **{"Content-Encoding": coding})


@pytest.mark.parametrize("coding", ["gzip", "zstd", "x-gzip", "GZIP", "identity"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_compressed_body_is_read_like_a_plain_one(harness: Line, coding: str) -> None:
    pack = PACK.get(coding.lower().removeprefix("x-"), bytes)
    answer = await send(harness, pack(BODY), coding)
    assert answer.status == 200, answer.raw
    assert "Hi Hi Hi" in harness.prompts[-1]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_library_of_a_coding_is_imported_in_a_thread(harness: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    importers: list[threading.Thread] = []
    load = CODINGS["zstd"]

    def recorded() -> ContentCoding:
        importers.append(threading.current_thread())
        return load()

    monkeypatch.setitem(CODINGS, "zstd", recorded)
    assert (await send(harness, zstd.compress(BODY), "zstd")).status == 200
    assert len(importers) == 1
    assert importers[0] is not threading.current_thread()


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_route_with_a_body_reads_it(harness: Line, coding: str) -> None:
    response = json.dumps({"model": "gpt-oss", "input": "Hi"}).encode()
    message = json.dumps(
        {"model": "gpt-oss", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]}
    ).encode()
    for path, body in (("/v1/responses", response), ("/v1/messages", message), ("/v1/messages/count_tokens", message)):
        assert (await send(harness, PACK[coding](body), coding, path)).status == 200


def zeros(size: int, coding: str) -> bytes:
    return gzip.compress(bytes(size), 1) if coding == "gzip" else zstd.compress(bytes(size), 1)


REFUSED: dict[str, tuple[Callable[[], bytes], str, int, str]] = {
    "a bomb in gzip": (lambda: zeros(50_000_000, "gzip"), "gzip", 413, "unpack"),
    "a bomb in zstd": (lambda: zeros(50_000_000, "zstd"), "zstd", 413, "unpack"),
    "a bomb in many members": (lambda: zeros(500_000, "gzip") * 20, "gzip", 413, "unpack"),
    "above the body limit, at a low ratio": (
        lambda: gzip.compress(bytes(i * 7919 % 251 for i in range(5_000_000))),
        "gzip",
        413,
        "larger than",
    ),
    "truncated gzip": (lambda: gzip.compress(BODY)[:-9], "gzip", 400, "complete"),
    "truncated zstd": (lambda: zstd.compress(BODY)[:-3], "zstd", 400, "complete"),
    "not gzip": (lambda: BODY, "gzip", 400, "not valid gzip"),
    "not zstd": (lambda: BODY, "zstd", 400, "not valid zstd"),
    "garbage after gzip": (lambda: gzip.compress(BODY) + b"garbage", "gzip", 400, "not valid gzip"),
    "garbage after zstd": (lambda: zstd.compress(BODY) + b"garbage", "zstd", 400, "not valid zstd"),
    "a zstd window above the limit": (lambda: WIDE, "zstd", 400, "not valid zstd"),
    "too many members": (lambda: gzip.compress(b"") * (MAX_MEMBERS + 1), "gzip", 400, "members"),
    "an unknown coding": (lambda: BODY, "br", 415, "Content-Encoding"),
    "two codings": (lambda: gzip.compress(gzip.compress(BODY)), "gzip, gzip", 415, "Content-Encoding"),
    "gzip without the header": (lambda: gzip.compress(BODY), "identity", 400, "Content-Encoding: gzip"),
    "zstd without the header": (lambda: zstd.compress(BODY), "identity", 400, "Content-Encoding: zstd"),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("body", "coding", "status", "reason"), REFUSED.values(), ids=REFUSED)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_invalid_compressed_body_is_refused(
    harness: Line, body: Callable[[], bytes], coding: str, status: int, reason: str
) -> None:
    answer = await send(harness, body(), coding)
    assert answer.status == status, answer.raw
    assert reason in answer.body["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_bombs_occupy_no_memory(harness: Line) -> None:
    bombs = [zeros(200_000_000, "gzip"), zeros(200_000_000, "zstd")]
    await send(harness, bombs[0], "gzip")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5):
        answers = await asyncio.gather(
            *(send(harness, bomb, coding) for bomb, coding in zip(bombs * 2, ["gzip", "zstd"] * 2, strict=True))
        )
        assert {answer.status for answer in answers} == {413}
    # In kilobytes on Linux, in bytes on macOS: the looser reading passes on both.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


@settings(max_examples=60, deadline=None)
@given(
    body=st.binary(max_size=3000),
    coding=st.sampled_from(sorted(PACK)),
    cuts=st.lists(st.integers(0, 4000), max_size=6),
    members=st.integers(1, 3),
)
def test_any_portions_give_the_original_bytes(body: bytes, coding: str, cuts: list[int], members: int) -> None:
    packed = PACK[coding](body) * members
    unpacking = Unpacking(coding, 1 << 20)
    found = b""
    places = sorted({0, len(packed), *(cut % (len(packed) + 1) for cut in cuts)})
    for begin, end in pairwise(places):
        unpacking.feed(packed[begin:end])
        while piece := unpacking.piece():
            found += piece
    unpacking.finish()
    assert found == body * members


@given(data=st.binary(max_size=400), coding=st.sampled_from(sorted(PACK)))
def test_any_bytes_raise_only_errors_of_the_request(data: bytes, coding: str) -> None:
    unpacking = Unpacking(coding, 10_000)
    try:
        unpacking.feed(data)
        while unpacking.piece():
            pass
        unpacking.finish()
    except (InvalidRequest, BodyTooLarge):
        pass


def test_a_piece_is_never_larger_than_its_limit() -> None:
    for coding in PACK:
        unpacking = Unpacking(coding, 64 * PIECE_BYTES)
        unpacking.feed(PACK[coding](Random(1).randbytes(3 * PIECE_BYTES)))
        sizes = []
        while piece := unpacking.piece():
            sizes.append(len(piece))
        assert sum(sizes) == 3 * PIECE_BYTES
        assert max(sizes) <= PIECE_BYTES
