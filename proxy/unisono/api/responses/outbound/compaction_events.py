"""Events of a response whose conversation may be compacted before the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unisono.api.responses.items import Wire
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.response import ResponseFrame
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.core.events import Compacted, Event, Finished
from unisono.core.generation import Usage
from unisono.core.state_store import Status, StoredItem
from unisono.errors import UnisonoError


class CompactionEvents(ResponseEvents):
    """Events of a response with a compaction item, if its conversation was compacted."""

    def __init__(self, frame: ResponseFrame, *args: Any, **options: Any) -> None:
        super().__init__(frame, *args, **options)
        self._summary_usage = Usage()

    def write(self, batch: Sequence[Event]) -> list[WireEvent]:
        """Return the wire events for one batch of engine events.

        A compaction is always the first event of its batch. Raises StoreTooLarge if the compacted conversation is too
        large for one item.
        """
        if batch and isinstance(compacted := batch[0], Compacted):
            self._start_response()
            self._compact(compacted)
            batch = batch[1:]
        return super().write(batch)

    def _compact(self, compacted: Compacted) -> None:
        self._summary_usage = compacted.usage
        # Without a summary, the compaction item would only repeat the conversation, so it is omitted. A client that
        # requested a compaction gets the item in any case.
        if not (compacted.summary or compacted.ends_answer):
            return
        assert self._frame.seal_history is not None
        location: Wire = {"item_id": self._new_id("cmp_"), "output_index": len(self._output)}
        sealed = self._frame.seal_history(compacted.items)
        wire: Wire = {"id": location["item_id"], "type": "compaction", "encrypted_content": sealed}
        entry: Wire = {"output_index": location["output_index"], "item": self._frame.dialect.item(wire)}
        self._add("response.output_item.added", entry)
        self._add("response.compaction.compacting", location)
        self._add("response.output_item.done", entry)
        self._output.append(StoredItem(wire["id"], compacted.items, wire))

    def _end(self, status: Status, *, finished: Finished | None = None, error: UnisonoError | None = None) -> None:
        if finished is not None:
            finished = replace(finished, usage=self._summary_usage + finished.usage)
        super()._end(status, finished=finished, error=error)


def events_type(frame: ResponseFrame) -> type[ResponseEvents]:
    """Return the class that writes the events of an answer with this frame."""
    return ResponseEvents if frame.seal_history is None else CompactionEvents
