"""The choice: tables of candidates, shares over many requests, and the same answer in every process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.prefix_blocks import BLOCK_TOKENS
from unisono.core.route_protocol import RouteRequirements
from unisono.routing.policy import (
    ANSWER_WORK,
    BIAS,
    EXPECTED_OUTPUT,
    Candidate,
    Rank,
    SelectionRequest,
    Strategy,
    choose,
    explained,
    to_selection_request,
)
from unisono.routing.tie_break import favourite, number_of, round_robin

A, B, C = 1, 2, 4


def three(**changed: Mapping[str, object]) -> list[Candidate]:
    """Candidates a, b and c, idle and well but for what is said of them."""
    return [
        Candidate(name, bit=bit, **changed.get(name, {}))  # type: ignore[arg-type]
        for name, bit in zip("abc", (A, B, C), strict=True)
    ]


PROMPT = SelectionRequest(prompt_tokens=1000, tokens=1500)
BUSY = {"running": 3, "work": 5000, "tokens": 5000}
FULL = {"running": 1, "max_requests": 1, "work": 500, "tokens": 500}
FAR = {"order": 1}

CHOICES: dict[str, tuple[list[Candidate], SelectionRequest, str]] = {
    "the only idle one": (three(a=BUSY, c=BUSY), PROMPT, "b"),
    "the least work": (three(a=BUSY, b=BUSY, c={"running": 9, "work": 4000}), PROMPT, "c"),
    "work by weight": (three(a={"work": 3000}, b={"work": 5000, "weight": 4}, c={"work": 3000}), PROMPT, "b"),
    "others' requests count": (three(a={"foreign": 5000}, b={"foreign": 5000}, c={"work": 3000}), PROMPT, "c"),
    "a large prompt goes to the fast one, busy as it is": (
        three(a={"work": 8000, "weight": 8}, b=BUSY, c={}),
        SelectionRequest(prompt_tokens=32_000),
        "a",
    ),
    "a small prompt goes to the idle one, slow as it is": (
        three(a={"work": 8000, "weight": 8}, b=BUSY, c={}),
        SelectionRequest(prompt_tokens=100),
        "c",
    ),
    "where the prompt is held": (three(), replace(PROMPT, cached_prefixes=[(B, 896)]), "b"),
    "where most of it is held": (
        three(),
        replace(PROMPT, cached_prefixes=[(A | B | C, 128), (A | C, 256), (C, 896)]),
        "c",
    ),
    "held, and less busy than reading it again would be": (
        three(b={"work": 500}),
        replace(PROMPT, cached_prefixes=[(B, 896)]),
        "b",
    ),
    "held, and too busy": (three(a=BUSY, b={"work": 2000}), replace(PROMPT, cached_prefixes=[(B, 896)]), "c"),
    "held by one that is full": (three(a=BUSY, b=FULL), replace(PROMPT, cached_prefixes=[(B, 896)]), "c"),
    "the lower order": (three(a=FAR, b=BUSY, c=FAR), PROMPT, "b"),
    "the higher order when the lower is full": (three(a=FULL, b=BUSY | FAR, c=FAR), PROMPT, "c"),
    "the higher order when the lower rests": (three(a={"rank": Rank.RESTING}, b=FAR, c=BUSY | FAR), PROMPT, "b"),
    "the higher order when the lower is too small": (three(a={"context": 900}, b=FAR, c=BUSY | FAR), PROMPT, "b"),
    "one that can do what is wanted": (
        three(c=BUSY | {"abilities": frozenset({"json_schema"})}),
        replace(PROMPT, preferred_abilities=frozenset({"json_schema"})),
        "c",
    ),
    "one that cannot, when the one that can is full": (
        three(a=BUSY, b=FULL | {"abilities": frozenset({"json_schema"})}),
        replace(PROMPT, preferred_abilities=frozenset({"json_schema"})),
        "c",
    ),
    "one that may be able to bias tokens": (
        three(b=BUSY | {"rank": Rank.UNKNOWN}),
        replace(PROMPT, preferred_abilities=frozenset({BIAS})),
        "b",
    ),
    "a larger window": (three(a={"context": 900}, b={"context": 1000}, c=BUSY), PROMPT, "c"),
    "a well one before one that is not examined": (three(a={"rank": Rank.UNKNOWN}, b=BUSY, c=FULL), PROMPT, "b"),
    "a well one before one half open": (three(a={"rank": Rank.HALF_OPEN}, b=BUSY, c=FULL), PROMPT, "b"),
    "one half open when all well ones are full": (three(a={"rank": Rank.HALF_OPEN}, b=FULL, c=FULL), PROMPT, "a"),
    "one half open before one at rest": (
        three(a={"rank": Rank.RESTING}, b={"rank": Rank.HALF_OPEN} | BUSY, c={"rank": Rank.UNREADY}),
        PROMPT,
        "b",
    ),
    "one at rest when there is nobody else": (
        three(a={"rank": Rank.UNFIT}, b={"rank": Rank.UNREADY}, c={"rank": Rank.RESTING}),
        PROMPT,
        "c",
    ),
    "one at rest that can before a well one that cannot": (
        three(a={"context": 900}, b={"context": 900}, c={"rank": Rank.RESTING}),
        PROMPT,
        "c",
    ),
    "not the one that failed": (three(a={}, b=BUSY, c=BUSY | {"work": 9000}), replace(PROMPT, excluded=A), "b"),
    "a large request runs alone": (three(a=FULL, b={"max_tokens": 100}, c=FULL), PROMPT, "b"),
    "what is promised counts": (
        three(a=FULL, b={"max_tokens": 2000, "running": 1, "tokens": 600}, c=BUSY | {"max_tokens": 6500}),
        PROMPT,
        "c",
    ),
}


@pytest.mark.parametrize(("candidates", "wanted", "name"), CHOICES.values(), ids=CHOICES)
def test_who_is_chosen(candidates: list[Candidate], wanted: SelectionRequest, name: str) -> None:
    for turn in range(5):
        choice = choose(candidates, wanted, turn)
        assert choice.candidate is not None
        assert choice.candidate.name == name
    mirrored = choose(candidates[::-1], wanted).candidate
    assert mirrored is not None
    assert mirrored.name == name


WAITS: dict[str, tuple[list[Candidate], SelectionRequest, int, int]] = {
    "nobody there": ([], PROMPT, 0, 0),
    "all unfit": (three(**{name: {"rank": Rank.UNFIT} for name in "abc"}), PROMPT, 0, 0),
    "all failed": (three(), replace(PROMPT, excluded=A | B | C), 0, 0),
    "all full": (three(a=FULL, b=FULL, c=FULL), PROMPT, 0, A | B | C),
    "the well ones are full": (three(a=FULL, b=FULL, c={"rank": Rank.RESTING}), PROMPT, 0, A | B),
    "the only one that is large enough is full": (three(a={"context": 9}, b=FULL, c={"context": 9}), PROMPT, 0, B),
    "the only one that can bias is full": (
        three(b=FULL | {"abilities": frozenset({BIAS})}),
        replace(PROMPT, preferred_abilities=frozenset({BIAS})),
        0,
        B,
    ),
    "half open, and somebody is trying": (
        three(a=FULL, b=FULL, c={"rank": Rank.HALF_OPEN, "running": 1}),
        PROMPT,
        0,
        A | B,
    ),
    "free for somebody else": (three(a=FULL), PROMPT, B | C, A | B | C),
}


@pytest.mark.parametrize(("candidates", "wanted", "barred", "mask"), WAITS.values(), ids=WAITS)
def test_who_is_waited_for(candidates: list[Candidate], wanted: SelectionRequest, barred: int, mask: int) -> None:
    choice = choose(candidates, wanted, barred=barred)
    assert (choice.candidate, choice.waits_for) == (None, mask)


STRATEGIES: dict[str, tuple[Strategy, list[Candidate], set[str]]] = {
    "turns, whatever the load": (Strategy.SIMPLE_SHUFFLE, three(a=BUSY), {"a", "b", "c"}),
    "turns, but not to who is full": (Strategy.SIMPLE_SHUFFLE, three(a=FULL), {"b", "c"}),
    "the fewest requests": (Strategy.LEAST_BUSY, three(a={"running": 2}, b={"running": 1, "work": 9999}), {"c"}),
    "the fewest requests by weight": (
        Strategy.LEAST_BUSY,
        three(a={"running": 3, "weight": 4}, b={"running": 1}, c={"foreign_requests": 1}),
        {"a"},
    ),
    "as few as others take turns": (Strategy.LEAST_BUSY, three(a={"running": 1, "max_requests": 1}), {"b", "c"}),
}


@pytest.mark.parametrize(("strategy", "candidates", "names"), STRATEGIES.values(), ids=STRATEGIES)
def test_other_strategies(strategy: Strategy, candidates: list[Candidate], names: set[str]) -> None:
    held = replace(PROMPT, cached_prefixes=[(A, 896)], key=7, sticky=True)
    taken = [choose(candidates, held, turn, strategy=strategy).candidate for turn in range(12)]
    assert {one.name for one in taken if one is not None} == names


def test_an_idle_group_is_balanced_by_weight_where_nothing_is_shared() -> None:
    candidates = [Candidate("fast", bit=1, weight=3), Candidate("slow", bit=2, weight=1)]
    taken = [choose(candidates, PROMPT, turn).candidate for turn in range(40)]
    assert Counter(one.name for one in taken if one is not None) == {"fast": 30, "slow": 10}


def test_what_may_share_something_goes_to_one_deployment_until_that_is_busy() -> None:
    candidates = three()
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


def test_a_conversation_nobody_knows_is_worth_its_prompt_where_its_key_leads() -> None:
    candidates = three()
    wanted = replace(PROMPT, key=11, sticky=True)
    home = choose(candidates, wanted).candidate
    assert home is not None
    for work, stays in ((0, True), (900, True), (2000, False)):
        home.work = work
        assert (choose(candidates, wanted).candidate is home) is stays
    # What is known of caches counts more than what a key may mean.
    home.work = 0
    other = next(one for one in candidates if one is not home)
    assert choose(candidates, replace(wanted, cached_prefixes=[(other.bit, 896)])).candidate is other


CASES: dict[str, tuple[list[int], list[list[int]]]] = {
    "none": ([], [[], []]),
    "one": ([1], [[0], [0]]),
    "two take turns": ([1, 1], [[0, 1], [1, 0], [0, 1]]),
    "three take turns": ([1, 1, 1], [[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]]),
    "two to one": ([2, 1], [[0, 1], [1, 0], [0, 1], [0, 1], [1, 0]]),
}


@pytest.mark.parametrize(("weights", "orders"), CASES.values(), ids=CASES)
def test_the_order_turn_by_turn(weights: list[int], orders: list[list[int]]) -> None:
    assert [round_robin(weights, turn) for turn in range(len(orders))] == orders


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=6), start=st.integers(0, 10_000))
def test_each_comes_first_as_often_as_its_weight_says(weights: list[int], start: int) -> None:
    orders = [round_robin(weights, start + turn) for turn in range(sum(weights))]
    first = Counter(order[0] for order in orders)
    assert [first[index] for index in range(len(weights))] == weights
    assert all(sorted(order) == list(range(len(weights))) for order in orders)


@pytest.mark.parametrize("weights", [[3, 3], [3, 2], [4, 4, 4], [1, 6]], ids=str)
def test_a_light_candidate_never_waits_for_a_run_of_a_heavy_one(weights: list[int]) -> None:
    firsts = [round_robin(weights, turn)[0] for turn in range(4 * sum(weights))]
    longest = max(len(list(run)) for _, run in groupby(firsts))
    assert longest <= max(1, round(max(weights) / min(weights)))


FAVOURITES: dict[str, tuple[str, list[str], str]] = {
    "one": ("k", ["a"], "a"),
    "one key": ("conv_1", ["a", "b", "c"], "b"),
    "another key": ("conv_3", ["a", "b", "c"], "c"),
    "the same names elsewhere in the list": ("conv_3", ["c", "a", "b"], "c"),
    "no letter is refused": ("\ud800", ["a", "b"], "a"),
}


@pytest.mark.parametrize(("key", "names", "name"), FAVOURITES.values(), ids=FAVOURITES)
def test_a_key_has_its_own_favourite_in_every_process(key: str, names: list[str], name: str) -> None:
    assert favourite(number_of(key), [Candidate(one) for one in names]).name == name


groups = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), st.integers(1, 9), min_size=2, max_size=6)


@given(key=st.integers(0, 2**64 - 1), group=groups, data=st.data())
def test_who_is_added_or_removed_moves_no_key_of_the_others(
    key: int, group: dict[str, int], data: st.DataObject
) -> None:
    candidates = [Candidate(name, weight=weight) for name, weight in group.items()]
    first = favourite(key, candidates)
    gone = data.draw(st.sampled_from(candidates))
    left = favourite(key, [one for one in candidates if one is not gone])
    assert (left is first) is (gone is not first)


@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1, 1], [3, 1], [1, 2, 5]], ids=str)
def test_shares_of_many_keys_follow_the_weights(weights: list[int]) -> None:
    candidates = [Candidate(f"backend {index}", weight=weight) for index, weight in enumerate(weights)]
    keys = 4_000
    firsts = Counter(favourite(number_of(f"conversation {n}"), candidates) for n in range(keys))
    for one in candidates:
        share = one.weight / sum(weights)
        # Five standard deviations of as many fair draws.
        assert abs(firsts[one] - share * keys) < 5 * (keys * share * (1 - share)) ** 0.5


LONG = RouteRequirements(prompt_tokens=1000, blocks=(7, 8, 9))
WANTED: dict[str, tuple[SelectionRequest, SelectionRequest]] = {
    "an answer of any length": (
        to_selection_request(LONG),
        SelectionRequest(prompt_tokens=1000, tokens=1000 + EXPECTED_OUTPUT, answer=ANSWER_WORK, cached_prefixes=[]),
    ),
    "a short one": (to_selection_request(RouteRequirements(1000, max_tokens=9)), SelectionRequest(1000, 1009, 9, [])),
    "one between the two": (
        to_selection_request(RouteRequirements(1000, max_tokens=ANSWER_WORK + 1)),
        SelectionRequest(1000, 1000 + ANSWER_WORK + 1, ANSWER_WORK, []),
    ),
    "with others of its beginning": (
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
    "with others of its conversation": (
        to_selection_request(RouteRequirements(50, max_tokens=0), sticky="conv", gathers=True),
        SelectionRequest(50, 50, 0, [], key=number_of("conv"), sticky=True),
    ),
    "where nobody gathers": (
        to_selection_request(RouteRequirements(50, max_tokens=0), sticky="conv"),
        SelectionRequest(50, 50, 0, []),
    ),
    "too short for a block": (
        to_selection_request(RouteRequirements(50, max_tokens=0), gathers=True),
        SelectionRequest(50, 50, 0, []),
    ),
}


@pytest.mark.parametrize(("made", "wanted"), WANTED.values(), ids=WANTED)
def test_what_a_demand_comes_to(made: SelectionRequest, wanted: SelectionRequest) -> None:
    assert made == wanted


def test_what_a_request_takes_up_shrinks_when_its_prompt_is_read_and_is_gone_when_it_is_given_back() -> None:
    one, *_ = three()
    wanted = to_selection_request(LONG, [(A, 3)])
    shares = [one.reserve(wanted), one.reserve(to_selection_request(RouteRequirements(200, max_tokens=10)))]
    fresh = 1000 - 3 * BLOCK_TOKENS
    assert (one.running, one.tokens, one.work) == (2, 1000 + EXPECTED_OUTPUT + 210, fresh + ANSWER_WORK + 210)
    shares[0].record_first_token()
    shares[0].record_first_token()
    assert one.work == ANSWER_WORK + 210
    for share in shares:
        share.give_back()
    assert (one.running, one.tokens, one.work) == (0, 0, 0)


def test_a_choice_can_be_explained() -> None:
    candidates = three(a=FULL, b={"rank": Rank.HALF_OPEN, "foreign": 5})
    rows = explained(candidates, SelectionRequest(1000, 1500, cached_prefixes=[(A | B, 128), (B, 896)], excluded=C))
    assert [(row["backend"], row["rank"], row["room"], row["held"], row["excluded"]) for row in rows] == [
        ("a", "healthy", False, 128, False),
        ("b", "half-open", True, 896, False),
        ("c", "healthy", True, 0, True),
    ]
    assert [(row["work"], row["foreign"]) for row in rows] == [(500, 0), (0, 5), (0, 0)]
