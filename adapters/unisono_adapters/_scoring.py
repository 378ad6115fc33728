"""Scores of given tokens from servers that report the log probabilities of a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from unisono.core.generation import Chunk, CompletionJob, Prompt, Sampling, TokenLogprob
from unisono.core.scoring import ScoreJob, TokenScore
from unisono.errors import BackendProtocolError

GREEDY = Sampling(temperature=0.0)


async def score_prompt(
    complete: Callable[[CompletionJob], AsyncIterator[Chunk]], job: ScoreJob
) -> list[TokenScore | None]:
    """Score the targets as the end of a prompt, in one request."""
    tokens = [*job.prompt.tokens, *job.targets]
    request = CompletionJob(
        prompt=Prompt(tokens),
        max_tokens=1,
        sampling=GREEDY,
        timeouts=job.timeouts,
        request_id=job.request_id,
        cache_salt=job.cache_salt,
        logprobs=job.top,
        prompt_logprobs=True,
        trace=job.trace,
    )
    entries: list[TokenLogprob | None] = []
    async for chunk in complete(request):
        entries += chunk.prompt_logprobs
    if len(entries) != len(tokens):
        raise BackendProtocolError("the backend sent no log probabilities of the prompt")
    return [to_score(entry, job.top) for entry in entries[len(job.prompt.tokens) :]]


def to_score(entry: TokenLogprob | None, top: int) -> TokenScore | None:
    """Return the score of an entry with at most `top` alternatives; None without any.

    Some servers add the token itself to the alternatives, so that there is one more.
    """
    return None if entry is None or not entry.top else TokenScore(entry.token, entry.logprob, entry.top[:top])
