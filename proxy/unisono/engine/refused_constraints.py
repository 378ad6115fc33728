"""Constraints that backends failed on, stored by digest so that none does harm twice.

After an error of the backend itself, the constraint is not sent to that backend again. After a broken connection it is
not sent to any backend of the model, since the server may have crashed on it. Both hold for an hour.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from time import monotonic
from typing import Final

from unisono.core.generation import AnyJson, Constraint, JsonSchema, OneOf
from unisono.errors import BackendError, BackendOverloaded, BackendRejected, BackendTimeout, Symptom
from unisono.harmony.lru_cache import LruCache

REMEMBERED_S: Final = 3600.0
MAX_REMEMBERED: Final = 4096

_EVERY: Final = ""  # stands for every deployment of a model

_Key = tuple[str, str, bytes]


class RefusedConstraints:
    """Refused constraints known to this process.

    Deployments are identified by their model and their own name.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._refused_until: LruCache[_Key, float] = LruCache(MAX_REMEMBERED)
        self._is_kept: LruCache[_Key, bool] = LruCache(MAX_REMEMBERED)

    def refuses(self, model: str, deployment: str, constraint: Constraint) -> bool:
        """Return whether a constraint must not be sent to a deployment."""
        digest, now = _digest(constraint), self._clock()
        own, every = self._refused_until.get_all([(model, deployment, digest), (model, _EVERY, digest)])
        if own is not None and own > now:
            return True
        return every is not None and every > now and not self._is_kept.get((model, deployment, digest))

    def kept(self, model: str, deployment: str, constraint: Constraint) -> None:
        """Record that a generation under a constraint has begun."""
        self._is_kept.put((model, deployment, _digest(constraint)), True, 1)

    def refused(self, model: str, deployment: str, constraint: Constraint, symptom: Symptom | None) -> None:
        """Record that a backend failed on a constraint before the first token.

        A rejection is not stored, since it does no harm.
        """
        key = (model, deployment, _digest(constraint))
        if symptom is None:
            return
        if self._is_kept.get(key):
            # It worked here before, so this was probably another problem. A server that breaks the connection twice in
            # a row on one constraint counts.
            self._is_kept.put(key, symptom is not Symptom.DISCONNECTED, 1)
            return
        where = _EVERY if symptom is Symptom.DISCONNECTED else deployment
        self._refused_until.put((model, where, key[2]), self._clock() + REMEMBERED_S, 1)

    def failed_without(
        self, model: str, deployment: str, constraint: Constraint, symptom: Symptom | None, error: BackendError
    ) -> None:
        """Record that the generation also failed without the constraint.

        `symptom` is that of the failure with it. If the failure was the same, or the request itself was invalid, the
        constraint is not to blame.
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
            said = json.dumps(schema)
        case AnyJson():
            said = ""
        case OneOf(texts):
            said = json.dumps(texts)
    return blake2b(f"{constraint.kind} {said}".encode(), digest_size=16).digest()
