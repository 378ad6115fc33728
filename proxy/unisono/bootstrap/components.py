"""Construction of the components that can detect errors in the configuration."""

from __future__ import annotations

from unisono.bootstrap.deployments import build_pool
from unisono.bootstrap.gateway_parts import Parts, build_parts
from unisono.bootstrap.hooks import Hookset, build_hooks
from unisono.bootstrap.models import Rules, rules_by_model
from unisono.bootstrap.stored_models import StoredModels
from unisono.config import Config, ModelRegistry
from unisono.errors import ConfigErrors
from unisono.routing.pool import RoutingPool


def build_components(
    config: Config, old_parts: Parts | None, old_pool: RoutingPool | None, share: int, models: StoredModels
) -> tuple[Parts, Hookset, ModelRegistry, Rules, RoutingPool]:
    """Build the components, or reuse those of the old gateway that are unchanged.

    `share` is the number of processes, by which limits are divided. Raises ConfigError with the errors of all
    components.
    """
    parts, errors = None, ConfigErrors()
    with errors:
        parts = build_parts(config, old_parts, share)
    with errors:
        hooks = build_hooks(config, None if parts is None else parts.observing.hook_failed)
    with errors:
        catalogue = ModelRegistry(config)
        rules = rules_by_model(catalogue)
        pool = build_pool(
            config, catalogue, share=share, keep=old_pool, drained=models.drained, on_trial=models.settings
        )
    errors.raise_all()
    assert parts is not None
    return parts, hooks, catalogue, rules, pool
