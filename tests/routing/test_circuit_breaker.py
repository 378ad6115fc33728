"""Circuits: which failures count, how long they have a deployment rest, and what closes them."""

from __future__ import annotations

import random

import pytest

from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    BackendUnfit,
    ConstraintRefused,
    ContextTooLong,
    InternalError,
    ShareExceeded,
    UnisonoError,
    UnsupportedValue,
)
from unisono.routing.circuit_breaker import (
    MAX_COOLDOWN_S,
    BreakerConfig,
    BreakerFailure,
    CircuitPhase,
    Circuits,
    after_failure,
    after_success,
    kind_of,
    phase_of,
    rests_for,
    rests_until,
)

KINDS: dict[str, tuple[UnisonoError, BreakerFailure | None]] = {
    "gone": (BackendUnavailable("x"), BreakerFailure.UNREACHABLE),
    "slow": (BackendTimeout("x"), BreakerFailure.TIMEOUT),
    "busy": (BackendOverloaded("x"), BreakerFailure.OVERLOADED),
    "busy with us": (ShareExceeded("x"), BreakerFailure.OVERLOADED),
    "garbage": (BackendProtocolError("x"), BreakerFailure.PROTOCOL),
    "any other of its own": (BackendError("x"), BreakerFailure.ERROR),
    "unfit": (BackendUnfit("x"), None),
    "the request was wrong": (BackendRejected("x"), None),
    "the schema was wrong": (ConstraintRefused("x"), None),
    "the prompt was too long": (ContextTooLong("x"), None),
    "the client's field": (UnsupportedValue("x"), None),
    "the gateway's own": (InternalError("x"), None),
}


@pytest.mark.parametrize(("error", "kind"), KINDS.values(), ids=KINDS)
def test_what_an_error_says_of_the_deployment(error: UnisonoError, kind: BreakerFailure | None) -> None:
    assert kind_of(error) is kind
    circuits = after_failure({}, error, 0.0, BreakerConfig(allowed_fails=0))
    assert set(circuits) == ({kind} if kind else set())


def backend_errors(root: type[UnisonoError] = BackendError) -> list[type[UnisonoError]]:
    return [root, *(one for kind in root.__subclasses__() for one in backend_errors(kind))]


@pytest.mark.parametrize("error", backend_errors(), ids=lambda error: error.__name__)
def test_every_backend_error_has_a_row(error: type[UnisonoError]) -> None:
    assert kind_of(error("x")) in {*BreakerFailure, None}


GONE, SLOW = BackendUnavailable("x"), BackendTimeout("x")
TOLERANCE = BreakerConfig(allowed_fails=2, cooldown_s=10.0)

STORIES: dict[str, tuple[list[tuple[float, UnisonoError | None]], list[CircuitPhase]]] = {
    "failures that are allowed": ([(0, GONE), (1, GONE)], [CircuitPhase.CLOSED, CircuitPhase.CLOSED]),
    "the next one opens": (
        [(0, GONE), (1, GONE), (2, GONE)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN],
    ),
    "a success between does not make up for two": (
        [(0, GONE), (1, GONE), (2, None), (3, GONE)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN],
    ),
    "three make up for one": (
        [(0, GONE), (1, GONE), (2, None), (3, None), (4, None), (5, GONE)],
        [CircuitPhase.CLOSED] * 6,
    ),
    "nobody has credit": ([(n, None) for n in range(9)] + [(9, GONE), (10, GONE)], [CircuitPhase.CLOSED] * 11),
    "kinds are counted apart": ([(0, GONE), (1, SLOW), (2, GONE), (3, SLOW)], [CircuitPhase.CLOSED] * 4),
    "one success after the rest is not enough": (
        [(0, GONE), (1, GONE), (2, GONE), (12, None)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN, CircuitPhase.HALF_OPEN],
    ),
    "two are": (
        [(0, GONE), (1, GONE), (2, GONE), (12, None), (13, None), (14, GONE)],
        [
            CircuitPhase.CLOSED,
            CircuitPhase.CLOSED,
            CircuitPhase.OPEN,
            CircuitPhase.HALF_OPEN,
            CircuitPhase.CLOSED,
            CircuitPhase.CLOSED,
        ],
    ),
    "a failure after the rest begins the next": (
        [(0, GONE), (1, GONE), (2, GONE), (12, GONE)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN, CircuitPhase.OPEN],
    ),
    "one of another kind too": (
        [(0, GONE), (1, GONE), (2, GONE), (12, SLOW)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN, CircuitPhase.OPEN],
    ),
    "two successes where all rest": (
        [(0, GONE), (1, GONE), (2, GONE), (3, None), (4, None)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN, CircuitPhase.OPEN, CircuitPhase.CLOSED],
    ),
    "being busy is over when it is over": (
        [(0, BackendOverloaded("x")), (2, BackendRejected("x"))],
        [CircuitPhase.OPEN, CircuitPhase.CLOSED],
    ),
}


