"""Foreground answers, whole or streamed. The generation ends when the client disconnects.

A response is stored before its last event is sent. If it cannot be stored, the answer fails, so that no unstored
response is reported as stored.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from unisono.api.error_responses import failure_of, with_attempts
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.outbound.compaction_events import events_type
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.api.responses.persistence import store_response
from unisono.api.responses.prepared_request import PreparedRequest
from unisono.api.sse import EventWriter
from unisono.core.state_store import StoredResponse
from unisono.engine.request import GenerationReport, GenerationStream
from unisono.errors import UnisonoError


async def answer_whole(deps: ResponsesDeps, prepared: PreparedRequest) -> tuple[StoredResponse, GenerationReport]:
    """Generate a response, store it, and return it with the report of the generation.

    Raises the errors of the generation, and StoreError if the response cannot be stored. If a tool has already run, a
    response with the status `failed` is returned instead of an error.
    """
    stream = prepared.start(deps.service)
    events = events_type(prepared.frame)(
        prepared.frame, stream.report, new_id=prepared.item_ids, clock=deps.clock, should_emit=False
    )
    try:
        async for batch in stream:
            events.write(batch)
    except Exception as error:
        # A client repeats a failed request, which would run the tools a second time.
        if not events.acted:
            raise
        events.fail(with_attempts(failure_of(error), prepared.generation.request.origin.caller))
    finally:
        await stream.aclose()
    response = events.stored
    assert response is not None  # a generation ends with Finished or raises
    try:
        await store_response(deps, prepared, response)
    except UnisonoError as error:
        if not events.acted:
            raise
        events.fail(error)
        response = events.stored
        assert response is not None
    return response, stream.report


async def answer_events(
    deps: ResponsesDeps,
    prepared: PreparedRequest,
    stream: GenerationStream,
    *,
    on_complete: Callable[[StoredResponse], None] | None = None,
    writer: EventWriter | None = None,
    too_late: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[list[WireEvent]]:
    """Yield the events of a response in batches. Only the last event is terminal.

    A failure before the first event is raised, unless `too_late` returns True because the HTTP headers have been sent.
    All other failures are yielded as events. `on_complete` is called with the finished response before the terminal
    event is yielded. If `writer` is given, some events may be written to the writer instead of being yielded; the order
    of the events does not change.
    """
    events = events_type(prepared.frame)(prepared.frame, stream.report, new_id=prepared.item_ids, clock=deps.clock)
    has_started = False
    if writer is not None:
        stream.sink = writer.sink_for(events.sse)
    try:
        try:
            async for batch in stream:
                if wire_events := events.write(batch):
                    has_started = True
                    yield wire_events
        except Exception as error:
            if not (has_started or too_late()):
                raise
            yield events.fail(with_attempts(failure_of(error), prepared.generation.request.origin.caller))
        response = events.stored
        assert response is not None  # a generation ends with Finished or raises
        try:
            await store_response(deps, prepared, response)
        except UnisonoError as error:
            yield events.fail(error)
        if on_complete is not None and events.stored is not None:
            on_complete(events.stored)
        yield [events.last()]
    finally:
        await stream.aclose()
