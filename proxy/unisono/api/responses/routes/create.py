"""Route `POST /responses`: a whole answer, a stream, or a background response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from unisono.api.answer_report import backend_header, limit_headers, recoveries_header
from unisono.api.body import read_json, read_model_request, work_size
from unisono.api.caller_options import GUARDRAILS
from unisono.api.disconnects import until_disconnect
from unisono.api.error_responses import failure_of
from unisono.api.json_response import to_whole
from unisono.api.media_loading import MediaSource, with_file_texts
from unisono.api.passthrough_requests import check_stateless, passed_through, way_for
from unisono.api.request_options import to_sampling
from unisono.api.responses import answer_schema
from unisono.api.responses.background.event_log import logged_events
from unisono.api.responses.background.runner import BackgroundRunner, missing
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.foreground import answer_events, answer_whole
from unisono.api.responses.idempotency import (
    HEADER,
    LOOK_EVERY_S,
    MAX_KEY_LENGTH,
    NO_EFFECT,
    ClaimLost,
    IdempotencyClaim,
    claim_of,
    is_repeatable,
    owner_of,
    release_claim,
    started,
)
from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.failures import failure_in
from unisono.api.responses.outbound.response import LAST_EVENTS, ResponseFrame, to_echo, to_response
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.api.responses.outbound.stored_stream import replay_events
from unisono.api.responses.persistence import retry_while_down
from unisono.api.responses.prepared_request import Sender, prepare_request, validate_body
from unisono.api.responses.routes.responses_api import ResponsesApi, to_sse
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.route_table import RouteTable, dependency
from unisono.api.routing_fields import chosen_fields, path_of
from unisono.api.sse import EventStream, EventWriter
from unisono.core.access import Caller
from unisono.core.passthrough_request import AnswerMode, Api
from unisono.core.route_protocol import NO_ROUTING
from unisono.core.state_store import Status, StoredResponse
from unisono.engine.request import GenerationReport
from unisono.errors import StoreConflict, StoreError, UnisonoError, UnsupportedValue

ONCE: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "Key of the request; repeating the request with the same key returns the same response.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH, "pattern": "^[ -~]+$"},
}


def add_create_route(table: RouteTable, dialect: Dialect) -> None:
    @table.add_model_call(
        "/responses",
        answer=answer_schema.Response,
        links=[f"{name} response_id" for name in ("getResponse", "deleteResponse", "cancelResponse", "listInputItems")],
        body=ResponsesRequest,
        events=answer_schema.ResponseEvent,
        parameters=[ONCE],
    )
    async def create_response(request: Request) -> Response:
        """Create a response, complete, as a stream of events, or in the background.

        Also available as a WebSocket.
        """
        return await _create(request, dependency(request, ResponsesApi), dialect)


async def _create(request: Request, api: ResponsesApi, dialect: Dialect) -> Response:
    deps, runner, keep_alive_s = api.deps, api.runner, api.keep_alive_s
    body = await read_model_request(request, "user", "safety_identifier")
    size = work_size(await request.body())
    served = way_for(deps.find_way, body, request.state.caller)
    if served.way in (AnswerMode.PASSTHROUGH, AnswerMode.PASSTHROUGH_THEN_ENGINE):
        if not served.stores_responses:
            check_stateless(body)
        request_id = request.state.request_id
        source = MediaSource(body, request.state.caller, ResponsesRequest, request_id, size, request=request)
        readable = await with_file_texts(source, deps.passthrough_files)
        group = served.group
        return await passed_through(
            request, deps.service, Api.RESPONSES, body, group, keep_alive_s=keep_alive_s, readable=readable
        )
    caller, request_id = request.state.caller, request.state.request_id
    parsed = await validate_body(deps, caller, body, size, request_id, request=request)
    notes = (NO_EFFECT,) if HEADER in request.headers and not parsed.stored else ()
    sender = Sender(request.state.caller, request.state.request_id, dialect, notes)
    is_idempotent = HEADER in request.headers and parsed.stored
    if is_idempotent or parsed.background:
        await check_options(request)
    # Only a stored response can be returned to a later request with the same key.
    claim = await claim_of(request, sender.tenant) if parsed.stored else None
    posted = ResponseCreation(deps, runner, sender, parsed, body, size)
    request.state.notes = posted.notes
    if claim is not None or parsed.background:
        response_id = await posted.start_background(claim, request)
        request.state.separate_answer = posted.created is not None
        limits = posted.limits
        if parsed.stream:
            events = to_sse(posted.logged(claim, response_id))
            return EventStream(events, headers=lambda: limits, keep_alive_s=keep_alive_s)
        if parsed.background:
            # Return the response as it was created, although the generation may have started by now.
            return to_http_response(posted.created or await posted.found(response_id), dialect, limits)
        response = await until_disconnect(request, posted.finished(claim, response_id))
        return to_http_response(response, dialect, limits)
    if parsed.stream:
        report = GenerationReport()
        sent = to_sse(posted.events(report, too_late=lambda: stream.is_head_sent), posted.connect)
        stream = EventStream(sent, headers=lambda: backend_header([report]), keep_alive_s=keep_alive_s)
        return stream
    response, report = await until_disconnect(request, posted.whole())
    return to_http_response(response, dialect, {**backend_header([report]), **recoveries_header([report])})


async def check_options(request: Request) -> None:
    """Reject guardrail and routing options in a request that another process may take over.

    Raises UnsupportedValue if the caller has chosen such options, because the other process would not know them.
    """
    caller: Caller = request.state.caller
    if caller.guardrails or caller.routing != NO_ROUTING:
        body = await read_json(request)
        chosen = [path_of(GUARDRAILS, body)] if caller.guardrails else chosen_fields(caller.routing, body)
        raise UnsupportedValue(
            f"'{chosen[0]}' is not supported for background responses or for requests with an idempotency key; "
            "omit it, or ask the operator to set it for all requests.",
            param=chosen[0],
        )


class ResponseCreation:
    """Creation of the response to one request: whole, as a stream, or in the background.

    `size` is the length of the request body in bytes. `created` is the background response that this request has
    started, or None. `limits` are the rate limit headers for this background response, empty without one. `notes` lists
    the fields without effect; the list is empty until the request has been prepared.
    """

    def __init__(
        self,
        deps: ResponsesDeps,
        runner: BackgroundRunner,
        sender: Sender,
        requested: ResponsesRequest,
        body: Mapping[str, Any],
        size: int,
    ) -> None:
        self._deps = deps
        self._runner = runner
        self._sender = sender
        self._requested = requested
        self._body = body
        self._size = size
        self.created: StoredResponse | None = None
        self.limits: Mapping[str, str] = {}
        self.notes: list[str] = []
        self._writer: EventWriter | None = None

    def connect(self, writer: EventWriter) -> None:
        """Set the writer of the HTTP stream. Must be called before `events` is iterated."""
        self._writer = writer

    async def whole(self) -> tuple[StoredResponse, GenerationReport]:
        response_id = self._deps.new_id("resp_")
        async with prepare_request(
            self._deps, self._sender, self._requested, response_id=response_id, size=self._size
        ) as prepared:
            self.notes += prepared.frame.notes
            return await answer_whole(self._deps, prepared)

    async def events(
        self, report: GenerationReport, *, too_late: Callable[[], bool]
    ) -> AsyncGenerator[list[WireEvent]]:
        """Yield the events of the answer in batches.

        The backend and the model are entered in `report` before the first batch is yielded. A failure before the first
        event is raised, unless `too_late` returns True because the HTTP headers have been sent.
        """
        response_id = self._deps.new_id("resp_")
        has_started = False
        try:
            async with prepare_request(
                self._deps, self._sender, self._requested, response_id=response_id, size=self._size
            ) as prepared:
                self.notes += prepared.frame.notes
                stream = prepared.start(self._deps.service)
                answer = answer_events(self._deps, prepared, stream, too_late=too_late, writer=self._writer)
                async with aclosing(answer) as answering:
                    async for batch in answering:
                        if not has_started:
                            # The HTTP headers contain these values, and are sent with the first batch.
                            report.backend, report.failovers = stream.report.backend, stream.report.failovers
                            report.model, report.tries = stream.report.model, stream.report.tries
                            report.standing = stream.report.standing
                            has_started = True
                        yield batch
        except Exception as error:
            if has_started or not too_late():
                raise
            yield self._failed_before_start(response_id, failure_of(error))

    def _failed_before_start(self, response_id: str, error: UnisonoError) -> list[WireEvent]:
        """Return all events of a response that failed before its first event."""
        deps, requested = self._deps, self._requested
        echo = to_echo(requested, to_sampling(requested))
        frame = ResponseFrame(response_id, int(deps.clock()), requested.model, echo, dialect=self._sender.dialect)
        events = ResponseEvents(frame, GenerationReport(), new_id=deps.new_id, clock=deps.clock)
        return [*events.fail(error), events.last()]

    async def logged(self, claim: IdempotencyClaim | None, response_id: str) -> AsyncGenerator[list[WireEvent]]:
        """Yield all events of a background response, from its stored log.

        If the response failed and is repeatable, its idempotency key is released before the failure event is yielded.
        """
        tenant, dialect = self._sender.tenant, self._sender.dialect
        has_started = False
        async with aclosing(logged_events(self._deps.store, tenant, response_id, dialect)) as events:
            async for batch in events:
                has_started = True
                if claim is not None and batch[-1].type == LAST_EVENTS[Status.FAILED]:
                    await self._release_if_repeatable(claim, response_id)
                yield batch
        if not has_started:
            # The idempotency key is stored longer than the event log. Without the log, the events are built from the
            # response.
            yield replay_events(await self.found(response_id), dialect)

    async def start_background(self, claim: IdempotencyClaim | None, request: Request) -> str:
        """Start a background response, and return its id.

        If the idempotency key belongs to an earlier request, wait until the response of that request is in the store,
        and return its id instead. Raises ClientGone if the client disconnects during the wait.
        """
        response_id = self._deps.new_id("resp_")
        # Without a key, there is no earlier request to look for.
        if claim is None:
            await self._wait_for_record(response_id)
            return response_id
        while True:
            owner = await owner_of(self._deps, claim, response_id)
            # The loop ends when this response, or the response that owns the key, has started. If the key gets another
            # owner in the meantime, the loop tries again.
            if owner == response_id and await self._has_started(claim, response_id):
                return response_id
            if owner != response_id:
                starting = started(self._deps, claim, owner, response_id, self._requested)
                if await until_disconnect(request, starting) is not None:
                    return owner

    async def _has_started(self, claim: IdempotencyClaim, response_id: str) -> bool:
        """Start the response for an idempotency key; return True if the response has started.

        Returns False if another request has claimed the key in the meantime.
        """

        async def confirm() -> None:
            if await owner_of(self._deps, claim, response_id) != response_id:
                raise ClaimLost

        try:
            await self._wait_for_record(response_id, confirm)
        except ClaimLost:
            return False
        except BaseException as error:
            if await self._is_missing(response_id):
                if isinstance(error, StoreConflict) and await self._has_lost_key(claim, response_id):
                    return False
                await release_claim(self._deps, claim, response_id)
            raise
        return True

    async def _wait_for_record(self, response_id: str, confirm: Callable[[], Awaitable[None]] | None = None) -> None:
        self.created, report = await self._runner.start_response(
            self._sender, self._requested, self._body, response_id=response_id, size=self._size, confirm=confirm
        )
        self.limits = {} if report.standing is None else limit_headers(report.standing)

    async def _has_lost_key(self, claim: IdempotencyClaim, response_id: str) -> bool:
        try:
            return await owner_of(self._deps, claim, response_id) != response_id
        except StoreError:
            return False

    async def _is_missing(self, response_id: str) -> bool:
        """Return True if the store was read and does not contain the response.

        If the store cannot be read, the response may exist, and must not lose its idempotency key.
        """
        try:
            [response] = await self._deps.store.responses(self._sender.tenant, [response_id])
        except StoreError:
            return False
        return response is None

    async def _release_if_repeatable(self, claim: IdempotencyClaim, response_id: str) -> None:
        # The last event and the record are written in one transaction.
        try:
            [response] = await self._deps.store.responses(self._sender.tenant, [response_id])
        except StoreError:
            return
        if response is not None and is_repeatable(response):
            await release_claim(self._deps, claim, response_id)

    async def found(self, response_id: str) -> StoredResponse:
        # The read is retried, because the response exists: after an error, the client would repeat the request, and the
        # response would be generated twice.
        store, tenant = self._deps.store, self._sender.tenant
        [response] = await retry_while_down(lambda: store.responses(tenant, [response_id]))
        if response is None:
            raise missing(response_id)
        return response

    async def finished(self, claim: IdempotencyClaim | None, response_id: str) -> StoredResponse:
        """Wait until the response has ended, and return it.

        If the response failed and is repeatable, its idempotency key is released, and its error is raised. After a call
        of a server tool, the failed response is returned instead, so that the client sees the call.
        """
        store, tenant = self._deps.store, self._sender.tenant
        response = await self.found(response_id)
        last_seen: int | None = None
        while not response.status.terminal:
            events = logged_events(store, tenant, response_id, self._sender.dialect, starting_after=last_seen)
            async for batch in events:
                last_seen = batch[-1].number if batch else last_seen
            response = await self.found(response_id)
            # If the event log is missing, the loop above ends at once. The response is then polled.
            await asyncio.sleep(0 if response.status.terminal else LOOK_EVERY_S)
        if is_repeatable(response):
            if claim is not None:
                await release_claim(self._deps, claim, response_id)
            raise failure_in(response)
        return response


def to_http_response(response: StoredResponse, dialect: Dialect, headers: Mapping[str, str] | None = None) -> Response:
    return to_whole(to_response(response, dialect), headers)
