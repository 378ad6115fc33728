"""Estimates with 95 % confidence intervals, from values that are grouped by answer.

The tokens of one answer depend on each other, so a thousand tokens of ten answers say less than a thousand independent
tokens. All intervals therefore use the variance between answers. The functions are pure and use no random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from typing import Final

from unisono.core.frozen import dataclass

# Quantile of the normal distribution for a two-sided interval of 95 %.
Z_95: Final = 1.959964
# Minimum probability that is assumed for all tokens together that are not among the alternatives.
MIN_PROBABILITY: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate from `count` values, with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Group:
    """Sum and number of the values of one answer."""

    total: float
    count: int


def proportion(groups: Sequence[Group]) -> Estimate | None:
    """Estimate a proportion, by Wilson's interval with the effective number of values."""
    count = sum(group.count for group in groups)
    if not count:
        return None
    share = sum(group.total for group in groups) / count
    binomial = share * (1 - share) / count
    # The variance of a few answers is itself uncertain. Never assume more information than independent values would
    # have.
    effect = max(_variance(groups, share, count) / binomial, 1.0) if binomial else 1.0
    size = count / effect
    spread = Z_95 * sqrt(share * (1 - share) / size + Z_95**2 / (4 * size**2))
    centre = share + Z_95**2 / (2 * size)
    scale = 1 + Z_95**2 / size
    return Estimate(share, max((centre - spread) / scale, 0.0), min((centre + spread) / scale, 1.0), count)


def mean(groups: Sequence[Group]) -> Estimate | None:
    """Estimate the mean of values. The interval is unbounded for a single answer."""
    count = sum(group.count for group in groups)
    if not count:
        return None
    value = sum(group.total for group in groups) / count
    used = sum(1 for group in groups if group.count)
    half = Z_95 * sqrt(_variance(groups, value, count)) if used > 1 else inf
    return Estimate(value, value - half, value + half, count)


def _variance(groups: Sequence[Group], value: float, count: int) -> float:
    """Return the variance of the mean `value`, which is a ratio of sums over answers."""
    used = [group for group in groups if group.count]
    if len(used) < 2:
        return 0.0
    squares = sum((group.total - value * group.count) ** 2 for group in used)
    return squares * len(used) / (len(used) - 1) / count**2


def divergence(first: Sequence[tuple[int, float]], second: Sequence[tuple[int, float]]) -> float:
    """Return the Kullback-Leibler divergence in nats, computed from the most likely tokens.

    `first` and `second` contain tokens with their log probabilities. All tokens that `first` does not list are treated
    as one more outcome. A token that `second` does not list gets the lowest log probability in `second`, which is too
    high. Therefore the result may be too small, but hardly too large.
    """
    if not first or not second:
        return 0.0
    known = dict(second)
    floor = min(known.values())
    total, rest_first, rest_second = 0.0, 1.0, 1.0
    for token, logprob in first:
        other = known.get(token, floor)
        probability = exp(logprob)
        total += probability * (logprob - other)
        rest_first -= probability
        rest_second -= exp(other)
    rest_first, rest_second = max(rest_first, MIN_PROBABILITY), max(rest_second, MIN_PROBABILITY)
    return max(total + rest_first * (log(rest_first) - log(rest_second)), 0.0)


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two proportions, with its 95 % interval and two-sided p-value."""

    value: float
    low: float
    high: float
    p_value: float


def paired_difference(before: Sequence[bool], after: Sequence[bool]) -> Difference:
    """Compare two runs of the same cases by McNemar's exact test.

    The interval is that of Agresti and Min (https://doi.org/10.1002/sim.1977), which adds half a case to each of the
    four possible pairs of results. It is an approximation, and can disagree with the exact test near its limit.
    """
    lost = sum(1 for old, new in zip(before, after, strict=True) if old and not new)
    won = sum(1 for old, new in zip(before, after, strict=True) if new and not old)
    count = max(len(before), 1)
    value = (won - lost) / count
    added = count + 2
    centre = (won - lost) / added
    half = Z_95 * sqrt(won + lost + 1 - (won - lost) ** 2 / added) / added
    return Difference(value, max(centre - half, -1.0), min(centre + half, 1.0), _binomial_test(won, won + lost))


def _binomial_test(successes: int, trials: int) -> float:
    """Return the two-sided p-value for a number of successes with a fair coin."""
    extreme = min(successes, trials - successes)
    row, tail = 1, 0
    for at in range(extreme + 1):
        tail += row
        row = row * (trials - at) // (at + 1)
    return min(2 * tail / 2**trials, 1.0) if trials else 1.0
