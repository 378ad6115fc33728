"""Small runs of the scenarios with state, on a complete gateway with its own Redis."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.fake_vllm import Pace
from bench.processes import Cpus
from bench.rig import Rig
from bench.sample import Sample
from bench.tasks import Arm, BackgroundWork, PriorTurns, Task, Work

SMALL = Work(streams=1, tokens=20, requests=4, wire="responses")
BEHIND = BackgroundWork(streams=6, watched=2, tokens=20, spread_s=0.1, pace=Pace(interval_us=10_000))

TASKS: dict[str, Task] = {
    "no history": SMALL,
    "not stored": replace(SMALL, wire="responses, not stored"),
    "chain": replace(SMALL, prior=PriorTurns("chain", turns=3, count=2)),
    "conversation": replace(SMALL, prior=PriorTurns("conversation", turns=3, count=2)),
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("rig")
    with Rig(folder, Cpus()) as rig:
        yield rig


def measured(rig: Rig, task: Task) -> Sample:
    return rig.sample(Arm("an arm", "unisono+redis", task))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_responses_are_answered_after_stored_history(rig: Rig, task: Task) -> None:
    sample = measured(rig, task)
    assert sample.examples == ()
    assert sample.ttft_p50_ms > 0


@pytest.mark.slow
def test_background_responses_are_watched_to_their_logged_end(rig: Rig) -> None:
    sample = measured(rig, BEHIND)
    assert sample.examples == ()
    assert 0 < sample.logged_p50_s <= sample.logged_max_s < 10
    assert 0 < sample.watched_max_s < 10
    assert sample.busy > 0
    assert sample.store_busy > 0
    assert sample.tokens_per_s <= 6 * 20 / (20 * 0.01)
