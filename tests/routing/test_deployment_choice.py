"""Selection of a deployment: tables of candidates, shares over requests, and stable keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.route_protocol import BLOCK_TOKENS, RouteRequirements
from unisono.routing.deployment_choice import (
    ANSWER_WORK,
    BIAS,
    EXPECTED_OUTPUT,
    Candidate,
    Rank,
    SelectionRequest,
    Strategy,
    choose,
    to_selection_request,
)
from unisono.routing.selector import explained
from unisono.routing.tie_break import favourite, number_of, round_robin

A, B, C = 1, 2, 4


def three_candidates(**changed: Mapping[str, object]) -> list[Candidate]:
    """Return candidates a, b and c, idle and healthy except for the given fields."""
    return [
        Candidate(name, bit=bit, **changed.get(name, {}))  # type: ignore[arg-type]
        for name, bit in zip("abc", (A, B, C), strict=True)
    ]


PROMPT = SelectionRequest(prompt_tokens=1000, tokens=1500)
BUSY = {"running": 3, "work": 5000, "tokens": 5000}
FULL = {"running": 1, "max_requests": 1, "work": 500, "tokens": 500}
HIGHER_ORDER = {"order": 1}

CHOICES: dict[str, tuple[list[Candidate], SelectionRequest, str]] = {
    "only idle candidate": (three_candidates(a=BUSY, c=BUSY), PROMPT, "b"),
    "least work": (three_candidates(a=BUSY, b=BUSY, c={"running": 9, "work": 4000}), PROMPT, "c"),
    "work by weight": (
        three_candidates(a={"work": 3000}, b={"work": 5000, "weight": 4}, c={"work": 3000}),
        PROMPT,
        "b",
    ),
    "requests of other clients count": (
        three_candidates(a={"foreign": 5000}, b={"foreign": 5000}, c={"work": 3000}),
        PROMPT,
        "c",
    ),
    "large prompt, busy fast candidate": (
        three_candidates(a={"work": 8000, "weight": 8}, b=BUSY, c={}),
        SelectionRequest(prompt_tokens=32_000),
        "a",
    ),
    "small prompt, idle slow candidate": (
        three_candidates(a={"work": 8000, "weight": 8}, b=BUSY, c={}),
        SelectionRequest(prompt_tokens=100),
        "c",
    ),
    "cached prompt": (three_candidates(), replace(PROMPT, cached_prefixes=[(B, 896)]), "b"),
    "longest cached prefix": (
        three_candidates(),
        replace(PROMPT, cached_prefixes=[(A | B | C, 128), (A | C, 256), (C, 896)]),
        "c",
    ),
    "cached prompt, less work than reading it again": (
        three_candidates(b={"work": 500}),
        replace(PROMPT, cached_prefixes=[(B, 896)]),
        "b",
    ),
    "cached prompt, too busy": (
        three_candidates(a=BUSY, b={"work": 2000}),
        replace(PROMPT, cached_prefixes=[(B, 896)]),
        "c",
    ),
    "cached prompt, candidate full": (
        three_candidates(a=BUSY, b=FULL),
        replace(PROMPT, cached_prefixes=[(B, 896)]),
        "c",
    ),
    "lower order": (three_candidates(a=HIGHER_ORDER, b=BUSY, c=HIGHER_ORDER), PROMPT, "b"),
    "higher order, lower one full": (three_candidates(a=FULL, b=BUSY | HIGHER_ORDER, c=HIGHER_ORDER), PROMPT, "c"),
    "higher order, lower one in cooldown": (
        three_candidates(a={"rank": Rank.RESTING}, b=HIGHER_ORDER, c=BUSY | HIGHER_ORDER),
        PROMPT,
        "b",
    ),
    "higher order, lower one too small": (
        three_candidates(a={"context": 900}, b=HIGHER_ORDER, c=BUSY | HIGHER_ORDER),
        PROMPT,
        "b",
    ),
    "preferred ability": (
        three_candidates(c=BUSY | {"abilities": frozenset({"json_schema"})}),
        replace(PROMPT, preferred_abilities=frozenset({"json_schema"})),
        "c",
    ),
    "no preferred ability, able candidate full": (
        three_candidates(a=BUSY, b=FULL | {"abilities": frozenset({"json_schema"})}),
        replace(PROMPT, preferred_abilities=frozenset({"json_schema"})),
        "c",
    ),
    "unknown candidate, may support bias": (
        three_candidates(b=BUSY | {"rank": Rank.UNKNOWN}),
        replace(PROMPT, preferred_abilities=frozenset({BIAS})),
        "b",
    ),
    "larger context": (three_candidates(a={"context": 900}, b={"context": 1000}, c=BUSY), PROMPT, "c"),
    "healthy before unknown": (three_candidates(a={"rank": Rank.UNKNOWN}, b=BUSY, c=FULL), PROMPT, "b"),
    "healthy before half-open": (three_candidates(a={"rank": Rank.HALF_OPEN}, b=BUSY, c=FULL), PROMPT, "b"),
    "half-open, healthy ones full": (three_candidates(a={"rank": Rank.HALF_OPEN}, b=FULL, c=FULL), PROMPT, "a"),
    "half-open before cooldown": (
        three_candidates(a={"rank": Rank.RESTING}, b={"rank": Rank.HALF_OPEN} | BUSY, c={"rank": Rank.UNREADY}),
        PROMPT,
        "b",
    ),
    "cooldown as the last resort": (
        three_candidates(a={"rank": Rank.UNFIT}, b={"rank": Rank.UNREADY}, c={"rank": Rank.RESTING}),
        PROMPT,
        "c",
    ),
    "cooldown, healthy ones too small": (
        three_candidates(a={"context": 900}, b={"context": 900}, c={"rank": Rank.RESTING}),
        PROMPT,
        "c",
    ),
    "excluded candidate": (three_candidates(a={}, b=BUSY, c=BUSY | {"work": 9000}), replace(PROMPT, excluded=A), "b"),
    "large request on an idle candidate": (three_candidates(a=FULL, b={"max_tokens": 100}, c=FULL), PROMPT, "b"),
    "reserved tokens count": (
        three_candidates(a=FULL, b={"max_tokens": 2000, "running": 1, "tokens": 600}, c=BUSY | {"max_tokens": 6500}),
        PROMPT,
        "c",
    ),
}


@pytest.mark.parametrize(("candidates", "selection", "name"), CHOICES.values(), ids=CHOICES)
def test_choose_returns_the_best_candidate(candidates: list[Candidate], selection: SelectionRequest, name: str) -> None:
    for turn in range(5):
        choice = choose(candidates, selection, turn)
        assert choice.candidate is not None
        assert choice.candidate.name == name
    mirrored = choose(candidates[::-1], selection).candidate
    assert mirrored is not None
    assert mirrored.name == name


WAITS: dict[str, tuple[list[Candidate], SelectionRequest, int, int]] = {
    "no candidates": ([], PROMPT, 0, 0),
    "all unfit": (three_candidates(**{name: {"rank": Rank.UNFIT} for name in "abc"}), PROMPT, 0, 0),
    "all failed": (three_candidates(), replace(PROMPT, excluded=A | B | C), 0, 0),
    "all full": (three_candidates(a=FULL, b=FULL, c=FULL), PROMPT, 0, A | B | C),
    "healthy candidates full": (three_candidates(a=FULL, b=FULL, c={"rank": Rank.RESTING}), PROMPT, 0, A | B),
    "only large enough candidate full": (three_candidates(a={"context": 9}, b=FULL, c={"context": 9}), PROMPT, 0, B),
    "only candidate with bias full": (
        three_candidates(b=FULL | {"abilities": frozenset({BIAS})}),
        replace(PROMPT, preferred_abilities=frozenset({BIAS})),
        0,
        B,
    ),
    "half-open with a running request": (
        three_candidates(a=FULL, b=FULL, c={"rank": Rank.HALF_OPEN, "running": 1}),
        PROMPT,
        0,
        A | B,
    ),
    "barred candidates": (three_candidates(a=FULL), PROMPT, B | C, A | B | C),
}


@pytest.mark.parametrize(("candidates", "selection", "barred", "mask"), WAITS.values(), ids=WAITS)
def test_choose_returns_the_deployments_to_wait_for(
    candidates: list[Candidate], selection: SelectionRequest, barred: int, mask: int
) -> None:
    choice = choose(candidates, selection, barred=barred)
    assert (choice.candidate, choice.waits_for) == (None, mask)


STRATEGIES: dict[str, tuple[Strategy, list[Candidate], set[str]]] = {
    "turns, independent of load": (Strategy.SIMPLE_SHUFFLE, three_candidates(a=BUSY), {"a", "b", "c"}),
    "turns, without full candidates": (Strategy.SIMPLE_SHUFFLE, three_candidates(a=FULL), {"b", "c"}),
    "fewest requests": (Strategy.LEAST_BUSY, three_candidates(a={"running": 2}, b={"running": 1, "work": 9999}), {"c"}),
    "fewest requests by weight": (
        Strategy.LEAST_BUSY,
        three_candidates(a={"running": 3, "weight": 4}, b={"running": 1}, c={"foreign_requests": 1}),
        {"a"},
    ),
    "turns among the fewest requests": (
        Strategy.LEAST_BUSY,
        three_candidates(a={"running": 1, "max_requests": 1}),
        {"b", "c"},
    ),
}


@pytest.mark.parametrize(("strategy", "candidates", "names"), STRATEGIES.values(), ids=STRATEGIES)
def test_other_strategies_choose_by_turns_or_requests(
    strategy: Strategy, candidates: list[Candidate], names: set[str]
) -> None:
    held = replace(PROMPT, cached_prefixes=[(A, 896)], key=7, sticky=True)
    taken = [choose(candidates, held, turn, strategy=strategy).candidate for turn in range(12)]
    assert {one.name for one in taken if one is not None} == names


def test_an_idle_group_is_balanced_by_weight_without_shared_prefixes() -> None:
    candidates = [Candidate("fast", bit=1, weight=3), Candidate("slow", bit=2, weight=1)]
    taken = [choose(candidates, PROMPT, turn).candidate for turn in range(40)]
    assert Counter(one.name for one in taken if one is not None) == {"fast": 30, "slow": 10}


def test_requests_with_one_key_stay_on_a_deployment_until_it_is_busy() -> None:
    candidates = three_candidates()
    for key in range(20):
        taken = {choose(candidates, replace(PROMPT, key=key), turn).candidate for turn in range(5)}
        assert len(taken) == 1
        (first,) = taken
        assert first is not None
        first.work = 1200
        second = choose(candidates, replace(PROMPT, key=key)).candidate
        assert second is not None
        assert second is not first
        first.work = 0


def test_an_uncached_conversation_prefers_the_deployment_of_its_key() -> None:
    candidates = three_candidates()
    selection = replace(PROMPT, key=11, sticky=True)
    preferred = choose(candidates, selection).candidate
    assert preferred is not None
    for work, stays in ((0, True), (900, True), (2000, False)):
        preferred.work = work
        assert (choose(candidates, selection).candidate is preferred) is stays
    # A known cached prefix counts more than the key.
    preferred.work = 0
    other = next(one for one in candidates if one is not preferred)
    assert choose(candidates, replace(selection, cached_prefixes=[(other.bit, 896)])).candidate is other


ROUND_ROBIN_ORDERS: dict[str, tuple[list[int], list[list[int]]]] = {
    "none": ([], [[], []]),
    "one": ([1], [[0], [0]]),
    "two equal weights": ([1, 1], [[0, 1], [1, 0], [0, 1]]),
    "three equal weights": ([1, 1, 1], [[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]]),
    "two to one": ([2, 1], [[0, 1], [1, 0], [0, 1], [0, 1], [1, 0]]),
}


@pytest.mark.parametrize(("weights", "orders"), ROUND_ROBIN_ORDERS.values(), ids=ROUND_ROBIN_ORDERS)
def test_round_robin_order_by_turn(weights: list[int], orders: list[list[int]]) -> None:
    assert [round_robin(weights, turn) for turn in range(len(orders))] == orders


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=6), start=st.integers(0, 10_000))
def test_round_robin_shares_follow_the_weights(weights: list[int], start: int) -> None:
    orders = [round_robin(weights, start + turn) for turn in range(sum(weights))]
    first = Counter(order[0] for order in orders)
    assert [first[index] for index in range(len(weights))] == weights
    assert all(sorted(order) == list(range(len(weights))) for order in orders)


@pytest.mark.parametrize("weights", [[3, 3], [3, 2], [4, 4, 4], [1, 6]], ids=str)
def test_round_robin_has_no_long_runs_of_a_heavy_candidate(weights: list[int]) -> None:
    firsts = [round_robin(weights, turn)[0] for turn in range(4 * sum(weights))]
    longest = max(len(list(run)) for _, run in groupby(firsts))
    assert longest <= max(1, round(max(weights) / min(weights)))


FAVOURITES: dict[str, tuple[str, list[str], str]] = {
    "one": ("k", ["a"], "a"),
    "one key": ("conv_1", ["a", "b", "c"], "b"),
    "another key": ("conv_3", ["a", "b", "c"], "c"),
    "the same names elsewhere in the list": ("conv_3", ["c", "a", "b"], "c"),
    "lone surrogate in the key": ("\ud800", ["a", "b"], "a"),
}


@pytest.mark.parametrize(("key", "names", "name"), FAVOURITES.values(), ids=FAVOURITES)
def test_a_key_has_the_same_favourite_in_every_process(key: str, names: list[str], name: str) -> None:
    assert favourite(number_of(key), [Candidate(one) for one in names]).name == name


groups = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), st.integers(1, 9), min_size=2, max_size=6)


@given(key=st.integers(0, 2**64 - 1), group=groups, data=st.data())
def test_removing_a_candidate_moves_no_keys_of_the_others(key: int, group: dict[str, int], data: st.DataObject) -> None:
    candidates = [Candidate(name, weight=weight) for name, weight in group.items()]
    first = favourite(key, candidates)
    removed = data.draw(st.sampled_from(candidates))
    second = favourite(key, [one for one in candidates if one is not removed])
    assert (second is first) is (removed is not first)


@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1, 1], [3, 1], [1, 2, 5]], ids=str)
def test_shares_of_many_keys_follow_the_weights(weights: list[int]) -> None:
    candidates = [Candidate(f"backend {index}", weight=weight) for index, weight in enumerate(weights)]
    keys = 4_000
    firsts = Counter(favourite(number_of(f"conversation {n}"), candidates) for n in range(keys))
    for one in candidates:
        share = one.weight / sum(weights)
        # Five standard deviations of fair draws.
        assert abs(firsts[one] - share * keys) < 5 * (keys * share * (1 - share)) ** 0.5


LONG = RouteRequirements(prompt_tokens=1000, blocks=(7, 8, 9))
SELECTION_REQUESTS: dict[str, tuple[SelectionRequest, SelectionRequest]] = {
    "no answer limit": (
        to_selection_request(LONG),
        SelectionRequest(prompt_tokens=1000, tokens=1000 + EXPECTED_OUTPUT, answer=ANSWER_WORK, cached_prefixes=[]),
    ),
    "short answer limit": (
        to_selection_request(RouteRequirements(1000, max_tokens=9)),
        SelectionRequest(1000, 1009, 9, []),
    ),
    "answer limit above the expected work": (
        to_selection_request(RouteRequirements(1000, max_tokens=ANSWER_WORK + 1)),
        SelectionRequest(1000, 1000 + ANSWER_WORK + 1, ANSWER_WORK, []),
    ),
    "gathered by prefix": (
        to_selection_request(LONG, [(A | B, 1), (A, 3)], gathers=True, excluded=C),
        SelectionRequest(
            1000,
            1000 + EXPECTED_OUTPUT,
            ANSWER_WORK,
            [(A | B, BLOCK_TOKENS), (A, 3 * BLOCK_TOKENS)],
            key=7,
            excluded=C,
        ),
    ),
    "gathered by conversation": (
        to_selection_request(RouteRequirements(50, max_tokens=0), sticky="conv", gathers=True),
        SelectionRequest(50, 50, 0, [], key=number_of("conv"), sticky=True),
    ),
    "without gathering": (
        to_selection_request(RouteRequirements(50, max_tokens=0), sticky="conv"),
        SelectionRequest(50, 50, 0, []),
    ),
    "prompt shorter than a block": (
        to_selection_request(RouteRequirements(50, max_tokens=0), gathers=True),
        SelectionRequest(50, 50, 0, []),
    ),
}


@pytest.mark.parametrize(("selection", "expected"), SELECTION_REQUESTS.values(), ids=SELECTION_REQUESTS)
def test_requirements_become_a_selection_request(selection: SelectionRequest, expected: SelectionRequest) -> None:
    assert selection == expected


def test_reserved_work_shrinks_after_the_first_token_and_is_released() -> None:
    candidate, *_ = three_candidates()
    selection = to_selection_request(LONG, [(A, 3)])
    shares = [
        candidate.reserve(selection),
        candidate.reserve(to_selection_request(RouteRequirements(200, max_tokens=10))),
    ]
    fresh = 1000 - 3 * BLOCK_TOKENS
    assert (candidate.running, candidate.tokens, candidate.work) == (
        2,
        1000 + EXPECTED_OUTPUT + 210,
        fresh + ANSWER_WORK + 210,
    )
    shares[0].record_first_token()
    shares[0].record_first_token()
    assert candidate.work == ANSWER_WORK + 210
    for share in shares:
        share.give_back()
    assert (candidate.running, candidate.tokens, candidate.work) == (0, 0, 0)


def test_explained_lists_the_facts_of_each_candidate() -> None:
    candidates = three_candidates(a=FULL, b={"rank": Rank.HALF_OPEN, "foreign": 5})
    rows = explained(candidates, SelectionRequest(1000, 1500, cached_prefixes=[(A | B, 128), (B, 896)], excluded=C))
    assert [(row["backend"], row["rank"], row["room"], row["held"], row["excluded"]) for row in rows] == [
        ("a", "healthy", False, 128, False),
        ("b", "half-open", True, 896, False),
        ("c", "healthy", True, 0, True),
    ]
    assert [(row["work"], row["foreign"]) for row in rows] == [(500, 0), (0, 5), (0, 0)]
