"""Response frames, ids and streams for the tests of outbound events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from tests.api.responses.folding import Event, parsed
from unisono.api.client_toolbox import CLIENT_FORMS, CallForm, Toolbox
from unisono.api.request_options import to_sampling
from unisono.api.responses.items import NewId, prefix_of, to_wire
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.response import ResponseFrame, to_echo
from unisono.api.responses.schema import ResponsesRequest
from unisono.core import events as engine_events
from unisono.core.conversation import Item
from unisono.core.state_store import StoredItem, StoredResponse
from unisono.engine.request import GenerationReport

NOW = 1700000007.5
TOOLBOX = Toolbox(
    forms={"free": CallForm.CUSTOM, **{form.value: form for form in CLIENT_FORMS}},
    origins={"files__read": ("files", "read")},
)


def ids() -> Callable[[str], str]:
    """Return a function that appends a running number to a prefix."""
    numbers = count()
    return lambda prefix: f"{prefix}{next(numbers)}"


def to_stored(item: Item, new_id: NewId, toolbox: Toolbox) -> StoredItem:
    """Return a stored item for an item that has only content."""
    item_id = new_id(prefix_of(str(to_wire(item, "", toolbox)["type"])))
    return StoredItem(item_id, (item,), to_wire(item, item_id, toolbox))


def request_of(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "gpt-oss-20b", "input": "Hi"} | fields)


def frame(body: ResponsesRequest | None = None, **changes: Any) -> ResponseFrame:
    request = body or request_of()
    fields: dict[str, Any] = {"toolbox": TOOLBOX, "request": to_echo(request, to_sampling(request))}
    return ResponseFrame("resp_1", 1700000000, "gpt-oss-20b", **fields | changes)


def streamed(
    batches: Iterable[Sequence[engine_events.Event]],
    response_frame: ResponseFrame,
    report: GenerationReport | None = None,
) -> tuple[list[Event], StoredResponse]:
    """Return the parsed events of a complete stream and the stored response."""
    events = ResponseEvents(response_frame, report or GenerationReport(), new_id=ids(), clock=lambda: NOW)
    wire_events = events.first_events()
    for batch in batches:
        wire_events += events.write(batch)
    assert events.ended
    assert events.stored is not None
    return parsed([*wire_events, events.last()]), events.stored
