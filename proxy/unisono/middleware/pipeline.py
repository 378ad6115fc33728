"""Gates around a generation, and the loop that passes each batch of events through them.

A gate admits or refuses the request, sees the batches, and accepts the end of the answer. Gates are ordered from the
outside in: the first gate is the first to admit a request, and the last to see a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeAlias

from unisono.core.events import Event, Finished
from unisono.engine.request import BatchStream, GenerationReport, GenerationRequest, GenerationService, GenerationStream
from unisono.middleware.open_requests import OPEN, Interruption, shutdown_error


class Gate:
    """Observer and filter of one generation, for example a quota. The base class does nothing.

    `report` is the report of the generation. The methods are called in this order:

    1. `start`, when the iteration begins.
    2. `admit`, once. If the consumer calls `GenerationStream.admit` before it iterates, `admit` precedes `start`.
    3. For each batch: `filter` of all gates, then `observe` of all gates.
    4. `finish`, for the last event.
    5. `end`, when the iteration ends or fails. `end` is also called if `admit` failed before the iteration.

    If the stream is closed without any iteration, `release` is called, even if `admit` failed.
    """

    report: GenerationReport
    # True if the class overrides `filter`, `observe` or `finish`. A method that is not overridden is not called.
    filters = observes = finishes = False

    def __init_subclass__(cls) -> None:
        cls.filters = cls.filter is not Gate.filter
        cls.observes = cls.observe is not Gate.observe
        cls.finishes = cls.finish is not Gate.finish

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request for the next gate, or raise an error to refuse the request."""
        return request

    def start(self) -> None:
        """Handle the beginning of the iteration; the request may not have been admitted yet."""

    async def filter(self, batch: list[Event]) -> list[Event]:
        """Return the events to emit now; the gate may change events, or hold them for a later batch."""
        return batch

    def observe(self, batch: Sequence[Event]) -> None:
        """Handle a batch before it is emitted, unless it is a single delta after the first output.

        Such deltas may go to a `BatchSink` instead. A gate that needs every delta has to filter.
        """

    async def finish(self, finished: Finished) -> None:
        """Handle the last event before it is emitted. If this raises, the error ends the answer."""

    def end(self, error: BaseException | None) -> None:
        """Handle the end of the iteration, or a failed admission, with its error if any.

        Must not raise.
        """

    def release(self) -> None:
        """Give back what `admit` reserved, because the stream was closed without iteration."""


# Factory that returns the gate of one generation, or None if the generation needs no gate.
GateFactory: TypeAlias = Callable[[GenerationRequest], Gate | None]


class GuardedService(GenerationService):
    """Generation service with gates around each generation.

    With `can_drain`, streams that run too long after the shutdown of the gateway has begun fail with an error.
    """

    def __init__(self, service: GenerationService, gates: Sequence[GateFactory], *, can_drain: bool = False) -> None:
        self._service = service
        self._gates = tuple(gates)
        self._can_drain = can_drain

    def start(self, request: GenerationRequest) -> GenerationStream:
        gates = [gate for create in self._gates if (gate := create(request)) is not None]
        return GuardedStream(self._service, request, gates, Interruption(OPEN.get() if self._can_drain else None))

    async def count(self, request: GenerationRequest) -> int:
        return await self._service.count(request)


class GuardedStream(BatchStream):
    """Stream of a generation behind its gates."""

    def __init__(
        self,
        service: GenerationService,
        request: GenerationRequest,
        gates: Sequence[Gate],
        interruption: Interruption,
    ) -> None:
        self.report = GenerationReport(recoveries=[*request.origin.recoveries])
        self._service = service
        self._request = request
        self._gates = gates
        self._interruption = interruption
        self._stream: GenerationStream | None = None
        self._is_iterated = False
        self._is_finished = False
        for gate in gates:
            gate.report = self.report

    async def admit(self) -> None:
        if self._stream is None:
            try:
                self._stream = await self._admit()
            except Exception as error:
                self._end(error)
                raise

    async def _admit(self) -> GenerationStream:
        """Pass the request through all gates, and return the stream of the resulting request.

        If a gate refuses the request, its error is raised.
        """
        request = self._request
        for gate in self._gates:
            request = await gate.admit(request)
        stream = self._service.start(request)
        # The consumer already holds the report.
        stream.report = self.report
        await stream.admit()
        return stream

    async def aclose(self) -> None:
        await super().aclose()
        if not self._is_iterated:
            for gate in reversed(self._gates):
                gate.release()
        if self._stream is not None:
            await self._stream.aclose()

    async def _each(self) -> AsyncGenerator[list[Event]]:
        self._is_iterated = True
        interruption = self._interruption
        for gate in self._gates:
            gate.start()
        failure: BaseException | None = None
        try:
            interruption.enter()
            stream = self._stream = self._stream or await self._admit()
            try:
                outward = self._gates[::-1]
                observers = [gate.observe for gate in outward if gate.observes]
                filters = [gate.filter for gate in outward if gate.filters]
                if not filters:
                    stream.sink = self.sink
                async for whole in stream:
                    batch = await _filtered(whole, filters) if filters else whole
                    # If the filters hold all events of a batch, nothing is emitted. A batch that was empty before is
                    # emitted.
                    if whole and not batch:
                        continue
                    if batch and isinstance(last := batch[-1], Finished):
                        await self._finish(batch, last)
                    else:
                        for observe in observers:
                            observe(batch)
                    interruption.waiting_task = None
                    yield batch
                    interruption.resume()
            finally:
                await stream.aclose()
        except asyncio.CancelledError as error:
            if not interruption.undo_cancellation():
                failure = error
                raise
            failure = shutdown_error()
            raise failure from None
        except BaseException as error:
            failure = error
            raise
        finally:
            interruption.leave()
            self._end(failure)

    async def _finish(self, batch: list[Event], last: Finished) -> None:
        """Pass the end of the answer to the gates, innermost first."""
        self._is_finished = True
        for gate in self._gates[::-1]:
            if gate.observes:
                gate.observe(batch)
            if gate.finishes:
                await gate.finish(last)

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit) and not self._is_finished:
            # If another choice of the request failed, that failure ended this generation. The client did not
            # disconnect.
            error = self.report.facts.sibling_failure or error
        for gate in reversed(self._gates):
            gate.end(error)


async def _filtered(
    batch: list[Event], filters: Sequence[Callable[[list[Event]], Awaitable[list[Event]]]]
) -> list[Event]:
    for one in filters:
        batch = await one(batch)
    return batch
