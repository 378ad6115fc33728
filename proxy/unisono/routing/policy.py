"""Which deployment a request goes to: pure, so that tables and a simulator can judge it.

What is asked for is the least expected work: what a deployment has before it and what of this prompt it does not hold
yet, by its weight. So a prompt goes where its beginning is cached, as long as waiting there costs less than reading it
again elsewhere. Where that makes no difference, requests that may share something go to one deployment, and all others
take turns by weight.

Everything is read from candidates that their owner keeps up to date: choosing among many is done for every request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

from unisono.core.prefix_blocks import BLOCK_TOKENS
from unisono.core.route_protocol import RouteRequirements
from unisono.routing.rate_window import Grain, Rate
from unisono.routing.tie_break import favourite, number_of, round_robin

EXPECTED_OUTPUT: Final = 1024
"""Tokens that an answer is taken for against a limit, unless it may have fewer: limits of clients are far above what
they get."""
ANSWER_WORK: Final = 128
"""What writing it is taken for, in tokens of prompt that would be read in the time: many are written at once."""

TIE_TOKENS: Final = 64
TIE_SHARE: Final = 0.05
"""Candidates whose work differs by no more than this are as good as each other: what is known of load is an estimate,
and staying where a conversation was is worth more than a difference nobody could measure."""

BIAS: Final = "logit_bias"
"""What a request cannot do without; constraints are checked behind a backend that cannot keep to them."""


class Strategy(StrEnum):
    PREFIX_AWARE = "prefix-aware"
    """The least expected work, a prompt that is held counting as done."""
    LEAST_BUSY = "least-busy"
    """The fewest requests by weight, whatever their size."""
    SIMPLE_SHUFFLE = "simple-shuffle"
    """Turns by weight, whatever the load."""


class Rank(IntEnum):
    """Better first. Nobody is asked while there is one of a better rank, but a single request may go to one that is
    half open while all better ones are full."""

    WELL = 0
    UNKNOWN = 1
    """Not examined yet."""
    HALF_OPEN = 2
    """It failed, or its last probe did, and nobody knows yet that it is well again."""
    RESTING = 3
    UNREADY = 4
    """Its last probe failed and none before it stands."""
    UNFIT = 5
    """Never asked: what it says could not be trusted."""


@dataclass(eq=False, slots=True)
class Candidate:
    """A deployment as the choice sees it. `bit` is its own in every mask; `order` groups come one after the other,
    lower first. `running` and `tokens` are the gateway's own requests there and what they may take up; `work` is what
    they leave to be done and `foreign` the same of everybody else's, both in tokens of prompt. `rate` is what it may
    begin in a minute, None for anything."""

    name: str
    bit: int = 1
    weight: float = 1.0
    order: int = 0
    context: int | None = None
    abilities: frozenset[str] = frozenset()
    max_requests: int | None = None
    max_tokens: int | None = None
    rank: Rank = Rank.WELL
    running: int = 0
    tokens: int = 0
    work: int = 0
    foreign: int = 0
    foreign_requests: int = 0
    rate: Rate | None = None
    seed: int = field(init=False)
    bounded: bool = field(init=False)
    """Whether there is any limit to look at."""

    def __post_init__(self) -> None:
        self.seed = number_of(self.name)
        self.bound(self.max_requests, self.max_tokens, self.rate)

    def bound(self, max_requests: int | None, max_tokens: int | None, rate: Rate | None) -> None:
        """To be used within these limits from now on."""
        self.max_requests, self.max_tokens, self.rate = max_requests, max_tokens, rate
        self.bounded = not (max_requests is None and max_tokens is None and rate is None)

    def take(self, wanted: SelectionRequest, now: float = 0.0) -> Share:
        """A place for one request. `now` is what its rate goes by."""
        share = Share(self, wanted.tokens, wanted.work(self.bit), wanted.answer)
        if self.rate is not None:
            share.began_in = self.rate, self.rate.take(wanted.tokens, now)
        self.running += 1
        self.tokens += share.tokens
        self.work += share.work
        return share

    def has_room(self, tokens: int) -> bool:
        """Whether a request of so many tokens can run now. One that is too large for the limit runs alone."""
        if self.max_requests is not None and self.running >= self.max_requests:
            return False
        if self.rate is not None and not self.rate.has_room(tokens):
            return False
        return self.max_tokens is None or not self.running or self.tokens + tokens <= self.max_tokens

    def can(self, wanted: SelectionRequest) -> bool:
        """Whether it could do more than refuse: the prompt leaves room, and tokens can be biased where they are to be.
        What was not examined yet may be able."""
        if self.context is not None and self.context <= wanted.prompt_tokens:
            return False
        return BIAS not in wanted.wants or BIAS in self.abilities or self.rank is Rank.UNKNOWN


@dataclass(eq=False, slots=True)
class Share:
    """What one request takes up of a candidate. `work` is what it leaves to be done, of which `answer` remains when the
    prompt is read. `used` are the tokens that it took in the end, None while nothing was asked for."""

    candidate: Candidate
    tokens: int
    work: int
    answer: int
    used: int | None = None
    began_in: tuple[Rate, Grain] | None = None
    """Where it counts among what began in a minute."""

    @property
    def unread_tokens(self) -> int:
        """The part of the prompt that is not read yet and not expected to be cached."""
        return self.work - self.answer

    def began(self) -> None:
        """The prompt is read."""
        self.candidate.work -= self.work - self.answer
        self.work = self.answer

    def took(self, tokens: int) -> None:
        """A generation is over, which took so many."""
        self.used = (self.used or 0) + tokens

    def give_back(self, now: float = 0.0) -> None:
        one = self.candidate
        one.running -= 1
        one.tokens -= self.tokens
        one.work -= self.work
        if self.began_in is not None:
            rate, grain = self.began_in
            rate.settle(grain, self.tokens, self.used, now)


@dataclass(frozen=True, slots=True)
class SelectionRequest:
    """What a choice is for. `tokens` is all the request may take up, `answer` what its answer counts as work. `held`
    says of deployments, as masks, how many tokens of the prompt's beginning they hold: later rows stand for fewer
    deployments, and more tokens. `key` is what requests that may share something have in common, None for nothing;
    `sticky` says that it is a conversation's and not only the prompt's beginning. `excluded` are bits of those that
    must not be chosen."""

    prompt_tokens: int = 0
    tokens: int = 0
    answer: int = 0
    held: Sequence[tuple[int, int]] = ()
    key: int | None = None
    sticky: bool = False
    wants: frozenset[str] = frozenset()
    excluded: int = 0

    def known(self, bit: int) -> int:
        """Tokens of the prompt's beginning that a deployment holds."""
        return max((tokens for mask, tokens in self.held if mask & bit), default=0)

    def work(self, bit: int) -> int:
        """What the request is to a deployment. What is held to its end is not quite nothing."""
        return max(self.prompt_tokens - self.known(bit), 1) + self.answer


