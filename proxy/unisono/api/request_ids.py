"""Layer that gives each request an id and a trace context, and sends its record to sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic, time
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unisono.api.caller_options import REQUESTED_MODEL
from unisono.api.end_user_fields import END_USER
from unisono.api.error_responses import CLIENT_CLOSED_REQUEST, ERROR_CODE, FORMAT, Formats, format_at
from unisono.api.json_response import BODY_WRITER, BodyWriter
from unisono.api.request_headers import RequestHeaders, request_headers
from unisono.api.route_table import REQUESTS, requested_route, route_of
from unisono.api.unused_fields import HEADER_NOTES, MAX_HEADER_FIELDS, NOTES, noted_fields
from unisono.core.access import Caller
from unisono.core.observer import GenerationDone
from unisono.core.request_record import GENERATIONS, MAX_ENTRIES, MAX_VALUE_LENGTH, RecordSink, RequestRecord
from unisono.core.trace_context import ARRIVED, TraceContext

# ASGI messages that carry the response headers.
ANSWERS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})

# Status in the record of an accepted WebSocket.
SWITCHED = 101
# Caller of a request without a valid key.
NOBODY = Caller("")


class RequestIds:
    """Layer that gives every request an id.

    The id is in `scope["state"]["request_id"]` and in the response header `x-request-id`. The layer also selects the
    error format from `formats`, sets the trace context, and passes the request's record to `sinks` when the request
    ends.
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
                # Records and logs contain this id, so it replaces an id that a route has set.
                headers = [header for header in message.get("headers", ()) if header[0] not in id_headers]
                headers += [(name, request_id.encode()) for name in id_headers]
                if fields := _fields_with_notes(state):
                    headers.append((b"x-unisono-notes", ", ".join(fields[:MAX_HEADER_FIELDS]).encode("latin-1")))
                message["headers"] = headers
                try:
                    await send(message)
                except OSError:
                    status = CLIENT_CLOSED_REQUEST
                    raise
                # A server may also discard the head without an error if the client has disconnected.
                writer: BodyWriter | None = state.get(BODY_WRITER)
                if writer is not None and not writer.is_head_written():
                    status = CLIENT_CLOSED_REQUEST
                return
            await send(message)

        arrived = ARRIVED.set(trace_of(headers_in))
        collected = GENERATIONS.set(generations if scope["type"] == "http" else None)
        try:
            await self._app(scope, receive, named)
        finally:
            # The context variables are reset only after the sinks have read the trace and generations from them.
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
        notes=tuple(_fields_with_notes(state)[:MAX_ENTRIES]),
        separate_answer=state.get("separate_answer", False),
    )


def _fields_with_notes(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields and headers for which the request's state contains notes."""
    notes = (*state.get(NOTES, ()), *state.get(HEADER_NOTES, ()))
    return noted_fields(notes) if notes else []


def trace_of(headers: RequestHeaders) -> TraceContext | None:
    """Return the trace context that the client sent; None if it sent no valid one."""
    parents = headers.get(b"traceparent", ())
    return TraceContext.read(parents[0], ",".join(headers.get(b"tracestate", ()))) if len(parents) == 1 else None