@pytest.mark.parametrize(("story", "phases"), STORIES.values(), ids=STORIES)
def test_how_a_circuit_goes(story: list[tuple[float, UnisonoError | None]], phases: list[CircuitPhase]) -> None:
    circuits: Circuits = {}
    seen = []
    for now, outcome in story:
        circuits = after_success(circuits) if outcome is None else after_failure(circuits, outcome, now, TOLERANCE)
        seen.append(phase_of(circuits, now))
    assert seen == phases


RHYTHMS: dict[str, tuple[str, int | None]] = {
    "always": ("x", 4),
    "every second": ("x.", 9),
    "every third": ("x..", 22),
    "two of three": ("xx.", 5),
    "three in a row, then one": ("xxx.", 5),
    "every fourth": ("x...", None),
    "three in a row, and often none": ("xxx" + 9 * ".", None),
    "one in ten": ("x" + 9 * ".", None),
    "one in a hundred": ("x" + 99 * ".", None),
}


@pytest.mark.parametrize(("rhythm", "at_request"), RHYTHMS.values(), ids=RHYTHMS)
def test_who_fails_often_comes_to_rest_be_it_never_twice_in_a_row(rhythm: str, at_request: int | None) -> None:
    """The number of the request with which it does, by the default of three that are allowed."""
    circuits: Circuits = {}
    rested = None
    for number, outcome in enumerate((rhythm * 500)[:500], 1):
        failed = outcome == "x"
        circuits = after_failure(circuits, GONE, number, BreakerConfig()) if failed else after_success(circuits)
        if phase_of(circuits, number) is CircuitPhase.OPEN:
            rested = number
            break
    assert rested == at_request


@pytest.mark.parametrize(("share", "rests"), [(0.5, True), (0.34, True), (0.01, False)])
def test_who_fails_at_random_comes_to_rest_by_how_often(share: float, rests: bool) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        circuits: Circuits = {}
        phases = set()
        for now in range(300):
            failed = chance.random() < share
            circuits = after_failure(circuits, SLOW, now, BreakerConfig()) if failed else after_success(circuits)
            phases.add(phase_of(circuits, now))
        assert (CircuitPhase.OPEN in phases) is rests


def test_two_kinds_in_turns_come_to_rest_too() -> None:
    circuits: Circuits = {}
    phases = set()
    for now in range(40):
        match now % 4:
            case 0:
                circuits = after_failure(circuits, GONE, now, BreakerConfig())
            case 2:
                circuits = after_failure(circuits, BackendProtocolError("x"), now, BreakerConfig())
            case _:
                circuits = after_success(circuits)
        phases.add(phase_of(circuits, now))
    assert CircuitPhase.OPEN in phases


def test_a_probe_makes_up_for_no_request() -> None:
    circuits: Circuits = {}
    for now in range(4):
        assert phase_of(circuits, now) is CircuitPhase.CLOSED
        circuits = after_success(after_failure(circuits, GONE, now, BreakerConfig()), probed=True)
    assert phase_of(circuits, 4) is CircuitPhase.OPEN


def test_what_began_before_a_rest_does_not_end_it() -> None:
    circuits = after_failure({}, GONE, 5.0, BreakerConfig(0, 10.0))
    for _ in range(5):
        circuits = after_success(circuits, started_at=4.9)
    assert phase_of(circuits, 6.0) is CircuitPhase.OPEN
    for _ in range(2):
        circuits = after_success(circuits, started_at=5.0)
    assert phase_of(circuits, 6.0) is CircuitPhase.CLOSED


