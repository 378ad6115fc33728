"""Configured use of one deployment."""

from __future__ import annotations

from dataclasses import dataclass, field

from unisono.core.generation import Timeouts
from unisono.routing.attempt_limits import MinTimeouts


@dataclass(frozen=True, slots=True)
class DeploymentConfig:
    """Configured use of a deployment.

    `name` is public: it holds no address and no path. Deployments of the lowest `order` come first and share by
    `weight`. `max_requests` and `max_tokens` limit concurrent load; `requests_per_minute` and
    `tokens_per_minute` limit the requests that begin per minute, and their tokens.
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
