"""Events of a response whose only item is a compaction of the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.api.responses.items import Wire
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.response import ResponseFrame
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.core.conversation import Item
from unisono.core.events import Closed, Event, Finished
from unisono.core.state_store import Status, StoredItem


class CompactionEvents(ResponseEvents):
    """Events of a compaction: one item, which contains the summary that the model writes."""

    def __init__(self, frame: ResponseFrame, *args: Any, **options: Any) -> None:
        super().__init__(frame, *args, **options)
        assert frame.compaction is not None
        self._compaction = frame.compaction
        self._answer: list[Closed] = []

    def write(self, batch: Sequence[Event]) -> list[WireEvent]:
        """Return the events of one batch.

        Raises StoreTooLarge if the content of the compaction item is too large.
        """
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


def events_type(frame: ResponseFrame) -> type[ResponseEvents]:
    """Return the class that writes the events of an answer in this frame."""
    return ResponseEvents if frame.compaction is None else CompactionEvents
