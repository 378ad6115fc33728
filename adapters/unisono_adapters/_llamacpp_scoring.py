"""Scoring of given tokens on llama.cpp's server.

The server reports log probabilities only for tokens that it generates. A grammar of token ids forces the server to
generate the given tokens. The log probabilities that it reports are those before grammar and biases are applied. A stop
token cannot be part of a grammar, so each stop token has a request of its own, in which a bias forces the token. On old
servers, which do not support grammars of token ids, every token has a request of its own. Measured on the server of
llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from unisono.core.generation import ALL_STOP_TOKENS
from unisono.core.scoring import ScoreJob, TokenScore
from unisono.errors import BackendError, BackendOverloaded, BackendTimeout, BackendUnavailable
from unisono_adapters._scoring import to_logprob, to_score

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
