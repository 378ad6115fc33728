"""Circuit breaker: failures that count, length of cooldowns, and closing of circuits."""

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
    "unreachable": (BackendUnavailable("x"), BreakerFailure.UNREACHABLE),
    "timeout": (BackendTimeout("x"), BreakerFailure.TIMEOUT),
    "overloaded": (BackendOverloaded("x"), BreakerFailure.OVERLOADED),
    "share exceeded": (ShareExceeded("x"), BreakerFailure.OVERLOADED),
    "protocol error": (BackendProtocolError("x"), BreakerFailure.PROTOCOL),
    "other backend error": (BackendError("x"), BreakerFailure.ERROR),
    "unfit": (BackendUnfit("x"), None),
    "rejected request": (BackendRejected("x"), None),
    "rejected constraint": (ConstraintRefused("x"), None),
    "prompt too long": (ContextTooLong("x"), None),
    "unsupported value": (UnsupportedValue("x"), None),
    "internal error": (InternalError("x"), None),
}


@pytest.mark.parametrize(("error", "kind"), KINDS.values(), ids=KINDS)
def test_errors_count_by_kind_of_failure(error: UnisonoError, kind: BreakerFailure | None) -> None:
    assert kind_of(error) is kind
    circuits = after_failure({}, error, 0.0, BreakerConfig(allowed_fails=0))
    assert set(circuits) == ({kind} if kind else set())


def backend_errors(root: type[UnisonoError] = BackendError) -> list[type[UnisonoError]]:
    return [root, *(one for kind in root.__subclasses__() for one in backend_errors(kind))]


@pytest.mark.parametrize("error", backend_errors(), ids=lambda error: error.__name__)
def test_every_backend_error_has_a_kind(error: type[UnisonoError]) -> None:
    assert kind_of(error("x")) in {*BreakerFailure, None}


GONE, SLOW = BackendUnavailable("x"), BackendTimeout("x")
TOLERANCE = BreakerConfig(allowed_fails=2, cooldown_s=10.0)

