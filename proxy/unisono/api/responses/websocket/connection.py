"""WebSocket connection of one client.

It reads frames, generates responses in lanes, and writes whole frames.

- Responses of one lane are generated in sequence; a limited number of lanes run in parallel.
- A failed request returns an error frame. The socket and all other requests continue.
- A failed continuation evicts the response that it names, as OpenAI does; the client then sends its full input again.
- A disconnect, or a client that reads nothing for too long, cancels all responses of the socket at once.
- A socket has a maximum lifetime. Afterwards no new response starts, running responses finish, and the socket closes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import assert_never

import orjson
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from unisono.api.body import OFF_LOOP_BYTES, off_loop, work_size
from unisono.api.caller_options import caller_with_options, without_options
from unisono.api.end_user_fields import identify_end_user
from unisono.api.error_responses import ClientGone, failure_of, with_attempts
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.foreground import answer_events
from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.api.responses.persistence import store_response
from unisono.api.responses.prepared_request import PreparedRequest, Sender, prepare_request, validate_body
from unisono.api.responses.websocket.frames import (
    CreateFrame,
    EmptyFrame,
    Lane,
    SteerFrame,
    error_frame,
    fields_of,
    lane_of,
    not_steered,
    to_client_frame,
    to_lane_frame,
)
from unisono.api.responses.websocket.response_cache import Continuation, ResponseCache
from unisono.core.events import Finished
from unisono.core.generation import FinishReason, Usage
from unisono.core.observer import GenerationDone
from unisono.core.request_record import GENERATIONS, WEBSOCKET, record_of_answer
from unisono.core.state_store import Status, StoredResponse
from unisono.engine.request import GenerationReport
from unisono.errors import BackendOverloaded, ConnectionTooOld, TooManyStreams, UnisonoError

# Lifetime of a socket for new responses, in seconds.
LASTS_S = 3600.0
# Maximum number of concurrent responses of one socket; further responses wait.
AT_ONCE = 16
# Maximum number of stream ids per socket. Their queues exist until the socket closes.
NAMED_LANES = 32
# Maximum number of pending responses of one socket, including running ones.
MAX_PENDING_RESPONSES = 64
# Maximum size in bytes of all pending requests of one socket.
MAX_PENDING_BYTES = 32 << 20
# Maximum number of error frames and replies to steer frames that are not sent yet.
MAX_UNSENT_ERRORS = 64
# WebSocket close code (RFC 6455).
CLOSED_NORMALLY = 1000


class Connection:
    """Connection of one socket, from before it is accepted to its end. Durations are in seconds."""

    def __init__(
        self,
        deps: ResponsesDeps,
        dialect: Dialect,
        socket: WebSocket,
        *,
        lasts_s: float = LASTS_S,
    ) -> None:
        self._deps = deps
        self._socket = socket
        # On a WebSocket, an error event has the fields of the error in an object `error`, unlike in server-sent events.
        in_socket = replace(dialect, nested_errors=True)
        self._sender = Sender(socket.state.caller, socket.state.request_id, in_socket)
        self._max_age_s = lasts_s
        self._is_expired = False
        self._cache = ResponseCache()
        self._lanes: dict[Lane, deque[CreateFrame]] = {}
        self._lane_tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._write_lock = asyncio.Lock()
        self._unsent_errors = 0
        self._admitted = 0

    async def run(self) -> None:
        await self._socket.accept()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(group))
                group.create_task(self._expire())
        except* (ClientGone, WebSocketDisconnect):
            pass

    async def _expire(self) -> None:
        await asyncio.sleep(self._max_age_s)
        self._is_expired = True
        if self._lane_tasks:
            await asyncio.wait(self._lane_tasks)
        await self._send([error_frame(self._too_old(), None)])
        await self._socket.close(CLOSED_NORMALLY)
        raise ClientGone

    def _too_old(self) -> ConnectionTooOld:
        return ConnectionTooOld(
            f"This connection has reached its limit of {self._max_age_s / 60:g} minutes; open another one to continue."
        )

    # -- reading

    async def _read(self, group: asyncio.TaskGroup) -> None:
        """Read every frame on arrival, because an unread socket does not report a disconnect."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                raise ClientGone
            await self._handle(message, group)

    async def _handle(self, message: Message, group: asyncio.TaskGroup) -> None:
        lane: Lane = None
        try:
            fields, size = await off_loop(lambda: fields_of(message), len(message.get("text") or ""))
            lane = lane_of(fields)
            match to_client_frame(fields, size, lane):
                case CreateFrame() as create:
                    self._admit(create, group)
                case SteerFrame() as steer:
                    self._send_later(not_steered(steer), group)
                case EmptyFrame():
                    pass
                case other:
                    assert_never(other)
        except UnisonoError as error:
            self._send_later(error_frame(error, lane), group)

    def _send_later(self, frame: str, group: asyncio.TaskGroup) -> None:
        """Write a frame in a separate task.

        Raises ClientGone if the client sends many frames without reading the replies.
        """
        if self._unsent_errors >= MAX_UNSENT_ERRORS:
            raise ClientGone
        self._unsent_errors += 1

        async def told() -> None:
            await self._send([frame])
            self._unsent_errors -= 1

        group.create_task(told())

    def _admit(self, create: CreateFrame, group: asyncio.TaskGroup) -> None:
        """Queue a response in its lane.

        Raises an error if the socket has expired, or has too many stream ids or pending responses.
        """
        if self._is_expired:
            raise self._too_old()
        new = create.lane is not None and create.lane not in self._lanes
        if new and sum(lane is not None for lane in self._lanes) >= NAMED_LANES:
            raise TooManyStreams(
                f"This connection has used {NAMED_LANES} stream ids; reuse one of them or open another connection.",
                param="stream_id",
            )
        waiting = [each for lane in self._lanes.values() for each in lane]
        if (
            len(waiting) >= MAX_PENDING_RESPONSES
            or sum(each.size for each in waiting) + create.size > MAX_PENDING_BYTES
        ):
            raise BackendOverloaded(
                "Too many responses are pending on this connection; try again once some have finished."
            )
        self._admitted += 1
        lane = self._lanes.setdefault(create.lane, deque())
        lane.append(replace(create, number=self._admitted))
        if len(lane) == 1:
            task = group.create_task(self._serve_lane(lane))
            self._lane_tasks.add(task)
            task.add_done_callback(self._lane_tasks.discard)

    # -- answering

    async def _serve_lane(self, lane: deque[CreateFrame]) -> None:
        while lane:
            async with self._slots:
                await self._answer(lane[0])
            lane.popleft()

    async def _answer(self, create: CreateFrame) -> None:
        generations: list[GenerationDone] = []
        GENERATIONS.set(generations)
        try:
            await self._respond(create)
        except ClientGone:
            raise
        except Exception as error:
            self._cache.forget(create.body.get("previous_response_id"))
            await self._send([error_frame(with_attempts(failure_of(error), self._socket.state.caller), create.lane)])
        finally:
            if generations:
                self._record(create, generations)

    def _record(self, create: CreateFrame, generations: Sequence[GenerationDone]) -> None:
        state, id, model = self._socket.state, self._id_of(create), str(create.body.get("model") or "")
        if id == self._sender.request_id:
            state.separate_answer = True
        self._deps.record(record_of_answer(id, WEBSOCKET, state.caller, model, generations, at=self._deps.clock()))

    async def _respond(self, create: CreateFrame) -> None:
        # The caller's key may have been revoked or restricted since the socket was opened.
        self._socket.state.caller = await self._socket.state.caller_again()
        await identify_end_user(self._socket, create.body, "user", "safety_identifier")
        caller = caller_with_options(self._socket, self._socket.state.caller, create.body)
        body = without_options(self._socket, {**create.body})
        sender = replace(self._sender, caller=caller, request_id=self._id_of(create))
        size = create.size if create.size > OFF_LOOP_BYTES else work_size(orjson.dumps(body))
        request = await validate_body(
            self._deps, caller, body, size, sender.request_id, answered=create.should_generate
        )
        continuation = Continuation(self._cache.find(request.previous_response_id))
        async with prepare_request(
            self._deps,
            sender,
            request,
            response_id=self._deps.new_id("resp_"),
            size=size,
            read_prior_state=continuation.recall,
        ) as incomplete:
            # Requests of one lane are routed together, even if they have nothing else in common.
            sticky = f"{self._sender.request_id}\0{create.lane or ''}"
            prepared_request = continuation.complete_request(incomplete, sticky)

            def over(response: StoredResponse) -> None:
                if response.status is Status.FAILED:
                    self._cache.forget(request.previous_response_id)
                cached = continuation.cached_response(prepared_request, response)
                if cached is not None:
                    self._cache.keep(create.lane, response.id, cached)

            made = (
                self._response_events(prepared_request, over)
                if create.should_generate
                else prepared(self._deps, prepared_request, over)
            )
            async with aclosing(made) as batches:
                async for batch in batches:
                    await self._send(to_lane_frame(event.data, create.lane) for event in batch)

    def _id_of(self, create: CreateFrame) -> str:
        """Return the request id of a response. The first response has the id of the handshake."""
        return self._sender.request_id + (f".{create.number}" if create.number > 1 else "")

    def _response_events(
        self, prepared_request: PreparedRequest, on_complete: Callable[[StoredResponse], None]
    ) -> AsyncGenerator[list[WireEvent]]:
        return answer_events(
            self._deps,
            prepared_request,
            prepared_request.start(self._deps.service),
            on_complete=on_complete,
        )

    # -- writing

    async def _send(self, frames: Iterable[str]) -> None:
        """Write frames in order. Raises ClientGone when the client has disconnected."""
        async with self._write_lock:
            for frame in frames:
                try:
                    await self._socket.send({"type": "websocket.send", "text": frame})
                except WebSocketDisconnect:
                    raise ClientGone from None


async def prepared(
    deps: ResponsesDeps, request: PreparedRequest, on_complete: Callable[[StoredResponse], None]
) -> AsyncGenerator[list[WireEvent]]:
    """Yield the events of a response that has no output and that a later request continues.

    Raises an error if the engine would refuse to generate an answer to the request.
    """
    await deps.service.count(request.generation.request)
    events = ResponseEvents(request.frame, GenerationReport(), new_id=request.item_ids, clock=deps.clock)
    first_events = events.first_events()
    events.write([Finished(FinishReason.STOP, Usage())])
    response = events.stored
    assert response is not None  # it is finished
    await store_response(deps, request, response)
    on_complete(response)
    yield [*first_events, events.last()]
