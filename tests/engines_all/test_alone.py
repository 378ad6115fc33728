"""An engine without another one that is killed or frozen in the middle of its answer: once it is back, its answer goes
on where it stopped, token by token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.gateway import gateway
from tests.engines_all.conftest import PINNED
from tests.engines_all.engines import Running, children_that_run
from tests.engines_all.striking import Fleet, Struck, to_strike
from tests.engines_all.test_failover import (
    PATIENT,
    PLACES,
    all_examined,
    asked,
    counts,
    essence,
    in_time,
    lost_a_space,
    port_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]

FROZEN_S = 6.0
SILENCE_S = 2.0
"""Less than an engine stays frozen, so that its attempt has ended before it goes on."""
CASES = [
    (name, blow, surface)
    for name in ("llamacpp", "mlx_server", "mlx", "vllm")
    for blow in ("frozen", "killed")
    for surface in ("chat", "responses")
    # An answer waits for a quarter of a minute, and vLLM takes longer to start.
    if (name, blow) != ("vllm", "killed")
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.end()


def config(engine: Running, blow: str) -> dict[str, Any]:
    entry: dict[str, Any] = dict(engine.deployment())
    entry["litellm_params"] |= {"timeout": 120, "stream_timeout": SILENCE_S if blow == "frozen" else 60.0}
    entry["model_info"] |= {"id": engine.engine.kind}
    return {"model_list": [entry], "unisono": PINNED, "router_settings": PATIENT}


async def back_again(fleet: Fleet, engine: Running, struck: Struck, blow: str) -> None:
    """What an operator does: the engine goes on, or is started anew on its port. `mlx` is started by its adapter."""
    if blow == "frozen":
        await asyncio.sleep(FROZEN_S)
        struck.go_on()
    elif engine.pid is not None:
        await asyncio.to_thread(fleet.again, engine.engine.kind, port_of(engine))


@pytest.mark.parametrize(("name", "blow", "surface"), CASES)
async def test_an_answer_goes_on_when_its_engine_is_back(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, name: str, blow: str, surface: str
) -> None:
    caplog.set_level(logging.INFO, "unisono.routing")
    engine = fleet.well(name)
    place, question = PLACES["in its text"], asked(PLACES["in its text"], surface)
    before = children_that_run("mlx.engine")
    async with gateway(config(engine, blow)) as site:
        await all_examined(caplog, (name,))
        expected = await question.answered(site)
        with to_strike(engine, before) as struck:
            returning: list[asyncio.Task[None]] = []

            def strike() -> None:
                if blow == "killed":
                    struck.kill()
                returning.append(asyncio.create_task(back_again(fleet, engine, struck, blow)))

            story, moment = await in_time(question, site, struck, place, strike)
            await asyncio.gather(*returning)
    about = story.last["unisono"]
    assert (about["backend"], story.status, story.done) == (name, 200, True)
    assert about["failovers"] >= 1
    if essence(story) == essence(expected):
        assert counts(story)[0] == counts(expected)[0]
    else:
        assert not engine.engine.shows_stop
        lost_a_space(story, moment, expected)
