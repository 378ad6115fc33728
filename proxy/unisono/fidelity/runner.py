"""Generation and scoring of answers on live backends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from unisono.core.generation import CompletionJob, Prompt, Sampling, Timeouts
from unisono.core.ports import Backend
from unisono.core.scoring import SCORED_ALTERNATIVES, ScoreJob, ScoringBackend, TokenScore
from unisono.fidelity.comparison import AnswerSample, ScoredSample
from unisono.fidelity.places import places_of
from unisono.harmony.encoding import Encoding

REQUEST_ID = "unisono-fidelity"
# Tokens at the end of a prompt that contain the beginning of the message that it leaves open.
OPEN_MESSAGE_TOKENS = 64


def to_sample(encoding: Encoding, name: str, prompt: Sequence[int], tokens: Sequence[int]) -> AnswerSample:
    """Return an answer with the places of its tokens."""
    return AnswerSample(name, prompt, tokens, places_of(encoding, tokens, prompt[-OPEN_MESSAGE_TOKENS:]))


async def generate(
    backend: Backend, prompt: Sequence[int], max_tokens: int, timeouts: Timeouts, sampling: Sampling | None = None
) -> list[int]:
    """Return the tokens of an answer, greedy by default. Raises the `BackendError` family."""
    job = CompletionJob(
        Prompt(prompt),
        max_tokens,
        sampling=sampling or Sampling(temperature=0.0),
        timeouts=timeouts,
        request_id=REQUEST_ID,
    )
    tokens: list[int] = []
    async for chunk in backend.complete(job):
        tokens += chunk.tokens
        if chunk.stop_token is not None:
            tokens.append(chunk.stop_token)
    return tokens


async def score(backend: ScoringBackend, sample: AnswerSample, timeouts: Timeouts) -> Sequence[TokenScore | None]:
    """Return the score of each token of an answer. Raises the `BackendError` family."""
    if not sample.tokens:
        return []
    job = ScoreJob(
        Prompt(sample.prompt),
        sample.tokens,
        top=SCORED_ALTERNATIVES,
        timeouts=timeouts,
        request_id=REQUEST_ID,
    )
    return await backend.score(job)


async def score_on_both(
    reference: ScoringBackend,
    other: ScoringBackend,
    samples: Sequence[AnswerSample],
    timeouts: Timeouts,
    *,
    at_once: int = 1,
    scored: Callable[[ScoredSample], None] = lambda one: None,
) -> list[ScoredSample]:
    """Score answers on two backends, `at_once` at a time. Calls `scored` after each answer."""
    places = asyncio.Semaphore(at_once)

    async def work(sample: AnswerSample) -> ScoredSample:
        async with places:
            both = await asyncio.gather(score(reference, sample, timeouts), score(other, sample, timeouts))
        found = ScoredSample(sample, *both)
        scored(found)
        return found

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work(sample)) for sample in samples]
    return [task.result() for task in tasks]
