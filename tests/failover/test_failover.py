"""Failovers at seeded moments: no write acknowledged by a replica is lost, and no tool call runs twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failover.run import Setting, failover
from tests.failover.topologies import REALISTIC

pytestmark = [pytest.mark.slow, pytest.mark.alone]

# A run takes about 40 seconds, and all runs together about 40 minutes.
RUNS = [
    *((Setting("sentinel", 1), seed) for seed in range(15)),
    *((Setting("cluster", 1), seed) for seed in range(12)),
    *((Setting("sentinel", None), seed) for seed in range(8)),
    *((Setting("cluster", None), seed) for seed in range(8)),
    *((Setting("sentinel", 0), seed) for seed in range(6)),
    *((Setting("cluster", 0), seed) for seed in range(5)),
    *((Setting("sentinel", 1, REALISTIC), seed) for seed in range(3)),
    *((Setting("sentinel", None, REALISTIC), seed) for seed in range(3, 6)),
    *((Setting("cluster", 1, REALISTIC), seed) for seed in range(2)),
]


@pytest.mark.parametrize(("setting", "seed"), RUNS, ids=[f"{setting}-{seed}" for setting, seed in RUNS])
async def test_a_failover_loses_no_acknowledged_write_and_repeats_no_tool_call(
    setting: Setting, seed: int, tmp_path: Path
) -> None:
    outcome = await failover(setting, seed, tmp_path)
    print(outcome)
    assert outcome.calls > 0
    assert outcome.called_twice == []
    assert not [code for code in outcome.failures if code.startswith("500")]
    if setting.replicas != 0:
        assert outcome.lost == []
        assert outcome.unfinished == []
