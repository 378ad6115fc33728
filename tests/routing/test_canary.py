"""Canaries and shadows: shares of requests, and deployments that serve none."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from tests.routing.doubles import REQUIREMENTS, Clock, known_pool, live_of
from unisono.core.route_protocol import RouteRequest
from unisono.errors import BackendUnavailable
from unisono.routing.canary import draw_of, masks
from unisono.routing.deployment_choice import Candidate, Rank, SelectionRequest, choose


def test_each_canary_gets_its_share() -> None:
    random = Random(26)
    counts = Counter(masks([(1, 0.05), (2, 0.1)], random.random()) for _ in range(20_000))
    assert counts.keys() == {(1, 2), (2, 1), (0, 3)}
    assert 900 < counts[1, 2] < 1_100
    assert 1_850 < counts[2, 1] < 2_150


def test_a_conversation_stays_on_one_side() -> None:
    draws = [draw_of(f"conversation {number}", 0.5) for number in range(5_000)]
    assert 200 < sum(draw < 0.05 for draw in draws) < 300
    assert draw_of("one", 0.1) == draw_of("one", 0.9)
    assert draw_of("", 0.1) == 0.1


CHOICES = {
    "a request of the canary": ({}, {"preferred": 2}, "canary"),
    "another request": ({}, {"avoided": 2}, "usual"),
    "another request, all others full": ({"usual": {"max_requests": 1, "running": 1}}, {"avoided": 2}, None),
    "another request, all others down": ({"usual": {"rank": Rank.RESTING}}, {"avoided": 2}, "canary"),
    "a request of a full canary": ({"canary": {"max_requests": 1, "running": 1}}, {"preferred": 2}, "usual"),
    "a request of a failed canary": ({"canary": {"rank": Rank.RESTING}}, {"preferred": 2}, "usual"),
    "a request of a canary with a higher order": ({"canary": {"order": 3}}, {"preferred": 2}, "canary"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choice(case: str) -> None:
    states, selection, expected = CHOICES[case]
    candidates = [
        Candidate(name, bit=bit, **states.get(name, {}))  # type: ignore[arg-type]
        for bit, name in ((1, "usual"), (2, "canary"))
    ]
    found = choose(candidates, SelectionRequest(**selection)).candidate  # type: ignore[arg-type]
    assert (found.name if found else None) == expected


async def test_a_canary_serves_a_part_and_a_shadow_nothing() -> None:
    clock = Clock()
    lives = [live_of("usual", clock), live_of("canary", clock, canary_share=0.25)]
    pool, _ = await known_pool(*lives, live_of("shadow", clock, shadow_of="usual"), clock=clock)
    served: Counter[str] = Counter()
    for number in range(200):
        with await pool.route(RouteRequest("m", sticky=f"conversation {number}")).next_slot(REQUIREMENTS) as slot:
            served[slot.deployment.name] += 1
    assert served.keys() == {"usual", "canary"}
    assert 30 < served["canary"] < 70
    states = {status.name: (status.state, status.reason) for status in pool.status()}
    assert states["shadow"] == ("shadow", "of usual")


async def test_a_shadow_is_no_last_resort() -> None:
    clock = Clock()
    pool, _ = await known_pool(live_of("shadow", clock, shadow_of="usual"), clock=clock)
    with pytest.raises(BackendUnavailable):
        await pool.route(RouteRequest("m")).next_slot(REQUIREMENTS)
