"""Addresses of servers and stores in the configuration."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from unisono.net.special_addresses import loopback_address

# API routes that users append to `api_base` by mistake, the longest first.
ROUTES: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/models"),
    *("/chat/completions", "/api/generate", "/api/chat", "/api/tags", "/completions", "/completion", "/embeddings"),
    *("/generate",),
)

SUPPORTED_STORES: Final = (
    "sqlite:///path, memory://, redis://host:6379/0, redis+sentinel://hosts/name or redis+cluster://hosts"
)


# Form of origins that browsers send. Browsers omit the path, and the default port of the scheme.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#*@\sA-Z]+")
_DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")


def without_route(address: str) -> tuple[str, str]:
    """Split an address into the address of the server and the API route at its end.

    The route is empty if the address does not end in a route.
    """
    plain = address.strip()
    lowered = plain.lower().rstrip("/")
    route = next((route for route in ROUTES if lowered.endswith(route)), "")
    return (plain.rstrip("/")[: -len(route)], route) if route else (plain, "")


def check_http_url(url: str, example: str) -> None:
    """Raise ValueError if `url` is not an http or https URL with a host.

    The error message contains `example`, a valid URL.
    """
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and " " not in url
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"must be an http or https URL, such as {example}")


def check_origin(origin: str) -> str:
    """Return `origin`. Raises ValueError if no browser sends an origin in this form."""
    if not _ORIGIN.fullmatch(origin) or _DEFAULT_PORT.fullmatch(origin):
        raise ValueError(
            "must be `*` or an origin as browsers send it, such as https://app.example.com: scheme and host in lower "
            "case, no path, and no default port"
        )
    return origin


def check_listener(address: str) -> str:
    """Return `address`. Raises ValueError if it is not `host:port` with a loopback host."""
    loopback_address(address)
    return address
