"""Contract of every backend for successful generations, with its fake server."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.dialects import SAMPLING
from tests.contract.kinds import (
    ENCODING,
    HTTP_KINDS,
    JOB,
    KEY,
    KINDS,
    Kind,
    backend_at,
    close_steps,
    collect,
)
from tests.fakes import (
    WireServer,
    Write,
    done_twice,
    in_one_write,
    inject_at,
    line_ends,
    recut,
)
from unisono.core.generation import Capabilities, Chunk, FinishReason, OutputForm, Prompt, Sampling

# Output


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
async def test_answer_is_complete_for_every_chunk_size(kind: Kind, per_chunk: int, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, per_chunk=per_chunk) as (backend, _):
        assert kind.delivered(await collect(backend)) == kind.answer


async def test_only_the_last_chunk_has_a_finish_reason(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, delay_s=0.001) as (backend, _):
        chunks = await collect(backend)
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("finish", list(FinishReason))
async def test_finish_reason_is_that_of_the_server(kind: Kind, finish: FinishReason, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, finish=finish.value) as (backend, _):
        assert (await collect(backend))[-1].finish is finish


async def test_max_tokens_cuts_the_answer(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, per_chunk=1) as (backend, _):
        chunks = await collect(backend, replace(JOB, max_tokens=5))
    assert kind.delivered(chunks) == kind.answer[:5]
    assert chunks[-1].finish is FinishReason.LENGTH


async def test_probe_reports_the_output_form(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path) as (backend, _):
        capabilities = (await backend.probe()).capabilities
    assert isinstance(capabilities, Capabilities)
    assert capabilities.output is kind.output
    assert capabilities.stop_visible is (kind.output is OutputForm.IDS)


async def test_concurrent_answers_do_not_mix(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, delay_s=0.002) as (backend, _):
        answers = await asyncio.gather(*(collect(backend) for _ in range(8)))
    assert [kind.delivered(chunks) for chunks in answers] == [kind.answer] * 8


async def test_backend_answers_consecutive_requests(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path) as (backend, _):
        for _ in range(3):
            assert kind.delivered(await collect(backend)) == kind.answer


# Chunks that are taken in the network callback


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_each_chunk_is_either_taken_or_yielded_in_order(kind: Kind, share: float, tmp_path: Path) -> None:
    chance = random.Random(1)
    chunks: list[Chunk] = []

    def on_chunk(chunk: Chunk) -> bool:
        is_taken = chance.random() < share
        if is_taken:
            chunks.append(chunk)
        return is_taken

    async with kind.serve(tmp_path, delay_s=0.001, per_chunk=1) as (backend, _):
        async for chunk in backend.complete(replace(JOB, on_chunk=on_chunk)):
            chunks.append(chunk)
    assert kind.delivered(chunks) == kind.answer
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.STOP]


async def test_only_the_end_is_yielded_if_all_chunks_are_taken(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, delay_s=0.001, per_chunk=1) as (backend, _):
        chunks = await collect(backend, replace(JOB, on_chunk=lambda _: True))
    assert len(chunks) < 5 < len(wired.answer)
    assert chunks[-1].finish is FinishReason.STOP


async def test_an_error_while_taking_is_raised_to_the_reader(wired: Kind, tmp_path: Path) -> None:
    def on_chunk(chunk: Chunk) -> bool:
        raise ZeroDivisionError

    async with wired.serve(tmp_path, delay_s=0.001, per_chunk=1) as (backend, _):
        with pytest.raises(ZeroDivisionError):
            await collect(backend, replace(JOB, on_chunk=on_chunk))
        # The connection to the server still works.
        assert wired.delivered(await collect(backend)) == wired.answer


# Framing

CUTS: dict[str, tuple[Any, ...]] = {
    "single bytes": (recut(1, 0),),
    "7-byte pieces": (recut(7, 0.0001),),
    "one write": (in_one_write,),
    "CR": (line_ends(b"\r"),),
    "CRLF": (line_ends(b"\r\n"),),
    "split CRLF": (line_ends(b"\r\n"), recut(5, 0.0001)),
    "mixed line ends": (line_ends(b"\r", b"\r\n", b"\n", b"\n"), recut(11, 0.0001)),
    "comments and keep-alives": (inject_at(1, b": keep-alive\n\n:\n\n"), inject_at(0, b":\n")),
    "unknown fields": (inject_at(0, b"event: x\nid: 1\nretry: 5\nnonsense\n\n"),),
    "duplicate [DONE]": (done_twice,),
}


EVENT_STREAM_CUTS = ("CR", "split CRLF", "mixed line ends", "comments and keep-alives", "unknown fields")
CUT_CASES = [
    pytest.param(KINDS[kind], faults, id=f"{kind}: {cut}")
    for kind in HTTP_KINDS
    for cut, faults in CUTS.items()
    if KINDS[kind].dialect.content_type == "text/event-stream" or cut not in EVENT_STREAM_CUTS
]


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(("wired", "faults"), CUT_CASES)
async def test_answer_is_independent_of_packet_boundaries_and_line_ends(
    wired: Kind, faults: tuple[Any, ...], tmp_path: Path
) -> None:
    async with wired.serve(tmp_path, per_chunk=8, faults=faults) as (backend, _):
        chunks = await collect(backend)
    assert wired.delivered(chunks) == wired.answer
    assert chunks[-1].finish is FinishReason.STOP


async def test_events_received_together_form_one_chunk(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, faults=(in_one_write,)) as (backend, _):
        assert len(await collect(backend)) == 1


async def test_character_split_across_packets_arrives_whole(wired: Kind, tmp_path: Path) -> None:
    (token,) = ENCODING.encode_text("é")
    event, last = wired.dialect.ending("é", token)
    content_type = wired.dialect.content_type.encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: " + content_type + b"\r\nConnection: close\r\n\r\n"
    first, second = event.split("é".encode()[1:])
    steps = [Write(head + first), Write(b"\xa9" + second), Write(last)]
    async with WireServer(lambda seen: [*steps, *close_steps()]) as server:
        backend = backend_at(wired, server)
        chunks = await collect(backend)
        await backend.aclose()
    assert wired.delivered(chunks) == ([token] if wired.output is OutputForm.IDS else "é")


# Requests


async def test_every_sampling_field_is_sent_explicitly(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path) as (backend, fake):
        await collect(backend)
    request, dialect = fake.requests[0].json, wired.dialect
    off = {name: dialect.value(request, name) for name in SAMPLING}
    assert off == {name: dialect.off_value(name) for name in SAMPLING}
    for name in ("seed", "logit_bias"):
        with pytest.raises(KeyError):
            dialect.value(request, name)
    assert not request.get("stop")


async def test_request_fields_are_sent_unchanged(wired: Kind, tmp_path: Path) -> None:
    bias = {200012: -100.0} if wired.dialect.bias else {}
    sampling = Sampling(0.3, 0.9, 40, 0.05, 0.1, 0.2, 1.1, seed=7, logit_bias=bias)
    async with wired.serve(tmp_path) as (backend, fake):
        await collect(backend, replace(JOB, sampling=sampling, max_tokens=77))
    request, dialect = fake.requests[0].json, wired.dialect
    assert [dialect.value(request, name) for name in SAMPLING] == [0.3, 0.9, 40, 0.05, 0.1, 0.2, 1.1]
    assert dialect.value(request, "seed") == 7
    assert dialect.value(request, "max_tokens") == 77
    if dialect.bias:
        assert dialect.value(request, "logit_bias") == dialect.bias(200012, -100.0)
    assert request == request | dialect.required


async def test_only_expected_headers_are_sent(wired: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with wired.serve(tmp_path) as (backend, fake):
        await collect(backend, replace(JOB, request_id="req-1"))
    headers = fake.requests[0].headers
    assert set(headers) == {
        "host", "accept", "accept-encoding", "authorization", "content-length", "content-type", "user-agent",
        "x-request-id",
    }  # fmt: skip
    assert headers["accept-encoding"] == "identity"
    assert headers["authorization"] == f"Bearer {KEY}"
    assert headers["x-request-id"].startswith("req-1")


async def test_request_id_that_is_not_a_header_value_is_omitted(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path) as (backend, fake):
        await collect(backend, replace(JOB, request_id="a\r\nX-Evil: 1"))
    assert "x-request-id" not in fake.requests[0].headers


@pytest.mark.sampled(one_in=3)
async def test_prompt_over_one_megabyte_is_sent(wired: Kind, tmp_path: Path) -> None:
    long_prompt = Prompt(tokens=[199000] * 200_000, text="word " * 300_000)
    async with wired.serve(tmp_path) as (backend, fake):
        await collect(backend, replace(JOB, prompt=long_prompt))
    assert len(fake.requests[0].body) > 2**20


# Usage

CLAIMS = {"correct": (12, 12), "zero": (0, 0), "negative": (-1, None), "huge": (10**12, None), "text": ("12", None)}


@pytest.mark.parametrize(("claimed", "expected"), CLAIMS.values(), ids=CLAIMS)
async def test_impossible_usage_counts_are_ignored(
    wired: Kind, claimed: object, expected: int | None, tmp_path: Path
) -> None:
    async with wired.serve(tmp_path, prompt_tokens=claimed, cached_tokens=3) as (backend, _):
        last = (await collect(backend))[-1]
    assert (last.prompt_tokens, last.cached_tokens) == (expected, 3)
