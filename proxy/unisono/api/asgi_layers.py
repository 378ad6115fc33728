"""ASGI layers that check a request before any route receives it.

Each layer raises a `UnisonoError`; `ErrorResponses`, outside of them, answers. `asgi_layers` returns the layers in
order. Decisions use the raw `scope["path"]` and raw headers, never a URL built from a Host header. A layer adds no cost
per streamed event, except for the request id header on the first. A layer that waits for nothing is a plain function
that returns the awaitable of the next layer, which saves a frame whenever the request continues.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Sequence
from ipaddress import ip_address
from time import monotonic, time
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unisono.access.failed_authentications import FailedAuthentications
from unisono.api.authentication import Authenticate, Authentication
from unisono.api.body_limits import (
    BODY_DEADLINE_S,
    MAX_BODY_BYTES,
    BodyLimits,
    RequestHeaders,
    header_values,
    request_headers,
)
from unisono.api.caller_options import NO_RULES, REQUESTED_MODEL, RequestRules
from unisono.api.end_user_fields import END_USER
from unisono.api.error_responses import CLIENT_CLOSED_REQUEST, ERROR_CODE, FORMAT, ErrorResponses, Formats, format_at
from unisono.api.request_notes import HEADER_NOTES, MAX_HEADER_FIELDS, NOTES, noted_fields
from unisono.api.request_routes import REQUESTS, requested_route, route_of
from unisono.core.access import Caller
from unisono.core.observer import GenerationDone
from unisono.core.request_record import GENERATIONS, MAX_ENTRIES, MAX_VALUE_LENGTH, RecordSink, RequestRecord
from unisono.core.trace_context import ARRIVED, TraceContext
from unisono.errors import NotAllowed
from unisono.net.client_networks import client_address

HEALTH_PATHS = frozenset({"/health/liveliness", "/health/liveness", "/health/readiness", "/ping"})
# Headers that a web page may read.
EXPOSED = "x-request-id, request-id, x-unisono-backend, x-unisono-model, x-unisono-served-model, x-unisono-recoveries, "
EXPOSED += "x-unisono-notes"
# ASGI messages that carry the response headers.
ANSWERS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})

# Status of a WebSocket.
SWITCHED = 101
# Caller of a request without a valid key.
NOBODY = Caller("")


class RequestIds:
    """Layer that gives every request an id.

    The id is in `scope["state"]["request_id"]` and in the response header `x-request-id`. The layer also selects the
    error format from `formats`, sets the trace context of the request, and hands its record to `sinks` when it ends.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        new_id: Callable[[], str],
        sinks: Sequence[RecordSink] = (),
        formats: Formats = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._new_id = new_id
        self._sinks = tuple(sinks)
        self._formats = formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in REQUESTS:
            await self._app(scope, receive, send)
            return
        request_id = f"req_{self._new_id()}"
        state, headers_in = scope.setdefault("state", {}), request_headers(scope)
        state["request_id"] = request_id
        failure_format = state[FORMAT] = format_at(scope["path"], self._formats, headers_in)
        other_name = failure_format.id_header.encode()
        id_headers = (b"x-request-id", other_name) if other_name else (b"x-request-id",)
        at, started_at, status = time(), monotonic(), CLIENT_CLOSED_REQUEST
        generations: list[GenerationDone] = []

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] in ANSWERS:
                status = message.get("status", SWITCHED)
                # Records and logs have this id, so one that a route has set is replaced.
                headers = [header for header in message.get("headers", ()) if header[0] not in id_headers]
                headers += [(name, request_id.encode()) for name in id_headers]
                if fields := _noted(state):
                    headers.append((b"x-unisono-notes", ", ".join(fields[:MAX_HEADER_FIELDS]).encode("latin-1")))
                message["headers"] = headers
            await send(message)

        arrived = ARRIVED.set(trace_of(headers_in))
        collected = GENERATIONS.set(generations if scope["type"] == "http" else None)
        try:
            await self._app(scope, receive, named)
        finally:
            # Receivers of the record read the trace and the generations of the request.
            if self._sinks:
                record = _record(scope, at, monotonic() - started_at, status).with_generations(generations)
                for sink in self._sinks:
                    sink(record)
            ARRIVED.reset(arrived)
            GENERATIONS.reset(collected)


def _record(scope: Scope, at: float, duration_s: float, status: int) -> RequestRecord:
    """Return the record of a request without the facts of its generations."""
    state = scope["state"]
    caller: Caller = state.get("caller", NOBODY)
    return RequestRecord(
        id=state["request_id"],
        at=at,
        duration_s=duration_s,
        method=scope.get("method", "GET"),
        route=route_of(scope) or requested_route(scope),
        status=status,
        error=state.get(ERROR_CODE, ""),
        tenant=caller.tenant,
        key=caller.key,
        key_name=caller.key_name,
        user=state.get(END_USER, "")[:MAX_VALUE_LENGTH],
        model=state.get(REQUESTED_MODEL, "")[:MAX_VALUE_LENGTH],
        notes=tuple(_noted(state)[:MAX_ENTRIES]),
    )


def _noted(state: Mapping[str, Any]) -> list[str]:
    """Return the fields and headers without effect of the request with this state."""
    notes = (*state.get(NOTES, ()), *state.get(HEADER_NOTES, ()))
    return noted_fields(notes) if notes else []


def trace_of(headers: RequestHeaders) -> TraceContext | None:
    """Return the trace context that the client sent."""
    parents = headers.get(b"traceparent", ())
    return TraceContext.read(parents[0], ",".join(headers.get(b"tracestate", ()))) if len(parents) == 1 else None


