"""Configuration of one deployment, and functions that apply it to the result of a probe."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import field, replace
from typing import Final

from unisono.core.frozen import dataclass
from unisono.core.generation import Timeouts
from unisono.core.probe import Check, Finding, Probe, Severity
from unisono.errors import BackendUnfit
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
    drained deployment and a shadow of another deployment get no new requests. After a reload has removed a deployment,
    requests that already wait use it only if no other deployment works. A canary gets `canary_share` (0 to 1) of the
    requests.
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
    is_removed: bool = False
    canary_share: float = 0.0
    shadow_of: str = ""
    wake: WakeRules | None = field(default=None, compare=False)

    @property
    def is_withdrawn(self) -> bool:
        """True if the deployment gets no new requests, however healthy it is."""
        return self.is_drained or bool(self.shadow_of)


# Log level of a failed check by its severity.
LEVELS: Final = {Severity.FATAL: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.NOTE: logging.INFO}

log = logging.getLogger(__name__)


def with_context(found: Probe, context: int | None) -> Probe:
    """Cap the probed context window at the configured one, in tokens.

    The configured window is also used if the probe found no context window.
    """
    if context is None:
        return found
    size = min(context, found.capabilities.context or context)
    findings = (Finding(Check.CONTEXT, True, f"{size} tokens") if _is_unsized(f) else f for f in found.findings)
    return replace(found, capabilities=replace(found.capabilities, context=size), findings=tuple(findings))


def log_findings(name: str, probe: Probe, before: Probe | None) -> None:
    """Log the failed checks, except those that the previous probe `before` (if any) had as well."""
    for finding in probe.findings:
        if finding.weight is not None and (before is None or finding not in before.findings):
            log.log(
                LEVELS[finding.weight],
                "backend check failed",
                extra={"backend": name, "check": finding.check.value, "severity": finding.weight.value}
                | {"reason": finding.text, "remedy": finding.advises},
            )


def unfit(name: str, fatal: Sequence[Finding]) -> BackendUnfit:
    """Return the error for a backend with fatal findings."""
    return BackendUnfit(
        f"The backend {name} cannot be used. Failed checks: {', '.join(finding.check for finding in fatal)}."
    )


def _is_unsized(finding: Finding) -> bool:
    """Return whether the check failed only because the probe found no context window."""
    return finding.check is Check.CONTEXT and finding.weight is Severity.WARNING