CIRCUIT_CASES: dict[str, tuple[list[tuple[float, UnisonoError | None]], list[CircuitPhase]]] = {
    "allowed failures": ([(0, GONE), (1, GONE)], [CircuitPhase.CLOSED, CircuitPhase.CLOSED]),
    "one failure above the allowed number": (
        [(0, GONE), (1, GONE), (2, GONE)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN],
    ),
    "one success offsets less than one failure": (
        [(0, GONE), (1, GONE), (2, None), (3, GONE)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN],
    ),
    "three successes offset one failure": (
        [(0, GONE), (1, GONE), (2, None), (3, None), (4, None), (5, GONE)],
        [CircuitPhase.CLOSED] * 6,
    ),
    "earlier successes give no credit": (
        [(n, None) for n in range(9)] + [(9, GONE), (10, GONE)],
        [CircuitPhase.CLOSED] * 11,
    ),
    "separate counts for kinds": ([(0, GONE), (1, SLOW), (2, GONE), (3, SLOW)], [CircuitPhase.CLOSED] * 4),
    "one success after the cooldown": (
        [(0, GONE), (1, GONE), (2, GONE), (12, None)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN, CircuitPhase.HALF_OPEN],
    ),
    "two successes after the cooldown": (
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
    "failure after the cooldown": (
        [(0, GONE), (1, GONE), (2, GONE), (12, GONE)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN, CircuitPhase.OPEN],
    ),
    "failure of another kind after the cooldown": (
        [(0, GONE), (1, GONE), (2, GONE), (12, SLOW)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN, CircuitPhase.OPEN],
    ),
    "two successes during the cooldown": (
        [(0, GONE), (1, GONE), (2, GONE), (3, None), (4, None)],
        [CircuitPhase.CLOSED, CircuitPhase.CLOSED, CircuitPhase.OPEN, CircuitPhase.OPEN, CircuitPhase.CLOSED],
    ),
    "end of an overload": (
        [(0, BackendOverloaded("x")), (2, BackendRejected("x"))],
        [CircuitPhase.OPEN, CircuitPhase.CLOSED],
    ),
}


@pytest.mark.parametrize(("outcomes", "phases"), CIRCUIT_CASES.values(), ids=CIRCUIT_CASES)
def test_circuit_phases_follow_failures_and_successes(
    outcomes: list[tuple[float, UnisonoError | None]], phases: list[CircuitPhase]
) -> None:
    circuits: Circuits = {}
    observed = []
    for now, outcome in outcomes:
        circuits = after_success(circuits) if outcome is None else after_failure(circuits, outcome, now, TOLERANCE)
        observed.append(phase_of(circuits, now))
    assert observed == phases


RHYTHMS: dict[str, tuple[str, int | None]] = {
    "every request": ("x", 4),
    "every second request": ("x.", 9),
    "every third request": ("x..", 22),
    "two of three requests": ("xx.", 5),
    "three failures, one success": ("xxx.", 5),
    "every fourth request": ("x...", None),
    "three failures, nine successes": ("xxx" + 9 * ".", None),
    "one in ten requests": ("x" + 9 * ".", None),
    "one in a hundred requests": ("x" + 99 * ".", None),
}


@pytest.mark.parametrize(("rhythm", "at_request"), RHYTHMS.values(), ids=RHYTHMS)
def test_frequent_failures_open_the_circuit_without_a_failure_streak(rhythm: str, at_request: int | None) -> None:
    # `at_request` is the request that opens the circuit, with the default of three allowed failures.
    circuits: Circuits = {}
    opened_at = None
    for number, outcome in enumerate((rhythm * 500)[:500], 1):
        failed = outcome == "x"
        circuits = after_failure(circuits, GONE, number, BreakerConfig()) if failed else after_success(circuits)
        if phase_of(circuits, number) is CircuitPhase.OPEN:
            opened_at = number
            break
    assert opened_at == at_request


@pytest.mark.parametrize(("share", "opens"), [(0.5, True), (0.34, True), (0.01, False)])
def test_random_failures_open_the_circuit_depending_on_their_share(share: float, opens: bool) -> None:
    for seed in range(20):
        chance = random.Random(seed)
        circuits: Circuits = {}
        phases = set()
        for now in range(300):
            failed = chance.random() < share
            circuits = after_failure(circuits, SLOW, now, BreakerConfig()) if failed else after_success(circuits)
            phases.add(phase_of(circuits, now))
        assert (CircuitPhase.OPEN in phases) is opens


def test_alternating_kinds_of_failure_open_the_circuit() -> None:
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


def test_a_successful_probe_does_not_offset_failed_requests() -> None:
    circuits: Circuits = {}
    for now in range(4):
        assert phase_of(circuits, now) is CircuitPhase.CLOSED
        circuits = after_success(after_failure(circuits, GONE, now, BreakerConfig()), probed=True)
    assert phase_of(circuits, 4) is CircuitPhase.OPEN


def test_a_success_started_before_the_cooldown_does_not_close_the_circuit() -> None:
    circuits = after_failure({}, GONE, 5.0, BreakerConfig(0, 10.0))
    for _ in range(5):
        circuits = after_success(circuits, started_at=4.9)
    assert phase_of(circuits, 6.0) is CircuitPhase.OPEN
    for _ in range(2):
        circuits = after_success(circuits, started_at=5.0)
    assert phase_of(circuits, 6.0) is CircuitPhase.CLOSED


REASONS: dict[str, tuple[list[tuple[float, UnisonoError]], float, tuple[BreakerFailure, float] | None]] = {
    "no errors": ([], 0.0, None),
    "allowed failure": ([(0, GONE)], 0.0, None),
    "open circuit": ([(0, GONE), (1, GONE), (2, GONE)], 5.0, (BreakerFailure.UNREACHABLE, 2.0)),
    "half-open circuit": ([(0, GONE), (1, GONE), (2, GONE)], 15.0, (BreakerFailure.UNREACHABLE, 2.0)),
    "past overload": ([(0, BackendOverloaded("x"))], 5.0, None),
    "longest of two cooldowns": (
        [(0, GONE), (1, GONE), (2, GONE), (3, BackendOverloaded("x", retry_after_s=5.0))],
        4.0,
        (BreakerFailure.UNREACHABLE, 2.0),
    ),
    "cooldown that is over": (
        [(0, BackendOverloaded("x", retry_after_s=2.0)), (1, SLOW), (1, SLOW), (1, SLOW)],
        5.0,
        (BreakerFailure.TIMEOUT, 1.0),
    ),
}


@pytest.mark.parametrize(("errors", "now", "expected"), REASONS.values(), ids=REASONS)
def test_rests_for_returns_reason_and_start_of_the_cooldown(
    errors: list[tuple[float, UnisonoError]], now: float, expected: tuple[BreakerFailure, float] | None
) -> None:
    circuits: Circuits = {}
    for when, error in errors:
        circuits = after_failure(circuits, error, when, TOLERANCE)
    cooldown = rests_for(circuits, now)
    assert (cooldown and (cooldown[0], cooldown[1].since)) == expected


def test_each_cooldown_doubles_up_to_the_maximum() -> None:
    circuits: Circuits = {}
    now, cooldowns = 0.0, []
    for _ in range(8):
        circuits = after_failure(circuits, GONE, now, BreakerConfig(0, 10.0))
        cooldowns.append(rests_until(circuits) - now)
        now = rests_until(circuits)
    assert cooldowns == [10, 20, 40, 80, 160, 300, 300, 300]
    assert cooldowns[-1] == MAX_COOLDOWN_S


def test_failures_during_a_cooldown_do_not_extend_it() -> None:
    circuits = after_failure({}, GONE, 0.0, BreakerConfig(0, 10.0))
    assert after_failure(circuits, GONE, 5.0, BreakerConfig(0, 10.0)) == circuits


def test_the_cooldown_has_jitter() -> None:
    assert rests_until(after_failure({}, GONE, 0.0, BreakerConfig(0, 10.0), jitter=1.1)) == pytest.approx(11.0)


BUSY: dict[str, tuple[float | None, float]] = {
    "retry-after": (5.0, 5.0),
    "retry-after of zero": (0.0, 0.0),
    "retry-after above the cooldown": (600.0, 10.0),
    "no retry-after": (None, 1.0),
}


@pytest.mark.parametrize(("retry_after_s", "expected_s"), BUSY.values(), ids=BUSY)
def test_the_cooldown_of_an_overloaded_backend_follows_retry_after(
    retry_after_s: float | None, expected_s: float
) -> None:
    error = BackendOverloaded("x", retry_after_s=retry_after_s)
    assert rests_until(after_failure({}, error, 0.0, TOLERANCE)) == expected_s


def test_cooldowns_of_an_overloaded_backend_without_retry_after_grow() -> None:
    circuits: Circuits = {}
    now, cooldowns = 0.0, []
    for _ in range(6):
        circuits = after_failure(circuits, BackendOverloaded("x"), now, TOLERANCE)
        cooldowns.append(rests_until(circuits) - now)
        now = rests_until(circuits)
    assert cooldowns == [1, 2, 4, 8, 10, 10]


def test_simultaneous_overload_errors_count_once() -> None:
    circuits: Circuits = {}
    for _ in range(20):
        circuits = after_failure(circuits, BackendOverloaded("x"), 0.0, TOLERANCE)
    assert rests_until(circuits) <= 2.0
