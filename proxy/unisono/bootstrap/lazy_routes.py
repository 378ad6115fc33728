"""Routes of the APIs that are imported only on their first request.

These are all APIs except Chat Completions. Importing all of them at startup would take a fifth of the time of all
imports, and 6 MB of memory. Many gateways serve only one API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from starlette.datastructures import State
from starlette.routing import BaseRoute

from unisono.api.layered_app import LazyRoutes
from unisono.api.route_table import PREFIXES, prepare_routes
from unisono.bootstrap.api_parts import ApiParts

# Paths, or beginnings of paths, without the prefix of the API version.
OTHER_PATHS = (
    *("/completions", "/embeddings", "/rerank", "/score", "/moderations", "/images/generations", "/audio/speech"),
    *("/audio/transcriptions", "/audio/translations"),
)


def lazy_routes(parts: ApiParts) -> list[LazyRoutes]:
    """Return the paths of each API except Chat Completions, and the importer of its routes."""
    return [
        LazyRoutes((*_paths("/responses"), "/open-responses/"), partial(_prepared, _responses, parts)),
        LazyRoutes(_paths("/messages"), partial(_prepared, _messages, parts)),
        LazyRoutes((*_paths(*OTHER_PATHS), "/v2/rerank"), partial(_prepared, _others, parts)),
    ]


def _paths(*paths: str) -> tuple[str, ...]:
    return tuple(prefix + path for prefix in PREFIXES for path in paths)


def _prepared(
    load: Callable[[ApiParts, State], Sequence[BaseRoute]], parts: ApiParts, state: State
) -> Sequence[BaseRoute]:
    routes = load(parts, state)
    prepare_routes(routes)
    return routes


def _responses(parts: ApiParts, state: State) -> Sequence[BaseRoute]:
    from unisono.bootstrap.responses_api import responses_routes

    return responses_routes(parts, state)


def _messages(parts: ApiParts, state: State) -> Sequence[BaseRoute]:
    from unisono.bootstrap.messages_api import messages_routes

    return messages_routes(parts, state)


def _others(parts: ApiParts, state: State) -> Sequence[BaseRoute]:
    from unisono.bootstrap.other_apis import other_routes

    return other_routes(parts, state)
