"""What every Backend promises of its load: what the server itself says, in a second, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.kinds import JOB, KINDS, Deaf, Kind, collect, forever, point
from tests.fakes import Flood, Refusal, Reset, WireServer, Write
from tests.fakes.loads import (
    llamacpp_metrics,
    llamacpp_slots,
    sglang_get_load,
    sglang_loads,
    sglang_metrics,
    vllm_metrics,
)
from unisono.core.generation import Load
from unisono.errors import BackendError, BackendOverloaded, BackendProtocolError, BackendTimeout, BackendUnavailable

AT_ONCE_S = 1.0
TELLING = ("vllm", "sglang", "llamacpp")
"""Kinds whose servers say something."""


@pytest.fixture(params=TELLING)
def telling(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@dataclass(frozen=True)
class Told:
    kind: str
    pages: Mapping[str, bytes]
    load: Load | None


def gauge(name: str, value: object) -> bytes:
    return f"{name} {value}\n".encode()


TOLD = {
    "vLLM, one engine": Told(
        "vllm", {"/metrics": vllm_metrics((3, 2, 0.25), cache_tokens=1000)}, Load(3, 2, 250, 0.25)
    ),
    "vLLM, two engines": Told(
        "vllm", {"/metrics": vllm_metrics((3, 2, 0.5), (4, 0, 0.25), cache_tokens=1000)}, Load(7, 2, 750, 0.375)
    ),
    "vLLM that does not tell its cache's size": Told(
        "vllm", {"/metrics": vllm_metrics((1, 0, 0.5), cache_tokens=None)}, Load(1, 0, None, 0.5)
    ),
    "vLLM before 0.9, without usage by this name": Told(
        "vllm", {"/metrics": gauge('vllm:num_requests_running{model_name="m"}', 4.0)}, Load(4, 0)
    ),
    "vLLM that keeps no statistics and counts": Told(
        "vllm", {"/metrics": b"# HELP x\nprocess_open_fds 27.0\n", "/load": b'{"server_load":5}'}, Load(5, 0)
    ),
    "vLLM that keeps no statistics and does not count": Told("vllm", {"/load": b'{"server_load":0}'}, None),
    "SGLang, gauges": Told("sglang", {"/metrics": sglang_metrics((2, 5, 900, 0.5))}, Load(2, 5, 900, 0.5)),
    "SGLang, gauges of every process": Told(
        "sglang",
        {"/metrics": sglang_metrics((2, 5, 900, 0.5), (1, 0, 100, 0.25), processes=4)},
        Load(3, 5, 1000, 0.375),
    ),
    "SGLang, gauges before other pages": Told(
        "sglang",
        {"/v1/loads": sglang_loads((9, 9, 9, 0.9)), "/metrics": sglang_metrics((1, 0, 10, 0.0))},
        Load(1, 0, 10, 0.0),
    ),
    "SGLang without metrics": Told(
        "sglang", {"/v1/loads": sglang_loads((2, 5, 900, 0.5), (1, 1, 100, 0.25))}, Load(3, 6, 1000, 0.375)
    ),
    "SGLang of 2025": Told("sglang", {"/get_load": sglang_get_load((7, 5, 900), (1, 0, 50))}, Load(3, 5, 950)),
    "SGLang that tells of no scheduler": Told("sglang", {"/v1/loads": b'{"loads":[]}'}, None),
    "llama.cpp, gauges": Told("llamacpp", {"/metrics": llamacpp_metrics(2, 3)}, Load(2, 3)),
    "llama.cpp of 2024, gauges of the cache too": Told(
        "llamacpp",
        {
            "/metrics": llamacpp_metrics(
                1, 0, "llamacpp:kv_cache_usage_ratio 0.125", "llamacpp:kv_cache_tokens 512"
            )
        },
        Load(1, 0, 512, 0.125),
    ),
    "llama.cpp, slots": Told("llamacpp", {"/slots": llamacpp_slots([True, False, True])}, Load(2, 0)),
    "llama.cpp of 2024, health": Told(
        "llamacpp", {"/health": b'{"status":"ok","slots_idle":1,"slots_processing":3}'}, Load(3, 0)
    ),
    "llama.cpp that tells nothing": Told("llamacpp", {"/health": b'{"status":"ok"}'}, None),
}  # fmt: skip


@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
async def test_the_load_is_what_the_server_says(told: Told, tmp_path: Path) -> None:
    async with KINDS[told.kind].serve(tmp_path) as (backend, fake):
        fake.pages = {path: lambda page=page: page for path, page in told.pages.items()}
        assert await backend.load() == told.load


async def test_it_follows_what_is_generated(telling: Kind, tmp_path: Path) -> None:
    async with telling.serve(tmp_path, delay_s=0.02) as (backend, fake):
        assert (await backend.load()).running == 0
        running = [asyncio.create_task(collect(backend)) for _ in range(2)]
        await fake.asked(2)
        assert (await backend.load()).running == 2
        await asyncio.gather(*running)
        assert (await backend.load()).running == 0


async def test_requests_of_others_count(telling: Kind, tmp_path: Path) -> None:
    async with telling.serve(tmp_path, delay_s=0.02) as (backend, fake):
        other = point(telling, fake)
        task = asyncio.create_task(collect(other))
        await fake.asked()
        assert (await backend.load()).running == 1
        await task
        await other.aclose()


async def test_a_recording_says_how_often_it_is_played(tmp_path: Path) -> None:
    async with KINDS["replay"].serve(tmp_path, delay_s=0.01) as (backend, _):
        stream = backend.complete(JOB)
        await anext(aiter(stream))
        assert await backend.load() == Load(1, 0)
        await stream.aclose()  # type: ignore[attr-defined]
        assert await backend.load() == Load(0, 0)


# Servers that say nothing


@pytest.mark.parametrize("kind", ["mlx_server", "ollama raw", "ollama template"])
async def test_a_kind_without_a_page_for_it_is_not_even_asked(kind: str, tmp_path: Path) -> None:
    async with KINDS[kind].serve(tmp_path) as (backend, fake):
        assert await backend.load() is None
        assert fake.connections == 0


SILENCE = {
    "404": Refusal(404, b'{"detail":"Not Found"}'),
    "501": Refusal(501, b'{"error":{"code":501,"message":"not supported"}}'),
    "403": Refusal(403, b"forbidden by the proxy"),
    "405": Refusal(405, b""),
    "400": Refusal(400, b'{"error":"model name is missing from the request"}'),
}


@pytest.mark.parametrize("refusal", SILENCE.values(), ids=SILENCE)
async def test_a_server_without_the_pages_says_nothing_and_is_left_alone(telling: Kind, refusal: Refusal) -> None:
    async with WireServer(lambda seen: refusal.steps()) as server:
        backend = point(telling, server)
        assert await backend.load() is None
        asked = len(server.probes)
        assert [await backend.load() for _ in range(5)] == [None] * 5
        assert len(server.probes) == asked
        await backend.aclose()


async def test_the_page_that_tells_is_the_first_to_be_asked_from_then_on(tmp_path: Path) -> None:
    async with KINDS["llamacpp"].serve(tmp_path) as (backend, fake):
        for _ in range(3):
            assert await backend.load() == Load(0, 0)
    assert [seen.path for seen in fake.probes] == ["/metrics", "/slots", "/slots", "/slots"]


async def test_a_count_of_nothing_is_believed_of_a_vllm_that_has_counted(tmp_path: Path) -> None:
    async with KINDS["vllm"].serve(tmp_path) as (backend, fake):
        for count, load in ((2, Load(2, 0)), (0, Load(0, 0))):
            fake.pages = {"/load": lambda count=count: b'{"server_load":%d}' % count}
            assert await backend.load() == load


# What is not believed

NONSENSE = {
    "nothing": b"",
    "HTML": b"<html>Welcome to nginx</html>",
    "bytes": bytes(range(256)) * 8,
    "NaN": gauge("vllm:num_requests_running", "NaN") + gauge("sglang:num_running_reqs", "NaN"),
    "less than nothing": gauge("vllm:num_requests_running", -1) + gauge("llamacpp:requests_processing", -1),
    "infinity": gauge("vllm:num_requests_running", "+Inf") + gauge("llamacpp:requests_processing", "inf"),
    "more than there is": gauge("vllm:num_requests_running", "1e300") + gauge("sglang:num_running_reqs", "9" * 400),
    "a name and no value": b"vllm:num_requests_running\nllamacpp:requests_processing\nsglang:num_running_reqs",
    "labels without an end": b'vllm:num_requests_running{model_name="' + b"}" * 10_000,
    "other names that begin alike": b"vllm:num_requests_running_total 3\nllamacpp:requests_processing_max 3\n",
}


@pytest.mark.parametrize("page", NONSENSE.values(), ids=NONSENSE)
async def test_gauges_that_cannot_be_are_no_gauges(telling: Kind, page: bytes, tmp_path: Path) -> None:
    async with telling.serve(tmp_path) as (backend, fake):
        fake.pages = {"/metrics": lambda: page}
        assert await backend.load() is None


JUNK = {"no JSON": b"{garbage", "text": b'"busy"', "null": b"null", "numbers": b"[1, 2]", "brackets": b"[" * 100_000}
PAGES = [("vllm", "/load"), ("sglang", "/v1/loads"), ("sglang", "/get_load"), ("llamacpp", "/slots")]
ODD = {
    "text for a number": b'{"server_load":"3","loads":[{"num_running_reqs":"3"}],"slots_processing":"3"}',
    "less than nothing": b'{"server_load":-3,"loads":[{"num_running_reqs":-3}],"slots_processing":-3}',
    "a part of one": b'{"server_load":0.5,"loads":[{"num_running_reqs":0.5}],"slots_processing":0.5}',
    "true": b'{"server_load":true,"loads":[{"num_running_reqs":true}],"slots_processing":true}',
}


@pytest.mark.parametrize(("kind", "path"), PAGES)
@pytest.mark.parametrize("page", {**JUNK, **ODD}.values(), ids={**JUNK, **ODD})
async def test_a_document_of_another_shape_is_nothing_or_an_error_of_its_kind(
    kind: str, path: str, page: bytes, tmp_path: Path
) -> None:
    async with KINDS[kind].serve(tmp_path) as (backend, fake):
        fake.pages = {path: lambda: page}
        try:
            assert await backend.load() is None
        except BackendProtocolError:
            assert page in (JUNK["no JSON"], JUNK["brackets"])


async def test_a_page_without_an_end_is_not_read_to_it(telling: Kind) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    water = gauge("vllm:num_requests_running", 1) * 1000
    async with WireServer(lambda seen: [Write(head), Flood((water,), 10**9)]) as server:
        backend = point(telling, server)
        with pytest.raises(BackendProtocolError):
            await backend.load()
        await backend.aclose()
        assert server.probes[0].poured < 64 * 2**20


# Failures


FAILURES: dict[str, tuple[list[Any], type[BackendError]]] = {
    "500": (Refusal(500, b"boom").steps(), BackendError),
    "503": (Refusal(503, b'{"error":{"message":"Loading model"}}').steps(), BackendOverloaded),
    "401": (Refusal(401, b'{"error":"Unauthorized"}').steps(), BackendUnavailable),
    "redirect": (Refusal(307, headers={"Location": "http://127.0.0.1:9/"}).steps(), BackendProtocolError),
    "RST": ([Reset()], BackendUnavailable),
    "not HTTP": ([Write(b"SSH-2.0-OpenSSH_9.9\r\n"), Reset()], BackendError),
}


@pytest.mark.parametrize(("steps", "expected"), FAILURES.values(), ids=FAILURES)
async def test_a_failure_is_an_error_of_its_kind(telling: Kind, steps: list[Any], expected: type[BackendError]) -> None:
    async with WireServer(lambda seen: steps) as server:
        backend = point(telling, server)
        with pytest.raises(expected):
            await backend.load()
        await backend.aclose()


async def test_a_closed_port_is_unavailable(telling: Kind) -> None:
    with Deaf() as url:
        port = url.rpartition(":")[2]
    backend = point(telling, f"http://127.0.0.1:{port}")
    with pytest.raises(BackendUnavailable):
        await backend.load()
    await backend.aclose()


async def test_a_server_without_time_for_it_is_waited_for_a_second_in_all(telling: Kind) -> None:
    loop = asyncio.get_running_loop()
    slow = [Write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")]
    answers = iter([slow])
    async with WireServer(lambda seen: next(answers, [*forever()])) as server:
        backend = point(telling, server)
        began = loop.time()
        with pytest.raises(BackendTimeout):
            await backend.load()
        assert 0.9 < loop.time() - began < 1.0 + AT_ONCE_S
        await backend.aclose()


async def test_leaving_drops_the_question_at_once(telling: Kind) -> None:
    async with WireServer(lambda seen: [*forever()]) as server:
        backend = point(telling, server)
        task = asyncio.create_task(backend.load())
        while not server.probes:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        loop = asyncio.get_running_loop()
        left = loop.time()
        while server.open:
            await asyncio.sleep(0.001)
            assert loop.time() - left < AT_ONCE_S
        await backend.aclose()


async def test_nothing_is_asked_of_a_backend_that_is_closed(telling: Kind, tmp_path: Path) -> None:
    async with telling.serve(tmp_path) as (backend, fake):
        await backend.aclose()
        with pytest.raises(BackendUnavailable):
            await backend.load()
        assert fake.connections == 0
