"""Generation and scoring of answers on live backends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from unisono.core.generation import CompletionJob, Prompt, Sampling, Timeouts
from unisono.core.ports import Backend
from unisono.core.scoring import SCORED_ALTERNATIVES, ScoreJob, ScoringBackend, TokenScore
from unisono.fidelity.comparison import AnswerSample, ScoredSample, places_of
from unisono.harmony.encoding import Encoding

REQUEST_ID = "unisono-fidelity"
# Number of tokens at the end of a prompt in which the beginning of an open message is searched for.
OPEN_MESSAGE_TOKENS = 64


def to_sample(encoding: Encoding, name: str, prompt: Sequence[int], tokens: Sequence[int]) -> AnswerSample:
    """Return an answer to score, with the place of each of its tokens."""
    return AnswerSample(name, prompt, tokens, places_of(encoding, tokens, prompt[-OPEN_MESSAGE_TOKENS:]))


async def generate(
    backend: Backend, prompt: Sequence[int], max_tokens: int, timeouts: Timeouts, sampling: Sampling | None = None
) -> list[int]:
    """Generate an answer, greedily by default. Raises a BackendError if the backend fails."""
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
    """Return the score of each token of an answer. Raises a BackendError if the backend fails."""
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
) -> AsyncIterator[ScoredSample]:
    """Score one answer after the other, each on both backends at once.

    Raises BackendError if a backend fails.
    """
    for sample in samples:
        both = await asyncio.gather(score(reference, sample, timeouts), score(other, sample, timeouts))
        yield ScoredSample(sample, *both)
