"""Behaviour of a real vLLM that other engines do not share."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.engines.demo_prompts import ENCODING, WEATHER_CALL, greedy, prompt_for
from tests.engines_all.conversations import recorded
from tests.engines_all.engines import Running
from unisono.core.generation import CALL, CompletionJob, FinishReason, Sampling
from unisono.core.ports import Backend, BackendOptions
from unisono.core.probe import Check
from unisono.errors import BackendError, BackendRejected
from unisono_adapters.vllm import VllmBackend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("engine", ["vllm"], indirect=True),
]


async def tokens_of(backend: Backend, job: CompletionJob) -> list[int]:
    return [token async for chunk in backend.complete(job) for token in chunk.tokens]


INVALID_JOBS = {
    "empty prompt": greedy([]),
    "a negative id": greedy([-1, 5]),
    "an id outside the vocabulary": greedy([5, 201088]),
    "temperature": replace(greedy([5], 5), sampling=Sampling(temperature=-1)),
    "top_p": replace(greedy([5], 5), sampling=Sampling(top_p=1.5)),
    "min_p": replace(greedy([5], 5), sampling=Sampling(min_p=2)),
    "repetition": replace(greedy([5], 5), sampling=Sampling(repetition_penalty=0)),
    "frequency": replace(greedy([5], 5), sampling=Sampling(frequency_penalty=5)),
    "bias": replace(greedy([5], 5), sampling=Sampling(logit_bias={201088: 1.0})),
}


@pytest.mark.parametrize("job", INVALID_JOBS.values(), ids=INVALID_JOBS)
async def test_an_invalid_job_is_rejected_and_the_engine_continues(backend: Backend, job: CompletionJob) -> None:
    with pytest.raises(BackendRejected):
        await tokens_of(backend, job)
    assert await tokens_of(backend, greedy(prompt_for("Hello!"))) == recorded()["greeting"]


async def test_an_unknown_model_fails_the_probe_and_a_generation(engine: Running) -> None:
    backend = VllmBackend(BackendOptions("vllm", "some-other", engine.url))
    try:
        [finding] = (await backend.probe()).fatal
        assert finding.check is Check.MODEL
        with pytest.raises(BackendError) as failed:
            await tokens_of(backend, greedy([5], 3))
        assert type(failed.value) is BackendError
    finally:
        await backend.aclose()


@pytest.mark.parametrize("salt", ["x", "ü" * 10, "a@b/c\\d\0", "s" * 2000], ids=len)
async def test_any_salt_is_accepted(backend: Backend, salt: str) -> None:
    assert await tokens_of(backend, greedy(prompt_for("ping"), salt=salt)) == recorded()["pong"]


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
async def test_any_seed_is_accepted(backend: Backend, seed: int) -> None:
    job = replace(greedy(prompt_for("ping")), sampling=Sampling(temperature=0, seed=seed))

    assert await tokens_of(backend, job) == recorded()["pong"]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def batching_backend(engine: Running) -> AsyncIterator[Backend]:
    """Yield a backend of the same engine with fewer and larger events."""
    backend = VllmBackend(BackendOptions("vllm", "tiny", engine.url, extra={"stream_interval": 10}))
    yield backend
    await backend.aclose()


async def test_larger_events_contain_the_same_ids_and_the_stop_token(
    backend: Backend, batching_backend: Backend
) -> None:
    job = greedy(prompt_for("What is the weather in Paris?", tools=True))

    chunks = [chunk async for chunk in batching_backend.complete(job)]
    tokens = [token for chunk in chunks for token in chunk.tokens]

    assert (tokens, tokens[-1]) == (ENCODING.encode_marked(WEATHER_CALL), CALL)
    assert len(chunks) <= math.ceil(len(tokens) / 10) + 2
    assert (chunks[-1].finish, chunks[-1].stop_token) == (FinishReason.STOP, None)
