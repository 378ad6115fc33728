"""Contract of every backend for its load: the server's figures or None, within a second."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.kinds import JOB, KINDS, FullBacklog, Kind, backend_at, collect, stall_steps
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
# Kinds whose servers report their load.
REPORTING_KINDS = ("vllm", "sglang", "llamacpp")


@pytest.fixture(params=REPORTING_KINDS)
def reporting(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@dataclass(frozen=True)
class LoadCase:
    kind: str
    pages: Mapping[str, bytes]
    load: Load | None


def gauge(name: str, value: object) -> bytes:
    return f"{name} {value}\n".encode()


LOAD_CASES = {
    "vLLM, one engine": LoadCase(
        "vllm", {"/metrics": vllm_metrics((3, 2, 0.25), cache_tokens=1000)}, Load(3, 2, 250, 0.25)
    ),
    "vLLM, two engines": LoadCase(
        "vllm", {"/metrics": vllm_metrics((3, 2, 0.5), (4, 0, 0.25), cache_tokens=1000)}, Load(7, 2, 750, 0.375)
    ),
    "vLLM without the cache size": LoadCase(
        "vllm", {"/metrics": vllm_metrics((1, 0, 0.5), cache_tokens=None)}, Load(1, 0, None, 0.5)
    ),
    "vLLM before 0.9, without cache usage": LoadCase(
        "vllm", {"/metrics": gauge('vllm:num_requests_running{model_name="m"}', 4.0)}, Load(4, 0)
    ),
    "vLLM without statistics, with a request count": LoadCase(
        "vllm", {"/metrics": b"# HELP x\nprocess_open_fds 27.0\n", "/load": b'{"server_load":5}'}, Load(5, 0)
    ),
    "vLLM without statistics and request count": LoadCase("vllm", {"/load": b'{"server_load":0}'}, None),
    "SGLang, gauges": LoadCase("sglang", {"/metrics": sglang_metrics((2, 5, 900, 0.5))}, Load(2, 5, 900, 0.5)),
    "SGLang, gauges of several processes": LoadCase(
        "sglang",
        {"/metrics": sglang_metrics((2, 5, 900, 0.5), (1, 0, 100, 0.25), processes=4)},
        Load(3, 5, 1000, 0.375),
    ),
    "SGLang, gauges preferred to other endpoints": LoadCase(
        "sglang",
        {"/v1/loads": sglang_loads((9, 9, 9, 0.9)), "/metrics": sglang_metrics((1, 0, 10, 0.0))},
        Load(1, 0, 10, 0.0),
    ),
    "SGLang without metrics": LoadCase(
        "sglang", {"/v1/loads": sglang_loads((2, 5, 900, 0.5), (1, 1, 100, 0.25))}, Load(3, 6, 1000, 0.375)
    ),
    "SGLang of 2025": LoadCase("sglang", {"/get_load": sglang_get_load((7, 5, 900), (1, 0, 50))}, Load(3, 5, 950)),
    "SGLang without schedulers": LoadCase("sglang", {"/v1/loads": b'{"loads":[]}'}, None),
    "llama.cpp, gauges": LoadCase("llamacpp", {"/metrics": llamacpp_metrics(2, 3)}, Load(2, 3)),
    "llama.cpp of 2024, gauges with the cache": LoadCase(
        "llamacpp",
        {
            "/metrics": llamacpp_metrics(
                1, 0, "llamacpp:kv_cache_usage_ratio 0.125", "llamacpp:kv_cache_tokens 512"
            )
        },
        Load(1, 0, 512, 0.125),
    ),
    "llama.cpp, slots": LoadCase("llamacpp", {"/slots": llamacpp_slots([True, False, True])}, Load(2, 0)),
    "llama.cpp of 2024, health": LoadCase(
        "llamacpp", {"/health": b'{"status":"ok","slots_idle":1,"slots_processing":3}'}, Load(3, 0)
    ),
    "llama.cpp without figures": LoadCase("llamacpp", {"/health": b'{"status":"ok"}'}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", LOAD_CASES.values(), ids=LOAD_CASES)
async def test_load_has_the_figures_of_the_server(case: LoadCase, tmp_path: Path) -> None:
    async with KINDS[case.kind].serve(tmp_path) as (backend, fake):
        fake.pages = {path: lambda page=page: page for path, page in case.pages.items()}
        assert await backend.load() == case.load


async def test_load_counts_running_generations(reporting: Kind, tmp_path: Path) -> None:
    async with reporting.serve(tmp_path, delay_s=0.02) as (backend, fake):
        assert (await backend.load()).running == 0
        running = [asyncio.create_task(collect(backend)) for _ in range(2)]
        await fake.asked(2)
        assert (await backend.load()).running == 2
        await asyncio.gather(*running)
        assert (await backend.load()).running == 0


async def test_load_counts_requests_of_other_clients(reporting: Kind, tmp_path: Path) -> None:
    async with reporting.serve(tmp_path, delay_s=0.02) as (backend, fake):
        other = backend_at(reporting, fake)
        task = asyncio.create_task(collect(other))
        await fake.asked()
        assert (await backend.load()).running == 1
        await task
        await other.aclose()


async def test_replay_load_counts_running_replays(tmp_path: Path) -> None:
    async with KINDS["replay"].serve(tmp_path, delay_s=0.01) as (backend, _):
        stream = backend.complete(JOB)
        await anext(aiter(stream))
        assert await backend.load() == Load(1, 0)
        await stream.aclose()  # type: ignore[attr-defined]
        assert await backend.load() == Load(0, 0)


# Servers without load figures


@pytest.mark.parametrize("kind", ["mlx_server", "ollama raw", "ollama template"])
async def test_kind_without_load_figures_sends_no_request(kind: str, tmp_path: Path) -> None:
    async with KINDS[kind].serve(tmp_path) as (backend, fake):
        assert await backend.load() is None
        assert fake.connections == 0


UNSUPPORTED = {
    "404": Refusal(404, b'{"detail":"Not Found"}'),
    "501": Refusal(501, b'{"error":{"code":501,"message":"not supported"}}'),
    "403": Refusal(403, b"forbidden by the proxy"),
    "405": Refusal(405, b""),
    "400": Refusal(400, b'{"error":"model name is missing from the request"}'),
}


@pytest.mark.parametrize("refusal", UNSUPPORTED.values(), ids=UNSUPPORTED)
async def test_server_without_load_endpoints_is_not_asked_again(reporting: Kind, refusal: Refusal) -> None:
    async with WireServer(lambda seen: refusal.steps()) as server:
        backend = backend_at(reporting, server)
        assert await backend.load() is None
        requests = len(server.probes)
        assert [await backend.load() for _ in range(5)] == [None] * 5
        assert len(server.probes) == requests
        await backend.aclose()


async def test_responding_endpoint_is_asked_first_afterwards(tmp_path: Path) -> None:
    async with KINDS["llamacpp"].serve(tmp_path) as (backend, fake):
        for _ in range(3):
            assert await backend.load() == Load(0, 0)
    assert [seen.path for seen in fake.probes] == ["/metrics", "/slots", "/slots", "/slots"]


async def test_vllm_count_of_zero_is_accepted_after_a_positive_count(tmp_path: Path) -> None:
    async with KINDS["vllm"].serve(tmp_path) as (backend, fake):
        for count, load in ((2, Load(2, 0)), (0, Load(0, 0))):
            fake.pages = {"/load": lambda count=count: b'{"server_load":%d}' % count}
            assert await backend.load() == load


# Invalid responses

INVALID_METRICS = {
    "empty": b"",
    "HTML": b"<html>Welcome to nginx</html>",
    "bytes": bytes(range(256)) * 8,
    "NaN": gauge("vllm:num_requests_running", "NaN") + gauge("sglang:num_running_reqs", "NaN"),
    "negative": gauge("vllm:num_requests_running", -1) + gauge("llamacpp:requests_processing", -1),
    "infinity": gauge("vllm:num_requests_running", "+Inf") + gauge("llamacpp:requests_processing", "inf"),
    "too large": gauge("vllm:num_requests_running", "1e300") + gauge("sglang:num_running_reqs", "9" * 400),
    "names without values": b"vllm:num_requests_running\nllamacpp:requests_processing\nsglang:num_running_reqs",
    "unterminated labels": b'vllm:num_requests_running{model_name="' + b"}" * 10_000,
    "names with the same prefix": b"vllm:num_requests_running_total 3\nllamacpp:requests_processing_max 3\n",
}


@pytest.mark.parametrize("page", INVALID_METRICS.values(), ids=INVALID_METRICS)
async def test_invalid_metrics_are_ignored(reporting: Kind, page: bytes, tmp_path: Path) -> None:
    async with reporting.serve(tmp_path) as (backend, fake):
        fake.pages = {"/metrics": lambda: page}
        assert await backend.load() is None


MALFORMED = {
    "not JSON": b"{garbage",
    "text": b'"busy"',
    "null": b"null",
    "numbers": b"[1, 2]",
    "deeply nested": b"[" * 100_000,
}
PAGES = [("vllm", "/load"), ("sglang", "/v1/loads"), ("sglang", "/get_load"), ("llamacpp", "/slots")]
INVALID_VALUES = {
    "strings for numbers": b'{"server_load":"3","loads":[{"num_running_reqs":"3"}],"slots_processing":"3"}',
    "negative": b'{"server_load":-3,"loads":[{"num_running_reqs":-3}],"slots_processing":-3}',
    "fractions": b'{"server_load":0.5,"loads":[{"num_running_reqs":0.5}],"slots_processing":0.5}',
    "booleans": b'{"server_load":true,"loads":[{"num_running_reqs":true}],"slots_processing":true}',
}


@pytest.mark.parametrize(("kind", "path"), PAGES)
@pytest.mark.parametrize("page", {**MALFORMED, **INVALID_VALUES}.values(), ids={**MALFORMED, **INVALID_VALUES})
async def test_malformed_load_document_is_none_or_a_protocol_error(
    kind: str, path: str, page: bytes, tmp_path: Path
) -> None:
    async with KINDS[kind].serve(tmp_path) as (backend, fake):
        fake.pages = {path: lambda: page}
        try:
            assert await backend.load() is None
        except BackendProtocolError:
            assert page in (MALFORMED["not JSON"], MALFORMED["deeply nested"])


async def test_endless_load_response_is_not_read_to_the_end(reporting: Kind) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    line = gauge("vllm:num_requests_running", 1) * 1000
    async with WireServer(lambda seen: [Write(head), Flood((line,), 10**9)]) as server:
        backend = backend_at(reporting, server)
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
async def test_failed_load_request_raises_the_matching_error(
    reporting: Kind, steps: list[Any], expected: type[BackendError]
) -> None:
    async with WireServer(lambda seen: steps) as server:
        backend = backend_at(reporting, server)
        with pytest.raises(expected):
            await backend.load()
        await backend.aclose()


async def test_load_of_a_closed_port_is_unavailable(reporting: Kind) -> None:
    with FullBacklog() as url:
        port = url.rpartition(":")[2]
    backend = backend_at(reporting, f"http://127.0.0.1:{port}")
    with pytest.raises(BackendUnavailable):
        await backend.load()
    await backend.aclose()


async def test_load_request_times_out_after_one_second_in_total(reporting: Kind) -> None:
    loop = asyncio.get_running_loop()
    slow = [Write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")]
    answers = iter([slow])
    async with WireServer(lambda seen: next(answers, [*stall_steps()])) as server:
        backend = backend_at(reporting, server)
        started = loop.time()
        with pytest.raises(BackendTimeout):
            await backend.load()
        assert 0.9 < loop.time() - started < 1.0 + AT_ONCE_S
        await backend.aclose()


async def test_cancelling_a_load_request_closes_the_socket(reporting: Kind) -> None:
    async with WireServer(lambda seen: [*stall_steps()]) as server:
        backend = backend_at(reporting, server)
        task = asyncio.create_task(backend.load())
        while not server.probes:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        loop = asyncio.get_running_loop()
        cancelled_at = loop.time()
        while server.open:
            await asyncio.sleep(0.001)
            assert loop.time() - cancelled_at < AT_ONCE_S
        await backend.aclose()


async def test_closed_backend_sends_no_load_request(reporting: Kind, tmp_path: Path) -> None:
    async with reporting.serve(tmp_path) as (backend, fake):
        await backend.aclose()
        with pytest.raises(BackendUnavailable):
            await backend.load()
        assert fake.connections == 0
