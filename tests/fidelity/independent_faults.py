"""Ten faults of a model server, written without knowledge of the detector.

`FAULTS` change the distributions, so the answers and the reported scores agree. `CHANGES` change only the tokens of the
greedy answer, so the reported scores stay right. A fault draws the same numbers each time for a prompt and a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log
from random import Random

from tests.fakes.language_model import Distribution, Fault, LanguageModel

Change = Callable[[list[int], Random], list[int]]

# Scores are log probabilities. Where a fault acts on raw logits, the most likely token has a logit of about this.
TOP_LOGIT = 20.0
# vLLM reports this score for a token that its sampler excluded.
EXCLUDED = -9999.0
# Tokens of text in the scripted model, as opposed to special tokens.
WORDS = range(1000, 1000 + 2**16)
CHUNK_TOKENS = 8


def eight_bit_logits(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    """The output layer computes logits in eight bits, so it rounds them to steps of a half."""
    top = TOP_LOGIT + _random("eight_bit_logits", prompt, position).uniform(-4, 4)
    return _normalized({token: round(2 * (top + score)) / 2 - top for token, score in found.items()}, _tail(found))


def repetition_penalty(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    """The sampler always applies a repetition penalty of 1.05, also to tokens of the prompt."""
    seen = {*prompt, *LanguageModel().greedy(prompt, position)}

    def repeated(token: int) -> bool:
        # Words of the scripted model seldom repeat, unlike those of real text. Three in ten count as repeated.
        return token in seen or (token in WORDS and _random("repetition_penalty", prompt, token).random() < 0.3)

    penalized = {
        token: (TOP_LOGIT + score) / 1.05 - TOP_LOGIT if repeated(token) else score for token, score in found.items()
    }
    return _normalized(penalized, _tail(found))


def forced_nucleus(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    """The server forces a top-p of 0.9 on every request and reports the scores after it."""
    kept: Distribution = {}
    mass = 0.0
    for token, score in sorted(found.items(), key=lambda one: -one[1]):
        if mass >= 0.9:
            break
        kept[token] = score
        mass += exp(score)
    # Where the listed tokens do not reach 0.9, tokens beyond the list fill the nucleus.
    whole = log(max(mass, 0.9))
    return {token: kept[token] - whole if token in kept else EXCLUDED for token in found}


def smaller_model(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    """The load balancer sends one prompt in eleven to a smaller model of the same name."""
    if _random("smaller_model", prompt).random() >= 1 / 11:
        return found
    random = _random("smaller_model", prompt, position)
    return _normalized({token: score + random.gauss(0, 1) for token, score in found.items()}, _tail(found))


def host_system_message(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    """The host adds its own system message, which hardly moves most tokens but changes a few."""
    other = LanguageModel().distribution([*prompt, 0], position)
    changes = _random("host_system_message", prompt, position).random() < 1 / 12
    return _blended(found, other, 0.6 if changes else 0.02)


def missing_attention_sinks(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    """The attention kernel ignores the learned sinks, so the last token weighs too much."""
    if not position:
        return found
    return _blended(found, LanguageModel().distribution(prompt, position - 1), 0.06)


def damaged_expert(prompt: Sequence[int], position: int, found: Distribution) -> Distribution:
    """One expert has damaged weights, which lowers the best token at one position in 40."""
    random = _random("damaged_expert", prompt, position)
    if random.random() >= 1 / 40:
        return found
    best = max(found, key=lambda token: found[token])
    return _normalized({**found, best: found[best] - random.uniform(0.5, 2.5)}, _tail(found))


def unverified_draft(answer: list[int], random: Random) -> list[int]:
    """Speculative decoding accepts a token copied from earlier in the answer, one in 70."""
    drafted = list(answer)
    for at in range(1, len(drafted)):
        if random.random() < 1 / 70:
            drafted[at] = random.choice(drafted[:at])
    return drafted


def doubled_token(answer: list[int], random: Random) -> list[int]:
    """The stream sends the last token of a chunk again with the next, one answer in 16."""
    ends = range(CHUNK_TOKENS, len(answer), CHUNK_TOKENS)
    if not ends or random.random() >= 1 / 16:
        return list(answer)
    end = random.choice(ends)
    return answer[:end] + answer[end - 1 :]


def hidden_stop_string(answer: list[int], random: Random) -> list[int]:
    """The host stops at a string of its own, which ends one answer in 12 in its second half."""
    if len(answer) < 4 or random.random() >= 1 / 12:
        return list(answer)
    return answer[: random.randrange(len(answer) // 2, len(answer) - 1)]


FAULTS: dict[str, Fault] = {
    "eight_bit_logits": eight_bit_logits,
    "repetition_penalty": repetition_penalty,
    "forced_nucleus": forced_nucleus,
    "smaller_model": smaller_model,
    "host_system_message": host_system_message,
    "missing_attention_sinks": missing_attention_sinks,
    "damaged_expert": damaged_expert,
}

CHANGES: dict[str, Change] = {
    "unverified_draft": unverified_draft,
    "doubled_token": doubled_token,
    "hidden_stop_string": hidden_stop_string,
}


def _random(name: str, prompt: Sequence[int], *at: int) -> Random:
    return Random(f"{name} {list(prompt)} {at}")


def _tail(found: Distribution) -> float:
    """Return the probability of all tokens that the distribution does not list."""
    return max(0.0, 1 - sum(map(exp, found.values())))


def _normalized(scores: Distribution, tail: float) -> Distribution:
    whole = log(sum(map(exp, scores.values())) + tail)
    return {token: score - whole for token, score in scores.items()}


def _blended(found: Distribution, other: Distribution, weight: float) -> Distribution:
    shares = {token: (1 - weight) * exp(score) for token, score in found.items()}
    for token, score in other.items():
        shares[token] = shares.get(token, 0.0) + weight * exp(score)
    return {token: log(share) for token, share in shares.items()}
