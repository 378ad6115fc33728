"""Recovery of the only engine after it is killed or frozen in the middle of an answer.

Once the engine is back, the answer continues from the exact token at which it stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.gateway import gateway
from tests.engines_all.conftest import PINNED
from tests.engines_all.engines import Running, child_pids
from tests.engines_all.striking import EngineProcesses, Fleet, processes_of
from tests.engines_all.test_failover import (
    NO_COOLDOWN,
    POINTS,
    assert_equal_but_for_a_space,
    content_of,
    interrupt,
    port_of,
    request_for,
    usage_of,
    wait_until_probed,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]

FROZEN_S = 6.0
# Shorter than FROZEN_S, so that the attempt ends before the engine resumes.
SILENCE_S = 2.0
CASES = [
    (name, fault, surface)
    for name in ("llamacpp", "mlx_server", "mlx", "vllm")
    for fault in ("frozen", "killed")
    for surface in ("chat", "responses")
    # A request waits 15 s for its backend, and vLLM takes longer to start.
    if (name, fault) != ("vllm", "killed")
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.end()


def config(engine: Running, fault: str) -> dict[str, Any]:
    entry: dict[str, Any] = dict(engine.deployment())
    entry["litellm_params"] |= {"timeout": 120, "stream_timeout": SILENCE_S if fault == "frozen" else 60.0}
    entry["model_info"] |= {"id": engine.engine.kind}
    return {"model_list": [entry], "unisono": PINNED, "router_settings": NO_COOLDOWN}


async def bring_back(fleet: Fleet, engine: Running, processes: EngineProcesses, fault: str) -> None:
    """Resume the engine, or restart it on its port. The adapter restarts `mlx`."""
    if fault == "frozen":
        await asyncio.sleep(FROZEN_S)
        processes.resume()
    elif engine.pid is not None:
        await asyncio.to_thread(fleet.restart, engine.engine.kind, port_of(engine))


@pytest.mark.parametrize(("name", "fault", "surface"), CASES)
async def test_an_answer_continues_when_its_engine_is_back(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, name: str, fault: str, surface: str
) -> None:
    caplog.set_level(logging.INFO, "unisono.routing")
    engine = fleet.get(name)
    point, request = POINTS["in the text"], request_for(POINTS["in the text"], surface)
    before = child_pids("mlx.engine")
    async with gateway(config(engine, fault)) as site:
        await wait_until_probed(caplog, (name,))
        expected = await request.completed(site)
        with processes_of(engine, before) as processes:
            returning: list[asyncio.Task[None]] = []

            def interrupt_engine() -> None:
                if fault == "killed":
                    processes.kill()
                returning.append(asyncio.create_task(bring_back(fleet, engine, processes, fault)))

            stream, moment = await interrupt(request, site, processes, point, interrupt_engine)
            await asyncio.gather(*returning)
    about = stream.fields["unisono"]
    assert (about["backend"], stream.status, stream.done) == (name, 200, True)
    # A retry on the same deployment is not a failover.
    assert about["failovers"] == 0
    if content_of(stream) == content_of(expected):
        assert usage_of(stream)[0] == usage_of(expected)[0]
    else:
        assert not engine.engine.shows_stop
        assert_equal_but_for_a_space(stream, moment, expected)
