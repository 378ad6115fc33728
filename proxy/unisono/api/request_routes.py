"""ASGI scopes that are requests, and their path templates."""

from __future__ import annotations

from starlette.routing import Match
from starlette.types import Scope

# Other ASGI scopes, such as `lifespan`, have no headers and pass through the layers.
REQUESTS = frozenset({"http", "websocket"})


def route_of(scope: Scope) -> str:
    """Return the path template of the route that answered, or "" if there is none."""
    return str(getattr(scope.get("route"), "path", ""))


def requested_route(scope: Scope) -> str:
    """Return the path template for a request that a layer refused, "" if there is none."""
    for route in getattr(scope.get("app"), "routes", ()):
        if route.matches(scope)[0] is not Match.NONE:
            return str(getattr(route, "path", ""))
    return ""
