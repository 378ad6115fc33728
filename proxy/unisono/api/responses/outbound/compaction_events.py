"""Events of a response whose only item is a compaction of the conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.api.responses.items import NewId, Wire
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.response import ResponseFrame
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.api.responses.summary import CompactionSeal
from unisono.core.conversation import Item
from unisono.core.events import Closed, Event, Finished
from unisono.core.state_store import Status, StoredItem
from unisono.engine.request import GenerationReport


class CompactionEvents(ResponseEvents):
    """Events of a compaction: one item, made of what the model writes."""

    def __init__(
        self,
        frame: ResponseFrame,
        report: GenerationReport,
        compaction: CompactionSeal,
        *,
        new_id: NewId,
        clock: Callable[[], float],
        should_emit: bool = True,
    ) -> None:
        super().__init__(frame, report, new_id=new_id, clock=clock, should_emit=should_emit)
        self._compaction = compaction
        self._answer: list[Closed] = []

    def write(self, batch: Sequence[Event]) -> list[WireEvent]:
        """Return the events of one batch. Raises StoreTooLarge."""
        self._start_response()
        for entry in batch:
            if isinstance(entry, Closed):
                self._answer.append(entry)
            elif isinstance(entry, Finished):
                items, sealed = self._compaction.replacement(self._answer)
                self._end_with(items, sealed, entry)
        return self._writer.pop_events()

    def _end_with(self, items: tuple[Item, ...], sealed: str, finished: Finished) -> None:
        """Emit the compaction item and end the response. `items` replace the conversation."""
        location: Wire = {"item_id": self._new_id("cmp_"), "output_index": len(self._output)}
        wire: Wire = {"id": location["item_id"], "type": "compaction", "encrypted_content": sealed}
        entry: Wire = {"output_index": location["output_index"], "item": self._frame.dialect.item(wire)}
        self._add("response.output_item.added", entry)
        self._add("response.compaction.compacting", location)
        self._add("response.output_item.done", entry)
        self._output.append(StoredItem(wire["id"], items, wire))
        self._end(Status.COMPLETED, finished=finished)


def to_events(
    frame: ResponseFrame,
    report: GenerationReport,
    *,
    new_id: NewId,
    clock: Callable[[], float],
    should_emit: bool = True,
) -> ResponseEvents:
    """Return the events of an answer in this frame."""
    if frame.compaction is None:
        return ResponseEvents(frame, report, new_id=new_id, clock=clock, should_emit=should_emit)
    return CompactionEvents(frame, report, frame.compaction, new_id=new_id, clock=clock, should_emit=should_emit)
