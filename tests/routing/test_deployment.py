"""State of one deployment: shared probes, their findings, and their intervals."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from tests.routing.doubles import IDS, Clock, ScriptedBackend
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


async def test_concurrent_callers_share_one_probe() -> None:
    script = ScriptedBackend(gate=asyncio.Event())
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


async def test_a_failed_probe_is_cached_for_a_short_time() -> None:
    clock = Clock()
    script = ScriptedBackend([BackendUnavailable("not yet"), IDS])
    deployment = LiveDeployment("a", script, clock=clock)
    for _ in range(3):
        with pytest.raises(BackendUnavailable):
            await deployment.capabilities()
    assert script.probes == 1
    clock.now += 3
    assert await deployment.capabilities() == IDS


WRONG = Finding(Check.TOKENIZER, ok=False, detail="Its ids are others.", remedy="Serve a gpt-oss model.")
HIDDEN = Finding(Check.STOP_TOKEN, ok=False, detail="It hides the stop token.")


async def test_a_backend_with_a_fatal_finding_is_unused_until_a_probe_succeeds() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", ScriptedBackend([Probe(IDS, (WRONG, HIDDEN)), Probe(IDS, (HIDDEN,))]), clock=clock)
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


async def test_a_good_backend_that_becomes_unfit_is_dropped() -> None:
    deployment = LiveDeployment("a", ScriptedBackend([IDS, Probe(IDS, (WRONG,))]))
    assert await deployment.capabilities() == IDS
    with pytest.raises(BackendUnfit):
        await deployment.check()
    with pytest.raises(BackendUnfit):
        await deployment.capabilities()


STUCK = Finding(Check.GENERATION, ok=False)


async def test_a_good_backend_that_stops_generating_stays_in_use_and_is_reported() -> None:
    deployment = LiveDeployment("a", ScriptedBackend([IDS, Probe(IDS, (STUCK,))]))
    pool = RoutingPool({"m": [deployment]})
    await deployment.check()
    with pytest.raises(BackendUnfit):
        await deployment.check()
    assert pool.status()[0].state == "unfit"
    assert await deployment.capabilities() == IDS


async def test_a_backend_that_never_generated_is_not_used() -> None:
    deployment = LiveDeployment("a", ScriptedBackend([Probe(IDS, (STUCK,))]))
    with pytest.raises(BackendUnfit):
        await deployment.capabilities()


async def test_an_unfit_backend_is_probed_at_growing_intervals() -> None:
    clock = Clock()
    script = ScriptedBackend([Probe(IDS, (WRONG,))])
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


async def test_an_idle_backend_is_probed_at_growing_intervals() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", ScriptedBackend(), clock=clock)
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


async def test_a_configured_context_replaces_the_missing_context_finding() -> None:
    deployment = LiveDeployment("a", ScriptedBackend([Probe(replace(IDS, context=None), (UNSIZED,))]), context=32768)
    probe = await deployment.check()
    assert probe.findings == (Finding(Check.CONTEXT, ok=True, detail="32768 tokens"),)


async def test_findings_are_logged_once_with_their_remedy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "unisono.routing")
    deployment = LiveDeployment("a", ScriptedBackend([Probe(IDS, (WRONG, HIDDEN))]))
    for _ in range(3):
        with pytest.raises(BackendUnfit):
            await deployment.check()
    found = [record for record in caplog.records if record.message == "backend check failed"]
    assert [(r.levelno, vars(r)["check"], vars(r)["reason"], vars(r)["remedy"]) for r in found] == [
        (logging.ERROR, "tokenizer", WRONG.detail, WRONG.remedy),
        (logging.INFO, "stop_token", HIDDEN.detail, MEANINGS[Check.STOP_TOKEN].remedy),
    ]


async def test_probes_are_due_sooner_for_a_backend_that_is_not_ready() -> None:
    clock = Clock()
    deployment = LiveDeployment("a", ScriptedBackend([BackendUnavailable("gone"), IDS]), clock=clock)
    assert deployment.stale(clock.now)
    with pytest.raises(BackendUnavailable):
        await deployment.check()
    assert [deployment.stale(clock.now + later) for later in (0, 0.9, 1)] == [False, False, True]
    await deployment.check()
    assert [deployment.stale(clock.now + later) for later in (0, 29, 31)] == [False, False, True]


PAUSES: dict[str, tuple[UnisonoError, list[float]]] = {
    "unreachable": (BackendUnavailable("gone"), [1.0] * 59 + [4.0] * 10),
    "timeout": (BackendTimeout("slow"), [4.0] * 30),
}


@pytest.mark.parametrize(("error", "pauses"), PAUSES.values(), ids=PAUSES)
async def test_probe_intervals_of_a_failing_backend(error: UnisonoError, pauses: list[float]) -> None:
    clock = Clock()
    deployment = LiveDeployment("a", ScriptedBackend([error]), clock=clock)
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
    "protocol error": (BackendProtocolError("gone"), True),
    "timeout": (BackendTimeout("slow"), False),
    "backend error": (BackendError("oops"), False),
    "overloaded": (BackendOverloaded("busy"), False),
    "rejected request": (BackendRejected("wrong"), False),
}


@pytest.mark.parametrize(("error", "is_urgent"), DOUBTS.values(), ids=DOUBTS)
async def test_a_failure_that_may_be_a_crash_makes_a_probe_urgent(error: UnisonoError, is_urgent: bool) -> None:
    clock = Clock()
    deployment = LiveDeployment("a", ScriptedBackend(), clock=clock)
    doubts = []
    deployment.on_doubt = lambda: doubts.append(clock.now)
    await deployment.check()
    clock.now += 5
    deployment.failed(error)
    assert (bool(doubts), deployment.stale(clock.now), deployment.urgent(clock.now)) == (is_urgent,) * 3
    await deployment.check()
    assert not deployment.urgent(clock.now)
    # There is at most one urgent probe per second.
    for _ in range(3):
        deployment.failed(error)
    assert [deployment.stale(clock.now + later) for later in (0, 0.9, 1)] == [False, False, is_urgent]


async def deployment_in_cooldown(clock: Clock, *probes: Capabilities | UnisonoError) -> LiveDeployment:
    """Return an unreachable deployment in a cooldown of one minute."""
    deployment = LiveDeployment("a", ScriptedBackend([IDS, *probes]), clock=clock)
    deployment.tolerance = BreakerConfig(0, 60.0)
    await deployment.check()
    deployment.failed(BackendUnavailable("gone"))
    assert deployment.phase(clock.now) is CircuitPhase.OPEN
    return deployment


async def test_a_deployment_that_came_back_leaves_its_cooldown() -> None:
    clock = Clock()
    deployment = await deployment_in_cooldown(clock, BackendUnavailable("gone"), IDS)
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


async def test_a_deployment_that_was_never_down_stays_in_cooldown() -> None:
    clock = Clock()
    deployment = await deployment_in_cooldown(clock, IDS)
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


async def test_answers_started_before_a_cooldown_do_not_end_it() -> None:
    clock = Clock()
    deployment = await deployment_in_cooldown(clock, IDS)
    for _ in range(5):
        deployment.succeeded(clock.now - 1)
    assert deployment.phase(clock.now) is CircuitPhase.OPEN
    for _ in range(2):
        deployment.succeeded(clock.now)
    assert deployment.phase(clock.now) is CircuitPhase.CLOSED


async def test_status_has_state_reason_and_duration() -> None:
    clock = Clock()
    script = ScriptedBackend([BackendTimeout("slow"), BackendTimeout("slow"), IDS])
    deployment = LiveDeployment("a", script, clock=clock)
    deployment.tolerance = BreakerConfig(0, 10.0)

    def reported() -> tuple[str, str, float]:
        status = status_of("m", deployment, 0, clock.now)
        return status.state, status.reason, round(status.since_s, 1)

    async def check() -> None:
        await asyncio.gather(deployment.check(), return_exceptions=True)

    clock.now += 2
    assert reported() == ("unknown", "not probed yet", 2)
    for waited in (0, 3):
        clock.now += waited
        await check()
        assert reported() == ("failing", "backend_timeout", waited)
    clock.now += 4
    await check()
    clock.now += 5
    assert reported() == ("ready", "", 5)
    deployment.failed(BackendProtocolError("garbage"))
    clock.now += 3
    assert reported() == ("resting", "sent incomplete or invalid responses too often", 3)
    rested_s = status_of("m", deployment, 0, clock.now).rests_s
    clock.now += rested_s + 1
    assert reported() == ("half-open", "sent incomplete or invalid responses too often", 1)
    await check()
    await check()
    clock.now += 6
    assert reported() == ("ready", "", 6)


CONTEXTS: dict[str, tuple[int | None, int | None, int | None]] = {
    "reported by the backend": (8192, None, 8192),
    "configured, not reported": (None, 4096, 4096),
    "configured smaller than reported": (8192, 4096, 4096),
    "configured larger than reported": (8192, 100_000, 8192),
    "unknown": (None, None, None),
}


@pytest.mark.parametrize(("claimed", "configured", "expected"), CONTEXTS.values(), ids=CONTEXTS)
async def test_the_context_is_the_smaller_known_value(
    claimed: int | None, configured: int | None, expected: int | None
) -> None:
    script = ScriptedBackend([Capabilities(OutputForm.TEXT, OutputForm.TEXT, stop_visible=False, context=claimed)])
    deployment = LiveDeployment("a", script, context=configured)
    assert (await deployment.capabilities()).context == expected
    assert RoutingPool({"m": [deployment]}).context("m") == expected
