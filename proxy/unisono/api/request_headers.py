"""Headers of a request, read once for all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from starlette.types import Scope

# Key in the scope for the request's headers, grouped by name.
HEADERS: Final = "unisono.headers"


# Headers of a request: values by name in lower case, in order.
RequestHeaders: TypeAlias = Mapping[bytes, list[str]]


def request_headers(scope: Scope) -> RequestHeaders:
    """Return the values of a request's headers by name. ASGI servers send names in lower case."""
    headers: dict[bytes, list[str]] | None = scope.get(HEADERS)
    if headers is None:
        # Nearly all layers look for headers, so the list is read once.
        headers = scope[HEADERS] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value.decode("latin-1"))
    return headers


def header_values(scope: Scope, name: bytes) -> Sequence[str]:
    """Return all values of the header `name` (in lower case), in order."""
    return request_headers(scope).get(name, ())
