"""Frames, ids and streams that tests of the answer begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from tests.api.responses.folding import Event, parsed
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.response import ResponseFrame, to_echo
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.sampling import to_sampling
from unisono.api.tools import CallForm, Toolbox
from unisono.core import events as made
from unisono.core.state_store import StoredResponse
from unisono.engine.request import GenerationReport

NOW = 1700000007.5
TOOLBOX = Toolbox(forms={"free": CallForm.CUSTOM}, origins={"files__read": ("files", "read")})


def ids() -> Callable[[str], str]:
    """Ids in the order they are asked for."""
    numbers = count()
    return lambda prefix: f"{prefix}{next(numbers)}"


def request_of(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "gpt-oss-20b", "input": "Hi"} | fields)


def frame(asked: ResponsesRequest | None = None, **changes: Any) -> ResponseFrame:
    request = asked or request_of()
    settled: dict[str, Any] = {"toolbox": TOOLBOX, "request": to_echo(request, to_sampling(request))}
    return ResponseFrame("resp_1", 1700000000, "gpt-oss-20b", **settled | changes)


def streamed(
    batches: Iterable[Sequence[made.Event]], shown: ResponseFrame, report: GenerationReport | None = None
) -> tuple[list[Event], StoredResponse]:
    """A whole stream, and what is kept of it."""
    events = ResponseEvents(shown, report or GenerationReport(), new_id=ids(), clock=lambda: NOW)
    out = events.first_events()
    for batch in batches:
        out += events.write(batch)
    assert events.ended
    assert events.stored is not None
    return parsed([*out, events.last()]), events.stored
