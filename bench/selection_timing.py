"""Worker process that times the selection of a deployment, without servers and requests.

It uses the deployment group of the gateway, with the cached prefixes of a case. The worker reads one `SelectionJob` per
line of JSON and answers with one `SelectionResult`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import orjson

from bench.intervention_timing import ScriptedBackend
from bench.processes import Process
from bench.sample import Sample
from bench.tasks import SelectionWork
from bench.worker import WorkerResult, serve_lines
from bench.worker_client import ask_worker
from unisono.core.generation import VOCABULARY
from unisono.core.route_protocol import BLOCK_TOKENS, RouteRequirements, blocks_of
from unisono.routing.deployment import LiveDeployment
from unisono.routing.deployment_choice import SelectionRequest
from unisono.routing.deployment_config import DeploymentConfig
from unisono.routing.group import DeploymentGroup
from unisono.routing.prefix_index import PrefixIndex

PROMPT_TOKENS = 32_000
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
# Blocks at the start of all prompts, in cases with a shared start.
SHARED_BLOCKS = PROMPT_BLOCKS // 4
MANY_DEPLOYMENTS = 64
# A deployment caches a conversation up to one of this many turns.
TURNS = 8
# Prompts that are routed in turn, so that no selection repeats the previous one.
PROMPT_COUNT = 64


@dataclass(frozen=True, slots=True)
class SelectionJob:
    """Name of a case; the result is the median of `times` runs over all prompts."""

    variant: str
    times: int


@dataclass(slots=True)
class SelectionResult(WorkerResult):
    choose_us: float = 0.0


@dataclass
class BusyDeployments:
    """Busy deployments of one model name, their cached prefixes, and the prompts to route."""

    live_deployments: Sequence[LiveDeployment]
    prefixes: PrefixIndex
    requirements: Sequence[RouteRequirements]
    rng: random.Random

    def record_prefix(self, number: int, live: int, blocks: int = PROMPT_BLOCKS) -> None:
        """Record that deployment `live` caches the first blocks of a prompt."""
        cached = self.requirements[number].blocks[:blocks]
        self.prefixes.record(cached, self.live_deployments[live].candidate.bit, time.monotonic())


def _busy_deployments(deployments: int, shared: int) -> BusyDeployments:
    rng, prefixes = random.Random(0), PrefixIndex()
    live_deployments = [
        LiveDeployment(DeploymentConfig(f"gpu-{n}", weight=1 + n % 3), ScriptedBackend((), guided=False))
        for n in range(deployments)
    ]
    for live in live_deployments:
        live.candidate.bit = prefixes.join()
        live.candidate.reserve(SelectionRequest(prompt_tokens=rng.randrange(50_000), tokens=3000))
    start = _random_blocks(rng, shared)
    prompts = [(*start, *_random_blocks(rng, PROMPT_BLOCKS - shared)) for _ in range(PROMPT_COUNT)]
    return BusyDeployments(
        live_deployments, prefixes, [RouteRequirements(PROMPT_TOKENS, blocks) for blocks in prompts], rng
    )


def _random_blocks(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.getrandbits(64) for _ in range(count))


def _cache_other_prompts(busy: BusyDeployments) -> None:
    # Each deployment caches one other prompt of the same length.
    for live in busy.live_deployments:
        busy.prefixes.record(_random_blocks(busy.rng, PROMPT_BLOCKS), live.candidate.bit, time.monotonic())


def _cache_on_one(busy: BusyDeployments) -> None:
    for number in range(PROMPT_COUNT):
        busy.record_prefix(number, number % len(busy.live_deployments))


def _cache_start_on_all(busy: BusyDeployments) -> None:
    for live in range(len(busy.live_deployments)):
        busy.record_prefix(0, live, SHARED_BLOCKS)
    _cache_on_one(busy)


def _cache_to_turns(busy: BusyDeployments) -> None:
    for number in range(PROMPT_COUNT):
        for live in range(len(busy.live_deployments)):
            busy.record_prefix(number, live, PROMPT_BLOCKS * (1 + (number + live) % TURNS) // TURNS)


def _cache_to_blocks(busy: BusyDeployments) -> None:
    for number in range(PROMPT_COUNT):
        lengths = busy.rng.sample(range(1, PROMPT_BLOCKS + 1), len(busy.live_deployments))
        for live, blocks in enumerate(lengths):
            busy.record_prefix(number, live, blocks)


@dataclass(frozen=True, slots=True)
class SelectionCase:
    """Cached prefixes of a case, and the number of different cached lengths of each prompt.

    `fill` records the prefixes. All prompts start with `shared` common blocks. With `reserves_slot`, a slot is also
    reserved and released.
    """

    deployments: int
    fill: Callable[[BusyDeployments], None]
    prefix_count: int
    shared: int = 0
    reserves_slot: bool = False


CASES: dict[str, SelectionCase] = {
    "one deployment": SelectionCase(1, _cache_on_one, 0),
    "none holds it": SelectionCase(MANY_DEPLOYMENTS, _cache_other_prompts, 0),
    "one holds it": SelectionCase(MANY_DEPLOYMENTS, _cache_on_one, 1),
    "all hold its beginning, one all of it": SelectionCase(MANY_DEPLOYMENTS, _cache_start_on_all, 2, SHARED_BLOCKS),
    "each holds it to one of eight turns": SelectionCase(MANY_DEPLOYMENTS, _cache_to_turns, TURNS),
    "each holds it to another block": SelectionCase(MANY_DEPLOYMENTS, _cache_to_blocks, MANY_DEPLOYMENTS),
    "one holds it, and a slot is reserved": SelectionCase(MANY_DEPLOYMENTS, _cache_on_one, 1, reserves_slot=True),
}
NUMBERING = "numbering its blocks, with the render"


async def run(job: SelectionJob) -> SelectionResult:
    result = SelectionResult()
    if job.variant == NUMBERING:
        result.choose_us = _numbering_us(job.times)
        return result
    case = CASES[job.variant]
    busy = _busy_deployments(case.deployments, case.shared)
    for live in busy.live_deployments:
        await live.check()
    case.fill(busy)
    group = DeploymentGroup("m", busy.live_deployments, busy.prefixes)
    requests = [(required, f"conversation {number}") for number, required in enumerate(busy.requirements)]
    for required, conversation in requests:
        prefix_count = len(group.selection_request(required, conversation, 0).cached_prefixes)
        if prefix_count != case.prefix_count:
            result.add_fault(f"{job.variant}: {prefix_count} cached lengths instead of {case.prefix_count}")
    select = _select_and_reserve if case.reserves_slot else _select
    durations_us = []
    for _ in range(job.times):
        started_at = time.process_time()
        select(group, requests)
        durations_us.append(1e6 * (time.process_time() - started_at) / len(requests))
    result.choose_us = median(durations_us)
    return result


def _select(group: DeploymentGroup, requests: Sequence[tuple[RouteRequirements, str]]) -> None:
    for required, conversation in requests:
        group.choice(group.selection_request(required, conversation, 0))


def _select_and_reserve(group: DeploymentGroup, requests: Sequence[tuple[RouteRequirements, str]]) -> None:
    for required, conversation in requests:
        attempt = group.attempt(required, group.selection_request(required, conversation, 0))
        if attempt.slot is not None:
            attempt.slot.live.give_back(attempt.slot)


def _numbering_us(times: int) -> float:
    rng = random.Random(0)
    durations_us = []
    for _ in range(times):
        tokens = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        started_at = time.process_time()
        blocks_of(tokens)
        durations_us.append(1e6 * (time.process_time() - started_at))
    return median(durations_us)


def measure_selection(process: Process, work: SelectionWork) -> Sample:
    """Run one case in a worker process of this module."""
    result = SelectionResult(**orjson.loads(ask_worker(process, asdict(SelectionJob(work.variant, work.times)))))
    return Sample(choose_us=result.choose_us, faults=result.faults, examples=tuple(result.examples))


def main() -> None:
    serve_lines(lambda line: run(SelectionJob(**orjson.loads(line))))


if __name__ == "__main__":
    main()
