"""Blame of identities: failures of one identity open a circuit only after a failed probe."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.routing.doubles import IDS, REQUEST, REQUIREMENTS, Clock, ScriptedBackend, known_pool
from unisono.core.generation import Capabilities
from unisono.core.probe import Check, Finding, Probe
from unisono.core.route_protocol import RouteRequest, RouteRequirements
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    Symptom,
    UnisonoError,
)
from unisono.routing.blame import PROBE_SELDOM_S, is_independent
from unisono.routing.circuit_breaker import (
    BreakerConfig,
    BreakerFailure,
    CircuitPhase,
    Circuits,
    after_acquittal,
    after_confirmation,
    after_failure,
    after_success,
    phase_of,
    suspected,
)
from unisono.routing.deployment import LiveDeployment

GONE, SLOW, BAD = BackendUnavailable("x"), BackendTimeout("x"), BackendError("x")
TOLERANCE = BreakerConfig(allowed_fails=2, cooldown_s=10.0)


@dataclass(frozen=True)
class Event:
    """Failure of a request of `identity`; a success if there is no error."""

    identity: str = ""
    error: UnisonoError | None = BAD


def phases_after(
    events: list[Event], *, probe_succeeds: bool | None, tolerance: BreakerConfig = TOLERANCE, pace_s: float = 1.0
) -> list[CircuitPhase]:
    """Return the phase after each event.

    A probe after each event has the given result; None means no probe.
    """
    circuits: Circuits = {}
    phases = []
    for number, event in enumerate(events):
        now = number * pace_s
        if event.error is None:
            circuits = after_success(circuits)
        else:
            circuits = after_failure(circuits, event.error, now, tolerance, identity=event.identity)
        if probe_succeeds is True:
            circuits = after_acquittal(circuits, tolerance)
        elif probe_succeeds is False:
            circuits = after_confirmation(circuits, now, tolerance)
        phases.append(phase_of(circuits, now))
    return phases


A, B, INDEPENDENT, SERVED = Event("a"), Event("b"), Event(""), Event("b", None)

CIRCUIT_CASES: dict[str, tuple[list[Event], bool | None, CircuitPhase]] = {
    "one identity, no probe yet": ([A, A, A], None, CircuitPhase.CLOSED),
    "one identity, failed probe": ([A, A, A], False, CircuitPhase.OPEN),
    "one identity, successful probe": ([A, A, A, A, A, A, A], True, CircuitPhase.CLOSED),
    "one identity, allowed failures": ([A, A], False, CircuitPhase.CLOSED),
    "two identities": ([A, B, A], None, CircuitPhase.OPEN),
    "two identities, allowed failures": ([A, B], None, CircuitPhase.CLOSED),
    "second identity before the probe ends": ([A, A, A, A, B], None, CircuitPhase.OPEN),
    "second identity after an acquittal": ([A, A, A, B, A], True, CircuitPhase.CLOSED),
    "failure independent of requests": ([A, A, INDEPENDENT], True, CircuitPhase.OPEN),
    "only failures independent of requests": ([INDEPENDENT, INDEPENDENT, INDEPENDENT], True, CircuitPhase.OPEN),
    "successes of another identity": ([A, SERVED, SERVED, SERVED, A, A], None, CircuitPhase.CLOSED),
    "successes after a failure of another identity": ([B, SERVED, SERVED, SERVED, A, A, A], True, CircuitPhase.CLOSED),
    "separate counts for kinds": ([A, A, Event("a", SLOW), Event("a", SLOW)], False, CircuitPhase.CLOSED),
    "overloaded": ([Event("a", BackendOverloaded("x"))], True, CircuitPhase.OPEN),
    "rejected requests": ([Event("a", BackendRejected("x"))] * 9, False, CircuitPhase.CLOSED),
}


@pytest.mark.parametrize(("sequence", "probe_succeeds", "phase"), CIRCUIT_CASES.values(), ids=CIRCUIT_CASES)
def test_failures_open_a_circuit_depending_on_identities_and_probes(
    sequence: list[Event], probe_succeeds: bool | None, phase: CircuitPhase
) -> None:
    assert phases_after(sequence, probe_succeeds=probe_succeeds)[-1] is phase


def test_an_acquittal_clears_all_failures_of_the_identity() -> None:
    circuits: Circuits = {}
    for identity, error in [("a", SLOW), ("a", SLOW), ("b", GONE), ("a", BAD), ("a", BAD), ("a", BAD)]:
        circuits = after_failure(circuits, error, 0.0, TOLERANCE, identity=identity)
    assert suspected(circuits, TOLERANCE) == {BreakerFailure.ERROR: "a"}
    assert set(after_acquittal(circuits, TOLERANCE)) == {BreakerFailure.UNREACHABLE}


HALF_OPEN: dict[str, tuple[list[Event], CircuitPhase]] = {
    "one identity": ([A], CircuitPhase.HALF_OPEN),
    "one identity, repeated": ([A, A, A, A], CircuitPhase.HALF_OPEN),
    "one identity, another kind": ([Event("a", SLOW)], CircuitPhase.HALF_OPEN),
    "two identities": ([A, B], CircuitPhase.OPEN),
    "two identities, two kinds": ([A, Event("b", SLOW)], CircuitPhase.OPEN),
    "failed probe": ([INDEPENDENT], CircuitPhase.OPEN),
}


@pytest.mark.parametrize(("sequence", "phase"), HALF_OPEN.values(), ids=HALF_OPEN)
def test_one_identity_cannot_extend_a_cooldown(sequence: list[Event], phase: CircuitPhase) -> None:
    circuits: Circuits = {}
    for event in [A, B, A]:
        circuits = after_failure(circuits, BAD, 0.0, TOLERANCE, identity=event.identity)
    assert phase_of(circuits, 10.0) is CircuitPhase.HALF_OPEN
    for event in sequence:
        assert event.error is not None
        circuits = after_failure(circuits, event.error, 10.0, TOLERANCE, identity=event.identity)
    assert phase_of(circuits, 10.0) is phase


def test_a_failure_of_one_identity_revokes_the_first_success() -> None:
    circuits: Circuits = {}
    for event in [A, B, A]:
        circuits = after_failure(circuits, BAD, 0.0, TOLERANCE, identity=event.identity)
    circuits = after_success(circuits, probed=True)
    circuits = after_failure(circuits, BAD, 11.0, TOLERANCE, identity="a")
    circuits = after_success(circuits, probed=True)
    assert phase_of(circuits, 12.0) is CircuitPhase.HALF_OPEN
    assert phase_of(after_success(circuits, probed=True), 12.0) is CircuitPhase.CLOSED


ERRORS = st.sampled_from([GONE, SLOW, BackendProtocolError("x"), BAD])
TOLERANCES = st.builds(BreakerConfig, st.integers(0, 5), st.just(10.0))
ONE_IDENTITY = st.lists(st.builds(Event, st.just("a"), st.none() | ERRORS), max_size=60)
FAILURES_OF_TWO = st.lists(st.builds(Event, st.sampled_from("ab"), st.just(BAD)), max_size=20)
ANYBODY = st.lists(st.builds(Event, st.sampled_from(["", "a", "b", "c"]), st.none() | ERRORS), max_size=40)


@given(ONE_IDENTITY, TOLERANCES)
def test_one_identity_opens_no_circuit_while_probes_succeed(events: list[Event], tolerance: BreakerConfig) -> None:
    assert set(phases_after(events, probe_succeeds=True, tolerance=tolerance)) <= {CircuitPhase.CLOSED}


@given(FAILURES_OF_TWO, TOLERANCES)
def test_two_identities_open_the_circuit_above_the_allowed_failures(
    events: list[Event], tolerance: BreakerConfig
) -> None:
    phases = phases_after(events, probe_succeeds=None, tolerance=tolerance)
    expected = [
        CircuitPhase.OPEN
        if at > tolerance.allowed_fails and len({event.identity for event in events[:at]}) > 1
        else CircuitPhase.CLOSED
        for at in range(1, len(events) + 1)
    ]
    assert phases[: 10 + tolerance.allowed_fails] == expected[: 10 + tolerance.allowed_fails]


@given(st.integers(0, 5), ERRORS)
def test_a_failed_probe_opens_the_circuit_for_one_identity(allowed: int, error: UnisonoError) -> None:
    events = [Event("a", error)] * (allowed + 1)
    phases = phases_after(events, probe_succeeds=False, tolerance=BreakerConfig(allowed))
    assert phases == [CircuitPhase.CLOSED] * allowed + [CircuitPhase.OPEN]


@given(ANYBODY, TOLERANCES)
def test_identities_never_open_a_circuit_earlier(events: list[Event], tolerance: BreakerConfig) -> None:
    # Identities can only keep a circuit closed for longer.
    independent = [Event("", event.error) for event in events]
    with_identities = phases_after(events, probe_succeeds=None, tolerance=tolerance, pace_s=0.01)
    without_identities = phases_after(independent, probe_succeeds=None, tolerance=tolerance, pace_s=0.01)
    first_blamed = with_identities.index(CircuitPhase.OPEN) if CircuitPhase.OPEN in with_identities else len(events)
    first_free = without_identities.index(CircuitPhase.OPEN) if CircuitPhase.OPEN in without_identities else len(events)
    assert first_free <= first_blamed


# -- deployments


CAUSES: dict[str, tuple[UnisonoError, bool]] = {
    "no connection": (BackendUnavailable("x", symptom=Symptom.NO_CONNECTION), True),
    "connect timeout": (BackendTimeout("x", symptom=Symptom.NO_CONNECTION), True),
    "disconnected": (BackendUnavailable("x", symptom=Symptom.DISCONNECTED), False),
    "failed": (BackendError("x", symptom=Symptom.SERVER_ERROR), False),
    "unknown": (BackendUnavailable("x"), False),
    "slow": (BackendTimeout("x"), False),
}


@pytest.mark.parametrize(("error", "independent"), CAUSES.values(), ids=CAUSES)
async def test_failures_independent_of_the_request_blame_no_identity(error: UnisonoError, independent: bool) -> None:
    assert is_independent(error) is independent
    deployment = LiveDeployment("a", ScriptedBackend(), clock=Clock())
    for _ in range(4):
        deployment.failed(error, "a")
    assert (deployment.phase(deployment.clock()) is CircuitPhase.OPEN) is independent


async def suspected_deployment(*probes: Capabilities | Probe | UnisonoError, clock: Clock) -> LiveDeployment:
    """Return a deployment with four failures of one identity."""
    deployment = LiveDeployment("a", ScriptedBackend([IDS, *probes]), clock=clock)
    await deployment.check()
    clock.now += 5
    for _ in range(4):
        deployment.failed(BAD, "a")
    assert deployment.phase(clock.now) is CircuitPhase.CLOSED
    return deployment


async def run_probe(deployment: LiveDeployment) -> None:
    await asyncio.gather(deployment.check(), return_exceptions=True)


async def test_a_suspected_deployment_is_probed_at_once_and_stays_in_use() -> None:
    clock = Clock()
    doubts = []
    deployment = LiveDeployment("a", ScriptedBackend(), clock=clock)
    deployment.on_doubt = lambda: doubts.append(clock.now)
    await deployment.check()
    clock.now += 5
    for _ in range(3):
        deployment.failed(BAD, "a")
    assert (doubts, deployment.stale(clock.now), deployment.urgent(clock.now)) == ([], False, False)
    deployment.failed(BAD, "a")
    assert (len(doubts), deployment.stale(clock.now), deployment.urgent(clock.now)) == (1, True, True)
    deployment.refresh(clock.now)
    assert deployment.candidate.rank < 2


STUCK = Probe(IDS, (Finding(Check.GENERATION, ok=False),))
PROBE_RESULTS: dict[str, tuple[Probe | Capabilities | UnisonoError, CircuitPhase]] = {
    "success": (IDS, CircuitPhase.CLOSED),
    "unreachable": (BackendUnavailable("gone"), CircuitPhase.OPEN),
    "no generation": (STUCK, CircuitPhase.OPEN),
    "server error": (BackendError("oops"), CircuitPhase.OPEN),
    "overloaded, inconclusive": (BackendOverloaded("busy"), CircuitPhase.CLOSED),
}


@pytest.mark.parametrize(("probe", "phase"), PROBE_RESULTS.values(), ids=PROBE_RESULTS)
async def test_a_probe_decides_about_a_suspected_deployment(
    probe: Probe | Capabilities | UnisonoError, phase: CircuitPhase
) -> None:
    clock = Clock()
    deployment = await suspected_deployment(probe, clock=clock)
    await run_probe(deployment)
    assert deployment.phase(clock.now) is phase
    clock.now += 1.5
    assert deployment.urgent(clock.now) is (isinstance(probe, BackendOverloaded | BackendUnavailable))


async def test_a_probe_that_began_before_the_failures_does_not_decide() -> None:
    clock = Clock()
    script = ScriptedBackend(gate=asyncio.Event())
    deployment = LiveDeployment("a", script, clock=clock)
    running = asyncio.create_task(deployment.check())
    await asyncio.sleep(0)
    clock.now += 1
    for _ in range(4):
        deployment.failed(BAD, "a")
    assert script.gate is not None
    script.gate.set()
    await running
    assert suspected(deployment.circuits, deployment.tolerance)
    await deployment.check()
    assert not deployment.circuits


async def test_probes_become_rarer_while_one_client_always_fails() -> None:
    clock = Clock()
    deployment = await suspected_deployment(IDS, clock=clock)
    pauses = []
    for _ in range(8):
        began = clock.now
        while not deployment.stale(clock.now):
            clock.now += 0.5
        pauses.append(clock.now - began)
        await deployment.check()
        for _ in range(4):
            deployment.failed(BAD, "a")
        assert deployment.phase(clock.now) is CircuitPhase.CLOSED
    assert pauses == [0, 2, 4, 8, 16, 30, 30, 30]
    assert pauses[-1] == PROBE_SELDOM_S


async def test_the_blamed_identity_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "unisono.routing")
    deployment = await suspected_deployment(IDS, clock=Clock())
    await deployment.check()
    assert [getattr(one, "caller", "") for one in caplog.records][-1] == "a"


PASS_THROUGH_CASES: dict[str, tuple[list[tuple[str, float]], CircuitPhase]] = {
    "no successful request": ([("x", 0), ("x", 1), ("x", 2), ("x", 3)], CircuitPhase.OPEN),
    "successful request started before the failures": (
        [("x", 1), (".", 0), ("x", 2), ("x", 3), ("x", 4), ("x", 5)],
        CircuitPhase.OPEN,
    ),
    "successful request": ([("x", 0), (".", 1), ("x", 2), ("x", 3), ("x", 4), ("x", 5)], CircuitPhase.CLOSED),
}


@pytest.mark.parametrize(("sequence", "phase"), PASS_THROUGH_CASES.values(), ids=PASS_THROUGH_CASES)
async def test_requests_decide_for_pass_through_deployments(
    sequence: list[tuple[str, float]], phase: CircuitPhase
) -> None:
    clock = Clock()
    deployment = LiveDeployment("a", ScriptedBackend(), passes=True, clock=clock)
    begun = clock.now
    for what, at in sequence:
        clock.now = begun + max(at, clock.now - begun)
        if what == "x":
            deployment.failed(BAD, "a")
        else:
            deployment.succeeded(begun + at)
    assert deployment.phase(clock.now) is phase


# -- routes


async def test_a_route_reports_the_identity_of_a_failure() -> None:
    clock = Clock()
    pool, (live,) = await known_pool("a", clock=clock)
    for _ in range(6):
        route = pool.route(RouteRequest("m", identity=lambda: "a"))
        with await route.next_slot(REQUIREMENTS) as slot:
            slot.failed(BAD)
    assert live.phase(clock.now) is CircuitPhase.CLOSED
    for _ in range(6):
        with await pool.route(REQUEST).next_slot(REQUIREMENTS) as slot:
            slot.failed(BAD)
    assert live.phase(clock.now) is CircuitPhase.OPEN


FORGETTING_ERRORS: dict[str, tuple[UnisonoError, bool]] = {
    "no connection": (BackendUnavailable("x", symptom=Symptom.NO_CONNECTION), True),
    "unknown": (BackendUnavailable("x"), True),
    "disconnected by the server": (BackendUnavailable("x", symptom=Symptom.DISCONNECTED), False),
    "failed": (BackendError("x"), False),
}


@pytest.mark.parametrize(("error", "forgotten"), FORGETTING_ERRORS.values(), ids=FORGETTING_ERRORS)
async def test_a_dropped_connection_keeps_the_known_cached_prompts(error: UnisonoError, forgotten: bool) -> None:
    clock = Clock()
    pool, _ = await known_pool("a", "b", clock=clock)
    demand = RouteRequirements(prompt_tokens=12_800, blocks=range(100))
    with await pool.route(RouteRequest("m", identity=lambda: "a")).next_slot(demand) as slot:
        clock.now += 1
        slot.failed(error)
    held = pool.prefixes.cached_prefixes(demand.blocks, clock.now)
    assert bool(held) is not forgotten
