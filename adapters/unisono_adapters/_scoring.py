"""Log probabilities in the answers of servers, and scores of given tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeGuard

from unisono.core.generation import VOCABULARY, Chunk, CompletionJob, Prompt, Sampling, TokenLogprob
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

    Returns None if the server reported no alternatives. Some servers add the token itself to the alternatives, so they
    send one alternative more than requested.
    """
    return None if entry is None or not entry.top else TokenScore(entry.token, entry.logprob, entry.top[:top])


def to_logprob(token: int, value: object, alternatives: Iterable[tuple[object, object]] = ()) -> TokenLogprob | None:
    """Return the log probability of a token and its alternatives.

    The most probable alternative comes first. `alternatives` are pairs of token id and log probability; invalid pairs
    are left out. Returns None if `value`, the log probability of the token, is not a number.
    """
    if not _is_number(value):
        return None
    ranked = [(other, float(each)) for other, each in alternatives if _is_token(other) and _is_number(each)]
    return TokenLogprob(token, float(value), tuple(sorted(ranked, key=lambda one: -one[1])))


def _is_token(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < VOCABULARY


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)
