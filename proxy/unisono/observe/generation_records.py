"""Records of generations: added to the record of their HTTP request, or separate records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unisono.core.observer import GenerationDone, GenerationStarted, Observer
from unisono.core.request_record import GENERATIONS, RecordSink, RequestRecord

# Values of `route` in the records of generations that have no HTTP request.
BACKGROUND: Final = "background"
WEBSOCKET: Final = "websocket"


class GenerationRecords(Observer):
    """Observer that adds generations to request records.

    A generation in an HTTP request becomes part of the request's record. A generation in the background or on a
    WebSocket gets its own record, which is sent to all `sinks`.
    """

    def __init__(self, sinks: Sequence[RecordSink]) -> None:
        self._sinks = tuple(sinks)

    def generation_started(self, began: GenerationStarted) -> None:
        """Do nothing: records contain generations that have ended."""

    def ended(self, done: GenerationDone) -> None:
        generations = GENERATIONS.get()
        if generations is not None and not done.start.background:
            generations.append(done)
            return
        started = done.start
        record = RequestRecord(
            id=started.request_id,
            at=started.at,
            duration_s=done.ended_s,
            route=BACKGROUND if started.background else WEBSOCKET,
            tenant=started.tenant,
            key=started.key,
            key_name=started.key_name,
        )
        for sink in self._sinks:
            sink(record.with_generations([done]))
