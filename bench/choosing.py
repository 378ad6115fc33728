"""Choosing a deployment for a long prompt, alone: no server and no request, only the choice.

What serves chooses by the same group of the same deployments, whose caches are taken to hold what the case says. A
process of its own, driven by lines of JSON: one `Ask` in, one `Told` out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import orjson

from bench.lines import answered
from bench.moves import Model
from bench.processes import Process
from bench.sample import Sample
from bench.tally import Tally, answer_lines
from bench.tasks import Choosing
from unisono.core.generation import VOCABULARY
from unisono.core.prefix_blocks import BLOCK_TOKENS, blocks_of
from unisono.core.route_protocol import RouteRequirements
from unisono.routing.deployment import LiveDeployment
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.group import DeploymentGroup
from unisono.routing.policy import SelectionRequest
from unisono.routing.prefix_index import PrefixIndex

TOKENS = 32_000
BLOCKS = TOKENS // BLOCK_TOKENS
SHARED = BLOCKS // 4
"""Blocks that all prompts begin with, where they have a beginning in common."""
MANY = 64
TURNS = 8
"""Ends to which a conversation of so many turns is held, where each deployment had the latest of them at one time."""
PROMPTS = 64
"""Chosen for in turn, so that none of them is the one that was looked at just now."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One of the cases; the median of so many `times` over all prompts."""

    how: str
    times: int


@dataclass(slots=True)
class Told(Tally):
    choose_us: float = 0.0


@dataclass
class Crowd:
    """Deployments of one name that are all busy, what they hold, and the prompts that are chosen for."""

    lives: Sequence[LiveDeployment]
    prefixes: PrefixIndex
    demands: Sequence[RouteRequirements]
    chance: random.Random

    def hold(self, number: int, live: int, blocks: int = BLOCKS) -> None:
        """The deployment `live` has read so many blocks of a prompt."""
        held = self.demands[number].blocks[:blocks]
        self.prefixes.record(held, self.lives[live].candidate.bit, time.monotonic())


def _crowd(deployments: int, shared: int) -> Crowd:
    chance, prefixes = random.Random(0), PrefixIndex()
    lives = [
        LiveDeployment(DeploymentConfig(f"gpu-{n}", weight=1 + n % 3), Model((), guided=False))
        for n in range(deployments)
    ]
    for live in lives:
        live.candidate.bit = prefixes.join()
        live.candidate.reserve(SelectionRequest(prompt_tokens=chance.randrange(50_000), tokens=3000))
    beginning = _numbers(chance, shared)
    prompts = [(*beginning, *_numbers(chance, BLOCKS - shared)) for _ in range(PROMPTS)]
    return Crowd(lives, prefixes, [RouteRequirements(TOKENS, blocks) for blocks in prompts], chance)


def _numbers(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.getrandbits(64) for _ in range(count))


def _nobody(crowd: Crowd) -> None:
    # What they hold are other prompts, as many.
    for live in crowd.lives:
        crowd.prefixes.record(_numbers(crowd.chance, BLOCKS), live.candidate.bit, time.monotonic())


def _one_each(crowd: Crowd) -> None:
    for number in range(PROMPTS):
        crowd.hold(number, number % len(crowd.lives))


def _all_and_one(crowd: Crowd) -> None:
    for live in range(len(crowd.lives)):
        crowd.hold(0, live, SHARED)
    _one_each(crowd)


def _to_a_turn_each(crowd: Crowd) -> None:
    for number in range(PROMPTS):
        for live in range(len(crowd.lives)):
            crowd.hold(number, live, BLOCKS * (1 + (number + live) % TURNS) // TURNS)


def _a_part_each(crowd: Crowd) -> None:
    for number in range(PROMPTS):
        lengths = crowd.chance.sample(range(1, BLOCKS + 1), len(crowd.lives))
        for live, blocks in enumerate(lengths):
            crowd.hold(number, live, blocks)


@dataclass(frozen=True, slots=True)
class Case:
    """`hold` says what is held; then every prompt is held to `parts` different ends. `shared` blocks begin all of
    them. With `placed` a place is taken, too, and given back."""

    deployments: int
    hold: Callable[[Crowd], None]
    parts: int
    shared: int = 0
    placed: bool = False


CASES: dict[str, Case] = {
    "one deployment": Case(1, _one_each, 0),
    "none holds it": Case(MANY, _nobody, 0),
    "one holds it": Case(MANY, _one_each, 1),
    "all hold its beginning, one all of it": Case(MANY, _all_and_one, 2, SHARED),
    "each holds it to one of eight turns": Case(MANY, _to_a_turn_each, TURNS),
    "each holds it to another block": Case(MANY, _a_part_each, MANY),
    "one holds it, and a slot is reserved": Case(MANY, _one_each, 1, placed=True),
}
NUMBERING = "numbering its blocks, with the render"


async def run(ask: Ask) -> Told:
    told = Told()
    if ask.how == NUMBERING:
        told.choose_us = _numbering(ask.times)
        return told
    case = CASES[ask.how]
    crowd = _crowd(case.deployments, case.shared)
    for live in crowd.lives:
        await live.check()
    case.hold(crowd)
    group = DeploymentGroup("m", crowd.lives, crowd.prefixes)
    talks = [(demand, f"conversation {number}") for number, demand in enumerate(crowd.demands)]
    for demand, talk in talks:
        parts = len(group.selection_request(demand, talk, 0).cached_prefixes)
        if parts != case.parts:
            told.fault(f"{ask.how}: held to {parts} ends, not {case.parts}")
    choices = _placed if case.placed else _chosen
    taken = []
    for _ in range(ask.times):
        begun = time.process_time()
        choices(group, talks)
        taken.append(1e6 * (time.process_time() - begun) / len(talks))
    told.choose_us = median(taken)
    return told


def _chosen(group: DeploymentGroup, talks: Sequence[tuple[RouteRequirements, str]]) -> None:
    for demand, talk in talks:
        group.choice(group.selection_request(demand, talk, 0))


def _placed(group: DeploymentGroup, talks: Sequence[tuple[RouteRequirements, str]]) -> None:
    for demand, talk in talks:
        offer = group.attempt(demand, group.selection_request(demand, talk, 0))
        if offer.slot is not None:
            offer.slot.live.give_back(offer.slot)


def _numbering(times: int) -> float:
    chance = random.Random(0)
    taken = []
    for _ in range(times):
        tokens = [chance.randrange(VOCABULARY) for _ in range(TOKENS)]
        begun = time.process_time()
        blocks_of(tokens)
        taken.append(1e6 * (time.process_time() - begun))
    return median(taken)


def chosen(process: Process, work: Choosing) -> Sample:
    """What `process`, which is this module, says of a case."""
    told = Told(**orjson.loads(answered(process, asdict(Ask(work.how, work.times)))))
    return Sample(choose_us=told.choose_us, faults=told.faults, examples=tuple(told.examples))


def main() -> None:
    answer_lines(lambda line: run(Ask(**orjson.loads(line))))


if __name__ == "__main__":
    main()
