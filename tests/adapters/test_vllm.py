"""vLLM's own ways: what is asked of it, what is believed of what it answers."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson
import pytest

from tests.fakes import Close, FakeVllm, Refusal, Stall, VllmScript, WireServer, inject_at
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


async def test_it_asks_for_ids_with_the_stop_token_in_them(fake: FakeVllm, backend: VllmBackend) -> None:
    await collect(backend)
    asked = fake.requests[0].json
    assert fake.requests[0].path == "/v1/completions"
    assert asked == asked | {
        "model": "tiny",
        "prompt": [200006, 1428, 200008],
        "max_tokens": 50,
        "stop_token_ids": [RETURN, CALL],
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    assert "cache_salt" not in asked
    assert "stream_interval" not in asked


async def test_each_tenant_has_a_salt_of_its_own_that_vllm_takes(fake: FakeVllm, backend: VllmBackend) -> None:
    tenants = ("one", "two", "a@b/c\\d\0", "s" * 2000, "s" * 2001, "Grüße")
    for tenant in tenants:
        await collect(backend, CompletionJob(JOB.prompt, 5, cache_salt=tenant))
    salts = [request.json["cache_salt"] for request in fake.requests]
    assert len(set(salts)) == len(tenants)
    assert all(salt.isalnum() and len(salt) <= 128 for salt in salts)


async def test_the_interval_is_an_option(fake: FakeVllm) -> None:
    backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url, extra={"stream_interval": 10}))
    await collect(backend)
    await backend.aclose()
    assert fake.requests[0].json["stream_interval"] == 10


async def test_two_generations_of_one_request_have_ids_of_their_own(fake: FakeVllm, backend: VllmBackend) -> None:
    for _ in range(2):
        await collect(backend, CompletionJob(JOB.prompt, 5, request_id="req-1"))
    first, second = (seen.headers["x-request-id"] for seen in fake.requests)
    assert first != second


STOPS: dict[str, tuple[dict[str, Any], int | None]] = {
    "the return token is in the ids": ({"tokens": [1, RETURN]}, None),
    "the call token is in the ids": ({"tokens": [1, CALL]}, None),
    "named, not in the ids": ({"tokens": [1, 2], "stop_reason": CALL}, CALL),
    "named and nothing before it": ({"tokens": [], "stop_reason": CALL}, CALL),
    "a stop string": ({"tokens": [1, 2], "stop_reason": "x"}, None),
    "no stop token of ours": ({"tokens": [1, 2], "stop_reason": 5}, None),
    "cut": ({"tokens": [1, 2], "stop_reason": CALL, "finish": "length"}, None),
}


@pytest.mark.parametrize(("script", "stop_token"), STOPS.values(), ids=STOPS)
async def test_the_stop_token_is_named_where_it_is_not_among_the_ids(
    fake: FakeVllm, backend: VllmBackend, script: dict[str, Any], stop_token: int | None
) -> None:
    fake.script = lambda asked: VllmScript(**script)
    chunks = await collect(backend)
    assert chunks[-1].stop_token == stop_token
    assert [token for chunk in chunks for token in chunk.tokens] == script["tokens"]


NOT_IDS: dict[str, object] = {
    "negative": -1,
    "beyond the vocabulary": 201088,
    "huge": 10**30,
    "a float": 5.0,
    "a string": "5",
    "a bool": True,
    "null": None,
    "a list": [5],
}


@pytest.mark.parametrize("wrong", NOT_IDS.values(), ids=NOT_IDS)
async def test_what_is_no_token_id_fails_the_answer(fake: FakeVllm, backend: VllmBackend, wrong: object) -> None:
    fake.script = lambda asked: VllmScript(tokens=[1, 2, wrong, RETURN], per_chunk=2)
    with pytest.raises(BackendProtocolError):
        await collect(backend)


async def test_the_first_and_the_last_id_of_the_vocabulary_are_ids(fake: FakeVllm, backend: VllmBackend) -> None:
    fake.script = lambda asked: VllmScript(tokens=[0, 201087, RETURN])
    assert [token for chunk in await collect(backend) for token in chunk.tokens] == [0, 201087, RETURN]


NO_IDS = {"missing": {"text": "hello"}, "null": {"text": "hello", "token_ids": None}, "text": {"token_ids": "12"}}


@pytest.mark.parametrize("choice", NO_IDS.values(), ids=NO_IDS)
async def test_text_without_ids_is_a_server_too_old(
    fake: FakeVllm, backend: VllmBackend, choice: dict[str, object]
) -> None:
    event = b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"
    fake.script = lambda asked: VllmScript(tokens=[1, RETURN], faults=(inject_at(0, event),))
    with pytest.raises(BackendProtocolError):
        await collect(backend)


async def test_an_event_with_neither_text_nor_ids_changes_nothing(fake: FakeVllm, backend: VllmBackend) -> None:
    event = b'data: {"choices": [{"index": 0, "text": "", "token_ids": null, "finish_reason": null}]}\n\n'
    fake.script = lambda asked: VllmScript(tokens=[1, RETURN], faults=(inject_at(0, event),))
    assert [token for chunk in await collect(backend) for token in chunk.tokens] == [1, RETURN]


async def test_the_end_is_not_ended_again(fake: FakeVllm, backend: VllmBackend) -> None:
    again = b'data: {"choices": [{"index": 0, "text": "", "token_ids": [7], "finish_reason": "length"}]}\n\n'
    fake.script = lambda asked: VllmScript(tokens=[1, RETURN], per_chunk=2, faults=(inject_at(1, again),))
    chunks = await collect(backend)
    assert [token for chunk in chunks for token in chunk.tokens] == [1, RETURN]
    assert chunks[-1].finish is FinishReason.STOP


async def test_too_long_says_the_numbers(fake: FakeVllm, backend: VllmBackend) -> None:
    message = "This model's maximum context length is 4096 tokens."
    fake.script = lambda asked: Refusal(400, orjson.dumps({"error": {"message": message, "param": "input_tokens"}}))
    with pytest.raises(ContextTooLong, match="4096"):
        await collect(backend)


async def test_a_prompt_that_fills_the_context_is_too_long_although_vllm_blames_the_limit(
    fake: FakeVllm, backend: VllmBackend
) -> None:
    message = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    fake.script = lambda asked: Refusal(400, orjson.dumps({"error": {"message": message, "param": "max_tokens"}}))
    with pytest.raises(ContextTooLong):
        await collect(backend)


async def test_an_error_event_may_say_that_the_prompt_is_too_long(fake: FakeVllm, backend: VllmBackend) -> None:
    error = {"error": {"message": "x", "param": "input_tokens", "code": 400}}
    event = b"data: " + orjson.dumps(error) + b"\n\n"
    fake.script = lambda asked: VllmScript(tokens=[1], faults=(inject_at(0, event),))
    with pytest.raises(ContextTooLong):
        await collect(backend)


# Connections


async def test_an_answer_read_to_its_end_leaves_its_connection_to_the_next(
    fake: FakeVllm, backend: VllmBackend
) -> None:
    for _ in range(5):
        await collect(backend)
    assert fake.connections == 1


async def test_a_kept_connection_that_died_is_replaced_once() -> None:
    def respond(seen: Any) -> Any:
        if seen.connection == 1 and len(server.requests) == 2:
            # The second request on the first connection: it dies before its first byte.
            return [Close()]
        return VllmScript(tokens=[1, RETURN]).steps(seen.json)

    async with WireServer(respond) as server:
        backend = VllmBackend(BackendOptions("vllm", "tiny", server.url))
        await collect(backend)
        await collect(backend)
        await backend.aclose()
    assert [seen.connection for seen in server.requests] == [1, 1, 2]


async def test_a_new_connection_that_dies_is_not_tried_again() -> None:
    async with WireServer(lambda seen: [Close()]) as server:
        backend = VllmBackend(BackendOptions("vllm", "tiny", server.url))
        with pytest.raises(BackendUnavailable):
            await collect(backend)
        await backend.aclose()
    assert len(server.requests) == 1


# Probing


async def test_probing_finds_the_context(backend: VllmBackend) -> None:
    found = (await backend.probe()).capabilities
    assert (found.prompt, found.output, found.context) == (OutputForm.IDS, OutputForm.IDS, 131072)


@pytest.mark.parametrize("context", [None, "4096", -1, 0, 1.5, True])
async def test_a_context_that_cannot_be_is_unknown(context: object) -> None:
    async with FakeVllm(context=context) as fake:
        backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url))
        assert (await backend.probe()).capabilities.context is None
        await backend.aclose()


NO_LISTS: dict[str, object] = {"no list": {"data": "tiny"}, "a list": [1], "a string": "tiny"}


@pytest.mark.parametrize("listed", NO_LISTS.values(), ids=NO_LISTS)
async def test_a_model_list_that_is_none_fails_the_probe(fake: FakeVllm, backend: VllmBackend, listed: object) -> None:
    fake.models = listed
    with pytest.raises(BackendError):
        await backend.probe()


WITHOUT_IT: dict[str, tuple[object, str]] = {
    "another model": ([{"id": "other/model"}], "other/model"),
    "a path": ([{"id": "/srv/secret/model"}], "does not serve"),
    "no model": ([], "does not serve"),
    "null entries": ([None, 3, {"id": 7}], "does not serve"),
}


@pytest.mark.parametrize(("listed", "says"), WITHOUT_IT.values(), ids=WITHOUT_IT)
async def test_a_model_that_is_not_served_is_found(
    fake: FakeVllm, backend: VllmBackend, listed: object, says: str
) -> None:
    fake.models = {"data": listed}
    (finding,) = (await backend.probe()).fatal
    assert finding.check is Check.MODEL
    assert says in finding.text
    assert "/srv" not in finding.text
    assert "--served-model-name" in finding.advises
    assert fake.patient.generations == 0


async def test_a_probe_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono_adapters._http.PROBE_S", 0.1)
    async with WireServer(lambda seen: [Stall()]) as server:
        backend = VllmBackend(BackendOptions("vllm", "tiny", server.url))
        with pytest.raises(BackendTimeout):
            await backend.probe()
        await backend.aclose()


# Options

WRONG: dict[str, dict[str, Any]] = {
    "no address": {"api_base": None},
    "an empty address": {"api_base": ""},
    "no scheme": {"api_base": "gpu-1:8000"},
    "another scheme": {"api_base": "ftp://gpu-1"},
    "no host": {"api_base": "http://"},
    "a port that is none": {"api_base": "http://gpu-1:99999"},
    "a key with a line end": {"api_base": "http://gpu-1", "api_key": "a\r\nX: y"},
    "a key and credentials": {"api_base": "http://user:pass@gpu-1", "api_key": "a"},
    "an interval of nothing": {"api_base": "http://gpu-1", "extra": {"stream_interval": 0}},
    "an interval of text": {"api_base": "http://gpu-1", "extra": {"stream_interval": "10"}},
}


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_options_that_cannot_work_fail_at_start_and_name_the_key(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^litellm_params\.\w+: ") as caught:
        VllmBackend(BackendOptions("vllm", "tiny", **options))
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_address_comes_with_or_without_v1(fake: FakeVllm, suffix: str) -> None:
    backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url + suffix))
    await collect(backend)
    await backend.aclose()
    assert fake.requests[0].path == "/v1/completions"


async def test_a_path_before_v1_is_kept(fake: FakeVllm) -> None:
    backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url + "/gpu/7/v1"))
    with pytest.raises(BackendError):
        await collect(backend)
    await backend.aclose()
    assert fake.requests[0].path == "/gpu/7/v1/completions"


@pytest.mark.parametrize("constraint", [None, AnyJson()])
async def test_a_stream_holds_neither_its_request_nor_the_echo_of_its_prompt(
    backend: VllmBackend, constraint: AnyJson | None
) -> None:
    job = replace(JOB, prompt=Prompt([1428] * 100_000), constraint=constraint)
    tracemalloc.start()
    try:
        async with aclosing(backend.complete(job)) as chunks:
            await anext(chunks)
            held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/unisono_adapters/*")])
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in held.traces) < 50_000
