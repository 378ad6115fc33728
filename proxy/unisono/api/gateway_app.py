"""Application that passes HTTP requests directly to the gateway's own ASGI layers."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

# Packages whose layers surround the application's own layers.
FRAMEWORKS: Final = frozenset({"fastapi", "starlette"})


class GatewayApp(FastAPI):
    """FastAPI application that passes HTTP requests to the first layer of its own.

    FastAPI and Starlette surround these layers with others, which answer exceptions, limit bodies and record telemetry.
    Here, `ErrorResponses` answers exceptions and `BodyLimits` limits bodies. The server answers an exception that is
    raised outside of `ErrorResponses`. If the process has configured OpenTelemetry before the first request, requests
    pass through all layers.
    """

    _entrance: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if self._entrance is None:
            # The attribute is private: other versions of FastAPI may lack it.
            telemetry: Any = getattr(self, "_native_telemetry", None)
            should_run_all = telemetry is None or telemetry.enabled()
            self._entrance = super().__call__ if should_run_all else self._first_own_layer()
        scope["app"] = self
        await self._entrance(scope, receive, send)

    def _first_own_layer(self) -> ASGIApp:
        """Return the outermost layer from another package, such as that of an instrumentation."""
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        layer: Any = self.middleware_stack
        while type(layer).__module__.partition(".")[0] in FRAMEWORKS:
            layer = layer.app
        first: ASGIApp = layer
        return first
