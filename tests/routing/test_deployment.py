"""One deployment: shared probes, what they find, when they are due."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from tests.routing.doubles import IDS, Clock, Script
from unisono.core.generation import Capabilities, OutputForm
from unisono.core.probe import MEANINGS, Check, Finding, Probe
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    BackendUnfit,
    UnisonoError,
)
from unisono.routing.circuit_breaker import BreakerConfig, CircuitPhase
from unisono.routing.deployment import LiveDeployment
from unisono.routing.pool import RoutingPool
from unisono.routing.status import status_of


async def test_callers_at_the_same_time_share_one_probe() -> None:
    script = Script(gate=asyncio.Event())
    deployment = LiveDeployment("a", script)
    callers = [asyncio.create_task(deployment.capabilities()) for _ in range(5)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.sleep(0)
    assert script.gate is not None
    script.gate.set()
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [IDS] * 4
    assert await deployment.capabilities() == IDS
    assert script.probes == 1


async def test_a_failed_probe_is_remembered_for_a_moment_only() -> None:
    clock = Clock()
    script = Script([BackendUnavailable("not yet"), IDS])
    deployment = LiveDeployment("a", script, clock=clock)
    for _ in range(3):
        with pytest.raises(BackendUnavailable):
            await deployment.capabilities()
    assert script.probes == 1
    clock.now += 3
    assert await deployment.capabilities() == IDS


WRONG = Finding(Check.TOKENIZER, ok=False, detail="Its ids are others.", remedy="Serve a gpt-oss model.")
HIDDEN = Finding(Check.STOP_TOKEN, ok=False, detail="It hides the stop token.")


async def test_a_backend_with_a_fatal_finding_is_not_used_until_it_is_found_well() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script([Probe(IDS, (WRONG, HIDDEN)), Probe(IDS, (HIDDEN,))]), clock=clock)
    pool = RoutingPool({"m": [deployment]}, clock=clock)
    for _ in range(2):
        with pytest.raises(BackendUnfit, match="a cannot be used"):
            await deployment.capabilities()
    (status,) = pool.status()
    meaning = MEANINGS[Check.TOKENIZER]
    assert (status.state, status.reason) == ("unfit", f"tokenizer: {meaning.problem} {meaning.remedy}")
    assert WRONG.detail not in status.reason
    clock.now += 3
    assert await deployment.capabilities() == IDS
    assert pool.status()[0].state == "ready"


async def test_a_backend_that_was_good_and_is_found_unfit_is_dropped() -> None:
    deployment = LiveDeployment("a", Script([IDS, Probe(IDS, (WRONG,))]))
    assert await deployment.capabilities() == IDS
    with pytest.raises(BackendUnfit):
        await deployment.check()
    with pytest.raises(BackendUnfit):
        await deployment.capabilities()


STUCK = Finding(Check.GENERATION, ok=False)


async def test_a_backend_that_was_good_and_is_only_stuck_is_kept_and_told() -> None:
    deployment = LiveDeployment("a", Script([IDS, Probe(IDS, (STUCK,))]))
    pool = RoutingPool({"m": [deployment]})
    await deployment.check()
    with pytest.raises(BackendUnfit):
        await deployment.check()
    assert pool.status()[0].state == "unfit"
    assert await deployment.capabilities() == IDS


async def test_a_backend_that_was_stuck_from_the_start_is_not_used() -> None:
    deployment = LiveDeployment("a", Script([Probe(IDS, (STUCK,))]))
    with pytest.raises(BackendUnfit):
        await deployment.capabilities()


async def test_an_unfit_backend_is_examined_more_and_more_seldom() -> None:
    clock = Clock()
    script = Script([Probe(IDS, (WRONG,))])
    deployment = LiveDeployment("a", script, clock=clock)
    pauses = []
    for _ in range(7):
        with pytest.raises(BackendUnfit):
            await deployment.capabilities()
        began = clock.now
        while not deployment.stale(clock.now):
            clock.now += 1
            if not deployment.stale(clock.now):
                with pytest.raises(BackendUnfit):
                    await deployment.capabilities()
        pauses.append(clock.now - began)
    assert pauses == [2, 4, 8, 16, 30, 30, 30]
    assert script.probes == 7


async def test_a_backend_in_use_is_not_asked_and_an_idle_one_more_and_more_seldom() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script(), clock=clock)
    pauses = []
    for _ in range(7):
        await deployment.check()
        began = clock.now
        while not deployment.stale(clock.now):
            clock.now += 10
        pauses.append(clock.now - began)
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    deployment.succeeded()
    assert [deployment.stale(clock.now + later) for later in (0, 29, 30)] == [False, False, True]


UNSIZED = Finding(Check.CONTEXT, ok=False, detail="It does not report its context size.")


async def test_a_context_that_is_configured_is_a_context_that_is_known() -> None:
    deployment = LiveDeployment("a", Script([Probe(replace(IDS, context=None), (UNSIZED,))]), context=32768)
    probe = await deployment.check()
    assert probe.findings == (Finding(Check.CONTEXT, ok=True, detail="32768 tokens"),)


async def test_what_a_check_found_is_logged_once_with_its_remedy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "unisono.routing")
    deployment = LiveDeployment("a", Script([Probe(IDS, (WRONG, HIDDEN))]))
    for _ in range(3):
        with pytest.raises(BackendUnfit):
            await deployment.check()
    found = [record for record in caplog.records if record.message == "backend check failed"]
    assert [(r.levelno, vars(r)["check"], vars(r)["reason"], vars(r)["remedy"]) for r in found] == [
        (logging.ERROR, "tokenizer", WRONG.detail, WRONG.remedy),
        (logging.INFO, "stop_token", HIDDEN.detail, MEANINGS[Check.STOP_TOKEN].remedy),
    ]


async def test_what_is_not_ready_is_asked_again_soon_and_what_is_ready_now_and_then() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script([BackendUnavailable("gone"), IDS]), clock=clock)
    assert deployment.stale(clock.now)
    with pytest.raises(BackendUnavailable):
        await deployment.check()
    assert [deployment.stale(clock.now + later) for later in (0, 0.9, 1)] == [False, False, True]
    await deployment.check()
    assert [deployment.stale(clock.now + later) for later in (0, 29, 31)] == [False, False, True]


PAUSES: dict[str, tuple[UnisonoError, list[float]]] = {
    "gone, and back at any moment": (BackendUnavailable("gone"), [1.0] * 59 + [4.0] * 10),
    "not well": (BackendTimeout("slow"), [4.0] * 30),
}


@pytest.mark.parametrize(("error", "pauses"), PAUSES.values(), ids=PAUSES)
async def test_how_often_what_is_not_well_is_asked(error: UnisonoError, pauses: list[float]) -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script([error]), clock=clock)
    seen: list[float] = []
    while len(seen) < len(pauses):
        await asyncio.gather(deployment.check(), return_exceptions=True)
        began = clock.now
        while not deployment.stale(clock.now):
            clock.now += 0.5
        seen.append(clock.now - began)
    assert seen == pauses


DOUBTS: dict[str, tuple[UnisonoError, bool]] = {
    "unreachable": (BackendUnavailable("gone"), True),
    "broke off": (BackendProtocolError("gone"), True),
    "slow": (BackendTimeout("slow"), False),
    "failed": (BackendError("oops"), False),
    "busy": (BackendOverloaded("busy"), False),
    "the request was wrong": (BackendRejected("wrong"), False),
}


@pytest.mark.parametrize(("error", "doubted"), DOUBTS.values(), ids=DOUBTS)
async def test_a_failure_that_may_be_a_death_calls_for_a_probe_at_once(error: UnisonoError, doubted: bool) -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script(), clock=clock)
    told = []
    deployment.on_doubt = lambda: told.append(clock.now)
    await deployment.check()
    clock.now += 5
    deployment.failed(error)
    assert (bool(told), deployment.stale(clock.now), deployment.urgent(clock.now)) == (doubted,) * 3
    await deployment.check()
    assert not deployment.urgent(clock.now)
    # However many doubts there are, a probe a second is enough.
    for _ in range(3):
        deployment.failed(error)
    assert [deployment.stale(clock.now + later) for later in (0, 0.9, 1)] == [False, False, doubted]


async def gone(clock: Clock, *probes: Capabilities | UnisonoError) -> LiveDeployment:
    """One that rests for a minute, because it could not be reached."""
    deployment = LiveDeployment("a", Script([IDS, *probes]), clock=clock)
    deployment.tolerance = BreakerConfig(0, 60.0)
    await deployment.check()
    deployment.failed(BackendUnavailable("gone"))
    assert deployment.phase(clock.now) is CircuitPhase.OPEN
    return deployment


async def test_one_that_was_gone_and_is_back_rests_no_longer() -> None:
    clock = Clock()
    deployment = await gone(clock, BackendUnavailable("gone"), IDS)
    clock.now += 1
    with pytest.raises(BackendUnavailable):
        await deployment.check()
    clock.now += 1
    assert deployment.stale(clock.now)
    await deployment.check()
    assert deployment.phase(clock.now) is CircuitPhase.OPEN
    await deployment.check()
    assert deployment.phase(clock.now) is CircuitPhase.CLOSED
    assert not deployment.urgent(clock.now)


async def test_one_that_was_there_all_the_time_and_could_not_be_reached_rests_to_the_end() -> None:
    clock = Clock()
    deployment = await gone(clock, IDS)
    for _ in range(5):
        clock.now += 2
        await deployment.check()
    assert deployment.phase(clock.now) is CircuitPhase.OPEN
    assert not deployment.stale(clock.now)
    clock.now += 60
    assert deployment.stale(clock.now)
    await deployment.check()
    await deployment.check()
    assert deployment.phase(clock.now) is CircuitPhase.CLOSED


async def test_answers_that_had_begun_do_not_end_a_rest() -> None:
    clock = Clock()
    deployment = await gone(clock, IDS)
    for _ in range(5):
        deployment.succeeded(clock.now - 1)
    assert deployment.phase(clock.now) is CircuitPhase.OPEN
    for _ in range(2):
        deployment.succeeded(clock.now)
    assert deployment.phase(clock.now) is CircuitPhase.CLOSED


async def test_its_state_is_told_with_why_and_since_when() -> None:
    clock = Clock()
    script = Script([BackendTimeout("slow"), BackendTimeout("slow"), IDS])
    deployment = LiveDeployment("a", script, clock=clock)
    deployment.tolerance = BreakerConfig(0, 10.0)

    def told() -> tuple[str, str, float]:
        status = status_of("m", deployment, 0, clock.now)
        return status.state, status.reason, round(status.since_s, 1)

    async def check() -> None:
        await asyncio.gather(deployment.check(), return_exceptions=True)

    clock.now += 2
    assert told() == ("unknown", "not probed yet", 2)
    for waited in (0, 3):
        clock.now += waited
        await check()
        assert told() == ("failing", "backend_timeout", waited)
    clock.now += 4
    await check()
    clock.now += 5
    assert told() == ("ready", "", 5)
    deployment.failed(BackendProtocolError("garbage"))
    clock.now += 3
    assert told() == ("resting", "sent incomplete or invalid responses too often", 3)
    rested_s = status_of("m", deployment, 0, clock.now).rests_s
    clock.now += rested_s + 1
    assert told() == ("half-open", "sent incomplete or invalid responses too often", 1)
    await check()
    await check()
    clock.now += 6
    assert told() == ("ready", "", 6)


WINDOWS: dict[str, tuple[int | None, int | None, int | None]] = {
    "the backend's": (8192, None, 8192),
    "ours, where it says nothing": (None, 4096, 4096),
    "ours, where it is smaller": (8192, 4096, 4096),
    "the backend's, where ours is larger": (8192, 100_000, 8192),
    "unknown": (None, None, None),
}


@pytest.mark.parametrize(("claimed", "configured", "window"), WINDOWS.values(), ids=WINDOWS)
async def test_the_window_is_the_smaller_of_what_is_known(
    claimed: int | None, configured: int | None, window: int | None
) -> None:
    script = Script([Capabilities(OutputForm.TEXT, OutputForm.TEXT, stop_visible=False, context=claimed)])
    deployment = LiveDeployment("a", script, context=configured)
    assert (await deployment.capabilities()).context == window
    assert RoutingPool({"m": [deployment]}).context("m") == window
