"""Fallback models of one model, and those that apply to a request."""

from __future__ import annotations

from typing import Final

from unisono.core.frozen import dataclass
from unisono.core.route_protocol import RequestedRouting


@dataclass(frozen=True, slots=True)
class FallbackModels:
    """Fallback models of one model, in the order in which they are tried.

    `fallbacks` are tried if the model's own backends have failed or have no free slot. `larger` are tried if the prompt
    is too long for the model's own backends.
    """

    fallbacks: tuple[str, ...] = ()
    larger: tuple[str, ...] = ()

    def for_request(self, model: str, requested: RequestedRouting) -> FallbackModels:
        """Return the fallback models for a request for `model`.

        If the request names fallback models, they replace the configured `fallbacks`. There are no fallback models if
        the request forbids them or names a deployment.
        """
        if requested.no_fallbacks or requested.deployment:
            return NO_FALLBACK_MODELS
        if requested.fallbacks is None:
            return self
        return FallbackModels(tuple(name for name in requested.fallbacks if name != model), self.larger)


NO_FALLBACK_MODELS: Final = FallbackModels()
