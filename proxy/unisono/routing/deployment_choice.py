"""Choice of the deployment for a request. Pure, so that tables and a simulator can test it.

The deployment with the least expected work is chosen. The expected work is the unfinished work plus the part of the
prompt that is not cached there, and this sum is divided by the weight. So a request goes where its prompt prefix is
cached, as long as waiting there costs less than reading the prompt elsewhere. On a tie, requests that may share a
prefix go to the same deployment, and all others are distributed by weight.

The owner of the candidates updates them in place, because every request reads many candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from enum import IntEnum, StrEnum
from typing import Final

from unisono.core.frozen import dataclass
from unisono.core.route_protocol import BLOCK_TOKENS, RouteRequirements
from unisono.routing.deployment_rate_limits import Grain, Rate
from unisono.routing.tie_break import favourite, number_of, round_robin

# Number of output tokens that a request counts against a token limit, unless its own `max_tokens` is lower. Clients set
# `max_tokens` far above the actual length.
EXPECTED_OUTPUT: Final = 1024
# Work assumed for writing an answer, in prompt tokens read in the same time. A server writes many answers concurrently.
ANSWER_WORK: Final = 128

# Number of tokens assumed for the prompt of another client's request that waits on the server.
FOREIGN_PROMPT: Final = 1024

# Two candidates tie if their work differs by no more than a number of tokens plus a share of the work. Load is only an
# estimate, and a conversation that stays on its deployment is worth more than a tiny gain.
TIE_TOKENS: Final = 64
TIE_SHARE: Final = 0.05

# Abilities that a deployment must have. It may lack support for constraints, which are then checked in the output.
BIAS: Final = "logit_bias"
LOGPROBS: Final = "logprobs"
PROMPT_LOGPROBS: Final = "prompt_logprobs"
REQUIRED: Final = frozenset({BIAS, LOGPROBS, PROMPT_LOGPROBS})


class Strategy(StrEnum):
    # Least expected work; reading cached prompt tokens is no work.
    PREFIX_AWARE = "prefix-aware"
    # Fewest requests in proportion to the weight, regardless of their size.
    LEAST_BUSY = "least-busy"
    # Round-robin in proportion to the weight, regardless of the load.
    SIMPLE_SHUFFLE = "simple-shuffle"


class Rank(IntEnum):
    """Health rank of a candidate, best first.

    A candidate is not used while another candidate has a better rank. As an exception, a half-open candidate gets a
    single request while all better candidates are full."""

    HEALTHY = 0
    # Not probed yet.
    UNKNOWN = 1
    # A request or the last probe failed, and no success has shown that the deployment has recovered.
    HALF_OPEN = 2
    # The circuit is open, or the deployment is quarantined or removed.
    RESTING = 3
    # The last probe failed, and no result of an earlier probe is valid.
    UNREADY = 4
    # Never used: its output cannot be trusted, it is drained, or it is new and no probe has passed.
    UNFIT = 5


@dataclass(eq=False, slots=True)
class Candidate:
    """State of a deployment that the choice depends on.

    `bit` identifies the deployment in every mask. Deployments of a lower `order` are chosen first. `running` is the
    number of the gateway's own requests on the deployment, and `tokens` the number of tokens that they may use. `work`
    is the remaining work of these requests, and `foreign` the work of other clients' requests, both in prompt tokens.
    `rate` limits the requests that begin per minute; None for no limit."""

    name: str
    bit: int = 1
    weight: float = 1.0
    order: int = 0
    context: int | None = None
    abilities: frozenset[str] = frozenset()
    max_requests: int | None = None
    max_tokens: int | None = None
    rank: Rank = Rank.HEALTHY
    running: int = 0
    tokens: int = 0
    work: int = 0
    foreign: int = 0
    foreign_requests: int = 0
    rate: Rate | None = None
    seed: int = field(init=False)
    # True if the deployment has a limit that must be checked.
    bounded: bool = field(init=False)

    def __post_init__(self) -> None:
        self.seed = number_of(self.name)
        self.bound(self.max_requests, self.max_tokens, self.rate)

    def bound(self, max_requests: int | None, max_tokens: int | None, rate: Rate | None) -> None:
        """Set the limits of the deployment; None for no limit."""
        self.max_requests, self.max_tokens, self.rate = max_requests, max_tokens, rate
        self.bounded = not (max_requests is None and max_tokens is None and rate is None)

    def set_server_load(self, running: int, waiting: int, running_before: int = 0) -> None:
        """Derive the load by other clients from all requests on the server.

        The server reports `running` and `waiting` requests. `running_before` is how many were the gateway's own."""
        # The server's report may include a request of the gateway that has ended since.
        others = max(running + waiting - max(self.running, running_before), 0)
        # The prompts of all running requests are assumed to be read.
        self.foreign_requests = others
        self.foreign = others * ANSWER_WORK + min(waiting, others) * FOREIGN_PROMPT

    def reserve(self, selection: SelectionRequest, now: float = 0.0) -> Share:
        """Reserve a slot for one request at the time `now`, in monotonic seconds."""
        share = Share(self, selection.tokens, selection.work(self.bit), selection.answer)
        if self.rate is not None:
            share.rate_grain = self.rate, self.rate.add_request(selection.tokens, now)
        self.running += 1
        self.tokens += share.tokens
        self.work += share.work
        return share

    def has_room(self, tokens: int) -> bool:
        """Return whether a request that may use `tokens` tokens can run now.

        A request that alone exceeds the token limit runs while no other request does."""
        if self.max_requests is not None and self.running >= self.max_requests:
            return False
        if self.rate is not None and not self.rate.has_room(tokens):
            return False
        return self.max_tokens is None or not self.running or self.tokens + tokens <= self.max_tokens

    def can(self, selection: SelectionRequest) -> bool:
        """Return whether the candidate has the required abilities and context window.

        The abilities of a candidate that was not probed yet are unknown, so they are assumed."""
        if self.context is not None and self.context <= selection.prompt_tokens:
            return False
        return (selection.preferred_abilities & REQUIRED) <= self.abilities or self.rank is Rank.UNKNOWN


