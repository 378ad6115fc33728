"""Conversations as they are made of a plan: how many, how long, and which blocks they share."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from unisono.core.prefix_blocks import BLOCK_TOKENS
from unisono.simulation import BackendPlan, Burst, SimulationPlan, TrafficPlan
from unisono.simulation.plan import MAX_TOKENS
from unisono.simulation.traffic import US, Draw, SimulatedConversation, SimulatedStep, conversations

PLAN = SimulationPlan((BackendPlan("a", 1000.0, 50.0),), requests=5000)


def made(
    requests: int = 5000, seed: int = 1, burst: Burst | None = None, **traffic: float
) -> list[SimulatedConversation]:
    told = replace(TrafficPlan(burst=burst), **traffic)  # type: ignore[arg-type]
    return conversations(replace(PLAN, requests=requests, seed=seed, traffic=told))


def shared(one: SimulatedStep, other: SimulatedStep) -> int:
    """Blocks at the beginning that the prompts have in common."""
    pairs = zip(one.prompt_blocks, other.prompt_blocks, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.prompt_blocks), len(other.prompt_blocks)))


def test_there_are_as_many_requests_as_were_asked_for() -> None:
    for requests in (1, 7, 5000):
        assert sum(len(talk.steps) for talk in made(requests)) == requests


def test_the_same_seed_makes_the_same_conversations_and_another_others() -> None:
    assert made() == made()
    assert made() != made(seed=2)


def test_a_conversation_does_not_depend_on_how_many_come_after_it() -> None:
    few, many = made(500), made(1000)
    # The last one may be cut short.
    assert [talk.steps for talk in many][: len(few) - 1] == [talk.steps for talk in few[:-1]]


def test_every_whole_block_of_prompt_and_answer_has_a_number() -> None:
    for talk in made(1000):
        for step in talk.steps:
            assert len(step.blocks) == (step.prompt + step.output) // BLOCK_TOKENS
            assert len(set(step.blocks)) == len(step.blocks)
            assert step.prompt + step.output <= MAX_TOKENS
            assert step.output >= 1


def test_a_step_of_a_tool_loop_goes_on_from_prompt_and_answer() -> None:
    talks = made(1000, turns=1.0, tool_steps=3.0)
    pairs = [(one, other) for talk in talks for one, other in pairwise(talk.steps)]
    assert pairs
    for one, other in pairs:
        assert other.prompt > one.prompt + one.output
        assert other.blocks[: len(one.blocks)] == one.blocks


def test_a_turn_goes_on_from_the_prompt_before_it_but_not_from_what_was_thought() -> None:
    pairs = [(one, other) for talk in made(1000, tool_steps=0.0) for one, other in pairwise(talk.steps)]
    assert pairs
    for one, other in pairs:
        assert one.prompt < other.prompt
        assert shared(one, other) == len(one.prompt_blocks)


def test_conversations_share_system_prompts_and_nothing_else() -> None:
    talks = made(1000, systems=3, system_tokens=2000, spread=0.0)
    whole = 2000 // BLOCK_TOKENS
    firsts = [talk.steps[0] for talk in talks]
    assert {shared(firsts[0], other) for other in firsts[1:]} == {0, whole}
    assert len({first.prompt_blocks[:whole] for first in firsts}) == 3


@pytest.mark.slow
def test_averages_are_those_of_the_plan() -> None:
    traffic = TrafficPlan()
    talks = made(30_000)
    steps = [step for talk in talks[:-1] for step in talk.steps]
    per_talk = traffic.turns * (1 + traffic.tool_steps)
    assert len(steps) / (len(talks) - 1) == pytest.approx(per_talk, rel=0.05)
    assert sum(step.output for step in steps) / len(steps) == pytest.approx(traffic.output_tokens, rel=0.03)
    assert talks[-1].starts_us / US / len(talks) == pytest.approx(1 / traffic.rate, rel=0.05)
    assert {talk.key for talk in talks} == set(range(traffic.keys))


def test_without_spread_every_length_is_the_mean() -> None:
    assert {step.output for talk in made(500, spread=0.0) for step in talk.steps} == {400}


def test_a_burst_brings_more_and_the_calm_as_much_as_ever() -> None:
    talks = made(8000, burst=Burst(every_s=100, for_s=10, times=5), rate=4.0, turns=1.0, tool_steps=0.0)
    inside = [talk for talk in talks if talk.starts_us / US % 100 < 10]
    seconds = talks[-1].starts_us / US
    assert len(inside) / (seconds * 0.1) == pytest.approx(20, rel=0.1)
    assert (len(talks) - len(inside)) / (seconds * 0.9) == pytest.approx(4, rel=0.1)
    assert [talk.starts_us for talk in talks] == sorted(talk.starts_us for talk in talks)


def test_a_burst_of_nothing_is_a_pause() -> None:
    talks = made(2000, burst=Burst(every_s=20, for_s=10, times=0), rate=4.0, turns=1.0, tool_steps=0.0)
    assert all(talk.starts_us / US % 20 >= 9.999999 for talk in talks)


@pytest.mark.parametrize("mean", [0.5, 3.0, 40.0])
def test_numbers_drawn_have_the_mean_that_was_asked_for(mean: float) -> None:
    draw = Draw(5)
    assert sum(draw.count(mean) for _ in range(20_000)) / 20_000 == pytest.approx(mean, rel=0.05)
    assert sum(draw.exponential(mean) for _ in range(20_000)) / 20_000 == pytest.approx(mean, rel=0.05)
    lengths = [draw.length(1000, 0.8) for _ in range(20_000)]
    assert sum(lengths) / 20_000 == pytest.approx(1000, rel=0.05)
    deviation = math.sqrt(sum((math.log(each) - math.log(1000) + 0.32) ** 2 for each in lengths) / 20_000)
    assert deviation == pytest.approx(0.8, rel=0.05)
