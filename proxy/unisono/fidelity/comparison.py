"""Comparison of two backends that score the tokens of the same answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from math import inf
from typing import Final

from unisono.core.frozen import dataclass
from unisono.core.generation import CALL, CHANNEL, CONSTRAIN, END, FIRST_SPECIAL, MESSAGE, RETURN, START
from unisono.core.scoring import TokenScore
from unisono.fidelity.statistics import Estimate, Group, divergence, mean, proportion
from unisono.harmony.encoding import Encoding


class Place(StrEnum):
    # Special tokens.
    MARKER = "marker"
    # Roles, channels, recipients and content types.
    HEADER = "header"
    ANALYSIS = "analysis"
    COMMENTARY = "commentary"
    FINAL = "final"
    # Body of a message on an unknown channel, or without a channel.
    OTHER = "other"


BODIES = (Place.ANALYSIS, Place.COMMENTARY, Place.FINAL)
# Markers that a header follows.
HEADER_FOLLOWS = frozenset({START, CHANNEL, CONSTRAIN, END, RETURN, CALL})


def places_of(encoding: Encoding, tokens: Sequence[int], before: Sequence[int] = ()) -> list[Place]:
    """Return the place of each token of an answer: marker, header, or a channel's body.

    `before` contains the last tokens of the prompt, back to the last `<|start|>`.
    """
    begin = max((at for at, token in enumerate(before) if token == START), default=0)
    known = [*before[begin:], *tokens]
    places: list[Place] = []
    header: list[int] = []
    body: Place | None = None
    for token in known:
        if token < FIRST_SPECIAL:
            places.append(body or Place.HEADER)
            if body is None:
                header.append(token)
            continue
        places.append(Place.MARKER)
        if token == MESSAGE:
            body = _body_of(encoding.decode(header))
            header = []
        elif token in HEADER_FOLLOWS:
            body = None
            # The channel or the recipient follows these markers; `<|constrain|>` only continues the header.
            header = [] if token != CONSTRAIN else header
    return places[len(known) - len(tokens) :]


def _body_of(header: str) -> Place:
    first = header.split(maxsplit=1)[:1]
    return next((place for place in BODIES if first == [place.value]), Place.OTHER)


# Two backends differ in their choice only if the reference prefers its own choice by at least this number of nats.
# Engines round differently, so the order of two nearly equally likely tokens may differ with identical weights.
TIE_NATS: Final = 0.1

# A token differs if its divergence is more than this number of times the limit for the mean divergence.
TOKEN_FACTOR: Final = 10

Scores = Sequence[TokenScore | None]


@dataclass(frozen=True, slots=True)
class AnswerSample:
    """Answer to score. `tokens` follow `prompt`; `places` contains the place of each token."""

    name: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    places: Sequence[Place]


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """Answer with its scores from the reference and from the other backend."""

    sample: AnswerSample
    reference: Scores
    other: Scores


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics over the tokens of one place in a message, or over all tokens.

    `agreement` is the share of positions at which both backends consider the same token most likely. `best` is the
    share of the answer's tokens that the reference considers most likely, and `best_other` the same for the other
    backend. `divergence` is the mean divergence in nats. `shift` is the mean of the other backend's log probability of
    a token minus the reference's, in nats. A value is None if no token has the necessary scores.
    """

    tokens: int
    agreement: Estimate | None
    best: Estimate | None
    best_other: Estimate | None
    divergence: Estimate | None
    shift: Estimate | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """First token of an answer at which the backends differ.

    `position` is its 0-based index. `expected` is the token that the reference considers most likely, and `found` that
    of the other backend. `preference` is the difference between the log probabilities that the reference gives to these
    two tokens. `nats` is the divergence of the distributions. `preference` and `nats` are in nats.
    """

    sample: AnswerSample
    position: int
    expected: int
    found: int
    preference: float
    nats: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison. `unscored` is the number of tokens that a backend did not score."""

    answers: int
    unscored: int
    total: Statistics
    places: Mapping[Place, Statistics]
    divergences: Sequence[Divergence]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits for differences: rounding explains any difference within these limits.

    `agreement` is the minimum share of tokens for which both backends make the same choice. `divergence` is the maximum
    mean divergence in nats.
    """

    agreement: float = 0.999
    divergence: float = 0.0005

    def exceeded_by(self, statistics: Statistics) -> tuple[str, ...]:
        """Return the names of the limits that the estimates exceed."""
        agreement, kl = statistics.agreement, statistics.divergence
        low = agreement is not None and agreement.value < self.agreement
        high = kl is not None and kl.value > self.divergence
        return (*(["agreement"] if low else []), *(["divergence"] if high else []))


