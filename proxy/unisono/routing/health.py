"""When a deployment rests: pure, the clock comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.errors import BackendError, BackendOverloaded, BackendUnfit, UnisonoError


@dataclass(frozen=True, slots=True)
class Circuit:
    """`failures` counts those in a row; before `rests_until` (monotonic seconds) others are tried first."""

    failures: int = 0
    rests_until: float = 0.0

    def resting(self, now: float) -> bool:
        return now < self.rests_until


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A deployment may fail `allowed_fails` times in a row; with the next failure it rests for `cooldown_s`."""

    allowed_fails: int = 3
    cooldown_s: float = 30.0


def counts(error: UnisonoError) -> bool:
    """Whether an error speaks against the deployment: a request it refused does not, nor does being busy. One that is
    unfit is kept out by its probe and needs no rest."""
    if isinstance(error, BackendOverloaded | BackendUnfit):
        return False
    return isinstance(error, BackendError) and error.retry_elsewhere


def after_failure(circuit: Circuit, now: float, tolerance: Tolerance) -> Circuit:
    """The failures are kept while it rests, so that one more after the rest begins the next."""
    failures = circuit.failures + 1
    if failures > tolerance.allowed_fails:
        return Circuit(failures, now + tolerance.cooldown_s)
    return replace(circuit, failures=failures)
