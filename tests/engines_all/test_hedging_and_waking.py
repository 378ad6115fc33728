"""Hedged requests while a real engine is silent, and the wake of a sleeping engine."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import gateway
from tests.engines_all.conftest import PINNED
from tests.engines_all.engines import ENGINES, Running, free_port, wait_until_idle
from tests.engines_all.striking import Fleet, processes_of
from tests.engines_all.test_failover import wait_until_probed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

# Seconds until the hedged request.
HEDGE_AFTER_S = 1.0
# Number of requests that wait for one engine to wake up.
WAITING = 30


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.end()


def entry(engine: Running, order: int) -> dict[str, Any]:
    """Return an entry of `model_list`; the lowest order is preferred."""
    found: dict[str, Any] = dict(engine.deployment())
    found["litellm_params"] |= {"order": order}
    found["model_info"] |= {"id": engine.engine.kind}
    return found


@pytest.mark.parametrize(
    ("first", "second"), [("llamacpp", "mlx_server"), ("vllm", "llamacpp"), ("mlx_server", "llamacpp")]
)
async def test_another_engine_answers_while_the_first_is_silent(
    fleet: Fleet, first: str, second: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    silent, other = fleet.get(first), fleet.get(second)
    hedging = {**PINNED, "hedge": {"after": HEDGE_AFTER_S}}
    config = {"model_list": [entry(silent, 0), entry(other, 1)], "unisono": hedging}
    async with gateway(config) as site:
        await wait_until_probed(caplog, (first, second))
        request: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
        expected = await site.chat(**request)
        assert expected.body["unisono"]["backend"] == first
        with processes_of(silent, []) as processes:
            processes.freeze()
            answer = await site.chat(**request)
        assert answer.status == 200, answer.body
        assert answer.body["unisono"]["backend"] == second
        # mlx_lm.server drops the space at the start of its text.
        texts = [each.body["choices"][0]["message"]["content"].strip() for each in (answer, expected)]
        assert texts[0] == texts[1]
        # The request to the silent engine was cancelled, in the engine too.
        await wait_until_idle(silent, 30.0)
        deployments = (await site.get("/v1/status")).body["models"][0]["deployments"]
        assert [each["running"] for each in deployments] == [0, 0]


@pytest.fixture
def sleeping(tmp_path: Path) -> Iterator[tuple[str, list[str], Path]]:
    """Yield the URL of a sleeping engine, the command that starts it, and the file of its pids."""
    port, pids = free_port(), tmp_path / "pids"
    command = ENGINES["llamacpp"].command
    assert command is not None
    start = shlex.join(map(str, command(port)))
    yield f"http://127.0.0.1:{port}", ["/bin/sh", "-c", f"{start} & echo $! >> {shlex.quote(str(pids))}"], pids
    for pid in pids.read_text().split() if pids.exists() else ():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


async def test_waiting_requests_start_one_engine(sleeping: tuple[str, list[str], Path]) -> None:
    url, command, pids = sleeping
    entry = {
        "model_name": "gpt-oss",
        "litellm_params": {"model": "llamacpp/tiny", "api_base": url},
        "unisono": {"wake": {"command": command, "timeout_s": 120}},
    }
    async with gateway({"model_list": [entry], "unisono": {**PINNED, "max_queue": 2 * WAITING}}) as site:
        answers = await asyncio.gather(*(site.chat(max_tokens=4) for _ in range(WAITING)))
        assert {answer.status for answer in answers} == {200}
        assert len(pids.read_text().split()) == 1