USUAL_THRESHOLDS = Thresholds()


def compare(scored: Sequence[ScoredSample], limits: Thresholds = USUAL_THRESHOLDS) -> Comparison:
    """Compare the scores of both backends for the same answers."""
    rows = [row for number, one in enumerate(scored) for row in _rows(number, one)]
    total = _statistics(rows)
    # Within the limits, tokens with the same choice do not differ, even if their distributions are far apart.
    most = limits.divergence * TOKEN_FACTOR if limits.exceeded_by(total) else inf
    return Comparison(
        answers=len(scored),
        unscored=sum(len(one.sample.tokens) for one in scored) - len(rows),
        total=total,
        places={place: _statistics(found) for place in Place if (found := [row for row in rows if row.place is place])},
        divergences=[first for one in scored if (first := first_divergence(one, most)) is not None],
    )


def agrees(reference: TokenScore, other: TokenScore) -> bool:
    """Return True if both backends consider the same token most likely.

    They also agree if the reference considers the choice of `other` nearly as likely as its own.
    """
    return reference.best == other.best or _preference(reference, other.best) < TIE_NATS


def _preference(reference: TokenScore, token: int) -> float:
    known = dict(reference.top)
    # A token that is not listed is at most as likely as the last listed token.
    return reference.top[0][1] - known.get(token, reference.top[-1][1])


def first_divergence(scored: ScoredSample, most: float) -> Divergence | None:
    """Return the first token whose choice differs, or whose divergence exceeds `most` nats."""
    for position, (reference, other) in enumerate(zip(scored.reference, scored.other, strict=True)):
        if reference is None or other is None:
            continue
        nats = divergence(reference.top, other.top)
        if not agrees(reference, other) or nats > most:
            preference = max(_preference(reference, other.best), 0.0)
            return Divergence(scored.sample, position, reference.best, other.best, preference, nats)
    return None


@dataclass(frozen=True, slots=True)
class _Row:
    sample: int
    place: Place
    reference: TokenScore
    other: TokenScore


def _rows(number: int, scored: ScoredSample) -> Iterable[_Row]:
    for place, reference, other in zip(scored.sample.places, scored.reference, scored.other, strict=True):
        if reference is not None and other is not None:
            yield _Row(number, place, reference, other)


def _statistics(rows: Sequence[_Row]) -> Statistics:
    by_sample = [list(group) for _, group in groupby(rows, key=lambda row: row.sample)]

    def groups(values: Sequence[Sequence[float]]) -> list[Group]:
        return [Group(sum(each), len(each)) for each in values]

    shifts = [[shift for row in group if (shift := _shift(row)) is not None] for group in by_sample]
    divergences = [[divergence(row.reference.top, row.other.top) for row in group] for group in by_sample]
    return Statistics(
        tokens=len(rows),
        agreement=proportion(groups([[agrees(row.reference, row.other) for row in group] for group in by_sample])),
        best=proportion(groups([[row.reference.rank == 0 for row in group] for group in by_sample])),
        best_other=proportion(groups([[row.other.rank == 0 for row in group] for group in by_sample])),
        divergence=mean(groups(divergences)),
        shift=mean(groups(shifts)),
    )


def _shift(row: _Row) -> float | None:
    before, after = row.reference.logprob, row.other.logprob
    return None if before is None or after is None else after - before
