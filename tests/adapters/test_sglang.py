"""Tests of the SGLang adapter: sampling fields, trimmed stop tokens, context size and probe."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.contract.kinds import collect_until_failure
from tests.fakes import Refusal, inject_at
from tests.fakes.dialects import sse_event
from tests.fakes.sglang import FakeSglang, SglangScript, sglang_error
from unisono.core.generation import Chunk, CompletionJob, FinishReason, OutputForm, Prompt, Sampling
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check
from unisono.errors import BackendOverloaded, BackendProtocolError, BackendUnavailable, ContextTooLong
from unisono_adapters._failures import IdsMissing
from unisono_adapters.sglang import SglangBackend

JOB = CompletionJob(Prompt([200006, 1428, 200008]), max_tokens=50)
RETURN, CALL = 200002, 200012


@pytest.fixture
async def fake() -> AsyncIterator[FakeSglang]:
    async with FakeSglang(tokens=[200005, 17196, 200008, 13225, RETURN]) as fake:
        yield fake


@pytest.fixture
async def backend(fake: FakeSglang) -> AsyncIterator[SglangBackend]:
    backend = SglangBackend(BackendOptions("sglang", "tiny", fake.url))
    yield backend
    await backend.aclose()


async def collect(backend: SglangBackend, job: CompletionJob = JOB) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(job)]


async def test_request_asks_for_ids_with_the_stop_token(fake: FakeSglang, backend: SglangBackend) -> None:
    await collect(backend)
    (request,) = fake.requests
    assert request.path == "/v1/completions"
    assert request.json == request.json | {
        "prompt": [200006, 1428, 200008],
        "stop_token_ids": [RETURN, CALL],
        "return_token_ids": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    assert "cache_salt" not in request.json


@pytest.mark.parametrize(("top_k", "sent"), [(0, -1), (1, 1), (40, 40)])
async def test_disabled_top_k_is_sent_as_minus_one(
    fake: FakeSglang, backend: SglangBackend, top_k: int, sent: int
) -> None:
    await collect(backend, replace(JOB, sampling=Sampling(top_k=top_k)))
    assert fake.requests[0].json["top_k"] == sent


async def test_cache_salt_of_the_tenant_is_sent(fake: FakeSglang, backend: SglangBackend) -> None:
    await collect(backend, replace(JOB, cache_salt="tenant"))
    assert fake.requests[0].json["cache_salt"] == "tenant"


@pytest.mark.parametrize("stop", [RETURN, CALL])
@pytest.mark.parametrize("per_chunk", [1, 8])
async def test_trimmed_stop_token_is_reported(
    fake: FakeSglang, backend: SglangBackend, stop: int, per_chunk: int
) -> None:
    fake.script = lambda request: SglangScript(tokens=[1, 2, stop], trims=True, per_chunk=per_chunk)
    chunks = await collect(backend)
    assert [token for chunk in chunks for token in chunk.tokens] == [1, 2]
    assert (chunks[-1].finish, chunks[-1].stop_token) == (FinishReason.STOP, stop)


async def test_stop_token_among_the_ids_is_not_reported_again(fake: FakeSglang, backend: SglangBackend) -> None:
    chunks = await collect(backend)
    assert [token for chunk in chunks for token in chunk.tokens][-1] == RETURN
    assert chunks[-1].stop_token is None


FAILURES: dict[str, tuple[dict[str, object], type[Exception]]] = {
    "aborted": ({"choices": [{"text": "", "token_ids": [], "finish_reason": "abort"}]}, BackendUnavailable),
    "error event": ({"error": {"object": "error", "message": "x", "code": 503}}, BackendOverloaded),
    "text without ids": ({"choices": [{"text": "hello", "token_ids": None}]}, IdsMissing),
}


@pytest.mark.parametrize(("event", "expected"), FAILURES.values(), ids=FAILURES)
async def test_failure_during_the_stream_raises_without_a_finish_reason(
    fake: FakeSglang, backend: SglangBackend, event: dict[str, object], expected: type[Exception]
) -> None:
    fake.script = lambda request: SglangScript(tokens=[1, 2, RETURN], faults=(inject_at(1, sse_event(event)),))
    chunks, error = await collect_until_failure(backend, JOB)
    assert type(error) is expected
    assert all(chunk.finish is None for chunk in chunks)


TOO_LONG: dict[str, Refusal] = {
    "prompt only": sglang_error("The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
    "prompt and output": sglang_error(
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of "
        "4100 tokens: 4000 tokens from the input messages and 100 tokens for the completion."
    ),
}


@pytest.mark.parametrize("refusal", TOO_LONG.values(), ids=TOO_LONG)
async def test_context_error_contains_the_limit(fake: FakeSglang, backend: SglangBackend, refusal: Refusal) -> None:
    fake.script = lambda request: refusal
    with pytest.raises(ContextTooLong, match="4096"):
        await collect(backend)


async def test_reported_context_can_be_filled() -> None:
    async with FakeSglang(tokens=[1, RETURN], context=300) as fake:
        backend = SglangBackend(BackendOptions("sglang", "tiny", fake.url))
        context = (await backend.probe()).capabilities.context
        assert context == 299
        await collect(backend, CompletionJob(Prompt([1] * 200), max_tokens=context - 200))
        with pytest.raises(ContextTooLong):
            await collect(backend, CompletionJob(Prompt([1] * 200), max_tokens=context - 199))
        await backend.aclose()


async def test_probe_of_a_sound_model_has_no_fatal_finding(backend: SglangBackend) -> None:
    probe = await backend.probe()
    capabilities = probe.capabilities
    assert (capabilities.prompt, capabilities.output, capabilities.stop_visible, capabilities.logit_bias) == (
        OutputForm.IDS,
        OutputForm.IDS,
        True,
        True,
    )
    assert probe.fatal == ()


async def test_missing_model_is_a_fatal_finding(fake: FakeSglang, backend: SglangBackend) -> None:
    fake.models = {"data": [{"id": "other"}, None, 3]}
    assert [finding.check for finding in (await backend.probe()).fatal] == [Check.MODEL]


@pytest.mark.parametrize("listed", [{"data": "tiny"}, [1], "tiny"])
async def test_invalid_model_list_fails_the_probe(fake: FakeSglang, backend: SglangBackend, listed: object) -> None:
    fake.models = listed
    with pytest.raises(BackendProtocolError):
        await backend.probe()


async def test_truncated_prompt_is_a_fatal_finding(fake: FakeSglang, backend: SglangBackend) -> None:
    fake.patient.reads_at_most = 5
    assert Check.PROMPT_WHOLE in [finding.check for finding in (await backend.probe()).fatal]
