"""Deployments that may answer a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

from unisono.core.fallback_models import NO_FALLBACK_MODELS, FallbackModels
from unisono.core.route_protocol import NO_ROUTING, RequestedRouting
from unisono.engine.request import GenerationRequest

# Maximum number of cached results. The limit is necessary because clients choose the routing fields in the cache keys.
CACHED_SELECTIONS: Final = 1024


class EligibleDeployments:
    """Function that returns the names of all deployments that may answer a request.

    `deployments(model, requested)` returns the names of the deployments of `model` that a request with these routing
    fields may use. `fallback_models` contains the configured fallbacks of each model. The deployments of a request's
    fallback models may answer too.
    """

    def __init__(
        self,
        deployments: Callable[[str, RequestedRouting], frozenset[str]],
        fallback_models: Mapping[str, FallbackModels],
    ) -> None:
        self._deployments = deployments
        self._fallback_models = fallback_models
        self._cached = lru_cache(CACHED_SELECTIONS)(self._select)

    def __call__(self, request: GenerationRequest) -> frozenset[str]:
        caller = request.origin.caller
        return self._cached(request.model, NO_ROUTING if caller is None else caller.routing)

    def _select(self, model: str, requested: RequestedRouting) -> frozenset[str]:
        others = self._fallback_models.get(model, NO_FALLBACK_MODELS).for_request(model, requested)
        models = (model, *others.fallbacks, *others.larger)
        return frozenset[str]().union(*(self._deployments(each, requested) for each in models))
