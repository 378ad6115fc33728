"""Scoring of given tokens on servers that can report the log probabilities of prompt tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from unisono.core.generation import Chunk, CompletionJob, Prompt, Sampling, TokenLogprob
from unisono.core.scoring import ScoreJob, TokenScore
from unisono.errors import BackendProtocolError

GREEDY = Sampling(temperature=0.0)


async def score_prompt(
    complete: Callable[[CompletionJob], AsyncIterator[Chunk]], job: ScoreJob
) -> list[TokenScore | None]:
    """Score the targets in one request whose prompt ends with the targets.

    Returns one entry for each target. Raises BackendProtocolError if the backend does not report a log probability
    for each token of the prompt.
    """
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
        raise BackendProtocolError("the backend did not send a log probability for each token of the prompt")
    return [to_score(entry, job.top) for entry in entries[len(job.prompt.tokens) :]]


def to_score(entry: TokenLogprob | None, top: int) -> TokenScore | None:
    """Return the score of a token with at most `top` alternatives.

    Returns None if there are no alternatives. Some servers add the token itself to the alternatives, so they send one
    more than requested.
    """
    return None if entry is None or not entry.top else TokenScore(entry.token, entry.logprob, entry.top[:top])
