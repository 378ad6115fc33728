"""Fallback models of each model, from the lists in the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from unisono.config.root_config import Config
from unisono.config.router_settings import FallbackList, Fallbacks
from unisono.core.fallback_models import FallbackModels
from unisono.core.frozen import dataclass
from unisono.core.passthrough_request import ModelMode
from unisono.errors import ConfigError, ConfigErrors

ANY: Final = "*"
"""Key in a list of fallback models that means every model without a list of its own."""


def fallback_models(config: Config, groups: Sequence[str], aliases: Mapping[str, str]) -> dict[str, FallbackModels]:
    """Return the fallback models of each model that has any, by the name of the model.

    `groups` are the names of all models. Raises ConfigError if a list contains an unknown name, or if a model has two
    lists.
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
        # The most specific list applies: the model's own, then that of `*`, then `default_fallbacks`. The last two may
        # contain the model itself and models of other modes, which are left out.
        model: FallbackModels(
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
        """Yield the models in `names` that can be fallback models of `model`.

        A fallback model must be a different model, and have the same mode.
        """
        return (name for name in names if name != model and self.modes[name] is self.modes[model])

    def resolve(self, name: str, path: str) -> str:
        model = self.aliases.get(name, name)
        if model not in self.groups:
            raise ConfigError(f"{path}: unknown model `{name}`; use a `model_name` from `model_list`")
        return model

    def resolve_all(self, names: Sequence[str], path: str) -> list[str]:
        """Return the models of a list of names. Raises one ConfigError for all unknown names."""
        found, errors = [], ConfigErrors()
        for at, name in enumerate(names):
            with errors:
                found.append(self.resolve(name, f"{path}[{at}]"))
        errors.raise_all()
        return found

    def read(self, rows: FallbackList, path: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        errors = ConfigErrors()
        for index, row in enumerate(rows):
            for model, names in row.items():
                with errors:
                    self._add(found, model, names, f"{path}[{index}].{model}")
        errors.raise_all()
        return found

    def _add(self, found: dict[str, list[str]], model: str, names: Sequence[str], path: str) -> None:
        """Add the fallback models `names` of `model` to `found`.

        Raises ConfigError for unknown names, for a fallback model of a different mode, and for a second list for the
        same model.
        """
        targets: list[str] = []
        origin, errors = ANY, ConfigErrors()
        with errors:
            targets = self.resolve_all(names, path)
        with errors:
            # A model can have a list under its name or under an alias, but not under both.
            origin = model if model == ANY else self.resolve(model, path)
        errors.raise_all()
        for at, target in enumerate(targets):
            if origin != ANY and self.modes[target] is not self.modes[origin]:
                raise ConfigError(
                    f"{path}[{at}]: `{target}` has the mode `{self.modes[target]}` and cannot replace a model of the "
                    f"mode `{self.modes[origin]}`; remove `{target}` from the list"
                )
        if origin in found:
            raise ConfigError(f"{path}: this is a second list for the model `{origin}`; merge the two lists")
        found[origin] = targets


def _sections(config: Config) -> tuple[tuple[str, Fallbacks], ...]:
    """Return the sections that may contain lists of fallback models, each with its name.

    The first section takes precedence.
    """
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
            return known.resolve_all(settings.default_fallbacks, f"{section}.default_fallbacks")
    return []