def to_wanted(
    demand: RouteRequirements,
    held: Sequence[tuple[int, int]] = (),
    *,
    sticky: str = "",
    excluded: int = 0,
    gathers: bool = False,
) -> SelectionRequest:
    """`held` says of deployments, as masks, how many blocks of the prompt they hold. What `gathers` goes where others
    went that it may share something with."""
    key: int | None = None
    if gathers and sticky:
        key = number_of(sticky)
    elif gathers and demand.blocks:
        key = demand.blocks[0]
    most = demand.max_tokens
    return SelectionRequest(
        prompt_tokens=demand.prompt_tokens,
        tokens=demand.prompt_tokens + (EXPECTED_OUTPUT if most is None else min(most, EXPECTED_OUTPUT)),
        answer=ANSWER_WORK if most is None else min(most, ANSWER_WORK),
        held=[(mask, blocks * BLOCK_TOKENS) for mask, blocks in held],
        key=key,
        sticky=bool(gathers and sticky),
        wants=demand.wants,
        excluded=excluded,
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """`taken` is None where there is nobody, or where it is worth waiting for one of `waits_for`, a mask."""

    taken: Candidate | None = None
    waits_for: int = 0


NOBODY: Final = Choice()


def choose(
    candidates: Sequence[Candidate],
    wanted: SelectionRequest,
    turn: int = 0,
    *,
    strategy: Strategy = Strategy.PREFIX_AWARE,
    barred: int = 0,
) -> Choice:
    """The candidate for a request. `turn` counts the choices of the group. `barred` are bits of those whose room is
    somebody else's: they are waited for, and not taken."""
    serving, unable = _serving(candidates, wanted)
    if not serving:
        return NOBODY
    tokens = wanted.tokens
    # Most have no limit to look at, and a call for each of many costs more than the rest.
    free = [c for c in serving if not c.bit & barred and (not c.bounded or c.has_room(tokens))]
    if free:
        return Choice(_best(_least(free, wanted), wanted, turn, strategy))
    if serving[0].rank < Rank.HALF_OPEN:
        for c in candidates:
            on_trial = c.rank == Rank.HALF_OPEN and not c.running and not c.bit & (barred | wanted.excluded)
            if on_trial and c.has_room(tokens) and c.can(wanted) is not unable:
                return Choice(c)
    mask = 0
    for c in serving:
        mask |= c.bit
    return Choice(None, mask)


def _serving(candidates: Sequence[Candidate], wanted: SelectionRequest) -> tuple[list[Candidate], bool]:
    """Those of the best rank among those that can do it at all, full or not, and whether they cannot."""
    excluded, prompt, bias = wanted.excluded, wanted.prompt_tokens, BIAS in wanted.wants
    best, serving = 2 * Rank.UNFIT, []
    for c in candidates:
        if c.bit & excluded:
            continue
        rank: int = c.rank
        if rank == 5:
            continue
        if (c.context is not None and c.context <= prompt) or (bias and not c.can(wanted)):
            rank += 5
        if rank < best:
            best, serving = rank, [c]
        elif rank == best:
            serving.append(c)
    return serving, best >= 5


def _least(free: list[Candidate], wanted: SelectionRequest) -> list[Candidate]:
    """Those of the lowest order, and of these the ones that lack the least of what is wanted."""
    orders = {c.order for c in free}
    if len(orders) > 1:
        lowest = min(orders)
        free = [c for c in free if c.order == lowest]
    if wanted.wants:
        lacks = [len(wanted.wants - c.abilities) for c in free]
        fewest = min(lacks)
        free = [c for c, lack in zip(free, lacks, strict=True) if lack == fewest]
    return free


def _best(free: list[Candidate], wanted: SelectionRequest, turn: int, strategy: Strategy) -> Candidate:
    if len(free) == 1:
        return free[0]
    if strategy is Strategy.PREFIX_AWARE:
        tied = _least_work(free, wanted)
        key = wanted.key
    else:
        tied = free if strategy is Strategy.SIMPLE_SHUFFLE else _fewest_requests(free)
        key = None
    if len(tied) == 1:
        return tied[0]
    if key is not None:
        return favourite(key, tied)
    return tied[round_robin([round(c.weight) or 1 for c in tied], turn)[0]]


def _least_work(free: list[Candidate], wanted: SelectionRequest) -> list[Candidate]:
    """Those with the least work, and those with hardly more. While nothing is to be done anywhere the weight is a share
    and no speed: idle ones that hold as much of the prompt are equal."""
    prompt, held = wanted.prompt_tokens, wanted.held
    if not held and wanted.sticky and wanted.key is not None:
        # Where a conversation went before is not known here any more, or it was another process that sent it there,
        # which made the same choice.
        held = ((favourite(wanted.key, free).bit, prompt),)
    if not held:
        works = [(c.work + c.foreign + prompt) / c.weight for c in free]
    else:
        (mask, tokens), *longer = held
        known = _known(longer)
        works = [
            (c.work + c.foreign + prompt - (known.get(c.bit) or (tokens if c.bit & mask else 0))) / c.weight
            for c in free
        ]
    least = min(works)
    best = free[works.index(least)]
    if not best.work and not best.foreign:
        mine = least * best.weight
        return [
            c
            for c, work in zip(free, works, strict=True)
            if not c.work and not c.foreign and abs(work * c.weight - mine) <= TIE_TOKENS
        ]
    most = least * (1 + TIE_SHARE) + TIE_TOKENS / best.weight
    return [c for c, work in zip(free, works, strict=True) if work <= most]


def _known(held: Sequence[tuple[int, int]]) -> dict[int, int]:
    """By bit: how many tokens of a prompt a deployment holds. Each is looked at once, however many rows there are."""
    known, seen = {}, 0
    for mask, tokens in reversed(held):
        new = mask & ~seen
        seen |= new
        while new:
            bit = new & -new
            known[bit] = tokens
            new ^= bit
    return known


def _fewest_requests(free: list[Candidate]) -> list[Candidate]:
    loads = [(c.running + c.foreign_requests) / c.weight for c in free]
    fewest = min(loads)
    return [c for c, load in zip(free, loads, strict=True) if load <= fewest]


def explained(candidates: Sequence[Candidate], wanted: SelectionRequest) -> list[Mapping[str, object]]:
    """What a choice goes by, of each candidate, for a log."""
    return [
        {
            "backend": c.name,
            "rank": c.rank.name.lower().replace("_", "-"),
            "order": c.order,
            "weight": c.weight,
            "excluded": bool(c.bit & wanted.excluded),
            "room": c.has_room(wanted.tokens),
            "running": c.running,
            "work": c.work,
            "foreign": c.foreign,
            "held": wanted.known(c.bit),
        }
        for c in candidates
    ]


STRATEGIES: Mapping[str, Strategy] = {strategy.value: strategy for strategy in Strategy}
