"""Application whose own ASGI layers receive each request first."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

# Packages whose layers surround those of the application.
FRAMEWORKS: Final = frozenset({"fastapi", "starlette"})


class GatewayApp(FastAPI):
    """FastAPI application that passes a request to its first own layer.

    FastAPI and Starlette surround the layers with others, which answer exceptions, limit bodies and record telemetry.
    `ErrorResponses` and `BodyLimits` do the first two here, and the server answers an exception outside of them. If the
    process has configured OpenTelemetry before the first request, requests pass through all layers.
    """

    _entrance: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if self._entrance is None:
            # Unknown versions of FastAPI may lack the attribute.
            telemetry: Any = getattr(self, "_native_telemetry", None)
            needs_all = telemetry is None or telemetry.enabled()
            self._entrance = super().__call__ if needs_all else self._first_own_layer()
        scope["app"] = self
        await self._entrance(scope, receive, send)

    def _first_own_layer(self) -> ASGIApp:
        """Return the first layer that is not of the frameworks, such as one of an instrumentation."""
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        layer: Any = self.middleware_stack
        while type(layer).__module__.partition(".")[0] in FRAMEWORKS:
            layer = layer.app
        first: ASGIApp = layer
        return first
