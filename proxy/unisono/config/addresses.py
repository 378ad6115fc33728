"""Addresses of servers and stores in the configuration."""

from __future__ import annotations

from typing import Final

# API routes that users append to `api_base` by mistake, the longest first.
ROUTES: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/models"),
    *("/chat/completions", "/api/generate", "/api/chat", "/api/tags", "/completions", "/completion", "/embeddings"),
    *("/generate",),
)

SUPPORTED_STORES: Final = (
    "sqlite:///path, memory://, redis://host:6379/0, redis+sentinel://hosts/name or redis+cluster://hosts"
)


def without_route(address: str) -> tuple[str, str]:
    """Split an address into the address of the server and the API route at its end.

    The route is empty if the address does not end in a route.
    """
    plain = address.strip()
    lowered = plain.lower().rstrip("/")
    route = next((route for route in ROUTES if lowered.endswith(route)), "")
    return (plain.rstrip("/")[: -len(route)], route) if route else (plain, "")
