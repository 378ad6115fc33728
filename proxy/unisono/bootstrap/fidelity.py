"""Continuous fidelity: comparison of live answers with a reference.

Part of the composition root.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from unisono.config import Config
from unisono.config.fidelity_settings import FidelitySettings
from unisono.core.alerts import AlertSink
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, Observer
from unisono.engine.journal import TokenSource, parts_of
from unisono.errors import ConfigError, ConfigErrors
from unisono.fidelity.drift import DriftLimits
from unisono.fidelity.monitor import CountSample, FidelityMonitor, FidelityPlan, LiveSample
from unisono.routing.deployment import LiveDeployment
from unisono.routing.pool import RoutingPool


class FidelityWatch(Observer):
    """Monitors by model, which receive the answers as an observer."""

    def __init__(self, monitors: Mapping[str, FidelityMonitor], pool: RoutingPool) -> None:
        self._monitors = monitors
        self._pool = pool

    @property
    def models(self) -> frozenset[str]:
        """Models whose prompts the monitors need."""
        return frozenset(self._monitors)

    def start(self) -> None:
        for model, members in self._pool.members().items():
            if model not in self._monitors:
                # A reload may have removed the settings.
                for live in members:
                    if live.fidelity is not None:
                        live.set_fidelity(None)
        for monitor in self._monitors.values():
            monitor.start()

    async def aclose(self) -> None:
        for monitor in self._monitors.values():
            await monitor.aclose()

    def generation_started(self, began: GenerationStarted) -> None:
        """Do nothing: only complete answers are scored."""

    def ended(self, done: GenerationDone) -> None:
        if (monitor := self._monitors.get(done.start.model)) is None:
            return
        if (sample := to_live_sample(done)) is not None:
            monitor.offer(sample)


def to_live_sample(done: GenerationDone) -> LiveSample | None:
    """Return the exact tokens of an answer that one generation gave; None for any other answer."""
    if done.outcome is not GenerationOutcome.COMPLETED or len(done.steps) != 1 or done.start.resumed:
        return None
    [step], tokens = done.steps, list[int]()
    for part in parts_of(done.journal):
        match part:
            case list() | tuple():
                tokens += part
            case TokenSource(guessed=False):
                pass
            # The gateway has inserted tokens, or they were derived from text.
            case _:
                return None
    return LiveSample(step.deployment, step.prompt, tokens, done.start.is_free) if step.prompt else None


def build_fidelity(config: Config, pool: RoutingPool, sink: AlertSink, count: CountSample) -> FidelityWatch:
    """Return the monitors of a configuration. Raises ConfigError."""
    errors, monitors = ConfigErrors(), dict[str, FidelityMonitor]()
    for model, settings in config.unisono.fidelity.items():
        with errors:
            monitors[model] = FidelityMonitor(_plan(model, settings, pool), sink, count, monotonic)
    errors.raise_all()
    return FidelityWatch(monitors, pool)


def _plan(model: str, settings: FidelitySettings, pool: RoutingPool) -> FidelityPlan:
    path = f"unisono.fidelity.{model}"
    members: list[LiveDeployment] = [live for live in pool.members().get(model, ()) if not live.passes]
    if not members:
        raise ConfigError(f"{path}: no gpt-oss backend has this `model_name`")
    reference = next((live for live in members if live.name == settings.reference), None)
    if reference is None:
        known = ", ".join(live.name for live in members)
        raise ConfigError(f"{path}.reference: the model has no backend `{settings.reference}`; backends: {known}")
    limits = settings.thresholds
    return FidelityPlan(
        model,
        reference,
        [live for live in members if live is not reference],
        settings.sample,
        settings.budget,
        DriftLimits(limits.agreement, limits.divergence, limits.implausible, settings.quarantine_s),
    )
