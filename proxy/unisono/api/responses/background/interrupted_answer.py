"""Reconstruction of an interrupted answer from its event log.

A process that ends an unrecoverable response knows only the logged events, because it does not generate the answer
again. The events that it adds must match the logged events: an open item is closed with its current content, and the
response contains exactly the content of the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.items import INCOMPLETE, Wire
from unisono.api.responses.outbound.dialects import OPENAI
from unisono.api.responses.outbound.failures import to_error
from unisono.api.responses.outbound.item_lifecycle import ARGUMENTS, INPUT, REASONING, REFUSAL, TEXT, ItemLifecycle
from unisono.api.responses.outbound.reasoning_summary import DELTA as SUMMARY_DELTA
from unisono.api.responses.outbound.reasoning_summary import last_events, summary_part
from unisono.api.responses.outbound.response import LAST_EVENTS, to_notes, to_response
from unisono.api.responses.persistence import retry_while_down
from unisono.core.state_store import BackgroundRun, Lease, LogWrite, Status, StoredItem, StoredResponse
from unisono.errors import UnisonoError

PARTS: Mapping[str, ItemLifecycle] = {"output_text": TEXT, "refusal": REFUSAL, "reasoning_text": REASONING}
CALLS: Mapping[str, ItemLifecycle] = {"function_call": ARGUMENTS, "custom_tool_call": INPUT}
ADDED, DONE = "response.output_item.added", "response.output_item.done"
PART_ADDED, PART_DONE = "response.content_part.added", "response.content_part.done"
FIRST = ("created", "in_progress")
PAGE = 256


async def fail_response(
    deps: ResponsesDeps,
    background_run: BackgroundRun,
    response: StoredResponse,
    lease: Lease,
    error: UnisonoError | None,
) -> None:
    """End a stored response that no process can continue, with `error` as its reason.

    If `error` is None, the response is cancelled. Raises StoreError if the end cannot be stored.
    """
    broken = InterruptedAnswer()
    while True:
        page = await retry_while_down(
            lambda: deps.store.events(background_run.tenant, background_run.response, broken.count, limit=PAGE)
        )
        if page is None or not page.events:
            break
        broken.read(page.events)
    made = [*_first_events(response, broken.count), *broken.closed()]
    if error is not None:
        made.append(OPENAI.error(error))
    status = Status.CANCELLED if error is None else Status.FAILED
    last = replace(
        response,
        status=status,
        output=tuple(StoredItem(item["id"], (), item) for item in broken.output),
        error=to_error(error),
        notes=to_notes(status, {}, deps.clock(), error),
    )
    made.append({"type": LAST_EVENTS[last.status], "response": to_response(last)})
    events = (
        orjson.dumps({"type": event["type"], "sequence_number": number, **event})
        for number, event in enumerate(made, broken.count)
    )
    write = LogWrite(broken.count, tuple(events))
    await retry_while_down(lambda: deps.store.update(background_run.tenant, last, lease=lease, log=write))


def _first_events(response: StoredResponse, written: int) -> list[Wire]:
    """Return the first events of a stream; [] unless the number `written` of logged events is 0."""
    in_progress = replace(response, status=Status.IN_PROGRESS, notes={})
    return [] if written else [{"type": f"response.{name}", "response": to_response(in_progress)} for name in FIRST]


class InterruptedAnswer:
    """Output of an answer whose generation was interrupted, rebuilt from its logged events.

    `read` must receive the events in order. `count` is the number of events read.
    """

    def __init__(self) -> None:
        self.count = 0
        # Finished items of the answer, as in the events.
        self.output: list[Wire] = []
        self._open: Wire | None = None
        self._part: Wire | None = None
        self._texts: list[str] = []
        # Deltas of the reasoning summary.
        self._summary: list[str] = []

    def read(self, events: Iterable[bytes]) -> None:
        for data in events:
            self.count += 1
            self._read_event(orjson.loads(data))

    def _read_event(self, event: Wire) -> None:
        kind = event["type"]
        if kind == ADDED:
            self._open, self._part, self._texts, self._summary = event["item"], None, [], []
        elif kind == DONE:
            self.output.append(event["item"])
            self._open = None
        elif kind == PART_ADDED:
            self._part = event["part"]
        elif kind == SUMMARY_DELTA:
            self._summary.append(event["delta"])
        elif kind.endswith(".delta"):
            self._texts.append(event["delta"])

    def closed(self) -> list[Wire]:
        """Close the open item and move it to `output`.

        Returns the closing events, without their numbers.
        """
        item = self._open
        if item is None:
            return []
        self._open = None
        where = {"item_id": item["id"], "output_index": len(self.output)}
        text = "".join(self._texts)
        events: list[Wire] = []
        if self._summary:
            summary = "".join(self._summary)
            events += [{"type": name, **body} for name, body in last_events(where, summary, INCOMPLETE)]
            item = {**item, "summary": [summary_part(summary)]}
        if self._part is not None:
            lifecycle = PARTS[self._part["type"]]
            assert lifecycle.part is not None
            within = {**where, "content_index": 0}
            part = lifecycle.part(text)
            events.append({"type": f"{lifecycle.event}.done", **within, lifecycle.full: text, **(lifecycle.more or {})})
            events.append({"type": PART_DONE, **within, "part": part})
            item = {**item, "content": [part]}
        elif (call := CALLS.get(item["type"])) is not None:
            copied: dict[str, Any] = {name: item[name] for name in call.copied}
            events.append({"type": f"{call.event}.done", **where, call.full: text, **copied})
            item = {**item, call.full: text}
        if "status" in item:
            item = {**item, "status": INCOMPLETE}
        self.output.append(item)
        events.append({"type": DONE, "output_index": where["output_index"], "item": item})
        return events