WHY: dict[str, tuple[list[tuple[float, UnisonoError]], float, tuple[BreakerFailure, float] | None]] = {
    "nothing happened": ([], 0.0, None),
    "nothing that counts": ([(0, GONE)], 0.0, None),
    "it rests": ([(0, GONE), (1, GONE), (2, GONE)], 5.0, (BreakerFailure.UNREACHABLE, 2.0)),
    "it is half open": ([(0, GONE), (1, GONE), (2, GONE)], 15.0, (BreakerFailure.UNREACHABLE, 2.0)),
    "it was busy": ([(0, BackendOverloaded("x"))], 5.0, None),
    "what lasts longest": (
        [(0, GONE), (1, GONE), (2, GONE), (3, BackendOverloaded("x", retry_after_s=5.0))],
        4.0,
        (BreakerFailure.UNREACHABLE, 2.0),
    ),
    "not what is over": (
        [(0, BackendOverloaded("x", retry_after_s=2.0)), (1, SLOW), (1, SLOW), (1, SLOW)],
        5.0,
        (BreakerFailure.TIMEOUT, 1.0),
    ),
}


@pytest.mark.parametrize(("story", "now", "why"), WHY.values(), ids=WHY)
def test_what_it_rests_for_and_since_when(
    story: list[tuple[float, UnisonoError]], now: float, why: tuple[BreakerFailure, float] | None
) -> None:
    circuits: Circuits = {}
    for when, error in story:
        circuits = after_failure(circuits, error, when, TOLERANCE)
    rest = rests_for(circuits, now)
    assert (rest and (rest[0], rest[1].since)) == why


def test_each_rest_is_twice_as_long_as_the_one_before_up_to_a_bound() -> None:
    circuits: Circuits = {}
    now, rests = 0.0, []
    for _ in range(8):
        circuits = after_failure(circuits, GONE, now, BreakerConfig(0, 10.0))
        rests.append(rests_until(circuits) - now)
        now = rests_until(circuits)
    assert rests == [10, 20, 40, 80, 160, 300, 300, 300]
    assert rests[-1] == MAX_COOLDOWN_S


def test_what_fails_late_makes_the_rest_no_longer() -> None:
    circuits = after_failure({}, GONE, 0.0, BreakerConfig(0, 10.0))
    assert after_failure(circuits, GONE, 5.0, BreakerConfig(0, 10.0)) == circuits


def test_gateways_do_not_come_back_at_one_moment() -> None:
    assert rests_until(after_failure({}, GONE, 0.0, BreakerConfig(0, 10.0), jitter=1.1)) == pytest.approx(11.0)


BUSY: dict[str, tuple[float | None, float]] = {
    "as long as it asks for": (5.0, 5.0),
    "not at all": (0.0, 0.0),
    "no longer than a dead one": (600.0, 10.0),
    "a breath when it does not say": (None, 1.0),
}


@pytest.mark.parametrize(("retry_after_s", "rest_s"), BUSY.values(), ids=BUSY)
def test_how_long_a_busy_one_is_left_alone(retry_after_s: float | None, rest_s: float) -> None:
    error = BackendOverloaded("x", retry_after_s=retry_after_s)
    assert rests_until(after_failure({}, error, 0.0, TOLERANCE)) == rest_s


def test_a_busy_one_that_does_not_say_is_left_alone_for_longer_and_longer() -> None:
    circuits: Circuits = {}
    now, rests = 0.0, []
    for _ in range(6):
        circuits = after_failure(circuits, BackendOverloaded("x"), now, TOLERANCE)
        rests.append(rests_until(circuits) - now)
        now = rests_until(circuits)
    assert rests == [1, 2, 4, 8, 10, 10]


def test_several_told_at_once_are_told_once() -> None:
    circuits: Circuits = {}
    for _ in range(20):
        circuits = after_failure(circuits, BackendOverloaded("x"), 0.0, TOLERANCE)
    assert rests_until(circuits) <= 2.0
