"""Conversations as a plan describes them, made before anything runs: who comes when with what does not depend on how
they are served, so strategies are compared over the very same requests.

Only `Random.random` is used, which is the same in every version of Python, and what comes of it is rounded to
microseconds and whole tokens, so that the last digit of a logarithm makes no difference between machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from unisono.core.prefix_blocks import BLOCK_TOKENS
from unisono.simulation.plan import MOST_TOKENS, SimulationPlan, TrafficPlan

US = 1_000_000
"""Microseconds in a second: time is counted in them."""


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One request: it comes `pause_us` after the answer before it. Its prompt is `prompt` tokens long; `blocks` are the
    numbers of all whole blocks of the prompt and the answer, so a later step that goes on from there shares them."""

    pause_us: int
    prompt: int
    output: int
    blocks: tuple[int, ...]

    @property
    def prompt_blocks(self) -> tuple[int, ...]:
        return self.blocks[: self.prompt // BLOCK_TOKENS]


@dataclass(frozen=True, slots=True)
class SimulatedConversation:
    number: int
    begins_us: int
    key: int
    steps: tuple[SimulatedStep, ...]


class Draw:
    """Random numbers in the shapes that are needed here."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)  # noqa: S311 - it has to be the same every time

    def below(self, count: int) -> int:
        return min(int(self._random.random() * count), count - 1)

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self._random.random())

    def length(self, mean: int, spread: float) -> int:
        """Tokens, lognormal around `mean`, at least one where the mean is."""
        if spread == 0 or mean == 0:
            return mean
        # Box and Muller's way to a normal number; its other half is let go.
        radius = math.sqrt(-2.0 * math.log(1.0 - self._random.random()))
        normal = radius * math.cos(2.0 * math.pi * self._random.random())
        return max(1, round(mean * math.exp(spread * normal - spread * spread / 2)))

    def count(self, mean: float) -> int:
        """0 or more, geometric."""
        if mean == 0:
            return 0
        return int(math.log(1.0 - self._random.random()) / math.log(mean / (1.0 + mean)))


def conversations(plan: SimulationPlan) -> list[SimulatedConversation]:
    """As many as it takes for `plan.requests` steps; the last one may be cut short."""
    made: list[SimulatedConversation] = []
    left = plan.requests
    beginnings = _beginnings(plan.traffic, Draw(plan.seed))
    numbers = iter(range(1 << 62))
    systems = [
        _System(length, tuple(next(numbers) for _ in range(length // BLOCK_TOKENS)))
        for length in _system_lengths(plan.traffic, Draw(plan.seed + 1))
    ]
    while left:
        number = len(made)
        # Each draws from its own numbers, so that one that is longer changes nothing in the next.
        draw = Draw((plan.seed + 2) * 1_000_003 + number)
        system = systems[draw.below(len(systems))]
        key = draw.below(plan.traffic.keys)
        steps = tuple(_steps(plan.traffic, draw, system, numbers))[:left]
        left -= len(steps)
        made.append(SimulatedConversation(number, next(beginnings), key, steps))
    return made


@dataclass(frozen=True, slots=True)
class _System:
    tokens: int
    blocks: tuple[int, ...]


def _system_lengths(traffic: TrafficPlan, draw: Draw) -> list[int]:
    return [min(draw.length(traffic.system_tokens, traffic.spread), MOST_TOKENS // 2) for _ in range(traffic.systems)]


def _beginnings(traffic: TrafficPlan, draw: Draw) -> Iterator[int]:
    """Poisson; in a burst time runs faster."""
    fresh = 0.0
    burst = traffic.burst
    while True:
        fresh += draw.exponential(1.0 / traffic.rate)
        if burst is None:
            yield round(fresh * US)
            continue
        # Of each period the burst's part holds as much of the steady stream as its length times what it is faster.
        calm = max(burst.every_s - burst.for_s, 0.0)
        period = burst.for_s * burst.times + calm
        if period <= 0:
            yield round(fresh * US)
            continue
        whole, within = divmod(fresh, period)
        inside = burst.for_s * burst.times
        offset = within / burst.times if within < inside else burst.for_s + within - inside
        yield round((whole * (burst.for_s + calm) + offset) * US)


def _steps(traffic: TrafficPlan, draw: Draw, system: _System, numbers: Iterator[int]) -> Iterator[SimulatedStep]:
    """The requests of one conversation, until it is over or fills the context."""
    blocks = list(system.blocks)
    history = system.tokens
    pause = 0.0
    for _ in range(1 + draw.count(traffic.turns - 1)):
        prompt = history + draw.length(traffic.user_tokens, traffic.spread)
        begun = history = prompt
        tools = draw.count(traffic.tool_steps)
        for step in range(tools + 1):
            output = draw.length(traffic.output_tokens, traffic.spread)
            if prompt + output > MOST_TOKENS:
                return
            blocks += [next(numbers) for _ in range((prompt + output) // BLOCK_TOKENS - len(blocks))]
            yield SimulatedStep(round(pause * US), prompt, output, tuple(blocks))
            pause = draw.exponential(traffic.tool_s)
            history += round(output * traffic.visible)
            if step < tools:
                result = draw.length(traffic.tool_tokens, traffic.spread)
                prompt += output + result
                history += result
        pause = draw.exponential(traffic.think_s)
        # The next prompt has the answers without their reasoning, so from here on it is another one.
        blocks = blocks[: begun // BLOCK_TOKENS]
