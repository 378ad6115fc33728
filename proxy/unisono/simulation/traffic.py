"""Conversations of a plan, generated before the simulation starts.

Arrivals do not depend on how requests are served, so all strategies get the same requests. Only `Random.random` is
used, which is the same in every version of Python. Results are rounded to microseconds and whole tokens, so that
differences in the last digit of a logarithm have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from unisono.core.route_protocol import BLOCK_TOKENS
from unisono.simulation.plan import MAX_TOKENS, SimulationPlan, TrafficPlan

# Microseconds per second, the unit of simulated time.
US = 1_000_000


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One request, which arrives `pause_us` microseconds after the previous answer.

    `prompt` and `output` are lengths in tokens. `blocks` are the numbers of all complete blocks of the prompt and the
    answer. A later step whose prompt begins with these blocks has the same block numbers.
    """

    pause_us: int
    prompt: int
    output: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SimulatedConversation:
    number: int
    starts_us: int
    key: int
    steps: tuple[SimulatedStep, ...]


class Draw:
    """Random numbers in the required distributions."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)  # noqa: S311 - it has to be the same every time

    def below(self, count: int) -> int:
        return min(int(self._random.random() * count), count - 1)

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self._random.random())

    def length(self, mean: int, spread: float) -> int:
        """Return a lognormal number of tokens with the given mean; at least 1 unless the mean is 0."""
        if spread == 0 or mean == 0:
            return mean
        # Box-Muller transform; the second normal number is discarded.
        radius = math.sqrt(-2.0 * math.log(1.0 - self._random.random()))
        normal = radius * math.cos(2.0 * math.pi * self._random.random())
        return max(1, round(mean * math.exp(spread * normal - spread * spread / 2)))

    def count(self, mean: float) -> int:
        """Return a random number with a geometric distribution, 0 or more, with the given mean."""
        if mean == 0:
            return 0
        return int(math.log(1.0 - self._random.random()) / math.log(mean / (1.0 + mean)))


def conversations(plan: SimulationPlan) -> list[SimulatedConversation]:
    """Return enough conversations for `plan.requests` steps. The last one may be truncated."""
    made: list[SimulatedConversation] = []
    remaining = plan.requests
    beginnings = _start_times(plan.traffic, Draw(plan.seed))
    numbers = iter(range(1 << 62))
    systems = [
        _System(length, tuple(next(numbers) for _ in range(length // BLOCK_TOKENS)))
        for length in _system_lengths(plan.traffic, Draw(plan.seed + 1))
    ]
    while remaining:
        number = len(made)
        # Each conversation has its own generator, so that the length of one does not affect the next.
        draw = Draw((plan.seed + 2) * 1_000_003 + number)
        system = systems[draw.below(len(systems))]
        key = draw.below(plan.traffic.keys)
        steps = tuple(_steps(plan.traffic, draw, system, numbers))[:remaining]
        remaining -= len(steps)
        made.append(SimulatedConversation(number, next(beginnings), key, steps))
    return made


@dataclass(frozen=True, slots=True)
class _System:
    tokens: int
    blocks: tuple[int, ...]


def _system_lengths(traffic: TrafficPlan, draw: Draw) -> list[int]:
    return [min(draw.length(traffic.system_tokens, traffic.spread), MAX_TOKENS // 2) for _ in range(traffic.systems)]


def _start_times(traffic: TrafficPlan, draw: Draw) -> Iterator[int]:
    """Yield start times of a Poisson process, which is accelerated during bursts."""
    fresh = 0.0
    burst = traffic.burst
    while True:
        fresh += draw.exponential(1.0 / traffic.rate)
        if burst is None:
            yield round(fresh * US)
            continue
        # Each period contains `burst.for_s * burst.times` seconds of the steady process in the burst, plus the calm
        # seconds.
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
    """Yield the requests of one conversation until it ends or fills the context."""
    blocks = list(system.blocks)
    history = system.tokens
    pause = 0.0
    for _ in range(1 + draw.count(traffic.turns - 1)):
        prompt = history + draw.length(traffic.user_tokens, traffic.spread)
        start = history = prompt
        tools = draw.count(traffic.tool_steps)
        for step in range(tools + 1):
            output = draw.length(traffic.output_tokens, traffic.spread)
            if prompt + output > MAX_TOKENS:
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
        # The next prompt omits the reasoning of earlier answers, so its blocks differ from here on.
        blocks = blocks[: start // BLOCK_TOKENS]
