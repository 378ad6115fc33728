"""What every Backend promises of a generation that goes well: one suite over every adapter and its fake."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.contract.dialects import SAMPLING
from tests.contract.kinds import (
    ENCODING,
    JOB,
    KEY,
    KINDS,
    ON_A_WIRE,
    Kind,
    closing,
    collect,
    point,
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
from unisono.core.generation import Capabilities, FinishReason, OutputForm, Prompt, Sampling

# What is delivered


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
async def test_what_the_backend_generates_arrives_exactly_however_it_is_chunked(
    kind: Kind, per_chunk: int, tmp_path: Path
) -> None:
    async with kind.serve(tmp_path, per_chunk=per_chunk) as (backend, _):
        assert kind.delivered(await collect(backend)) == kind.answer


async def test_only_the_last_chunk_carries_the_finish(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, delay_s=0.001) as (backend, _):
        chunks = await collect(backend)
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("finish", list(FinishReason))
async def test_the_finish_is_the_backends(kind: Kind, finish: FinishReason, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, finish=finish.value) as (backend, _):
        assert (await collect(backend))[-1].finish is finish


async def test_max_tokens_cuts_the_answer(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, per_chunk=1) as (backend, _):
        chunks = await collect(backend, replace(JOB, max_tokens=5))
    assert kind.delivered(chunks) == kind.answer[:5]
    assert chunks[-1].finish is FinishReason.LENGTH


async def test_probing_says_which_form_it_speaks(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path) as (backend, _):
        found = (await backend.probe()).capabilities
    assert isinstance(found, Capabilities)
    assert found.output is kind.output
    assert found.stop_visible is (kind.output is OutputForm.IDS)


async def test_eight_at_once_do_not_mix(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, delay_s=0.002) as (backend, _):
        answers = await asyncio.gather(*(collect(backend) for _ in range(8)))
    assert [kind.delivered(chunks) for chunks in answers] == [kind.answer] * 8


async def test_it_serves_one_after_the_other(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path) as (backend, _):
        for _ in range(3):
            assert kind.delivered(await collect(backend)) == kind.answer


# How bytes are cut

CUTS: dict[str, tuple[Any, ...]] = {
    "every byte alone": (recut(1, 0),),
    "every 7 bytes": (recut(7, 0.0001),),
    "all at once": (in_one_write,),
    "CR": (line_ends(b"\r"),),
    "CRLF": (line_ends(b"\r\n"),),
    "CRLF cut anywhere": (line_ends(b"\r\n"), recut(5, 0.0001)),
    "mixed line ends": (line_ends(b"\r", b"\r\n", b"\n", b"\n"), recut(11, 0.0001)),
    "comments and keep-alives": (inject_at(1, b": keep-alive\n\n:\n\n"), inject_at(0, b":\n")),
    "unknown fields": (inject_at(0, b"event: x\nid: 1\nretry: 5\nnonsense\n\n"),),
    "done twice": (done_twice,),
}


ONLY_IN_EVENT_STREAMS = ("CR", "CRLF cut anywhere", "mixed line ends", "comments and keep-alives", "unknown fields")
CUT = [
    pytest.param(KINDS[kind], faults, id=f"{kind}: {cut}")
    for kind in ON_A_WIRE
    for cut, faults in CUTS.items()
    if KINDS[kind].speaks.content_type == "text/event-stream" or cut not in ONLY_IN_EVENT_STREAMS
]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("wired", "faults"), CUT)
async def test_how_the_bytes_are_cut_changes_nothing(wired: Kind, faults: tuple[Any, ...], tmp_path: Path) -> None:
    async with wired.serve(tmp_path, per_chunk=8, faults=faults) as (backend, _):
        chunks = await collect(backend)
    assert wired.delivered(chunks) == wired.answer
    assert chunks[-1].finish is FinishReason.STOP


async def test_events_that_arrive_together_are_one_chunk(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, faults=(in_one_write,)) as (backend, _):
        assert len(await collect(backend)) == 1


async def test_a_raw_character_cut_in_half_by_the_network_arrives_whole(wired: Kind, tmp_path: Path) -> None:
    (token,) = ENCODING.encode_text("é")
    event, last = wired.speaks.ending("é", token)
    content_type = wired.speaks.content_type.encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: " + content_type + b"\r\nConnection: close\r\n\r\n"
    first, second = event.split("é".encode()[1:])
    steps = [Write(head + first), Write(b"\xa9" + second), Write(last)]
    async with WireServer(lambda seen: [*steps, *closing()]) as server:
        backend = point(wired, server)
        chunks = await collect(backend)
        await backend.aclose()
    assert wired.delivered(chunks) == ([token] if wired.output is OutputForm.IDS else "é")


# What is asked


async def test_every_sampling_field_is_sent_every_time(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path) as (backend, fake):
        await collect(backend)
    asked, speaks = fake.requests[0].json, wired.speaks
    off = {name: speaks.asked(asked, name) for name in SAMPLING}
    assert off == {name: speaks.off(name) for name in SAMPLING}
    for name in ("seed", "logit_bias"):
        with pytest.raises(KeyError):
            speaks.asked(asked, name)
    assert not asked.get("stop")


async def test_the_request_is_passed_on_exactly(wired: Kind, tmp_path: Path) -> None:
    bias = {200012: -100.0} if wired.speaks.bias else {}
    sampling = Sampling(0.3, 0.9, 40, 0.05, 0.1, 0.2, 1.1, seed=7, logit_bias=bias)
    async with wired.serve(tmp_path) as (backend, fake):
        await collect(backend, replace(JOB, sampling=sampling, max_tokens=77))
    asked, speaks = fake.requests[0].json, wired.speaks
    assert [speaks.asked(asked, name) for name in SAMPLING] == [0.3, 0.9, 40, 0.05, 0.1, 0.2, 1.1]
    assert speaks.asked(asked, "seed") == 7
    assert speaks.asked(asked, "max_tokens") == 77
    if speaks.bias:
        assert speaks.asked(asked, "logit_bias") == speaks.bias(200012, -100.0)
    assert asked == asked | speaks.whole


async def test_only_listed_headers_go_out(wired: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_request_id_that_is_no_header_value_is_left_out(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path) as (backend, fake):
        await collect(backend, replace(JOB, request_id="a\r\nX-Evil: 1"))
    assert "x-request-id" not in fake.requests[0].headers


async def test_a_prompt_of_more_than_a_megabyte_goes_out(wired: Kind, tmp_path: Path) -> None:
    long = Prompt(tokens=[199000] * 200_000, text="word " * 300_000)
    async with wired.serve(tmp_path) as (backend, fake):
        await collect(backend, replace(JOB, prompt=long))
    assert len(fake.requests[0].body) > 2**20


# Usage is a claim

CLAIMS = {"truth": (12, 12), "zero": (0, 0), "negative": (-1, None), "huge": (10**12, None), "text": ("12", None)}


@pytest.mark.parametrize(("claimed", "taken"), CLAIMS.values(), ids=CLAIMS)
async def test_usage_that_cannot_be_is_no_usage(
    wired: Kind, claimed: object, taken: int | None, tmp_path: Path
) -> None:
    async with wired.serve(tmp_path, prompt_tokens=claimed, cached_tokens=3) as (backend, _):
        last = (await collect(backend))[-1]
    assert (last.prompt_tokens, last.cached_tokens) == (taken, 3)
