"""The answer to one request while its client waits: whole, or as events. It ends when the client leaves.

What is to be kept is kept before the end is told. When it cannot be, the answer fails: nothing that was not kept is
ever said to be.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from unisono.api.error_responses import failure_of
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.api.responses.persistence import keep
from unisono.api.responses.prepared_request import PreparedRequest
from unisono.core.state_store import StoredResponse
from unisono.engine.turn import GenerationReport, GenerationStream
from unisono.errors import UnisonoError


async def answer_whole(means: ResponsesDeps, asked: PreparedRequest) -> tuple[StoredResponse, GenerationReport]:
    """The finished response, stored. Raises what the run raises, and the StoreError family when it cannot be stored. If
    tools were run by then, the response is returned as failed instead."""
    run = means.turns.start(asked.turn.turn)
    events = ResponseEvents(asked.frame, run.report, new_id=asked.item_ids, clock=means.clock, told=False)
    try:
        async for batch in run:
            events.write(batch)
    except Exception as error:
        # A client tries again what failed: then what tools have done would be done twice.
        if not events.acted:
            raise
        events.fail(failure_of(error))
    finally:
        await run.aclose()
    response = events.stored
    assert response is not None  # a run ends with Finished or raises
    try:
        await keep(means, asked, response)
    except UnisonoError as error:
        if not events.acted:
            raise
        events.fail(error)
        response = events.stored
        assert response is not None
    return response, run.report


async def answer_events(
    means: ResponsesDeps,
    asked: PreparedRequest,
    run: GenerationStream,
    *,
    over: Callable[[StoredResponse], None] | None = None,
    too_late: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[list[WireEvent]]:
    """The events as they come; the last is exactly one terminal event. A failure before the first is raised, unless it
    is `too_late` for that; later ones are told in the stream. `over` gets the finished response before its end is
    told."""
    events = ResponseEvents(asked.frame, run.report, new_id=asked.item_ids, clock=means.clock)
    begun = False
    try:
        try:
            async for batch in run:
                if made := events.write(batch):
                    begun = True
                    yield made
        except Exception as error:
            if not (begun or too_late()):
                raise
            yield events.fail(failure_of(error))
        response = events.stored
        assert response is not None  # a run ends with Finished or raises
        try:
            await keep(means, asked, response)
        except UnisonoError as error:
            yield events.fail(error)
        if over is not None and events.stored is not None:
            over(events.stored)
        yield [events.last()]
    finally:
        await run.aclose()
