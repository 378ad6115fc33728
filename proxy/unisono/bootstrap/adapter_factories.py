"""Factories of backends by kind: adapters of this and other packages, found by entry points.

Part of the composition root. An entry that is not Harmony gets an adapter that answers in the OpenAI API. An entry of
another provider uses litellm, which is loaded on the first request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

from unisono.config import KIND_ALIASES, KINDS, Config, ModelEntry
from unisono.core.ports import BackendOptions, Endpoint
from unisono.errors import ConfigError

# Entry-point group of Harmony adapters.
BACKENDS = "unisono.backends"
# Entry-point group of pass-through adapters.
PASSING = "unisono.passing"

Factory = Callable[[BackendOptions], Endpoint]


class Factories:
    """Adapters by kind, imported when a model first needs them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._found = _installed(BACKENDS)
        self._passthrough = _installed(PASSING)

    def factory_for(self, entry: ModelEntry, path: str) -> Factory:
        """Return the factory for an entry. Raises ConfigError that names the alternatives."""
        path = f"{path}.litellm_params.model"
        if entry.by_litellm:
            return self._provider(entry, path)
        kinds = ", ".join(sorted(self._found))
        model = entry.litellm_params.model
        if not entry.kind or not entry.backend_model:
            raise ConfigError(f"{path}: must be `<backend kind>/<model>`, not `{model}`; kinds: {kinds}")
        if entry.kind not in self._found:
            why = (
                f"no adapter is installed for the backend kind `{entry.kind}`"
                if entry.kind in KINDS
                else f"unknown backend kind `{entry.kind}`, so the model cannot be served as Harmony"
            )
            raise ConfigError(f"{path}: {why}; kinds: {kinds} (and {', '.join(KIND_ALIASES)})")
        if not entry.harmony and entry.kind not in self._passthrough:
            raise ConfigError(
                f"{path}: neither `{entry.model_name}` nor `{model}` contains gpt-oss, and `{entry.kind}` serves only "
                "Harmony models; if this is one, set `model_info: {harmony: true}`"
            )
        try:
            factory: Factory = (self._found if entry.harmony else self._passthrough)[entry.kind].load()
        except ImportError as error:
            raise ConfigError(
                f"{path}: the adapter for `{entry.kind}` cannot be imported: {error}; an extra may be missing (for "
                "`mlx`, run `pip install 'unisono[mlx]'`)"
            ) from error
        return factory

    def _provider(self, entry: ModelEntry, path: str) -> Factory:
        """Return the litellm factory; raises ConfigError if litellm is not installed."""
        model = entry.litellm_params.model
        # The import of litellm takes seconds, so only its presence is checked here.
        if find_spec("litellm") is None:
            hint = f" Or {entry.harmony_hint}." if entry.harmony_hint else ""
            kinds = ", ".join(sorted(self._found))
            raise ConfigError(
                f"{path}: `{entry.kind}` is not a backend kind of Unisono ({kinds}), and litellm, which serves other "
                f"providers, is not installed; run `pip install 'unisono[litellm]'`.{hint}"
            )
        from unisono.passthrough.providers import LitellmProvider

        settings = provider_settings(entry, self._config)
        return lambda options: LitellmProvider(replace(options, model=model), **settings)


def provider_settings(entry: ModelEntry, config: Config) -> dict[str, Any]:
    """Return litellm's settings for an entry, besides its address; empty for any other entry."""
    if not entry.by_litellm:
        return {}
    return {
        "params": entry.litellm_params.provider,
        "drop_params": config.litellm_settings.drop_params,
        "environment": {name: value.get_secret_value() for name, value in config.environment_variables.items()},
    }


def _installed(group: str) -> dict[str, EntryPoint]:
    # Listing entry points imports no adapter. An installed adapter with missing libraries does no harm until a model
    # uses it.
    return {point.name: point for point in entry_points(group=group)}
