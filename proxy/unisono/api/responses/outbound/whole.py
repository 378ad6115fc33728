"""A finished answer as a response: the fold of the very events a stream is made of."""

from __future__ import annotations

from unisono.api.about import to_about
from unisono.api.responses.items import COMPLETED, INCOMPLETE, NewId
from unisono.api.responses.outbound.response import Frame, is_shown, silent, to_notes, to_status
from unisono.core.conversation import Item
from unisono.core.events import ToolCall
from unisono.core.state import Status, StoredItem, StoredResponse
from unisono.engine.collect import Result
from unisono.engine.turn import Report


def to_stored_response(frame: Frame, result: Result, report: Report, *, new_id: NewId, now: float) -> StoredResponse:
    """The response as it is kept and, through `to_response`, shown. `now` is in seconds since the epoch.

    Only the last item can be incomplete: one that was cut in the middle was mended, and the model went on.
    """
    shown = [closed for closed in result.items if is_shown(closed)]
    calls = sum(isinstance(closed.item, ToolCall) for closed in shown)
    status = to_status(result.finished, calls=calls)
    output: list[StoredItem] = []
    before: list[Item] = []
    for closed in result.items:
        if not is_shown(closed):
            before += silent(closed)
            continue
        cut = closed is shown[-1] and not closed.complete and status is Status.INCOMPLETE
        item_id = frame.item_id(closed.item, new_id)
        output.append(frame.output(closed, item_id, INCOMPLETE if cut else COMPLETED, before))
        before = []
    notes = to_notes(status, to_about([report], frame.notes), now)
    return frame.stored(status, output=tuple(output), usage=result.finished.usage, notes=notes)
