"""Conversion of log probabilities that servers report, and scores of given tokens.

llama.cpp's server reports log probabilities only for tokens that it generates. A grammar of token ids forces the server
to generate the given tokens. The log probabilities that it reports are those before grammar and biases are applied. A
stop token cannot be part of a grammar, so each stop token has a request of its own, in which a bias forces the token.
Old servers do not support grammars of token ids, so on them every token has a request of its own. All this was observed
on the server of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

from unisono.core.generation import ALL_STOP_TOKENS, VOCABULARY, Chunk, CompletionJob, Prompt, Sampling, TokenLogprob
from unisono.core.scoring import ScoreJob, TokenScore
from unisono.errors import BackendError, BackendOverloaded, BackendProtocolError, BackendTimeout, BackendUnavailable

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


# Maximum number of tokens that one request generates. A request cannot be cancelled before it is answered.
FORCED_TOKENS = 128
# Bias so large that the token with the bias is always generated.
FORCING_BIAS = 1e9
# Failures whose cause is not the grammar, so that trying again with biases would not help.
NOT_OF_THE_GRAMMAR = (BackendOverloaded, BackendTimeout, BackendUnavailable)

# Function that generates tokens. Its arguments are the ids of the prompt, the number of tokens to generate, and
# additional fields of the request body. It returns the decoded JSON answer.
Generate = Callable[[Sequence[int], int, Mapping[str, object]], Awaitable[object]]


async def score_forced(generate: Generate, job: ScoreJob) -> list[TokenScore | None]:
    """Return the score of each target; None for a target that the server did not score.

    Raises BackendError or a subclass.
    """
    scores: list[TokenScore | None] = []
    for part in parts_of(job.targets):
        before = [*job.prompt.tokens, *job.targets[: len(scores)]]
        scores += await _score_part(generate, before, part, job.top)
    return scores


def parts_of(targets: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the tokens to score, `targets`, in slices of at most `FORCED_TOKENS` tokens.

    Each stop token is a slice of its own.
    """
    begin = 0
    for at, token in enumerate(targets):
        if token in ALL_STOP_TOKENS:
            if at > begin:
                yield targets[begin:at]
            yield targets[at : at + 1]
            begin = at + 1
        elif at - begin == FORCED_TOKENS:
            yield targets[begin:at]
            begin = at
    if begin < len(targets):
        yield targets[begin:]


async def _score_part(
    generate: Generate, before: Sequence[int], part: Sequence[int], top: int
) -> list[TokenScore | None]:
    if len(part) > 1:
        grammar = "root ::= " + " ".join(f"<[{token}]>" for token in part)
        try:
            answer = await generate(before, len(part), {"grammar": grammar})
        except NOT_OF_THE_GRAMMAR:
            raise
        except BackendError:
            # The server does not support grammars of token ids, or the tokens do not form valid UTF-8.
            pass
        else:
            return _scores_in(answer, part, top)
    scores: list[TokenScore | None] = []
    for at, token in enumerate(part):
        answer = await generate([*before, *part[:at]], 1, {"logit_bias": [[token, FORCING_BIAS]]})
        scores += _scores_in(answer, [token], top)
    return scores


def _scores_in(answer: object, targets: Sequence[int], top: int) -> list[TokenScore | None]:
    """Return the score of each target in an answer.

    Returns None for a token that ends inside a character, because the server leaves such tokens out.
    """
    listed = answer.get("completion_probabilities") if isinstance(answer, dict) else None
    entries = [entry for entry in (listed if isinstance(listed, list) else ()) if isinstance(entry, dict)]
    scores: list[TokenScore | None] = []
    for target in targets:
        if entries and entries[0].get("id") == target:
            entry = entries.pop(0)
            others = entry.get("top_logprobs")
            alternatives = [each for each in (others if isinstance(others, list) else ()) if isinstance(each, dict)]
            known = ((each.get("id"), each.get("logprob")) for each in alternatives)
            scores.append(to_score(to_logprob(target, entry.get("logprob"), known), top))
        else:
            scores.append(None)
    return scores
