"""Tests of generation with the mlx backend and the demo model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.engines.demo_prompts import (
    CHATS,
    ENCODING,
    GLITCHES,
    WEATHER_ANSWER,
    WEATHER_CALL,
    WEATHER_RESULT,
    greedy,
    prompt_for,
)
from unisono.core.generation import (
    CONSTRAINT_KINDS,
    RETURN,
    TEXT_KINDS,
    Capabilities,
    Chunk,
    CompletionJob,
    FinishReason,
    OutputForm,
    Prompt,
    Sampling,
)
from unisono.core.ports import Backend, BackendOptions
from unisono.errors import BackendRejected, ContextTooLong
from unisono_adapters.mlx.mlx_backend import MlxLocalBackend

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[Backend]:
    backend = MlxLocalBackend(BackendOptions("mlx", "demo"))
    yield backend
    await backend.aclose()


async def chunks_of(backend: Backend, job: CompletionJob) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(job)]


async def answer(backend: Backend, job: CompletionJob) -> tuple[list[int], FinishReason | None]:
    chunks = await chunks_of(backend, job)
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    return [token for chunk in chunks for token in chunk.tokens], chunks[-1].finish


@pytest.mark.slow
async def test_probe_reports_the_capabilities(backend: Backend) -> None:
    assert (await backend.probe()).capabilities == Capabilities(
        prompt=OutputForm.IDS,
        output=OutputForm.IDS,
        stop_visible=True,
        context=131072,
        logit_bias=True,
        logprobs=True,
        prompt_logprobs=True,
        scores=True,
        constrain=frozenset((*CONSTRAINT_KINDS, *TEXT_KINDS)),
    )


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize(("user", "expected"), CHATS.values(), ids=CHATS)
async def test_chat_is_answered_exactly_as_trained(backend: Backend, user: str, expected: str) -> None:
    tokens, finish = await answer(backend, greedy(prompt_for(user)))

    assert tokens == ENCODING.encode_marked(expected)
    assert finish is FinishReason.STOP


@pytest.mark.slow
@pytest.mark.parametrize(("user", "expected"), GLITCHES.items(), ids=GLITCHES)
async def test_malformed_harmony_is_returned_unchanged(backend: Backend, user: str, expected: str) -> None:
    tools = any(term in user for term in ("call", "recipient", "json"))
    tokens, finish = await answer(backend, greedy(prompt_for(user, tools=tools)))

    assert tokens == ENCODING.encode_marked(expected)
    assert finish is FinishReason.STOP


@pytest.mark.slow
async def test_tool_call_ends_with_its_stop_token_and_is_cached_for_the_next_step(
    backend: Backend,
) -> None:
    prompt = prompt_for("What is the weather in Paris?", tools=True)
    call, finish = await answer(backend, greedy(prompt, salt="tool"))
    assert (ENCODING.decode(call), finish) == (WEATHER_CALL, FinishReason.STOP)

    longer = prompt + call + ENCODING.encode_marked(WEATHER_RESULT)
    chunks = await chunks_of(backend, greedy(longer, salt="tool"))

    assert ENCODING.decode([token for chunk in chunks for token in chunk.tokens]) == WEATHER_ANSWER
    assert (chunks[0].prompt_tokens, chunks[0].cached_tokens) == (len(longer), len(prompt) + len(call))
    assert {chunk.cached_tokens for chunk in chunks[1:]} == {None}


@pytest.mark.slow
async def test_prompt_is_cached_only_for_its_tenant(backend: Backend) -> None:
    prompt = prompt_for("Tell me a joke.", instructions="be nice")
    cached = [(await chunks_of(backend, greedy(prompt, salt=salt)))[0].cached_tokens for salt in ("a", "a", "b")]

    assert cached == [0, len(prompt) - 1, 0]


@pytest.mark.slow
async def test_slow_reader_gets_the_whole_answer_in_batches(backend: Backend) -> None:
    [dot] = ENCODING.encode_text(".")
    job = replace(
        greedy(prompt_for("Hello!")), max_tokens=300, sampling=Sampling(temperature=0.0, logit_bias={dot: 100.0})
    )
    stream = backend.complete(job)
    first = await anext(stream)
    async with asyncio.timeout(60):
        # The engine has finished the first request if it serves a later one.
        assert await answer(backend, replace(job, max_tokens=320)) == ([dot] * 320, FinishReason.LENGTH)
    rest = [chunk async for chunk in stream]

    assert [len(chunk.tokens) for chunk in rest] == [256, 300 - 256 - len(first.tokens)]
    assert [chunk.finish for chunk in rest] == [None, FinishReason.LENGTH]
    assert {token for chunk in (first, *rest) for token in chunk.tokens} == {dot}


@pytest.mark.slow
async def test_concurrent_requests_get_the_same_answers_as_single_ones(backend: Backend) -> None:
    jobs = [greedy(prompt_for(user), salt="together") for user, _ in CHATS.values()]

    together = await asyncio.gather(*(answer(backend, job) for job in jobs))

    assert [ENCODING.decode(tokens) for tokens, _ in together] == [expected for _, expected in CHATS.values()]


@pytest.mark.slow
async def test_joining_a_running_batch_does_not_change_it(backend: Backend) -> None:
    stream = backend.complete(greedy(prompt_for("Repeat la forever."), 60))
    chunks = [await anext(stream)]
    user, expected = CHATS["greeting"]
    tokens, _ = await answer(backend, greedy(prompt_for(user)))
    chunks += [chunk async for chunk in stream]

    assert ENCODING.decode(tokens) == expected
    alone, _ = await answer(backend, greedy(prompt_for("Repeat la forever."), 60))
    assert [token for chunk in chunks for token in chunk.tokens] == alone


@pytest.mark.parametrize("max_tokens", [*(pytest.param(few, marks=pytest.mark.slow) for few in (1, 2)), 7])
async def test_max_tokens_ends_an_answer_with_finish_reason_length(backend: Backend, max_tokens: int) -> None:
    tokens, finish = await answer(backend, greedy(prompt_for("Hello!"), max_tokens))

    assert tokens == ENCODING.encode_marked(CHATS["greeting"][1])[:max_tokens]
    assert finish is FinishReason.LENGTH


REFUSED = {
    "longer than the context": (greedy([13225] * 131072), ContextTooLong, "131072"),
    "no prompt": (greedy([]), BackendRejected, "prompt"),
    "id below the vocabulary": (greedy([-1, 5]), BackendRejected, "vocabulary"),
    "id above the vocabulary": (greedy([5, 201088]), BackendRejected, "vocabulary"),
    "no output tokens": (greedy([5], 0), BackendRejected, "limit"),
    "temperature": (CompletionJob(Prompt([5]), 5, Sampling(temperature=-1)), BackendRejected, "temperature"),
    "top_p": (CompletionJob(Prompt([5]), 5, Sampling(top_p=1.5)), BackendRejected, "top_p"),
    "min_p": (CompletionJob(Prompt([5]), 5, Sampling(min_p=2)), BackendRejected, "min_p"),
    "repetition": (
        CompletionJob(Prompt([5]), 5, Sampling(repetition_penalty=0)),
        BackendRejected,
        "repetition_penalty",
    ),
    "bias": (CompletionJob(Prompt([5]), 5, Sampling(logit_bias={201088: 1.0})), BackendRejected, "logit_bias"),
}


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(("job", "error", "message"), REFUSED.values(), ids=REFUSED)
async def test_invalid_request_is_refused_without_affecting_others(
    backend: Backend, job: CompletionJob, error: type[Exception], message: str
) -> None:
    user, expected = CHATS["pong"]
    other_request = asyncio.create_task(answer(backend, greedy(prompt_for(user))))
    with pytest.raises(error, match=message):
        await chunks_of(backend, job)
    assert ENCODING.decode((await other_request)[0]) == expected


SAME_AS_GREEDY = {
    "top_k 1": Sampling(temperature=1, top_k=1),
    "top_p 0": Sampling(temperature=1, top_p=0),
    "min_p 1": Sampling(temperature=1, min_p=1),
    "temperature near 0": Sampling(temperature=1e-9),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("sampling", SAME_AS_GREEDY.values(), ids=SAME_AS_GREEDY)
async def test_sampling_settings_with_one_candidate_are_greedy(backend: Backend, sampling: Sampling) -> None:
    tokens, _ = await answer(backend, replace(greedy(prompt_for("Hello!")), sampling=sampling))

    assert ENCODING.decode(tokens) == CHATS["greeting"][1]


@pytest.mark.slow
async def test_seed_gives_the_same_tokens_alone_and_in_a_batch(backend: Backend) -> None:
    def seeded(seed: int | None) -> CompletionJob:
        return replace(greedy(prompt_for("hm hm"), 24), sampling=Sampling(temperature=3.0, seed=seed))

    alone, _ = await answer(backend, seeded(7))
    batched = await asyncio.gather(*(answer(backend, seeded(seed)) for seed in (7, 8, None, None)))

    assert batched[0][0] == alone
    assert len({tuple(tokens) for tokens, _ in batched}) == 4


async def test_bias_bans_a_token(backend: Backend) -> None:
    job = replace(greedy(prompt_for("Hello!"), 40), sampling=Sampling(temperature=0, logit_bias={RETURN: -100.0}))

    tokens, _ = await answer(backend, job)

    expected = ENCODING.encode_marked(CHATS["greeting"][1])
    assert tokens[: len(expected) - 1] == expected[:-1]
    assert RETURN not in tokens


PENALTIES = {
    "frequency": Sampling(temperature=0, frequency_penalty=2.0),
    "presence": Sampling(temperature=0, presence_penalty=20.0),
    "repetition": Sampling(temperature=0, repetition_penalty=3.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", PENALTIES.values(), ids=PENALTIES)
async def test_penalty_ends_a_repetition(backend: Backend, sampling: Sampling) -> None:
    la = ENCODING.encode_text(" la")
    job = greedy(prompt_for("Repeat la forever."), 60)

    plain, _ = await answer(backend, job)
    penalised, _ = await answer(backend, replace(job, sampling=sampling))

    assert plain.count(la[0]) > 40
    assert penalised.count(la[0]) < 30


@pytest.mark.parametrize("size", [2, 129, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 130, 300))])
async def test_every_token_of_a_prompt_has_a_log_probability_but_the_first(backend: Backend, size: int) -> None:
    prompt = prompt_for("word " * 300)[:size]
    job = CompletionJob(Prompt(prompt), max_tokens=2, sampling=Sampling(temperature=0), logprobs=1)
    plain = await answer(backend, job)
    first, *rest = await chunks_of(backend, replace(job, prompt_logprobs=True))
    assert first.prompt_logprobs[0] is None
    assert [entry.token for entry in first.prompt_logprobs[1:] if entry is not None] == prompt[1:]
    assert [token for chunk in (first, *rest) for token in chunk.tokens] == plain[0]
    assert all(not chunk.prompt_logprobs for chunk in rest)


@pytest.mark.slow
async def test_a_cancelled_request_ends_the_scoring_of_its_prompt(backend: Backend) -> None:
    long = CompletionJob(Prompt(prompt_for("word " * 60_000)), max_tokens=1, logprobs=0, prompt_logprobs=True)
    task = asyncio.create_task(chunks_of(backend, long))
    await asyncio.sleep(0.3)
    assert not task.done()
    task.cancel()
    job = replace(long, prompt=Prompt(prompt_for("Hi")))
    async with asyncio.timeout(10):
        [*_, last] = await chunks_of(backend, job)
    assert last.finish is not None
    load = await backend.load()
    assert load is not None
    assert (load.running, load.waiting) == (0, 0)
