"""Route tables of the HTTP API, built once per process, and the routes of requests.

A module has one table for each of its APIs. Endpoints are functions that read their dependencies from the state of the
application. FastAPI caches every endpoint, so an endpoint that is a closure would keep the old gateway in memory after
a reload. `direct` endpoints do not use FastAPI, whose handler takes about 70 us (version 0.165, two cores). The first
request to any other route imports FastAPI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_origin, get_type_hints

from pydantic import BaseModel
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from fastapi.routing import APIRoute
    from starlette.datastructures import State


EVENTS = "text/event-stream"
PREFIXES = ("/v1", "")
# Error statuses in the OpenAPI document, by the kind of operation. The end of a name says which statuses are added.
READ_ERRORS = (400, 401, 403, 503)  # any request with a key; 503 if the store is unavailable
READ_404 = (*READ_ERRORS, 404)
READ_404_409 = (*READ_404, 409)
BODY_ERRORS = (*READ_ERRORS, 408, 413, 415)  # a body may be slow, too large, or not JSON
BODY_404_409 = (*BODY_ERRORS, 404, 409)
MODEL_CALL_ERRORS = (*BODY_404_409, 429, 502, 504)

# Response headers that name the backend and the recoveries of an answer.
ANSWER_HEADERS = (
    "x-unisono-backend",
    "x-unisono-model",
    "x-unisono-served-model",
    "x-unisono-failovers",
    "x-unisono-recoveries",
    "x-unisono-notes",
)
# The layer `Authentication` checks the key before any route. FastAPI's security dependencies would take another 50 us.
KEYS: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}, {"azure": []}]

NO_MATCH: tuple[Match, Scope] = (Match.NONE, {})
Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Any]])
Kind = TypeVar("Kind")


class GatewayRoute(Route):
    """Route whose FastAPI route is built on first use.

    FastAPI builds the models of a route when the route is created, which took a quarter of the gateway's startup. Here
    the models are built for the first request or for the OpenAPI document. `body` and `events` are the models of the
    request body and of the events; only the document uses them, not the handler. A `body` of the type `Model | None` is
    optional. A `direct` endpoint parses its request and writes its response itself, without FastAPI's handler.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        methods: Sequence[str],
        body: type[BaseModel] | UnionType | None = None,
        events: type[BaseModel] | None = None,
        direct: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(path, endpoint)
        self.methods = {*methods}
        self.is_direct = direct
        self._body, self._events, self._options = body, events, options
        self._start = _literal_start(path)
        self._app: ASGIApp | None = None
        if not direct:
            self.app = self._run_described

    @cached_property
    def described(self) -> APIRoute:
        """FastAPI's route, with the docstring of the endpoint as its summary."""
        from fastapi import params
        from fastapi.routing import APIRoute
        from fastapi.utils import create_model_field

        route = APIRoute(self.path, self.endpoint, methods=self.methods, **self._options)
        route.summary, route.description = " ".join((self.endpoint.__doc__ or "").split()), ""
        # These fields are set after the handler was built, so the handler reads no body.
        if self._body is not None:
            info = params.Body(... if isinstance(self._body, type) else None, annotation=self._body)
            route.body_field = create_model_field("body", self._body, field_info=info)
        if self._events is not None:
            route.stream_item_field = create_model_field("event", self._events, mode="serialization")
        return route

    @property
    def body_model(self) -> type[BaseModel]:
        declared: Any = self._body
        model: type[BaseModel] = declared.__args__[0] if self.has_optional_body else declared
        return model

    @property
    def has_optional_body(self) -> bool:
        return isinstance(self._body, UnionType)

    @cached_property
    def query_parameters(self) -> frozenset[str]:
        """Names of the query parameters that the endpoint declares, also in a model."""
        from fastapi import params

        names: set[str] = set()
        for name, hint in get_type_hints(self.endpoint, include_extras=True).items():
            if get_origin(hint) is Annotated and any(isinstance(each, params.Query) for each in hint.__metadata__):
                kind = hint.__origin__
                names |= {*kind.model_fields} if isinstance(kind, type) and issubclass(kind, BaseModel) else {name}
        return frozenset(names)

    async def _run_described(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            # In a thread, because the first route also imports `pydantic.v1`, which takes 0.1 s.
            self._app = (await asyncio.to_thread(lambda: self.described)).app
        await self._app(scope, receive, send)

    def prepare(self) -> None:
        """Build the model with which a `direct` endpoint parses bodies."""
        if self.is_direct and isinstance(self._body, type):
            self._body.model_rebuild()

    def alias(self, path: str, methods: Iterable[str]) -> GatewayRoute:
        """Return a copy of this route with a different path and methods, which the document omits."""
        route = copy(self)
        route.path, route.methods, route.include_in_schema = path, {*methods}, False
        route.path_regex, route.path_format, route.param_convertors = compile_path(path)
        route._start = _literal_start(path)
        return route

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # The application tries every route in turn, and Starlette's matching takes 1 us per route. This comparison
        # excludes most routes faster.
        if not scope["path"].startswith(self._start):
            return NO_MATCH
        match, found = super().matches(scope)
        return match, {**found, "route": self}


class RouteTable:
    """Routes of one API under each of `prefixes`. The OpenAPI document has only the first one.

    `failure` selects the error format in the document: `Failure` is OpenAI's, `MessagesFailure` is Anthropic's, and
    with `ModelsFailure`, the header `anthropic-version` selects one of the two. `suffix` is appended to the names of
    the operations.
    """

    def __init__(
        self, tag: str, *, prefixes: Sequence[str] = PREFIXES, failure: str = "Failure", suffix: str = ""
    ) -> None:
        self.routes: list[BaseRoute] = []
        self._tag = tag
        self._prefixes = prefixes
        self._failure = failure
        self._suffix = suffix

    def add(
        self,
        method: str,
        path: str,
        failures: Collection[int] = READ_ERRORS,
        *,
        answer: Any = None,
        headers: Collection[str] = (),
        links: Collection[str] = (),
        needs_key: bool = True,
        events: type[BaseModel] | None = None,
        responses: Mapping[int | str, dict[str, Any]] | None = None,
        parameters: Sequence[dict[str, Any]] = (),
        **options: Any,
    ) -> Callable[[Endpoint], Endpoint]:
        """Return the decorator that adds an endpoint.

        `failures` are the possible error statuses. `answer` is the model of a successful answer, for an endpoint whose
        return type is not this model. Each entry of `links` has the name of an operation, a blank, and the parameter of
        this operation that accepts the id in the answer. `parameters` describes the query parameters and headers that a
        `direct` endpoint reads.
        """
        if answer is not None:
            options["response_model"] = answer
        described: dict[int | str, dict[str, Any]] = {200: self._success(headers, links, events), **(responses or {})}
        for status in sorted(failures):
            described[status] = {"$ref": f"#/components/responses/{self._failure}{status}"}

        def added(endpoint: Endpoint) -> Endpoint:
            route = GatewayRoute(
                self._prefixes[0] + path,
                endpoint,
                methods=[method],
                operation_id=_camel_case(endpoint.__name__) + self._suffix,
                tags=[self._tag],
                openapi_extra={"security": KEYS if needs_key else [], "parameters": [*parameters]},
                response_description="Success.",
                responses=described,
                events=events,
                **options,
            )
            self._append(route, path, method)
            return endpoint

        return added

    def add_model_call(self, path: str, *, answer: Any, **options: Any) -> Callable[[Endpoint], Endpoint]:
        """Return a decorator that adds a `direct` endpoint for requests to a model; see `add`."""
        return self.add("POST", path, MODEL_CALL_ERRORS, answer=answer, headers=ANSWER_HEADERS, direct=True, **options)

    def _success(
        self, headers: Collection[str], links: Collection[str], events: type[BaseModel] | None
    ) -> dict[str, Any]:
        success: dict[str, Any] = {"headers": header_refs(("x-request-id", *headers))}
        if events is not None:
            # The event schema is for human readers: OpenAPI 3.1 has no field for it.
            success["content"] = {EVENTS: {"x-event-schema": {"$ref": f"#/components/schemas/{events.__name__}"}}}
        if links:
            success["links"] = dict(map(self._link, links))
        return success

    def _append(self, route: GatewayRoute, path: str, method: str) -> None:
        methods = (method, "HEAD") if method == "GET" else (method,)
        self.routes.append(route)
        # HTTP requires HEAD wherever GET is supported (RFC 9110).
        if method == "GET":
            self.routes.append(route.alias(route.path, ["HEAD"]))
        self.routes.extend(route.alias(prefix + path, methods) for prefix in self._prefixes[1:])

    def add_websocket(self, path: str, endpoint: Callable[..., Any]) -> None:
        self.routes.extend(WebSocketRoute(prefix + path, endpoint) for prefix in self._prefixes)

    def _link(self, link: str) -> tuple[str, dict[str, Any]]:
        name, parameter = link.split()
        name += self._suffix
        return name, {"operationId": name, "parameters": {parameter: "$response.body#/id"}}


def _literal_start(path: str) -> str:
    """Return the part of a path template before its first parameter."""
    return path.partition("{")[0]


def _camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def keep_properties(names: Collection[str], schema: dict[str, Any]) -> None:
    """Remove all properties except `names` from a schema, as `json_schema_extra` of a model."""
    schema["properties"] = {name: each for name, each in schema["properties"].items() if name in names}


def header_refs(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def prepare_routes(routes: Iterable[BaseRoute]) -> None:
    """Build the body models of `direct` endpoints, so that the first requests need not wait."""
    for route in routes:
        # Aliases share the models of their route.
        if isinstance(route, GatewayRoute) and route.include_in_schema:
            route.prepare()


def provide(state: State, *dependencies: object) -> None:
    """Put the objects that endpoints need into the state of the application."""
    for each in dependencies:
        setattr(state, type(each).__name__, each)


def find_dependency(state: State, kind: type[Kind]) -> Kind:
    """Return the object of `kind` that was passed to `provide`."""
    found: Kind = getattr(state, kind.__name__)
    return found


def dependency(connection: HTTPConnection, kind: type[Kind]) -> Kind:
    """Return the object of `kind` in the state of the application that answers `connection`."""
    return find_dependency(connection.scope["app"].state, kind)


# Other ASGI scopes, such as `lifespan`, have no headers and pass through the layers.
REQUESTS = frozenset({"http", "websocket"})


def route_of(scope: Scope) -> str:
    """Return the path template of the route that answered, or "" if there is none."""
    return str(getattr(scope.get("route"), "path", ""))


def all_methods(scope: Scope) -> list[str]:
    """Return the methods of all routes of the application."""
    routes = getattr(scope.get("app"), "routes", ())
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


def has_endpoint(scope: Scope) -> bool:
    """Return True if the application has a route for the path and the method of a request."""
    return any(route.matches(scope)[0] is Match.FULL for route in getattr(scope.get("app"), "routes", ()))


def requested_route(scope: Scope) -> str:
    """Return the path template that matches a request which a layer refused, "" if none matches."""
    for route in getattr(scope.get("app"), "routes", ()):
        if route.matches(scope)[0] is not Match.NONE:
            return str(getattr(route, "path", ""))
    return ""
