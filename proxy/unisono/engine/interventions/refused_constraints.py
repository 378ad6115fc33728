"""Constraints on which backends failed: a tracker per answer, and a memory for all answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from time import monotonic
from typing import Final

from unisono.core.generation import AnyJson, Constraint, Gbnf, JsonSchema, Lark, OneOf, Regex
from unisono.core.lru_cache import LruCache
from unisono.core.observer import RefusedConstraint
from unisono.core.route_protocol import Slot
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.errors import BackendError, BackendOverloaded, BackendRejected, BackendTimeout, ConstraintRefused, Symptom

REFUSAL_TTL_S: Final = 3600.0
MAX_REFUSALS: Final = 4096

_EVERY: Final = ""  # in a key, instead of a deployment's name: every deployment of the model

_Key = tuple[str, str, bytes]


class RefusedConstraints:
    """Memory of constraints on which backends failed, to avoid sending these constraints again.

    The memory is limited in size. Constraints are stored as digests. A deployment is identified by the names of its
    model and of the deployment itself.
    """

    # If a backend responds with a server error, the constraint is not sent to this backend for an hour. If the
    # connection breaks, the server may have crashed because of the constraint. The constraint is then not sent to any
    # backend of the model for an hour.

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._refused_until: LruCache[_Key, float] = LruCache(MAX_REFUSALS)
        self._is_accepted: LruCache[_Key, bool] = LruCache(MAX_REFUSALS)

    def refuses(self, model: str, deployment: str, constraint: Constraint) -> bool:
        """Return whether a constraint must not be sent to a deployment."""
        digest, now = _digest(constraint), self._clock()
        own, every = self._refused_until.get_all([(model, deployment, digest), (model, _EVERY, digest)])
        if own is not None and own > now:
            return True
        return every is not None and every > now and not self._is_accepted.get((model, deployment, digest))

    def record_success(self, model: str, deployment: str, constraint: Constraint) -> None:
        """Record that a deployment has generated a token under a constraint."""
        self._is_accepted.put((model, deployment, _digest(constraint)), True, 1)

    def record_failure(self, model: str, deployment: str, constraint: Constraint, symptom: Symptom | None) -> None:
        """Record that a backend failed on a constraint before the first token.

        `symptom` is None if the backend rejected the constraint. A rejection is not stored, because it does no harm.
        """
        key = (model, deployment, _digest(constraint))
        if symptom is None:
            return
        if self._is_accepted.get(key):
            # The constraint worked on this deployment before, so the failure probably has a different cause. The
            # constraint is blamed only if the connection broke, and the next generation under it fails too.
            self._is_accepted.put(key, symptom is not Symptom.DISCONNECTED, 1)
            return
        where = _EVERY if symptom is Symptom.DISCONNECTED else deployment
        self._refused_until.put((model, where, key[2]), self._clock() + REFUSAL_TTL_S, 1)

    def record_failure_without(
        self, model: str, deployment: str, constraint: Constraint, symptom: Symptom | None, error: BackendError
    ) -> None:
        """Record that the generation also failed without the constraint.

        `symptom` is the symptom of the failure under the constraint, and `error` is the failure without the constraint.
        If both were server errors, or if the request itself was invalid, the constraint is not to blame and may be sent
        again.
        """
        is_same = symptom is Symptom.SERVER_ERROR and error.symptom is symptom
        if isinstance(error, BackendRejected) or (
            is_same and not isinstance(error, BackendOverloaded | BackendTimeout)
        ):
            for where in (deployment, _EVERY):
                self._refused_until.put((model, where, _digest(constraint)), 0.0, 1)


def _digest(constraint: Constraint) -> bytes:
    match constraint:
        case JsonSchema(schema):
            content = json.dumps(schema)
        case AnyJson():
            content = ""
        case OneOf(texts):
            content = json.dumps(texts)
        case Regex(text) | Gbnf(text) | Lark(text):
            content = text
    return blake2b(f"{constraint.kind} {content}".encode(), digest_size=16).digest()


class ConstraintTracker:
    """Tracker of the constraints of one answer: enforced kinds, and constraints that failed."""

    def __init__(self, memory: RefusedConstraints, request: GenerationRequest, report: GenerationReport) -> None:
        self._memory = memory
        self._request = request
        self._report = report
        # constraint kinds that are not sent any more during this answer, by the name of the deployment
        self._refused: dict[str, frozenset[str]] = {}
        # The failure because of which the constraint was left out. None once the backend has generated a token without
        # the constraint.
        self._blamed: ConstraintRefused | None = None

    def enforced_kinds(self, slot: Slot, constraint: Constraint | None) -> frozenset[str]:
        """Return the constraint kinds that the slot's backend has to enforce.

        `constraint` is the constraint for the next generation, or None.
        """
        kinds = slot.capabilities.constrain - self._refused.get(slot.deployment.name, frozenset())
        if constraint is None or constraint.kind not in kinds:
            return kinds
        if not self._memory.refuses(*self._deployment(slot), constraint):
            return kinds
        self._leave_out(slot, constraint, "remembered")
        return kinds - {constraint.kind}

    def start(self) -> None:
        """Forget the last failure; call this before each generation under a constraint."""
        self._blamed = None

    def record_token(self, slot: Slot, constraint: Constraint | None) -> None:
        """Record that a generation under `constraint` has generated its first token."""
        self._blamed = None
        if constraint is not None:
            self._memory.record_success(*self._deployment(slot), constraint)

    def record_refusal(self, slot: Slot, constraint: Constraint, error: ConstraintRefused) -> None:
        """Record that a generation under `constraint` failed; it is repeated without the constraint."""
        self._blamed = error
        self._memory.record_failure(*self._deployment(slot), constraint, error.symptom)
        self._leave_out(slot, constraint, error.symptom or "rejected")

    def record_failure(self, slot: Slot, constraint: Constraint | None, error: BackendError) -> None:
        """Record that a generation failed, with `constraint` or when repeated without it."""
        if self._blamed is not None and constraint is not None:
            self._memory.record_failure_without(*self._deployment(slot), constraint, self._blamed.symptom, error)

    def _deployment(self, slot: Slot) -> tuple[str, str]:
        """Return the model and the name of the slot's deployment."""
        return self._report.served_model or self._request.model, slot.deployment.name

    def _leave_out(self, slot: Slot, constraint: Constraint, reason: str) -> None:
        """Leave out constraints of this kind on this deployment for the rest of the answer.

        The controller then validates the output, as it does for a backend that cannot enforce constraints.
        """
        name, kind = slot.deployment.name, constraint.kind
        self._refused[name] = self._refused.get(name, frozenset()) | {kind}
        self._report.facts.refused_constraints.append(RefusedConstraint(name, reason))
        note = (
            f"The backend failed on the constraint ({kind}). The output was generated without this constraint and "
            "validated afterwards."
        )
        if note not in self._report.notes:
            self._report.notes.append(note)
