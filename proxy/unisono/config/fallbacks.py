"""Fallback models from LiteLLM's lists, checked against the model list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from unisono.config.sections import Config, FallbackList, Fallbacks
from unisono.core.frozen import dataclass
from unisono.core.passthrough_request import ModelMode
from unisono.core.route_protocol import RequestedRouting
from unisono.errors import ConfigError, ConfigErrors

ANY: Final = "*"
"""Key for every model without its own list."""


@dataclass(frozen=True, slots=True)
class StandIns:
    """Fallback models of one model, in order.

    `fallbacks` apply if its own backends failed or have no slot, `larger` if the prompt is too long for those backends.
    """

    fallbacks: tuple[str, ...] = ()
    larger: tuple[str, ...] = ()

    def for_request(self, model: str, requested: RequestedRouting) -> StandIns:
        """Return the fallback models of a request for `model`; its own replace the configured ones."""
        if requested.no_fallbacks or requested.deployment:
            return NO_STAND_INS
        if requested.fallbacks is None:
            return self
        return StandIns(tuple(name for name in requested.fallbacks if name != model), self.larger)


NO_STAND_INS: Final = StandIns()


def stand_ins(config: Config, groups: Sequence[str], aliases: Mapping[str, str]) -> dict[str, StandIns]:
    """Return the fallback models by model.

    Raises ConfigError for an unknown name or a second list.
    """
    known = _Names(groups, aliases, {entry.model_name: entry.mode for entry in config.model_list})
    fallbacks: Mapping[str, Sequence[str]] = {}
    larger: Mapping[str, Sequence[str]] = {}
    default: Sequence[str] = ()
    errors = ConfigErrors()
    with errors:
        fallbacks = _fallbacks(config, known)
    with errors:
        larger = _larger(config, known)
    with errors:
        default = _default(config, known)
    errors.raise_all()
    found = {
        # The most specific list applies: the model's own, then `*`, then `default_fallbacks`. The lists for all models
        # may name the model itself, and models of other modes.
        model: StandIns(
            tuple(known.suitable(model, fallbacks.get(model, fallbacks.get(ANY, default)))),
            tuple(known.suitable(model, larger.get(model, larger.get(ANY, ())))),
        )
        for model in groups
    }
    return {model: fallback for model, fallback in found.items() if fallback.fallbacks or fallback.larger}


@dataclass(frozen=True, slots=True)
class _Names:
    groups: Sequence[str]
    aliases: Mapping[str, str]
    modes: Mapping[str, ModelMode]

    def suitable(self, model: str, names: Iterable[str]) -> Iterator[str]:
        """Yield the names that can stand in for a model."""
        return (name for name in names if name != model and self.modes[name] is self.modes[model])

    def resolve(self, name: str, path: str) -> str:
        model = self.aliases.get(name, name)
        if model not in self.groups:
            raise ConfigError(f"{path}: unknown model `{name}`; use a `model_name` from `model_list`")
        return model

    def read(self, rows: FallbackList, path: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for index, row in enumerate(rows):
            for model, names in row.items():
                entry_path = f"{path}[{index}].{model}"
                targets = [self.resolve(name, f"{entry_path}[{at}]") for at, name in enumerate(names)]
                # An alias and its model have one list, so a list under each of the two names is a contradiction.
                origin = model if model == ANY else self.resolve(model, entry_path)
                for at, target in enumerate(targets):
                    if origin != ANY and self.modes[target] is not self.modes[origin]:
                        raise ConfigError(
                            f"{entry_path}[{at}]: `{target}` has the mode `{self.modes[target]}` and cannot stand in "
                            f"for a model of the mode `{self.modes[origin]}`; remove it"
                        )
                if origin in found:
                    raise ConfigError(
                        f"{entry_path}: a second list for the model `{origin}`; merge it into the first one"
                    )
                found[origin] = targets
        return found


def _sections(config: Config) -> tuple[tuple[str, Fallbacks], ...]:
    """Sections that may contain the lists; the first one with a list wins."""
    return ("router_settings", config.router_settings), ("litellm_settings", config.litellm_settings)


def _fallbacks(config: Config, known: _Names) -> dict[str, list[str]]:
    for section, settings in _sections(config):
        if settings.fallbacks is not None:
            return known.read(settings.fallbacks, f"{section}.fallbacks")
    return {}


def _larger(config: Config, known: _Names) -> dict[str, list[str]]:
    for section, settings in _sections(config):
        if settings.context_window_fallbacks is not None:
            return known.read(settings.context_window_fallbacks, f"{section}.context_window_fallbacks")
    return {}


def _default(config: Config, known: _Names) -> list[str]:
    for section, settings in _sections(config):
        if settings.default_fallbacks is not None:
            path = f"{section}.default_fallbacks"
            return [known.resolve(name, f"{path}[{at}]") for at, name in enumerate(settings.default_fallbacks)]
    return []
