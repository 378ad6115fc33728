"""Every engine at its adapter: the same ids from all of them, limits, tenants, refusals, and no work for nobody."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from tests.engines.demo_prompts import CHATS, ENCODING, greedy, prompt_for
from tests.engines_all.conversations import FILLER, LONGEST, conversations, recorded
from tests.engines_all.engines import AT_ONCE, CONTEXT, ENGINES, Running, idle_soon
from unisono.core.generation import (
    CALL,
    ENDOFTEXT,
    RETURN,
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


def as_text(job: CompletionJob) -> CompletionJob:
    """The job as a text backend is given it; one for ids does not look."""
    return replace(job, prompt=Prompt(job.prompt.tokens, ENCODING.decode(job.prompt.tokens)))


async def chunks_of(backend: Backend, job: CompletionJob) -> list[Chunk]:
    async with asyncio.timeout(120):
        return [chunk async for chunk in backend.complete(as_text(job))]


def delivered(chunks: list[Chunk]) -> list[int] | str:
    """What came, in the form the backend speaks."""
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    text = "".join(chunk.text for chunk in chunks)
    assert not (tokens and text)
    return tokens or text


def shown(engine: Running, ids: list[int], finish: FinishReason) -> list[int] | str:
    """The same ids as the engine's adapter delivers them. mlx_lm.server hides the stop token and eats a space at the
    very beginning."""
    if engine.engine.shows_stop:
        return ids
    return ENCODING.decode(ids[:-1] if finish is FinishReason.STOP else ids).removeprefix(" ")


def finish_of(name: str) -> FinishReason:
    return FinishReason.LENGTH if len(recorded()[name]) == LONGEST else FinishReason.STOP


async def test_it_says_what_it_can_do(engine: Running, backend: Backend) -> None:
    probe = await backend.probe()

    form = OutputForm.IDS if engine.engine.shows_stop else OutputForm.TEXT
    known = replace(probe.capabilities, constrain=frozenset(), context=None)
    assert known == Capabilities(form, form, stop_visible=engine.engine.shows_stop, logit_bias=True)
    assert probe.capabilities.context == engine.engine.context
    assert probe.fatal == ()


@pytest.mark.parametrize("name", conversations())
async def test_every_engine_writes_the_same_ids(engine: Running, backend: Backend, name: str) -> None:
    prompt = conversations()[name]

    chunks = await chunks_of(backend, greedy(prompt, LONGEST))

    assert delivered(chunks) == shown(engine, recorded()[name], finish_of(name))
    assert chunks[-1].finish is finish_of(name)
    assert {chunk.prompt_tokens for chunk in chunks if chunk.prompt_tokens is not None} == {len(prompt)}


async def test_eight_at_once_answer_as_each_does_alone(engine: Running, backend: Backend) -> None:
    names = list(CHATS)[:AT_ONCE]

    together = await asyncio.gather(*(chunks_of(backend, greedy(conversations()[name])) for name in names))

    assert [delivered(chunks) for chunks in together] == [
        shown(engine, recorded()[name], FinishReason.STOP) for name in names
    ]


@pytest.mark.parametrize("most", [1, 2, 7])
async def test_max_tokens_ends_an_answer_for_length(engine: Running, backend: Backend, most: int) -> None:
    chunks = await chunks_of(backend, greedy(prompt_for("Hello!"), most))

    assert delivered(chunks) == shown(engine, GREETING[:most], FinishReason.LENGTH)
    assert chunks[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("room", [1, 16])
async def test_a_prompt_may_fill_the_context_up_to_what_is_left_to_write(backend: Backend, room: int) -> None:
    prompt = long_prompt(CONTEXT - room)

    chunks = await chunks_of(backend, greedy(prompt, room))

    assert chunks[-1].finish is not None
    assert delivered(chunks) != []
    assert {chunk.prompt_tokens for chunk in chunks if chunk.prompt_tokens is not None} == {len(prompt)}


@pytest.mark.parametrize("over", [0, 1, 5000])
# The gateway holds the others to a limit.
@pytest.mark.parametrize("engine", [name for name, one in ENGINES.items() if one.context is not None], indirect=True)
async def test_a_prompt_that_leaves_no_room_is_too_long(engine: Running, backend: Backend, over: int) -> None:
    assert engine.engine.context is not None
    with pytest.raises(ContextTooLong):
        await chunks_of(backend, greedy([13225] * (engine.engine.context + over), 5))
    assert delivered(await chunks_of(backend, greedy(prompt_for("Hello!")))) == GREETING


def long_prompt(length: int, begins: str = "Hello") -> list[int]:
    """A conversation of so many tokens."""
    ends = prompt_for(f"{begins}@")
    at = ends.index(ENCODING.encode_text("@")[0])
    filler = ENCODING.encode_text(FILLER) * (length // 10)
    return [*ends[:at], *filler[: length - len(ends) + 1], *ends[at + 1 :]]


async def test_a_bias_forbids_a_token(engine: Running, backend: Backend) -> None:
    job = replace(greedy(prompt_for("Hello!"), 40), sampling=Sampling(temperature=0, logit_bias={RETURN: -100.0}))

    chunks = await chunks_of(backend, job)

    got, before = delivered(chunks), shown(engine, GREETING[:-1], FinishReason.LENGTH)
    assert got[: len(before)] == before
    assert len(got) > len(before)
    assert not isinstance(got, list) or RETURN not in got


async def test_a_prefix_is_cached_and_for_its_own_tenant_only(engine: Running, backend: Backend) -> None:
    prompt = prompt_for("Hello!", instructions="Cache this." + FILLER * 40)
    before = [await cached(backend, prompt, salt) for salt in ("one", "one")]
    other = await cached(backend, prompt, "two")

    # Whatever else begins alike is no tenant's secret: the system message.
    assert before[0] < 128 <= before[1]
    assert before[1] >= len(prompt) - engine.engine.block
    if engine.engine.keeps_tenants_apart:
        assert other == 0


async def cached(backend: Backend, prompt: list[int], salt: str) -> int:
    counts = [c.cached_tokens for c in await chunks_of(backend, greedy(prompt, 4, salt=salt)) if c.cached_tokens]
    return max(counts, default=0)


SAME_AS_GREEDY = {
    "top_k 1": Sampling(temperature=1, top_k=1),
    "a tiny top_p": Sampling(temperature=1, top_p=1e-6),
    "min_p 1": Sampling(temperature=1, min_p=1),
}


@pytest.mark.parametrize("sampling", SAME_AS_GREEDY.values(), ids=SAME_AS_GREEDY)
async def test_settings_that_leave_one_choice_are_greedy(engine: Running, backend: Backend, sampling: Sampling) -> None:
    chunks = await chunks_of(backend, replace(greedy(prompt_for("Hello!")), sampling=sampling))

    assert delivered(chunks) == shown(engine, GREETING, FinishReason.STOP)


async def test_a_seed_gives_the_same_again_and_another_seed_does_not(backend: Backend) -> None:
    job = greedy(prompt_for("hm hm"), 24)
    asked = [replace(job, sampling=Sampling(temperature=2.0, seed=seed)) for seed in (7, 7, 8)]

    one, again, other = [delivered(await chunks_of(backend, one)) for one in asked]

    assert one == again
    assert one != other


@pytest.mark.parametrize("streams", [1, AT_ONCE])
async def test_closing_a_stream_leaves_the_engine_idle(engine: Running, backend: Backend, streams: int) -> None:
    running = [backend.complete(as_text(greedy(ENDLESS, 3000))) for _ in range(streams)]
    for stream in running:
        assert (await anext(stream)).finish is None
    assert await engine.busy()

    await asyncio.gather(*(stream.aclose() for stream in running))  # type: ignore[attr-defined]

    await idle_soon(engine)
    assert delivered(await chunks_of(backend, greedy(prompt_for("Hello!")))) == shown(
        engine, GREETING, FinishReason.STOP
    )


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.05, 0.3, 3.0])
async def test_cancelling_leaves_the_engine_idle_in_whatever_phase(
    engine: Running, backend: Backend, after_s: float
) -> None:
    # A prompt nobody has cached, and an answer that cannot end before its limit.
    prompt = long_prompt(CONTEXT - 2500, f"Wait for {after_s} s")
    endless = Sampling(temperature=0, logit_bias=dict.fromkeys((RETURN, CALL, ENDOFTEXT), -100.0))
    task = asyncio.create_task(chunks_of(backend, replace(greedy(prompt, 2400), sampling=endless)))
    await asyncio.sleep(after_s)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await idle_soon(engine)


# The others read text.
@pytest.mark.parametrize("engine", [name for name, one in ENGINES.items() if one.shows_stop], indirect=True)
async def test_an_id_outside_the_vocabulary_is_refused_and_hurts_nobody(engine: Running, backend: Backend) -> None:
    neighbour = asyncio.create_task(chunks_of(backend, greedy(prompt_for("Hello!"))))
    for token in (201088, 300_000, 2**31):
        with pytest.raises(BackendRejected):
            [chunk async for chunk in backend.complete(greedy([5, token], 5))]
    assert delivered(await neighbour) == GREETING


async def test_how_fast_it_is(engine: Running, backend: Backend, measured: dict[str, str]) -> None:
    first, alone_s, most = await timed(backend)
    began = time.monotonic()
    together = await asyncio.gather(*(timed(backend) for _ in range(AT_ONCE)))
    together_s = time.monotonic() - began

    assert {count for _, _, count in together} == {most}
    measured["first token"] = f"{first * 1000:.0f} ms"
    measured["alone"] = f"{most / alone_s:.0f} tokens/s"
    measured[f"{AT_ONCE} at once"] = f"{AT_ONCE * most / together_s:.0f} tokens/s"


async def timed(backend: Backend, most: int = 100) -> tuple[float, float, int]:
    """Seconds to the first token and to the end, and how many tokens came."""
    began = time.monotonic()
    first: float | None = None
    chunks = []
    async for chunk in backend.complete(as_text(greedy(ENDLESS, most))):
        first = first or time.monotonic() - began
        chunks.append(chunk)
    got = delivered(chunks)
    assert first is not None
    return first, time.monotonic() - began, len(ENCODING.encode_marked(got) if isinstance(got, str) else got)


async def test_clients_that_leave_a_busy_engine_before_its_answer_begins_leave_it_idle(
    engine: Running, backend: Backend
) -> None:
    running = backend.complete(as_text(greedy(ENDLESS, 3000)))
    await anext(running)
    waiting = [asyncio.create_task(chunks_of(backend, greedy(ENDLESS, 3000))) for _ in range(AT_ONCE)]
    await asyncio.sleep(0.01)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await running.aclose()  # type: ignore[attr-defined]

    await idle_soon(engine)
