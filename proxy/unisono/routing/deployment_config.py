"""Configuration of one deployment: name, time limits, priority, weight and load limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import field

from unisono.core.frozen import dataclass
from unisono.core.generation import Timeouts
from unisono.routing.attempt_timeouts import MinTimeouts


@dataclass(frozen=True, slots=True)
class WakeRules:
    """Call that wakes a backend, and the maximum number of seconds until the backend is ready.

    `call` raises OSError if the backend cannot be woken.
    """

    call: Callable[[], Awaitable[None]]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class DeploymentConfig:
    """Configuration of one deployment, as routing uses it.

    `name` is public, so it contains no address and no path. Deployments of the lowest `order` are used first, in
    proportion to `weight`. `max_requests` and `max_tokens` limit the concurrent load. `requests_per_minute` and
    `tokens_per_minute` limit the requests that begin per minute, and their tokens. `tags` are for tag-based routing. A
    drained deployment and a shadow of another deployment get no new requests. A canary gets `canary_share` (0 to 1) of
    the requests.
    """

    name: str
    timeouts: Timeouts = field(default_factory=Timeouts)
    min_timeouts: MinTimeouts = field(default_factory=MinTimeouts)
    weight: int = 1
    order: int = 0
    max_requests: int | None = None
    max_tokens: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tags: frozenset[str] = frozenset()
    is_drained: bool = False
    canary_share: float = 0.0
    shadow_of: str = ""
    wake: WakeRules | None = field(default=None, compare=False)

    @property
    def is_withdrawn(self) -> bool:
        """True if the deployment gets no new requests, however healthy it is."""
        return self.is_drained or bool(self.shadow_of)