@dataclass(eq=False, slots=True)
class Share:
    """Part of a candidate's capacity that is reserved for one request.

    `tokens` is the number of tokens that the request may use. `work` is the remaining work, and `answer` the part of it
    that the answer causes. `used` is the number of tokens that its generations used; None before the first one ends."""

    candidate: Candidate
    tokens: int
    work: int
    answer: int
    used: int | None = None
    # Rate window, and its grain, in which the request is counted.
    rate_grain: tuple[Rate, Grain] | None = None

    @property
    def unread_tokens(self) -> int:
        """Number of prompt tokens that are neither read yet nor expected to be cached."""
        return self.work - self.answer

    def record_first_token(self) -> None:
        """Reduce the remaining work to that of the answer, because the prompt has been read."""
        self.candidate.work -= self.work - self.answer
        self.work = self.answer

    def record_usage(self, tokens: int) -> None:
        """Add the tokens that a finished generation used."""
        self.used = (self.used or 0) + tokens

    def give_back(self, now: float = 0.0) -> None:
        one = self.candidate
        one.running -= 1
        one.tokens -= self.tokens
        one.work -= self.work
        if self.rate_grain is not None:
            rate, grain = self.rate_grain
            rate.settle(grain, self.tokens, self.used, now)


@dataclass(frozen=True, slots=True)
class SelectionRequest:
    """Properties of a request that the choice depends on.

    `tokens` is the number of tokens that the request may use, and `answer` the work of its answer. `cached_prefixes`
    lists masks of deployments with the number of prompt tokens that they have cached. Each row has fewer deployments
    and more tokens than the row before. Requests that may share a prefix have the same `key`; None if the request
    shares none. `sticky` means that `key` identifies a conversation. Four fields are masks of candidates: those in
    `excluded` must not be used now, and those in `ruled_out` in no attempt. Those in `preferred` are used first, and
    those in `avoided` only if no other healthy candidate can serve the request."""

    prompt_tokens: int = 0
    tokens: int = 0
    answer: int = 0
    cached_prefixes: Sequence[tuple[int, int]] = ()
    key: int | None = None
    sticky: bool = False
    preferred_abilities: frozenset[str] = frozenset()
    excluded: int = 0
    ruled_out: int = 0
    preferred: int = 0
    avoided: int = 0

    def known(self, bit: int) -> int:
        """Return the number of prompt tokens that the deployment `bit` is expected to have cached."""
        return max((tokens for mask, tokens in self.cached_prefixes if mask & bit), default=0)

    def work(self, bit: int) -> int:
        """Return the work on the deployment `bit`; even a fully cached prompt costs 1."""
        known = self.known(bit) if self.cached_prefixes else 0
        return max(self.prompt_tokens - known, 1) + self.answer


