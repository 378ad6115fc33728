"""Construction of continuous fidelity, which compares live answers with a reference.

Part of the composition root. `to_live_sample` selects the answers that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic

from unisono.bootstrap.deployments import deployment_names
from unisono.config import Config, ModelEntry
from unisono.config.unisono_settings import FidelitySettings
from unisono.core.alerts import AlertSink
from unisono.core.generation import Sampling
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, Observer, TokenInfluences
from unisono.engine.journal import TokenSource, parts_of
from unisono.errors import ConfigError, ConfigErrors
from unisono.fidelity.drift import DriftLimits
from unisono.fidelity.monitor import CountSample, FidelityMonitor, FidelityPlan, LiveSample
from unisono.routing.deployment import LiveDeployment
from unisono.routing.pool import RoutingPool


class FidelityWatch(Observer):
    """Observer of generations that passes complete answers to the monitors of their model."""

    def __init__(self, monitors: Mapping[str, Sequence[FidelityMonitor]], pool: RoutingPool) -> None:
        self._monitors = monitors
        self._pool = pool

    @property
    def models(self) -> frozenset[str]:
        """Names of the models that have monitors. The monitors need the prompts of these models."""
        return frozenset(self._monitors)

    def start(self) -> None:
        every = [monitor for monitors in self._monitors.values() for monitor in monitors]
        watched = {name for monitor in every for name in monitor.names}
        for members in self._pool.members().values():
            for live in members:
                # If a reload has removed the settings of a model, reset the results of its backends.
                if live.fidelity is not None and live.name not in watched:
                    live.set_fidelity(None)
        for monitor in every:
            monitor.start()

    async def aclose(self) -> None:
        for monitors in self._monitors.values():
            for monitor in monitors:
                await monitor.aclose()

    def generation_started(self, began: GenerationStarted) -> None:
        """Do nothing: only complete answers are scored."""

    def ended(self, done: GenerationDone) -> None:
        monitors = self._monitors.get(done.start.model, ())
        if monitors and (sample := to_live_sample(done)) is not None:
            for monitor in monitors:
                monitor.offer(sample)


def to_live_sample(done: GenerationDone) -> LiveSample | None:
    """Return an answer for comparison, or None if it cannot be compared.

    A single backend request must have generated the whole answer, and the exact tokens must be known.
    """
    if done.outcome is not GenerationOutcome.COMPLETED or len(done.steps) != 1 or done.start.resumed:
        return None
    [step], tokens = done.steps, list[int]()
    for part in parts_of(done.journal):
        match part:
            case list() | tuple():
                tokens += part
            case TokenSource(guessed=False):
                pass
            # The gateway has inserted tokens, or the tokens were derived from text.
            case _:
                return None
    if not step.prompt:
        return None
    influences = done.start.influences
    return LiveSample(step.deployment, step.prompt, tokens, influences is not None and model_decides_alone(influences))


def model_decides_alone(influences: TokenInfluences) -> bool:
    """Return True if only the model decides on the tokens, without any constraint or penalty."""
    is_forced = influences.has_form or influences.has_tool_choice or influences.has_reasoning_budget
    if is_forced or influences.is_raw_prompt or influences.has_strict_tools:
        return False
    return not (influences.sampling.temperature > 1 or _has_penalty(influences.sampling))


def _has_penalty(sampling: Sampling) -> bool:
    """Return True if penalties or biases change the probabilities of the model."""
    has_penalty = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    return bool(has_penalty or sampling.logit_bias)


def build_fidelity(config: Config, pool: RoutingPool, sink: AlertSink, count: CountSample) -> FidelityWatch:
    """Return the monitors of a configuration.

    Raises ConfigError if a model or a backend that the configuration names does not exist.
    """
    errors, plans = ConfigErrors(), list[FidelityPlan]()
    for model, settings in config.unisono.fidelity.items():
        with errors:
            plans.append(_plan(model, settings, pool))
    shadows = zip(config.model_list, deployment_names(config.model_list), strict=True)
    for index, (entry, name) in enumerate(shadows):
        if entry.unisono.shadow is not None:
            with errors:
                settings = config.unisono.fidelity.get(entry.model_name, FidelitySettings(reference=name, sample=1.0))
                plans.append(_shadow_plan(f"model_list[{index}].unisono.shadow", entry, name, settings, pool))
    errors.raise_all()
    monitors: dict[str, list[FidelityMonitor]] = {}
    for plan in plans:
        monitors.setdefault(plan.model, []).append(FidelityMonitor(plan, sink, count, monotonic))
    return FidelityWatch(monitors, pool)


def _plan(model: str, settings: FidelitySettings, pool: RoutingPool) -> FidelityPlan:
    path = f"unisono.fidelity.{model}"
    members = _members(model, pool)
    if not members:
        raise ConfigError(f"{path}: no gpt-oss backend has this `model_name`; use a `model_name` from `model_list`")
    reference = next((live for live in members if pool.terms_of(live).name == settings.reference), None)
    if reference is None:
        known = ", ".join(pool.terms_of(live).name for live in members)
        raise ConfigError(f"{path}.reference: the model has no backend `{settings.reference}`; backends: {known}")
    return FidelityPlan(
        model,
        reference,
        [live for live in members if live is not reference],
        settings.sample,
        settings.budget,
        _limits(settings, settings.quarantine_s),
    )


def _shadow_plan(
    path: str, entry: ModelEntry, name: str, settings: FidelitySettings, pool: RoutingPool
) -> FidelityPlan:
    members = _members(entry.model_name, pool)
    source = next((live for live in members if pool.terms_of(live).name == entry.unisono.shadow), None)
    if source is None:
        known = ", ".join(other for live in members if (other := pool.terms_of(live).name) != name)
        raise ConfigError(
            f"{path}: no other gpt-oss backend of this model is `{entry.unisono.shadow}`; backends: {known}"
        )
    shadow = next(live for live in pool.members()[entry.model_name] if pool.terms_of(live).name == name)
    # A shadow serves no clients, so it needs no quarantine.
    limits = _limits(settings, quarantine_s=0.0)
    return FidelityPlan(entry.model_name, source, [shadow], settings.sample, settings.budget, limits, shadow)


def _members(model: str, pool: RoutingPool) -> list[LiveDeployment]:
    """Return the gpt-oss deployments of a model, except shadows, which have their own monitors."""
    members = pool.members().get(model, ())
    return [live for live in members if not live.passes and not pool.terms_of(live).shadow_of]


def _limits(settings: FidelitySettings, quarantine_s: float) -> DriftLimits:
    limits = settings.thresholds
    return DriftLimits(limits.agreement, limits.divergence, limits.implausible, quarantine_s)
