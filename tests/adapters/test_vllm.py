"""Tests of the vLLM adapter: requests, invalid responses, connections, probe and options."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson
import pytest

from tests.fakes import Close, FakeVllm, Refusal, Stall, VllmScript, WireServer, close_at, inject_at, stall_at
from tests.fakes.faults import Fault
from unisono.core.generation import AnyJson, Chunk, CompletionJob, FinishReason, OutputForm, Prompt
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check
from unisono.errors import (
    BackendError,
    BackendProtocolError,
    BackendTimeout,
    BackendUnavailable,
    ConfigError,
    ContextTooLong,
)
from unisono_adapters.vllm import VllmBackend

JOB = CompletionJob(Prompt([200006, 1428, 200008]), max_tokens=50)
RETURN, CALL = 200002, 200012


@pytest.fixture
async def fake() -> AsyncIterator[FakeVllm]:
    async with FakeVllm(tokens=[200005, 17196, 200008, 13225, RETURN]) as fake:
        yield fake


@pytest.fixture
async def backend(fake: FakeVllm) -> AsyncIterator[VllmBackend]:
    backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url))
    yield backend
    await backend.aclose()


async def collect(backend: VllmBackend, job: CompletionJob = JOB) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(job)]


async def test_request_asks_for_ids_with_the_stop_token(fake: FakeVllm, backend: VllmBackend) -> None:
    await collect(backend)
    request = fake.requests[0].json
    assert fake.requests[0].path == "/v1/completions"
    assert request == request | {
        "model": "tiny",
        "prompt": [200006, 1428, 200008],
        "max_tokens": 50,
        "stop_token_ids": [RETURN, CALL],
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    assert "cache_salt" not in request
    assert "stream_interval" not in request


async def test_each_tenant_has_a_distinct_valid_cache_salt(fake: FakeVllm, backend: VllmBackend) -> None:
    tenants = ("one", "two", "a@b/c\\d\0", "s" * 2000, "s" * 2001, "Grüße")
    for tenant in tenants:
        await collect(backend, CompletionJob(JOB.prompt, 5, cache_salt=tenant))
    salts = [request.json["cache_salt"] for request in fake.requests]
    assert len(set(salts)) == len(tenants)
    assert all(salt.isalnum() and len(salt) <= 128 for salt in salts)


async def test_stream_interval_is_an_option(fake: FakeVllm) -> None:
    backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url, extra={"stream_interval": 10}))
    await collect(backend)
    await backend.aclose()
    assert fake.requests[0].json["stream_interval"] == 10


async def test_generations_of_one_request_have_distinct_request_ids(fake: FakeVllm, backend: VllmBackend) -> None:
    for _ in range(2):
        await collect(backend, CompletionJob(JOB.prompt, 5, request_id="req-1"))
    first, second = (seen.headers["x-request-id"] for seen in fake.requests)
    assert first != second


STOPS: dict[str, tuple[dict[str, Any], int | None]] = {
    "return token in the ids": ({"tokens": [1, RETURN]}, None),
    "call token in the ids": ({"tokens": [1, CALL]}, None),
    "stop reason only": ({"tokens": [1, 2], "stop_reason": CALL}, CALL),
    "stop reason without ids": ({"tokens": [], "stop_reason": CALL}, CALL),
    "stop string": ({"tokens": [1, 2], "stop_reason": "x"}, None),
    "unknown stop token": ({"tokens": [1, 2], "stop_reason": 5}, None),
    "cut at the limit": ({"tokens": [1, 2], "stop_reason": CALL, "finish": "length"}, None),
}


@pytest.mark.parametrize(("script", "stop_token"), STOPS.values(), ids=STOPS)
async def test_stop_token_is_reported_unless_it_is_among_the_ids(
    fake: FakeVllm, backend: VllmBackend, script: dict[str, Any], stop_token: int | None
) -> None:
    fake.script = lambda request: VllmScript(**script)
    chunks = await collect(backend)
    assert chunks[-1].stop_token == stop_token
    assert [token for chunk in chunks for token in chunk.tokens] == script["tokens"]


INVALID_IDS: dict[str, object] = {
    "negative": -1,
    "float": 5.0,
    "string": "5",
    "bool": True,
    "null": None,
    "list": [5],
}


@pytest.mark.parametrize("invalid_id", INVALID_IDS.values(), ids=INVALID_IDS)
async def test_invalid_token_id_is_a_protocol_error(fake: FakeVllm, backend: VllmBackend, invalid_id: object) -> None:
    fake.script = lambda request: VllmScript(tokens=[1, 2, invalid_id, RETURN], per_chunk=2)
    with pytest.raises(BackendProtocolError):
        await collect(backend)


async def test_first_and_last_id_of_the_vocabulary_are_valid(fake: FakeVllm, backend: VllmBackend) -> None:
    fake.script = lambda request: VllmScript(tokens=[0, 201087, RETURN])
    assert [token for chunk in await collect(backend) for token in chunk.tokens] == [0, 201087, RETURN]


async def test_ids_above_the_vocabulary_become_its_first_invalid_id(fake: FakeVllm, backend: VllmBackend) -> None:
    fake.script = lambda request: VllmScript(tokens=[1, 201088, 201089, 10**18, RETURN], per_chunk=2)
    tokens = [token for chunk in await collect(backend) for token in chunk.tokens]
    assert tokens == [1, 201088, 201088, 201088, RETURN]


MISSING_IDS = {"missing": {"text": "hello"}, "null": {"text": "hello", "token_ids": None}, "text": {"token_ids": "12"}}


@pytest.mark.parametrize("choice", MISSING_IDS.values(), ids=MISSING_IDS)
async def test_text_without_ids_is_a_protocol_error(
    fake: FakeVllm, backend: VllmBackend, choice: dict[str, object]
) -> None:
    event = b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"
    fake.script = lambda request: VllmScript(tokens=[1, RETURN], faults=(inject_at(0, event),))
    with pytest.raises(BackendProtocolError):
        await collect(backend)


async def test_event_without_text_and_ids_is_ignored(fake: FakeVllm, backend: VllmBackend) -> None:
    event = b'data: {"choices": [{"index": 0, "text": "", "token_ids": null, "finish_reason": null}]}\n\n'
    fake.script = lambda request: VllmScript(tokens=[1, RETURN], faults=(inject_at(0, event),))
    assert [token for chunk in await collect(backend) for token in chunk.tokens] == [1, RETURN]


async def test_second_finish_event_is_ignored(fake: FakeVllm, backend: VllmBackend) -> None:
    second_finish = b'data: {"choices": [{"index": 0, "text": "", "token_ids": [7], "finish_reason": "length"}]}\n\n'
    fake.script = lambda request: VllmScript(tokens=[1, RETURN], per_chunk=2, faults=(inject_at(1, second_finish),))
    chunks = await collect(backend)
    assert [token for chunk in chunks for token in chunk.tokens] == [1, RETURN]
    assert chunks[-1].finish is FinishReason.STOP


async def test_context_error_contains_the_limit(fake: FakeVllm, backend: VllmBackend) -> None:
    message = "This model's maximum context length is 4096 tokens."
    fake.script = lambda request: Refusal(400, orjson.dumps({"error": {"message": message, "param": "input_tokens"}}))
    with pytest.raises(ContextTooLong, match="4096"):
        await collect(backend)


async def test_max_tokens_error_for_a_full_context_is_context_too_long(fake: FakeVllm, backend: VllmBackend) -> None:
    message = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    fake.script = lambda request: Refusal(400, orjson.dumps({"error": {"message": message, "param": "max_tokens"}}))
    with pytest.raises(ContextTooLong):
        await collect(backend)


async def test_error_event_for_input_tokens_is_context_too_long(fake: FakeVllm, backend: VllmBackend) -> None:
    error = {"error": {"message": "x", "param": "input_tokens", "code": 400}}
    event = b"data: " + orjson.dumps(error) + b"\n\n"
    fake.script = lambda request: VllmScript(tokens=[1], faults=(inject_at(0, event),))
    with pytest.raises(ContextTooLong):
        await collect(backend)


@pytest.mark.parametrize("end", [stall_at(6), close_at(6)], ids=["silence", "closed connection"])
async def test_answer_without_done_is_complete_after_the_usage(
    fake: FakeVllm, backend: VllmBackend, end: Fault
) -> None:
    tokens = [200005, 17196, 200008, 13225, RETURN]
    fake.script = lambda request: VllmScript(tokens=tokens, per_chunk=1, faults=(end,))
    # The limit here is far below the time for which a backend may be silent.
    async with asyncio.timeout(10):
        chunks = await collect(backend)
    assert [token for chunk in chunks for token in chunk.tokens] == tokens
    assert (chunks[-1].finish, chunks[-1].prompt_tokens) == (FinishReason.STOP, len(JOB.prompt.tokens))


# Connections


async def until_finish(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        yield chunk
        if chunk.finish is not None:
            return


@pytest.mark.parametrize("delay_s", [0.0, 0.005], ids=["at once", "with pauses"])
async def test_connection_of_a_complete_answer_is_reused(fake: FakeVllm, backend: VllmBackend, delay_s: float) -> None:
    fake.script = lambda request: VllmScript(tokens=[200008, 13225, RETURN], delay_s=delay_s)
    for _ in range(5):
        async with aclosing(backend.complete(JOB)) as chunks:
            # Like the engine, stop at the finish reason.
            assert [chunk async for chunk in until_finish(chunks)]
    assert fake.connections == 1


async def test_closed_idle_connection_is_replaced_once() -> None:
    def respond(seen: Any) -> Any:
        if seen.connection == 1 and len(server.requests) == 2:
            # The second request on the first connection; it closes before its first byte.
            return [Close()]
        return VllmScript(tokens=[1, RETURN]).steps(seen.json)

    async with WireServer(respond) as server:
        backend = VllmBackend(BackendOptions("vllm", "tiny", server.url))
        await collect(backend)
        await collect(backend)
        await backend.aclose()
    assert [seen.connection for seen in server.requests] == [1, 1, 2]


async def test_failed_new_connection_is_not_retried() -> None:
    async with WireServer(lambda seen: [Close()]) as server:
        backend = VllmBackend(BackendOptions("vllm", "tiny", server.url))
        with pytest.raises(BackendUnavailable):
            await collect(backend)
        await backend.aclose()
    assert len(server.requests) == 1


# Probing


async def test_probe_reports_the_context_size(backend: VllmBackend) -> None:
    capabilities = (await backend.probe()).capabilities
    assert (capabilities.prompt, capabilities.output, capabilities.context) == (OutputForm.IDS, OutputForm.IDS, 131072)


@pytest.mark.parametrize("context", [None, "4096", -1, 0, 1.5, True])
async def test_invalid_context_size_is_none(context: object) -> None:
    async with FakeVllm(context=context) as fake:
        backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url))
        assert (await backend.probe()).capabilities.context is None
        await backend.aclose()


INVALID_LISTS: dict[str, object] = {"data is not a list": {"data": "tiny"}, "list": [1], "string": "tiny"}


@pytest.mark.parametrize("listed", INVALID_LISTS.values(), ids=INVALID_LISTS)
async def test_invalid_model_list_fails_the_probe(fake: FakeVllm, backend: VllmBackend, listed: object) -> None:
    fake.models = listed
    with pytest.raises(BackendError):
        await backend.probe()


MISSING_MODEL: dict[str, tuple[object, str]] = {
    "another model": ([{"id": "other/model"}], "other/model"),
    "path as id": ([{"id": "/srv/secret/model"}], "does not serve"),
    "no model": ([], "does not serve"),
    "null entries": ([None, 3, {"id": 7}], "does not serve"),
}


@pytest.mark.parametrize(("listed", "expected"), MISSING_MODEL.values(), ids=MISSING_MODEL)
async def test_missing_model_is_a_fatal_finding(
    fake: FakeVllm, backend: VllmBackend, listed: object, expected: str
) -> None:
    fake.models = {"data": listed}
    (finding,) = (await backend.probe()).fatal
    assert finding.check is Check.MODEL
    assert expected in finding.text
    assert "/srv" not in finding.text
    assert "--served-model-name" in finding.advises
    assert fake.patient.generations == 0


async def test_probe_of_a_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono_adapters._http.PROBE_S", 0.1)
    async with WireServer(lambda seen: [Stall()]) as server:
        backend = VllmBackend(BackendOptions("vllm", "tiny", server.url))
        with pytest.raises(BackendTimeout):
            await backend.probe()
        await backend.aclose()


# Options

INVALID_OPTIONS: dict[str, dict[str, Any]] = {
    "no address": {"api_base": None},
    "empty address": {"api_base": ""},
    "no scheme": {"api_base": "gpu-1:8000"},
    "unsupported scheme": {"api_base": "ftp://gpu-1"},
    "no host": {"api_base": "http://"},
    "invalid port": {"api_base": "http://gpu-1:99999"},
    "key with a line break": {"api_base": "http://gpu-1", "api_key": "a\r\nX: y"},
    "key and URL credentials": {"api_base": "http://user:pass@gpu-1", "api_key": "a"},
    "zero stream_interval": {"api_base": "http://gpu-1", "extra": {"stream_interval": 0}},
    "string stream_interval": {"api_base": "http://gpu-1", "extra": {"stream_interval": "10"}},
}


@pytest.mark.parametrize("options", INVALID_OPTIONS.values(), ids=INVALID_OPTIONS)
def test_invalid_option_is_a_config_error_with_its_key(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^litellm_params\.\w+: ") as caught:
        VllmBackend(BackendOptions("vllm", "tiny", **options))
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_address_may_end_with_v1(fake: FakeVllm, suffix: str) -> None:
    backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url + suffix))
    await collect(backend)
    await backend.aclose()
    assert fake.requests[0].path == "/v1/completions"


async def test_path_before_v1_is_preserved(fake: FakeVllm) -> None:
    backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url + "/gpu/7/v1"))
    with pytest.raises(BackendError):
        await collect(backend)
    await backend.aclose()
    assert fake.requests[0].path == "/gpu/7/v1/completions"


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("constraint", [None, AnyJson()])
async def test_stream_keeps_neither_its_request_nor_the_echoed_prompt_in_memory(
    backend: VllmBackend, constraint: AnyJson | None
) -> None:
    job = replace(JOB, prompt=Prompt([1428] * 100_000), constraint=constraint)
    tracemalloc.start()
    try:
        async with aclosing(backend.complete(job)) as chunks:
            await anext(chunks)
            snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/unisono_adapters/*")])
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in snapshot.traces) < 50_000
