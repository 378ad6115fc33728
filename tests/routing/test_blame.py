"""Blame: one identity never opens a circuit that a probe would not, and nothing else has changed for the others."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.routing.doubles import ASK, DEMAND, IDS, Clock, Script, known_pool
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
    """A failure, or without an error a success, of `identity`."""

    identity: str = ""
    error: UnisonoError | None = BAD


def played(
    events: list[Event], *, probe_succeeds: bool | None, tolerance: BreakerConfig = TOLERANCE, pace_s: float = 1.0
) -> list[CircuitPhase]:
    """The phase after each event. A suspect is probed at once; not at all where nobody says how that goes."""
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


A, B, NOBODY, SERVED = Event("a"), Event("b"), Event(""), Event("b", None)

STORIES: dict[str, tuple[list[Event], bool | None, CircuitPhase]] = {
    "one identity, before the probe": ([A, A, A], None, CircuitPhase.CLOSED),
    "one identity, and the probe fails": ([A, A, A], False, CircuitPhase.OPEN),
    "one identity, and the probe is well": ([A, A, A, A, A, A, A], True, CircuitPhase.CLOSED),
    "fewer than are allowed need no probe": ([A, A], False, CircuitPhase.CLOSED),
    "two identities": ([A, B, A], None, CircuitPhase.OPEN),
    "two identities that are fewer": ([A, B], None, CircuitPhase.CLOSED),
    "another identity before the probe is over": ([A, A, A, A, B], None, CircuitPhase.OPEN),
    "another identity behind an acquittal begins anew": ([A, A, A, B, A], True, CircuitPhase.CLOSED),
    "a failure that no request can cause": ([A, A, NOBODY], True, CircuitPhase.OPEN),
    "nobody's, as before": ([NOBODY, NOBODY, NOBODY], True, CircuitPhase.OPEN),
    "what others were served makes up for it": ([A, SERVED, SERVED, SERVED, A, A], None, CircuitPhase.CLOSED),
    "who was made up for counts no more": ([B, SERVED, SERVED, SERVED, A, A, A], True, CircuitPhase.CLOSED),
    "kinds are counted apart": ([A, A, Event("a", SLOW), Event("a", SLOW)], False, CircuitPhase.CLOSED),
    "busy is busy, whoever asks": ([Event("a", BackendOverloaded("x"))], True, CircuitPhase.OPEN),
    "a wrong request never counts": ([Event("a", BackendRejected("x"))] * 9, False, CircuitPhase.CLOSED),
}


@pytest.mark.parametrize(("story", "probe_succeeds", "phase"), STORIES.values(), ids=STORIES)
def test_whose_failures_open_a_circuit(story: list[Event], probe_succeeds: bool | None, phase: CircuitPhase) -> None:
    assert played(story, probe_succeeds=probe_succeeds)[-1] is phase


def test_an_acquittal_forgives_the_other_failures_of_that_identity_too() -> None:
    circuits: Circuits = {}
    for identity, error in [("a", SLOW), ("a", SLOW), ("b", GONE), ("a", BAD), ("a", BAD), ("a", BAD)]:
        circuits = after_failure(circuits, error, 0.0, TOLERANCE, identity=identity)
    assert suspected(circuits, TOLERANCE) == {BreakerFailure.ERROR: "a"}
    assert set(after_acquittal(circuits, TOLERANCE)) == {BreakerFailure.UNREACHABLE}


HALF_OPEN: dict[str, tuple[list[Event], CircuitPhase]] = {
    "one identity": ([A], CircuitPhase.HALF_OPEN),
    "one identity, again and again": ([A, A, A, A], CircuitPhase.HALF_OPEN),
    "one identity in another way": ([Event("a", SLOW)], CircuitPhase.HALF_OPEN),
    "two identities": ([A, B], CircuitPhase.OPEN),
    "two identities in two ways": ([A, Event("b", SLOW)], CircuitPhase.OPEN),
    "a probe": ([NOBODY], CircuitPhase.OPEN),
}


@pytest.mark.parametrize(("story", "phase"), HALF_OPEN.values(), ids=HALF_OPEN)
def test_one_identity_makes_no_rest_longer(story: list[Event], phase: CircuitPhase) -> None:
    circuits: Circuits = {}
    for event in [A, B, A]:
        circuits = after_failure(circuits, BAD, 0.0, TOLERANCE, identity=event.identity)
    assert phase_of(circuits, 10.0) is CircuitPhase.HALF_OPEN
    for event in story:
        assert event.error is not None
        circuits = after_failure(circuits, event.error, 10.0, TOLERANCE, identity=event.identity)
    assert phase_of(circuits, 10.0) is phase


def test_a_failure_of_one_identity_takes_back_the_first_of_the_two_successes() -> None:
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
def test_one_identity_opens_nothing_while_probes_are_well(events: list[Event], tolerance: BreakerConfig) -> None:
    assert set(played(events, probe_succeeds=True, tolerance=tolerance)) <= {CircuitPhase.CLOSED}


@given(FAILURES_OF_TWO, TOLERANCES)
def test_two_identities_open_with_the_first_failure_that_is_more_than_allowed(
    events: list[Event], tolerance: BreakerConfig
) -> None:
    phases = played(events, probe_succeeds=None, tolerance=tolerance)
    expected = [
        CircuitPhase.OPEN
        if at > tolerance.allowed_fails and len({event.identity for event in events[:at]}) > 1
        else CircuitPhase.CLOSED
        for at in range(1, len(events) + 1)
    ]
    assert phases[: 10 + tolerance.allowed_fails] == expected[: 10 + tolerance.allowed_fails]


@given(st.integers(0, 5), ERRORS)
def test_a_backend_that_fails_is_found_out_with_one_identity_too(allowed: int, error: UnisonoError) -> None:
    events = [Event("a", error)] * (allowed + 1)
    phases = played(events, probe_succeeds=False, tolerance=BreakerConfig(allowed))
    assert phases == [CircuitPhase.CLOSED] * allowed + [CircuitPhase.OPEN]


@given(ANYBODY, TOLERANCES)
def test_nothing_opens_that_would_not_open_if_nobody_was_blamed(events: list[Event], tolerance: BreakerConfig) -> None:
    """Identities keep circuits closed, and open none."""
    independent = [Event("", event.error) for event in events]
    blamed = played(events, probe_succeeds=None, tolerance=tolerance, pace_s=0.01)
    free = played(independent, probe_succeeds=None, tolerance=tolerance, pace_s=0.01)
    first_blamed = blamed.index(CircuitPhase.OPEN) if CircuitPhase.OPEN in blamed else len(events)
    first_free = free.index(CircuitPhase.OPEN) if CircuitPhase.OPEN in free else len(events)
    assert first_free <= first_blamed


# -- a deployment


CAUSES: dict[str, tuple[UnisonoError, bool]] = {
    "no connection": (BackendUnavailable("x", symptom=Symptom.NO_CONNECTION), True),
    "not accepted in time": (BackendTimeout("x", symptom=Symptom.NO_CONNECTION), True),
    "broke off": (BackendUnavailable("x", symptom=Symptom.DISCONNECTED), False),
    "failed": (BackendError("x", symptom=Symptom.SERVER_ERROR), False),
    "unknown": (BackendUnavailable("x"), False),
    "slow": (BackendTimeout("x"), False),
}


@pytest.mark.parametrize(("error", "independent"), CAUSES.values(), ids=CAUSES)
async def test_what_no_request_can_cause_is_nobodys_failure(error: UnisonoError, independent: bool) -> None:
    assert is_independent(error) is independent
    deployment = LiveDeployment("a", Script(), clock=Clock())
    for _ in range(4):
        deployment.failed(error, "a")
    assert (deployment.phase(deployment.clock()) is CircuitPhase.OPEN) is independent


async def suspect(*probes: Capabilities | Probe | UnisonoError, clock: Clock) -> LiveDeployment:
    """One that failed four times for one identity."""
    deployment = LiveDeployment("a", Script([IDS, *probes]), clock=clock)
    await deployment.check()
    clock.now += 5
    for _ in range(4):
        deployment.failed(BAD, "a")
    assert deployment.phase(clock.now) is CircuitPhase.CLOSED
    return deployment


async def probed(deployment: LiveDeployment) -> None:
    await asyncio.gather(deployment.check(), return_exceptions=True)


async def test_a_suspect_is_probed_at_once_and_used_meanwhile() -> None:
    clock = Clock()
    told = []
    deployment = LiveDeployment("a", Script(), clock=clock)
    deployment.on_doubt = lambda: told.append(clock.now)
    await deployment.check()
    clock.now += 5
    for _ in range(3):
        deployment.failed(BAD, "a")
    assert (told, deployment.stale(clock.now), deployment.urgent(clock.now)) == ([], False, False)
    deployment.failed(BAD, "a")
    assert (len(told), deployment.stale(clock.now), deployment.urgent(clock.now)) == (1, True, True)
    deployment.refresh(clock.now)
    assert deployment.candidate.rank < 2


STUCK = Probe(IDS, (Finding(Check.GENERATION, ok=False),))
JUDGED: dict[str, tuple[Probe | Capabilities | UnisonoError, CircuitPhase]] = {
    "it is well": (IDS, CircuitPhase.CLOSED),
    "it is gone": (BackendUnavailable("gone"), CircuitPhase.OPEN),
    "it does not generate": (STUCK, CircuitPhase.OPEN),
    "it fails": (BackendError("oops"), CircuitPhase.OPEN),
    "it is busy, which says nothing": (BackendOverloaded("busy"), CircuitPhase.CLOSED),
}


@pytest.mark.parametrize(("probe", "phase"), JUDGED.values(), ids=JUDGED)
async def test_the_probe_of_a_suspect_decides(probe: Probe | Capabilities | UnisonoError, phase: CircuitPhase) -> None:
    clock = Clock()
    deployment = await suspect(probe, clock=clock)
    await probed(deployment)
    assert deployment.phase(clock.now) is phase
    clock.now += 1.5
    assert deployment.urgent(clock.now) is (isinstance(probe, BackendOverloaded | BackendUnavailable))


async def test_a_probe_that_began_before_the_failures_does_not_decide() -> None:
    clock = Clock()
    script = Script(gate=asyncio.Event())
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


async def test_a_client_that_always_fails_has_it_probed_more_and_more_seldom() -> None:
    clock = Clock()
    deployment = await suspect(IDS, clock=clock)
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


async def test_who_is_to_blame_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "unisono.routing")
    deployment = await suspect(IDS, clock=Clock())
    await deployment.check()
    assert [getattr(one, "caller", "") for one in caplog.records][-1] == "a"


PASSING: dict[str, tuple[list[tuple[str, float]], CircuitPhase]] = {
    "nobody was served": ([("x", 0), ("x", 1), ("x", 2), ("x", 3)], CircuitPhase.OPEN),
    "who was served had begun before": (
        [("x", 1), (".", 0), ("x", 2), ("x", 3), ("x", 4), ("x", 5)],
        CircuitPhase.OPEN,
    ),
    "somebody was served": ([("x", 0), (".", 1), ("x", 2), ("x", 3), ("x", 4), ("x", 5)], CircuitPhase.CLOSED),
}


@pytest.mark.parametrize(("story", "phase"), PASSING.values(), ids=PASSING)
async def test_where_probes_generate_nothing_requests_decide(
    story: list[tuple[str, float]], phase: CircuitPhase
) -> None:
    clock = Clock()
    deployment = LiveDeployment("a", Script(), passes=True, clock=clock)
    begun = clock.now
    for what, at in story:
        clock.now = begun + max(at, clock.now - begun)
        if what == "x":
            deployment.failed(BAD, "a")
        else:
            deployment.succeeded(begun + at)
    assert deployment.phase(clock.now) is phase


# -- a route


async def test_a_route_tells_whose_failure_it_is() -> None:
    clock = Clock()
    pool, (live,) = await known_pool("a", clock=clock)
    for _ in range(6):
        route = pool.route(RouteRequest("m", identity=lambda: "a"))
        with await route.place(DEMAND) as place:
            place.failed(BAD)
    assert live.phase(clock.now) is CircuitPhase.CLOSED
    for _ in range(6):
        with await pool.route(ASK).place(DEMAND) as place:
            place.failed(BAD)
    assert live.phase(clock.now) is CircuitPhase.OPEN


FORGETS: dict[str, tuple[UnisonoError, bool]] = {
    "no connection": (BackendUnavailable("x", symptom=Symptom.NO_CONNECTION), True),
    "unknown": (BackendUnavailable("x"), True),
    "dropped, so that it may live": (BackendUnavailable("x", symptom=Symptom.DISCONNECTED), False),
    "failed": (BackendError("x"), False),
}


@pytest.mark.parametrize(("error", "forgotten"), FORGETS.values(), ids=FORGETS)
async def test_a_dropped_request_costs_others_no_cached_prompt(error: UnisonoError, forgotten: bool) -> None:
    clock = Clock()
    pool, _ = await known_pool("a", "b", clock=clock)
    demand = RouteRequirements(prompt_tokens=12_800, blocks=range(100))
    with await pool.route(RouteRequest("m", identity=lambda: "a")).place(demand) as place:
        clock.now += 1
        place.failed(error)
    held = pool.prefixes.cached_prefixes(demand.blocks, clock.now)
    assert bool(held) is not forgotten
