"""Events of a Responses stream, numbered from 0, each a complete object.

Rules for every stream:

- The order is `created`, `in_progress`, items in sequence, then exactly one last event.
- Every item has a complete life cycle, even without content. All events of an item have the same item id and index.
- A call is emitted only when it is complete, unless its arguments are streamed.
- Between the arguments and the result of a server tool call, no events of other items are emitted.
- `last` emits the last event. The caller can store the response in `stored` before it calls `last`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from unisono.api.answer_report import to_about
from unisono.api.logprobs import to_entries
from unisono.api.responses.client_tools import command_events
from unisono.api.responses.items import COMPLETED, INCOMPLETE, NewId, Wire, message, refusal_part
from unisono.api.responses.outbound import server_tool_items
from unisono.api.responses.outbound.citations import Citations
from unisono.api.responses.outbound.failures import to_error
from unisono.api.responses.outbound.item_lifecycle import (
    ARGUMENTS,
    REASONING,
    REFUSAL,
    TEXT,
    TOOL_SEARCH_CALL,
    WORDLESS,
    ItemLifecycle,
    OpenItem,
    has_server_calls,
)
from unisono.api.responses.outbound.reasoning_summary import SummaryEvents
from unisono.api.responses.outbound.response import (
    LAST_EVENTS,
    ResponseFrame,
    is_in_answer,
    silent_items,
    to_notes,
    to_response,
    to_status,
)
from unisono.api.responses.outbound.serializer import EventSerializer, WireEvent, sse_of
from unisono.core.conversation import AssistantMessage, Item, Phase
from unisono.core.events import (
    Closed,
    Compacted,
    Delta,
    Event,
    Finished,
    HostedCall,
    Listed,
    Listing,
    Opened,
    Passed,
    PassedBytes,
    Ran,
    Reasoning,
    Repaired,
    Text,
    ToolCall,
    join_deltas,
)
from unisono.core.events import Item as Made
from unisono.core.state_store import Status, StoredItem, StoredResponse
from unisono.engine.request import GenerationReport
from unisono.errors import UnisonoError


class ResponseEvents:
    """Events of one response. `new_id` makes item ids; `clock` returns seconds since the epoch."""

    def __init__(
        self,
        frame: ResponseFrame,
        report: GenerationReport,
        *,
        new_id: NewId,
        clock: Callable[[], float],
        should_emit: bool = True,
    ) -> None:
        """Create the writer.

        If `should_emit` is False, the writer emits no events. It only counts them and sets `stored`.
        """
        self._writer = EventSerializer(frame.dialect, should_emit=should_emit)
        self._add = self._writer.add
        self.stored: StoredResponse | None = None
        self._frame = frame
        self._report = report
        self._new_id = new_id
        self._clock = clock
        self._output: list[StoredItem] = []
        self._silent_items: list[Item] = []
        self._open_item: OpenItem | None = None
        self._calls = 0
        self._has_truncated_call = False
        self._builtins = frame.trained()

    @property
    def acted(self) -> bool:
        """True if a server tool call was started, so that the answer must not be repeated."""
        return has_server_calls(self._output) or isinstance(self._open_item and self._open_item.made, HostedCall)

    @property
    def ended(self) -> bool:
        """True if the response has ended, so that `last` is the only event left."""
        return self.stored is not None

    def first_events(self, *, queued: bool = False) -> list[WireEvent]:
        """Return the events before the first item; with `queued`, `response.queued` is one of them."""
        # If this method is not called, the first call of another method returns these events before its own.
        self._start_response(queued=queued)
        return self._writer.pop_events()

    def write(self, batch: Sequence[Event]) -> list[WireEvent]:
        """Return the events of one batch. Adjacent deltas of one item become one event."""
        self._start_response()
        for entry in join_deltas(batch):
            if isinstance(entry, Delta):
                self._delta(entry.item, entry.text)
            else:
                self._entry(entry)
        return self._writer.pop_events()

    def sse(self, batch: Sequence[Event]) -> bytes:
        """Return the events of one batch as bytes of an HTTP stream."""
        # Nearly all batches are one delta of the open item.
        opened = self._open_item
        if opened is None or opened.plain_delta is None or opened.closed is not None or len(batch) != 1:
            return sse_of(self.write(batch))
        delta = batch[0]
        if type(delta) is not Delta or delta.item is not opened.made or not delta.text:
            return sse_of(self.write(batch))
        opened.text.write(delta.text)
        return self._writer.sse_delta(opened.plain_delta, delta.text)

    def resume(self, batch: Sequence[Event], number: int) -> None:
        """Continue after `batch`. Another process has already emitted the first `number` events."""
        self.write(batch)
        self._writer.pop_events()
        self._writer.number = number
        self._frame = self._frame.resumed(batch)

    def refuse(self, text: str) -> list[WireEvent]:
        """Return the events of a refusal message. The caller must end the response afterwards."""
        self._start_response()
        self._settle(COMPLETED)
        item_id, place = self._new_id("msg_"), len(self._output)
        open_item = self._start_item(Text(place, Phase.FINAL), item_id, REFUSAL)
        self._emit_delta(open_item, text)
        item = message(item_id, Phase.FINAL, [refusal_part(text)], COMPLETED)
        self._end_item(open_item, text, StoredItem(item_id, (AssistantMessage(text),), item))
        return self._writer.pop_events()

    def fail(self, error: UnisonoError) -> list[WireEvent]:
        """Close the open item and report the error."""
        self._start_response()
        self._settle(INCOMPLETE)
        self._add("error", {key: value for key, value in self._frame.dialect.error(error).items() if key != "type"})
        self._end(Status.FAILED, error=error)
        return self._writer.pop_events()

    def cancel(self) -> list[WireEvent]:
        """Close the open item in its current state. `last` then reports the cancellation."""
        self._start_response()
        self._settle(INCOMPLETE)
        self._end(Status.CANCELLED)
        return self._writer.pop_events()

    def last(self) -> WireEvent:
        """Return the last event; requires `ended`. If it cannot be sent, `fail` may be called next."""
        assert self.stored is not None
        self._response(LAST_EVENTS[self.stored.status], self.stored)
        [event] = self._writer.pop_events()
        self._writer.number = event.number
        return event

    # -- events of the engine

    def _entry(
        self, entry: Opened | Closed | Ran | Listed | Repaired | Compacted | Finished | Passed | PassedBytes
    ) -> None:
        match entry:
            case Opened():
                self._opened(entry.item)
            case Closed():
                self._closed(entry)
            case Finished():
                status = to_status(entry, calls=self._calls, has_truncated_call=self._has_truncated_call)
                self._settle(INCOMPLETE if status is Status.INCOMPLETE else COMPLETED)
                self._end(status, finished=entry)
            case Ran() | Listed():
                self._add_entry(entry)
            case Repaired() | Compacted() | Passed() | PassedBytes():
                pass  # reported by the last event, or written by `CompactionEvents`; a Harmony answer has no Passed
            case _:
                assert_never(entry)

    def _opened(self, item: Made) -> None:
        match item:
            case Reasoning():
                pass  # emitted with its first text: empty reasoning is omitted
            case ToolCall() if self._frame.hold_calls or self._frame.lifecycle(item) is not ARGUMENTS:
                pass
            case HostedCall() if item.needs_approval or server_tool_items.kind_of(item).is_added_at_end:
                pass
            case Text() | ToolCall() | HostedCall() | Listing():
                self._show(item)
            case _:
                assert_never(item)

    def _delta(self, item: Made, text: str) -> None:
        if not text:
            return
        open_item = self._open_item
        if open_item is None or (open_item.made is not item and open_item.made != item) or open_item.closed is not None:
            if not isinstance(item, Reasoning):
                return  # buffered: its Closed event has the complete text
            open_item = self._show(item)
        self._emit_delta(open_item, text)

    def _closed(self, closed: Closed) -> None:
        closed, open_item = self._frame.presentable(closed), self._open_item
        if isinstance(closed.item, HostedCall) and closed.item.needs_approval:
            self._request(closed)
            return
        if open_item is None or open_item.made != closed.item or open_item.closed is not None:
            if not is_in_answer(closed) and not isinstance(closed.item, HostedCall):
                self._silent_items += silent_items(closed)
                return
            open_item = self._show(closed.item, closed.text)
        text = closed.text
        if isinstance(closed.item, HostedCall):
            text = server_tool_items.complete_text(closed.item, text)
        emitted = open_item.text.getvalue()
        self._emit_delta(open_item, text[len(emitted) :])
        open_item.closed = closed
        if isinstance(closed.item, HostedCall):
            self._emit_text(open_item, text)
            for step in server_tool_items.kind_of(closed.item).made:
                self._step(open_item, step)
        elif isinstance(closed.item, ToolCall):
            self._calls += closed.complete
            self._has_truncated_call = self._has_truncated_call or not closed.complete
            self._settle(COMPLETED if closed.complete else INCOMPLETE)
        elif closed.complete:
            self._settle(COMPLETED)
        # A truncated item stays open, because the model may continue it after a repair. Only the last item can be
        # incomplete.

    # -- tools the gateway runs

    def _request(self, closed: Closed) -> None:
        self._settle(COMPLETED)
        item_id = self._frame.item_id(closed.item, self._new_id)
        item = server_tool_items.to_stored_request(closed, item_id, self._silent_items)
        self._silent_items = []
        self._add_whole(item)

    def _add_whole(self, item: StoredItem) -> None:
        place = {"output_index": len(self._output)}
        wire = self._frame.dialect.item(item.wire)
        self._add("response.output_item.added", {**place, "item": wire})
        self._output.append(item)
        self._add("response.output_item.done", {**place, "item": wire})

    def _add_entry(self, entry: Ran | Listed) -> None:
        """Emit the result of the tool call or tool list that is open."""
        opened = self._open_item
        assert opened is not None
        if isinstance(entry, Listed):
            item = server_tool_items.to_stored_listing(entry.item, opened.id, entry)
            self._end_server_call(opened, item, failed=entry.error is not None)
        else:
            closed = opened.closed
            assert closed is not None
            self._builtins.record_result(entry.item, entry)
            item = server_tool_items.to_stored_call(closed, opened.id, entry, opened.silent_items, self._builtins)
            self._end_server_call(opened, item, failed=entry.outcome.is_error)
            if server_tool_items.kind_of(entry.item) is TOOL_SEARCH_CALL:
                declared = self._frame.request.get("tools") or ()
                self._add_whole(server_tool_items.to_stored_search_result(entry, self._frame.toolbox, declared))

    def _end_server_call(self, open_item: OpenItem, item: StoredItem, *, failed: bool) -> None:
        self._step(open_item, server_tool_items.kind_of(open_item.made).failed if failed else "completed")
        self._done(open_item, item)

    def _step(self, open_item: OpenItem, step: str) -> None:
        if (kind := server_tool_items.kind_of(open_item.made)).has_steps:
            self._add(f"response.{kind.type}.{step}", open_item.location)

    # -- item life cycles

    def _show(self, item: Made, text: str = "") -> OpenItem:
        self._settle(COMPLETED)
        return self._start_item(item, self._frame.item_id(item, self._new_id), self._frame.lifecycle(item), text)

    def _start_item(self, item: Made, item_id: str, lifecycle: ItemLifecycle, text: str = "") -> OpenItem:
        hidden = lifecycle is WORDLESS or (lifecycle is REASONING and not self._frame.show_reasoning)
        opened = OpenItem(item, item_id, len(self._output), lifecycle, hidden, self._silent_items)
        opened.delta = self._writer.form(f"{lifecycle.event}.delta", opened.location, lifecycle.more)
        if lifecycle is TEXT and self._builtins.pages:
            opened.citations = Citations(self._builtins.pages)
        # A summary would reveal hidden reasoning.
        if lifecycle is REASONING and not hidden and self._frame.summary_chars:
            opened.summary = SummaryEvents(self._add, opened.place, self._frame.summary_chars)
        has_logprobs = lifecycle is TEXT and self._frame.logprobs is not None
        if self._writer.should_emit and not (hidden or has_logprobs or opened.citations or opened.summary):
            opened.plain_delta = opened.delta
        self._open_item = opened
        self._silent_items = []
        added = self._frame.added(item, item_id, text, self._builtins)
        self._add("response.output_item.added", {"output_index": opened.index, "item": self._frame.dialect.item(added)})
        if lifecycle.part is not None and not opened.hidden:
            self._add("response.content_part.added", {**opened.location, "part": lifecycle.part("")})
        if isinstance(item, HostedCall | Listing):
            self._step(opened, "in_progress")
        return opened

    def _emit_delta(self, open_item: OpenItem, text: str) -> None:
        if not text:
            return
        open_item.text.write(text)
        if open_item.lifecycle is TEXT and self._frame.logprobs is not None:
            new = to_entries(self._report.facts.logprobs, open_item.made.index, text, self._frame.logprobs)
            open_item.logprobs += new
            self._add("response.output_text.delta", {**open_item.location, "delta": text, "logprobs": new})
        elif not open_item.hidden and open_item.delta is not None:
            self._writer.delta(open_item.delta, text)
        if open_item.summary is not None:
            open_item.summary.feed(text)
        for annotation in open_item.citations.feed(text) if open_item.citations is not None else ():
            number = {"annotation_index": len(open_item.annotations), "annotation": annotation}
            self._add("response.output_text.annotation.added", {**open_item.location, **number})
            open_item.annotations.append(annotation)

    def _settle(self, status: str) -> None:
        """End the open item, if there is one, with this status."""
        open_item = self._open_item
        if open_item is None:
            return
        if open_item.summary is not None:
            open_item.summary.end(status)
        text = open_item.text.getvalue()
        closed = open_item.closed or Closed(open_item.made, text, complete=False)
        item = self._frame.output(closed, open_item.id, status, open_item)
        if isinstance(open_item.made, HostedCall | Listing):
            # The call was interrupted, so its result is unknown.
            if isinstance(open_item.made, HostedCall):
                self._emit_text(open_item, text)
            self._end_server_call(open_item, item, failed=True)
            return
        self._end_item(open_item, text, item)

    def _end_item(self, open_item: OpenItem, text: str, item: StoredItem) -> None:
        for name, fields in command_events(dict(item.wire)):
            self._add(name, {"output_index": open_item.index, **fields})
        self._emit_text(open_item, text, {name: item.wire[name] for name in open_item.lifecycle.copied})
        self._done(open_item, item)

    def _emit_text(self, open_item: OpenItem, text: str, copied: Wire | None = None) -> None:
        """Emit the complete text of an item, with the fields `copied`; later calls have no effect."""
        if open_item.hidden or open_item.is_text_emitted:
            return
        open_item.is_text_emitted = True
        lifecycle = open_item.lifecycle
        at = open_item.location
        self._add(f"{lifecycle.event}.done", {**at, lifecycle.full: text, **open_item.more, **(copied or {})})
        if lifecycle.part is not None:
            self._add("response.content_part.done", {**at, "part": open_item.part(text)})

    def _done(self, open_item: OpenItem, item: StoredItem) -> None:
        self._output.append(item)
        done = {"output_index": open_item.index, "item": self._frame.dialect.item(item.wire)}
        self._add("response.output_item.done", done)
        self._open_item = None

    # -- the frame

    def _start_response(self, *, queued: bool = False) -> None:
        """Emit the events before the first item, if they have not been emitted yet."""
        if self._writer.number:
            return
        status = Status.QUEUED if queued else Status.IN_PROGRESS
        self._response("response.created", self._frame.stored(status))
        if queued:
            self._response("response.queued", self._frame.stored(status))
        self._response("response.in_progress", self._frame.stored(Status.IN_PROGRESS))

    def _end(self, status: Status, *, finished: Finished | None = None, error: UnisonoError | None = None) -> None:
        about = to_about([self._report], self._frame.notes_on(self._output))
        usage = finished.usage if finished is not None else self.stored and self.stored.usage
        ending = {"error": to_error(error), "notes": to_notes(status, about, self._clock(), error)}
        self.stored = self._frame.stored(status, output=tuple(self._output), usage=usage, **ending)

    def _response(self, name: str, stored: StoredResponse) -> None:
        self._add(name, {"response": to_response(stored, self._frame.dialect)} if self._writer.should_emit else {})
