"""Simulated conversations: their number, their lengths and their shared blocks."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from unisono.core.route_protocol import BLOCK_TOKENS
from unisono.simulation import BackendPlan, Burst, SimulationPlan, TrafficPlan
from unisono.simulation.plan import MAX_TOKENS
from unisono.simulation.traffic import US, Draw, SimulatedConversation, SimulatedStep, conversations

PLAN = SimulationPlan((BackendPlan("a", 1000.0, 50.0),), requests=5000)


def make(
    requests: int = 5000, seed: int = 1, burst: Burst | None = None, **traffic: float
) -> list[SimulatedConversation]:
    plan = replace(TrafficPlan(burst=burst), **traffic)  # type: ignore[arg-type]
    return conversations(replace(PLAN, requests=requests, seed=seed, traffic=plan))


def prompt_blocks(step: SimulatedStep) -> tuple[int, ...]:
    return step.blocks[: step.prompt // BLOCK_TOKENS]


def shared(one: SimulatedStep, other: SimulatedStep) -> int:
    """Return the number of leading blocks that two prompts share."""
    blocks = prompt_blocks(one), prompt_blocks(other)
    return next((i for i, (a, b) in enumerate(zip(*blocks, strict=False)) if a != b), min(map(len, blocks)))


def test_the_number_of_requests_is_that_of_the_plan() -> None:
    for requests in (1, 7, 5000):
        assert sum(len(conversation.steps) for conversation in make(requests)) == requests


def test_equal_seeds_make_equal_conversations() -> None:
    assert make() == make()
    assert make() != make(seed=2)


def test_more_requests_do_not_change_earlier_conversations() -> None:
    few, many = make(500), make(1000)
    # The last one may be cut short.
    assert [conversation.steps for conversation in many][: len(few) - 1] == [
        conversation.steps for conversation in few[:-1]
    ]


def test_every_full_block_of_prompt_and_output_has_a_number() -> None:
    for conversation in make(1000):
        for step in conversation.steps:
            assert len(step.blocks) == (step.prompt + step.output) // BLOCK_TOKENS
            assert len(set(step.blocks)) == len(step.blocks)
            assert step.prompt + step.output <= MAX_TOKENS
            assert step.output >= 1


def test_a_tool_step_continues_from_prompt_and_output() -> None:
    made = make(1000, turns=1.0, tool_steps=3.0)
    pairs = [(one, other) for conversation in made for one, other in pairwise(conversation.steps)]
    assert pairs
    for one, other in pairs:
        assert other.prompt > one.prompt + one.output
        assert other.blocks[: len(one.blocks)] == one.blocks


def test_a_turn_continues_from_the_previous_prompt_without_reasoning() -> None:
    pairs = [(one, other) for conversation in make(1000, tool_steps=0.0) for one, other in pairwise(conversation.steps)]
    assert pairs
    for one, other in pairs:
        assert one.prompt < other.prompt
        assert shared(one, other) == len(prompt_blocks(one))


def test_conversations_share_only_system_prompts() -> None:
    made = make(1000, systems=3, system_tokens=2000, spread=0.0)
    whole = 2000 // BLOCK_TOKENS
    firsts = [conversation.steps[0] for conversation in made]
    assert {shared(firsts[0], other) for other in firsts[1:]} == {0, whole}
    assert len({prompt_blocks(first)[:whole] for first in firsts}) == 3


@pytest.mark.slow
def test_averages_match_the_plan() -> None:
    traffic = TrafficPlan()
    made = make(30_000)
    steps = [step for conversation in made[:-1] for step in conversation.steps]
    per_talk = traffic.turns * (1 + traffic.tool_steps)
    assert len(steps) / (len(made) - 1) == pytest.approx(per_talk, rel=0.05)
    assert sum(step.output for step in steps) / len(steps) == pytest.approx(traffic.output_tokens, rel=0.03)
    assert made[-1].starts_us / US / len(made) == pytest.approx(1 / traffic.rate, rel=0.05)
    assert {conversation.key for conversation in made} == set(range(traffic.keys))


def test_without_spread_every_length_is_the_mean() -> None:
    assert {step.output for conversation in make(500, spread=0.0) for step in conversation.steps} == {400}


def test_a_burst_raises_the_rate_only_while_it_lasts() -> None:
    made = make(8000, burst=Burst(every_s=100, for_s=10, times=5), rate=4.0, turns=1.0, tool_steps=0.0)
    inside = [conversation for conversation in made if conversation.starts_us / US % 100 < 10]
    seconds = made[-1].starts_us / US
    assert len(inside) / (seconds * 0.1) == pytest.approx(20, rel=0.1)
    assert (len(made) - len(inside)) / (seconds * 0.9) == pytest.approx(4, rel=0.1)
    assert [conversation.starts_us for conversation in made] == sorted(conversation.starts_us for conversation in made)


def test_a_burst_of_nothing_is_a_pause() -> None:
    made = make(2000, burst=Burst(every_s=20, for_s=10, times=0), rate=4.0, turns=1.0, tool_steps=0.0)
    assert all(conversation.starts_us / US % 20 >= 9.999999 for conversation in made)


@pytest.mark.parametrize("mean", [0.5, 3.0, 40.0])
def test_random_numbers_have_the_requested_mean(mean: float) -> None:
    draw = Draw(5)
    assert sum(draw.count(mean) for _ in range(20_000)) / 20_000 == pytest.approx(mean, rel=0.05)
    assert sum(draw.exponential(mean) for _ in range(20_000)) / 20_000 == pytest.approx(mean, rel=0.05)
    lengths = [draw.length(1000, 0.8) for _ in range(20_000)]
    assert sum(lengths) / 20_000 == pytest.approx(1000, rel=0.05)
    deviation = math.sqrt(sum((math.log(each) - math.log(1000) + 0.32) ** 2 for each in lengths) / 20_000)
    assert deviation == pytest.approx(0.8, rel=0.05)