def to_selection_request(
    demand: RouteRequirements,
    held: Sequence[tuple[int, int]] = (),
    *,
    sticky: str = "",
    excluded: int = 0,
    ruled_out: int = 0,
    gathers: bool = False,
) -> SelectionRequest:
    """Return the selection request for a demand.

    `held` lists masks of deployments with the number of prompt blocks that they have cached. With `gathers`, requests
    that may share a prefix get the same key."""
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
        cached_prefixes=[(mask, blocks * BLOCK_TOKENS) for mask, blocks in held] if held else [],
        key=key,
        sticky=bool(gathers and sticky),
        preferred_abilities=demand.preferred_abilities,
        excluded=excluded,
        ruled_out=ruled_out,
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen candidate; if it is None, `waits_for` is the mask of full candidates to wait for."""

    candidate: Candidate | None = None
    waits_for: int = 0


NO_CHOICE: Final = Choice()


def choose(
    candidates: Sequence[Candidate],
    selection: SelectionRequest,
    turn: int = 0,
    *,
    strategy: Strategy = Strategy.PREFIX_AWARE,
    barred: int = 0,
) -> Choice:
    """Choose the candidate for a request.

    `turn` is the number of earlier choices of the group, for round-robin. `barred` is the mask of candidates whose free
    slots belong to another waiting request. Such a candidate is not chosen, but the request may wait for it."""
    if selection.avoided:
        selection = _without_avoided(candidates, selection)
    serving, unable = _serving(candidates, selection)
    if not serving:
        return NO_CHOICE
    tokens = selection.tokens
    # Most candidates have no limit, and there may be many: calling `has_room` for each would take most of the time.
    free = [c for c in serving if not c.bit & barred and (not c.bounded or c.has_room(tokens))]
    if len(free) == 1:
        return Choice(free[0])
    if free:
        return Choice(_best(_least(free, selection), selection, turn, strategy))
    if serving[0].rank < Rank.HALF_OPEN:
        for c in candidates:
            on_trial = c.rank == Rank.HALF_OPEN and not c.running and not c.bit & (barred | selection.excluded)
            if on_trial and c.has_room(tokens) and c.can(selection) is not unable:
                return Choice(c)
    return Choice(None, sum(c.bit for c in serving))


def _without_avoided(candidates: Sequence[Candidate], selection: SelectionRequest) -> SelectionRequest:
    """Exclude the avoided candidates, if another healthy candidate can serve the request."""
    excluded = selection.excluded | selection.avoided
    others = (c for c in candidates if not c.bit & excluded)
    is_served = any(c.rank < Rank.HALF_OPEN and c.can(selection) for c in others)
    return replace(selection, excluded=excluded) if is_served else selection


def _serving(candidates: Sequence[Candidate], selection: SelectionRequest) -> tuple[list[Candidate], bool]:
    """Return the best-ranked candidates, even full ones; and True if none can serve the request."""
    excluded, prompt = selection.excluded, selection.prompt_tokens
    has_required = not REQUIRED.isdisjoint(selection.preferred_abilities)
    best, serving = 2 * Rank.UNFIT, []
    for c in candidates:
        if c.bit & excluded:
            continue
        rank: int = c.rank
        if rank == 5:
            continue
        if (c.context is not None and c.context <= prompt) or (has_required and not c.can(selection)):
            rank += 5
        if rank < best:
            best, serving = rank, [c]
        elif rank == best:
            serving.append(c)
    return serving, best >= 5


def _least(free: list[Candidate], selection: SelectionRequest) -> list[Candidate]:
    """Keep the preferred candidates, then the lowest `order`, then the fewest missing abilities."""
    if selection.preferred:
        free = [c for c in free if c.bit & selection.preferred] or free
    orders = {c.order for c in free}
    if len(orders) > 1:
        lowest = min(orders)
        free = [c for c in free if c.order == lowest]
    if selection.preferred_abilities:
        lacks = [len(selection.preferred_abilities - c.abilities) for c in free]
        fewest = min(lacks)
        free = [c for c, lack in zip(free, lacks, strict=True) if lack == fewest]
    return free


def _best(free: list[Candidate], selection: SelectionRequest, turn: int, strategy: Strategy) -> Candidate:
    if len(free) == 1:
        return free[0]
    if strategy is Strategy.PREFIX_AWARE:
        tied = _least_work(free, selection)
        key = selection.key
    else:
        tied = free if strategy is Strategy.SIMPLE_SHUFFLE else _fewest_requests(free)
        key = None
    if len(tied) == 1:
        return tied[0]
    if key is not None:
        return favourite(key, tied)
    return tied[round_robin([round(c.weight) or 1 for c in tied], turn)[0]]


def _least_work(free: list[Candidate], selection: SelectionRequest) -> list[Candidate]:
    """Return the candidate with the least work, and all candidates that have about as little.

    If the candidate with the least work is idle, weights are ignored here: idle candidates tie if they have cached
    about the same part of the prompt. The caller then breaks the tie by weight."""
    prompt, held = selection.prompt_tokens, selection.cached_prefixes
    if not held and selection.sticky and selection.key is not None:
        # This process does not know the conversation's deployment. If another process chose it, it used the same rule.
        held = ((favourite(selection.key, free).bit, prompt),)
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
    """Return the number of cached prompt tokens by bit, visiting each bit once."""
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