class Cors:
    """Layer that lets listed origins read responses and send preflights."""

    def __init__(self, app: ASGIApp, *, origins: Collection[str] = ()) -> None:
        self._app = app
        self._allowed_origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = header_values(scope, b"origin") if scope["type"] == "http" else ()
        if len(origins) != 1 or self._allowed_origins.isdisjoint((origins[0], "*")):
            await self._app(scope, receive, send)
            return
        origin = origins[0]
        requested_methods = header_values(scope, b"access-control-request-method")
        if scope["method"] == "OPTIONS" and requested_methods:
            await self._preflight(scope, origin, send)
            return

        async def shared(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["access-control-allow-origin"] = origin
                headers["access-control-expose-headers"] = EXPOSED
                headers.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, shared)

    @staticmethod
    async def _preflight(scope: Scope, origin: str, send: Send) -> None:
        # SDKs in browsers add headers of their own (x-stainless-*): a listed origin may send any.
        requested_headers = ", ".join(header_values(scope, b"access-control-request-headers"))
        headers = [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (
                b"access-control-allow-headers",
                (requested_headers or "authorization, content-type, x-api-key, api-key").encode("latin-1"),
            ),
            (b"access-control-max-age", b"600"),
            (b"vary", b"Origin, Access-Control-Request-Headers"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


class LocalOnly:
    """Layer that restricts a gateway without keys to this machine.

    Allows loopback hosts, and only the gateway's own origin or a listed one.
    """

    def __init__(self, app: ASGIApp, *, origins: Collection[str] = ()) -> None:
        self._app = app
        self._allowed_origins = frozenset(origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] in REQUESTS:
            # A web page can send requests to localhost. With DNS rebinding it names its own host; otherwise the browser
            # adds its origin.
            hosts = header_values(scope, b"host")
            if len(hosts) != 1 or not is_loopback(f"//{hosts[0]}"):
                raise NotAllowed(
                    "This gateway has no API key and accepts only requests to localhost: "
                    "set a master key to allow other hosts."
                )
            # Another port of this machine is another origin: any local program may serve a page there.
            own = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
            for origin in header_values(scope, b"origin"):
                if origin not in self._allowed_origins and origin not in own:
                    raise NotAllowed(
                        "This gateway has no API key and refuses requests from other origins: "
                        "set a master key, or list the origin in 'unisono.cors_origins'."
                    )
        return self._app(scope, receive, send)


class AllowedAddresses:
    """Layer that restricts all paths except `open_paths` to clients in `networks`.

    A connection from one of `proxies` has the address of its client in `X-Forwarded-For`.
    """

    def __init__(
        self, app: ASGIApp, *, networks: Container[str], proxies: Container[str], open_paths: Collection[str]
    ) -> None:
        self._app = app
        self._networks = networks
        self._proxies = proxies
        self._open_paths = frozenset(open_paths)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] in REQUESTS and scope["path"] not in self._open_paths and not self._is_allowed(scope):
            raise NotAllowed(
                "This client address may not use the gateway. Its operator can add the address to `allowed_ips`."
            )
        return self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if (client := scope.get("client")) is None:
            return False
        forwarded = header_values(scope, b"x-forwarded-for")
        return client_address(client[0], forwarded, self._proxies) in self._networks


def is_loopback(url: str) -> bool:
    """Return True if a URL's host is a name or address of this machine."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    if not host or parts.username is not None or parts.path not in {"", "/"} or parts.query or parts.fragment:
        return False
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def asgi_layers(
    *,
    authenticate: Authenticate,
    keyless: bool,
    new_id: Callable[[], str],
    origins: Iterable[str] = (),
    open_paths: Collection[str] = HEALTH_PATHS,
    max_body_bytes: int = MAX_BODY_BYTES,
    body_deadline_s: float = BODY_DEADLINE_S,
    max_upload_bytes: int = MAX_BODY_BYTES,
    upload_deadline_s: float = BODY_DEADLINE_S,
    sinks: Sequence[RecordSink] = (),
    formats: Formats = MappingProxyType({}),
    networks: Container[str] | None = None,
    proxies: Container[str] = (),
    rules: RequestRules = NO_RULES,
    failures: FailedAuthentications | None = None,
) -> list[Middleware]:
    """Return every layer in order, outermost first, for `LayeredApp`.

    `keyless` adds the check that a request originates from this machine and names it. `origins` are the web origins
    that CORS allows. `formats` are the error formats of other APIs than OpenAI's. `networks` contains the addresses of
    permitted clients; None for all. `proxies` contains the addresses of trusted proxies. `rules` are the operator's
    rules for requests of models. `sinks` receive the record of each request. `failures` limits requests with invalid
    keys.
    """
    listed = frozenset(origins)
    local = [Middleware(LocalOnly, origins=listed)] if keyless else []
    if networks is not None:
        local.insert(0, Middleware(AllowedAddresses, networks=networks, proxies=proxies, open_paths=open_paths))
    # CORS is outside of the error responses, so that a page can read errors. It precedes the key, because a preflight
    # carries none. No byte of a body is read without a valid key.
    return [
        Middleware(RequestIds, new_id=new_id, sinks=sinks, formats=formats),
        *([Middleware(Cors, origins=listed)] if listed else []),
        Middleware(ErrorResponses),
        *local,
        Middleware(Authentication, authenticate=authenticate, open_paths=open_paths, rules=rules, failures=failures),
        Middleware(
            BodyLimits,
            max_bytes=max_body_bytes,
            deadline_s=body_deadline_s,
            max_upload_bytes=max_upload_bytes,
            upload_deadline_s=upload_deadline_s,
        ),
    ]
