"""Use of a probe's findings: effective context window, log lines, error for unfit backends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from unisono.core.probe import Check, Finding, Probe, Severity
from unisono.errors import BackendUnfit

# Log level of a failed check by its severity.
LEVELS: Final = {Severity.FATAL: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.NOTE: logging.INFO}

log = logging.getLogger(__name__)


def with_context(found: Probe, context: int | None) -> Probe:
    """Cap the probed context window at the configured one, in tokens.

    The configured window is also used if the probe found none.
    """
    if context is None:
        return found
    size = min(context, found.capabilities.context or context)
    findings = (Finding(Check.CONTEXT, True, f"{size} tokens") if _is_unsized(f) else f for f in found.findings)
    return replace(found, capabilities=replace(found.capabilities, context=size), findings=tuple(findings))


def log_findings(name: str, probe: Probe, before: Probe | None) -> None:
    """Log the failed checks that the probe `before` did not have."""
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
