"""Runner of background responses that is built when there is something to run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import cast

from unisono.api.responses.background.runner import BackgroundRunner
from unisono.bootstrap.background import BackgroundResponses
from unisono.core.state_store import BackgroundRun
from unisono.store import open_store

LEASE_S = 0.02


class FakeRunner:
    def __init__(self, closing: bool = False) -> None:
        self.closing = closing
        self.lapsed: list[BackgroundRun] = []
        self.graces: list[float] = []

    async def take_over_lapsed(self, lapsed: Sequence[BackgroundRun]) -> bool:
        self.lapsed += lapsed
        return True

    async def aclose(self, grace_s: float) -> None:
        self.graces.append(grace_s)


async def test_the_runner_is_built_for_the_first_abandoned_response_in_a_thread() -> None:
    store = open_store("memory://")
    await store.start()
    built: list[tuple[FakeRunner, threading.Thread]] = []

    def build(closing: bool) -> BackgroundRunner:
        built.append((FakeRunner(closing), threading.current_thread()))
        return cast("BackgroundRunner", built[-1][0])

    background = BackgroundResponses(store, LEASE_S, build)
    background.start()
    await asyncio.sleep(5 * LEASE_S)
    assert built == []
    abandoned = BackgroundRun("ann", "resp_1")
    await store.watch(abandoned, 0.0)
    while not built or not built[0][0].lapsed:
        await asyncio.sleep(LEASE_S)
    [(runner, thread)] = built
    assert runner.lapsed[0] == abandoned
    assert not runner.closing
    assert thread is not threading.main_thread()
    await background.aclose(1.5)
    assert runner.graces == [1.5]
    await store.aclose()


async def test_a_runner_that_is_built_during_or_after_a_close_runs_no_job() -> None:
    store = open_store("memory://")
    runners: list[FakeRunner] = []

    def build(closing: bool) -> BackgroundRunner:
        time.sleep(0.05)
        runners.append(FakeRunner(closing))
        return cast("BackgroundRunner", runners[-1])

    background = BackgroundResponses(store, LEASE_S, build)
    building = asyncio.create_task(asyncio.to_thread(background.runner))
    await asyncio.sleep(0.01)
    await background.aclose(2.0)
    await building
    assert [(runner.closing, runner.graces) for runner in runners] == [(False, [2.0])]

    late = BackgroundResponses(store, LEASE_S, build)
    await late.aclose()
    late.runner()
    assert [(runner.closing, runner.graces) for runner in runners[1:]] == [(True, [])]
