"""Every engine through its adapter: token ids, limits, tenants, rejections, cancellation."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from tests.engines.demo_prompts import CHATS, ENCODING, greedy, prompt_for
from tests.engines_all.conversations import FILLER, MAX_TOKENS, conversations, recorded
from tests.engines_all.engines import CONCURRENCY, CONTEXT, ENGINES, Running, wait_until_idle
from unisono.core.generation import (
    CALL,
    ENDOFTEXT,
    RETURN,
    VOCABULARY,
    Capabilities,
    Chunk,
    CompletionJob,
    FinishReason,
    OutputForm,
    Prompt,
    Sampling,
)
from unisono.core.ports import Backend
from unisono.errors import BackendRejected, ContextTooLong

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

GREETING = recorded()["greeting"]
ENDLESS = prompt_for("Repeat la forever.")


def with_text(job: CompletionJob) -> CompletionJob:
    """Return the job with the prompt as text, for backends that take text."""
    return replace(job, prompt=Prompt(job.prompt.tokens, ENCODING.decode(job.prompt.tokens)))


async def chunks_of(backend: Backend, job: CompletionJob) -> list[Chunk]:
    async with asyncio.timeout(120):
        return [chunk async for chunk in backend.complete(with_text(job))]


def output_of(chunks: list[Chunk]) -> list[int] | str:
    """Return the output in the form of the backend: token ids or text."""
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    text = "".join(chunk.text for chunk in chunks)
    assert not (tokens and text)
    return tokens or text


def as_delivered(engine: Running, ids: list[int], finish: FinishReason) -> list[int] | str:
    """Return these ids as the adapter delivers them.

    mlx_lm.server hides the stop token and drops a leading space.
    """
    if engine.engine.shows_stop:
        return ids
    return ENCODING.decode(ids[:-1] if finish is FinishReason.STOP else ids).removeprefix(" ")


def finish_of(name: str) -> FinishReason:
    return FinishReason.LENGTH if len(recorded()[name]) == MAX_TOKENS else FinishReason.STOP


async def test_the_probe_reports_the_capabilities(engine: Running, backend: Backend) -> None:
    probe = await backend.probe()

    form = OutputForm.IDS if engine.engine.shows_stop else OutputForm.TEXT
    known = replace(probe.capabilities, constrain=frozenset(), context=None)
    has_logprobs = engine.engine.kind != "mlx_server"
    assert known == Capabilities(
        form,
        form,
        stop_visible=engine.engine.shows_stop,
        logit_bias=True,
        logprobs=has_logprobs,
        scores=has_logprobs,
        prompt_logprobs=engine.engine.kind in ("vllm", "mlx"),
    )
    assert probe.capabilities.context == engine.engine.context
    assert probe.fatal == ()


@pytest.mark.parametrize("name", conversations())
async def test_every_engine_generates_the_recorded_ids(engine: Running, backend: Backend, name: str) -> None:
    prompt = conversations()[name]

    chunks = await chunks_of(backend, greedy(prompt, MAX_TOKENS))

    assert output_of(chunks) == as_delivered(engine, recorded()[name], finish_of(name))
    assert chunks[-1].finish is finish_of(name)
    assert {chunk.prompt_tokens for chunk in chunks if chunk.prompt_tokens is not None} == {len(prompt)}


async def test_eight_concurrent_answers_equal_the_recorded_ones(engine: Running, backend: Backend) -> None:
    names = list(CHATS)[:CONCURRENCY]

    together = await asyncio.gather(*(chunks_of(backend, greedy(conversations()[name])) for name in names))

    assert [output_of(chunks) for chunks in together] == [
        as_delivered(engine, recorded()[name], FinishReason.STOP) for name in names
    ]


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
async def test_max_tokens_ends_an_answer_with_finish_length(engine: Running, backend: Backend, max_tokens: int) -> None:
    chunks = await chunks_of(backend, greedy(prompt_for("Hello!"), max_tokens))

    assert output_of(chunks) == as_delivered(engine, GREETING[:max_tokens], FinishReason.LENGTH)
    assert chunks[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("room", [1, 16])
async def test_a_prompt_can_fill_the_context_except_for_the_output(backend: Backend, room: int) -> None:
    prompt = long_prompt(CONTEXT - room)

    chunks = await chunks_of(backend, greedy(prompt, room))

    assert chunks[-1].finish is not None
    assert output_of(chunks) != []
    assert {chunk.prompt_tokens for chunk in chunks if chunk.prompt_tokens is not None} == {len(prompt)}


@pytest.mark.parametrize("over", [0, 1, 5000])
# The gateway enforces the limit for the other engines.
@pytest.mark.parametrize(
    "engine", [name for name, candidate in ENGINES.items() if candidate.context is not None], indirect=True
)
async def test_a_prompt_without_room_for_output_is_too_long(engine: Running, backend: Backend, over: int) -> None:
    assert engine.engine.context is not None
    with pytest.raises(ContextTooLong):
        await chunks_of(backend, greedy([13225] * (engine.engine.context + over), 5))
    assert output_of(await chunks_of(backend, greedy(prompt_for("Hello!")))) == GREETING


def long_prompt(length: int, begins: str = "Hello") -> list[int]:
    """Return a prompt of `length` tokens."""
    ends = prompt_for(f"{begins}@")
    at = ends.index(ENCODING.encode_text("@")[0])
    filler = ENCODING.encode_text(FILLER) * (length // 10)
    return [*ends[:at], *filler[: length - len(ends) + 1], *ends[at + 1 :]]


async def test_a_logit_bias_excludes_a_token(engine: Running, backend: Backend) -> None:
    job = replace(greedy(prompt_for("Hello!"), 40), sampling=Sampling(temperature=0, logit_bias={RETURN: -100.0}))

    chunks = await chunks_of(backend, job)

    output, before = output_of(chunks), as_delivered(engine, GREETING[:-1], FinishReason.LENGTH)
    assert output[: len(before)] == before
    assert len(output) > len(before)
    assert not isinstance(output, list) or RETURN not in output


async def test_a_prefix_is_cached_only_for_its_tenant(engine: Running, backend: Backend) -> None:
    prompt = prompt_for("Hello!", instructions="Cache this." + FILLER * 40)
    before = [await cached(backend, prompt, salt) for salt in ("one", "one")]
    other = await cached(backend, prompt, "two")

    # Below 128 tokens is the system message, which all tenants share.
    assert before[0] < 128 <= before[1]
    assert before[1] >= len(prompt) - engine.engine.block
    if engine.engine.keeps_tenants_apart:
        assert other == 0


async def cached(backend: Backend, prompt: list[int], salt: str) -> int:
    cached_counts = [c.cached_tokens for c in await chunks_of(backend, greedy(prompt, 4, salt=salt)) if c.cached_tokens]
    return max(cached_counts, default=0)


SAME_AS_GREEDY = {
    "top_k 1": Sampling(temperature=1, top_k=1),
    "a tiny top_p": Sampling(temperature=1, top_p=1e-6),
    "min_p 1": Sampling(temperature=1, min_p=1),
    "a top_p that is 0 in 32 bits": Sampling(temperature=1, top_p=1e-300),
    "a temperature that is 0 in 32 bits": Sampling(temperature=1e-300),
    "a temperature whose inverse overflows": Sampling(temperature=1e-40),
}
# Values that stop or confuse some engines if these values are sent unchanged.
EXTREME = {
    "top_k": Sampling(temperature=1, top_k=VOCABULARY),
    "negative seed": Sampling(temperature=1, seed=-1),
    "smallest seed": Sampling(temperature=1, seed=-(2**63)),
    "largest seed": Sampling(temperature=1, seed=2**63 - 1),
    "min_p": Sampling(temperature=1, min_p=5e-324),
    "small repetition penalty": Sampling(temperature=1, repetition_penalty=0.01),
    "large repetition penalty": Sampling(temperature=1, repetition_penalty=10),
    "penalties": Sampling(temperature=1, presence_penalty=-2, frequency_penalty=2),
    "biases": Sampling(temperature=1, logit_bias=dict.fromkeys(range(1000), 100.0)),
}


@pytest.mark.parametrize("sampling", SAME_AS_GREEDY.values(), ids=SAME_AS_GREEDY)
async def test_sampling_with_one_candidate_is_greedy(engine: Running, backend: Backend, sampling: Sampling) -> None:
    chunks = await chunks_of(backend, replace(greedy(prompt_for("Hello!")), sampling=sampling.for_backends()))

    assert output_of(chunks) == as_delivered(engine, GREETING, FinishReason.STOP)


@pytest.mark.parametrize("sampling", EXTREME.values(), ids=EXTREME)
async def test_every_engine_survives_extreme_sampling(engine: Running, backend: Backend, sampling: Sampling) -> None:
    job = greedy(prompt_for("Hello!"), 4)

    first, second = [
        output_of(await chunks_of(backend, replace(job, sampling=sampling.for_backends()))) for _ in range(2)
    ]

    assert first
    assert sampling.seed is None or first == second
    assert output_of(await chunks_of(backend, greedy(prompt_for("Hello!")))) == as_delivered(
        engine, GREETING, FinishReason.STOP
    )


async def test_equal_seeds_give_equal_output_and_other_seeds_do_not(backend: Backend) -> None:
    job = greedy(prompt_for("hm hm"), 24)
    jobs = [replace(job, sampling=Sampling(temperature=2.0, seed=seed)) for seed in (7, 7, 8)]
    # Engines read a prompt in larger batches than the rest of a cached one, which changes the last bits of its logits.
    await chunks_of(backend, job)

    first, second, other = [output_of(await chunks_of(backend, seeded)) for seeded in jobs]

    assert first == second
    assert first != other


@pytest.mark.parametrize("streams", [1, CONCURRENCY])
async def test_closing_a_stream_leaves_the_engine_idle(engine: Running, backend: Backend, streams: int) -> None:
    running = [backend.complete(with_text(greedy(ENDLESS, 3000))) for _ in range(streams)]
    for stream in running:
        assert (await anext(stream)).finish is None
    assert await engine.busy()

    await asyncio.gather(*(stream.aclose() for stream in running))  # type: ignore[attr-defined]

    await wait_until_idle(engine)
    assert output_of(await chunks_of(backend, greedy(prompt_for("Hello!")))) == as_delivered(
        engine, GREETING, FinishReason.STOP
    )


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.05, 0.3, 3.0])
async def test_cancelling_in_any_phase_leaves_the_engine_idle(
    engine: Running, backend: Backend, after_s: float
) -> None:
    # The prompt is not in a cache, and the answer cannot end before its limit.
    prompt = long_prompt(CONTEXT - 2500, f"Wait for {after_s} s")
    endless = Sampling(temperature=0, logit_bias=dict.fromkeys((RETURN, CALL, ENDOFTEXT), -100.0))
    task = asyncio.create_task(chunks_of(backend, replace(greedy(prompt, 2400), sampling=endless)))
    await asyncio.sleep(after_s)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await wait_until_idle(engine)


# The other engines read text.
@pytest.mark.parametrize("engine", [name for name, candidate in ENGINES.items() if candidate.shows_stop], indirect=True)
async def test_an_id_outside_the_vocabulary_is_rejected_alone(engine: Running, backend: Backend) -> None:
    neighbour = asyncio.create_task(chunks_of(backend, greedy(prompt_for("Hello!"))))
    for token in (201088, 300_000, 2**31):
        with pytest.raises(BackendRejected):
            [chunk async for chunk in backend.complete(greedy([5, token], 5))]
    assert output_of(await neighbour) == GREETING


async def test_speed_is_reported(engine: Running, backend: Backend, measured: dict[str, str]) -> None:
    first, alone_s, tokens = await timed(backend)
    began = time.monotonic()
    together = await asyncio.gather(*(timed(backend) for _ in range(CONCURRENCY)))
    together_s = time.monotonic() - began

    assert {count for _, _, count in together} == {tokens}
    measured["first token"] = f"{first * 1000:.0f} ms"
    measured["alone"] = f"{tokens / alone_s:.0f} tokens/s"
    measured[f"{CONCURRENCY} at once"] = f"{CONCURRENCY * tokens / together_s:.0f} tokens/s"


async def timed(backend: Backend, max_tokens: int = 100) -> tuple[float, float, int]:
    """Return the seconds to the first token, the seconds to the end, and the number of tokens."""
    began = time.monotonic()
    first: float | None = None
    chunks = []
    async for chunk in backend.complete(with_text(greedy(ENDLESS, max_tokens))):
        first = first or time.monotonic() - began
        chunks.append(chunk)
    output = output_of(chunks)
    assert first is not None
    return first, time.monotonic() - began, len(ENCODING.encode_marked(output) if isinstance(output, str) else output)


async def test_cancelling_queued_requests_leaves_the_engine_idle(engine: Running, backend: Backend) -> None:
    running = backend.complete(with_text(greedy(ENDLESS, 3000)))
    await anext(running)
    waiting = [asyncio.create_task(chunks_of(backend, greedy(ENDLESS, 3000))) for _ in range(CONCURRENCY)]
    await asyncio.sleep(0.01)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await running.aclose()  # type: ignore[attr-defined]

    await wait_until_idle(engine)
