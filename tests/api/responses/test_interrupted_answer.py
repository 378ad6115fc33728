"""The end of a background response that no process can continue, made from its events alone."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.api.responses.folding import Folded, parsed
from tests.api.responses.frames import NOW, frame, ids
from tests.api.scripted import call, final, reasoning
from unisono.api.responses.background.interrupted_answer import InterruptedAnswer
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.core.events import Event
from unisono.engine.request import GenerationReport

STREAM: list[Event] = [*reasoning(0, "One.", " Two", ".", " Thr"), *final(1, "Hi", "!"), *call(2, 0, "f", "{}")]


@pytest.mark.parametrize("summary_chars", [0, 600], ids=["plain", "summary"])
@pytest.mark.parametrize("length", range(1, len(STREAM) + 1))
def test_an_answer_interrupted_anywhere_ends_as_its_events_say(length: int, summary_chars: int) -> None:
    live = ResponseEvents(frame(summary_chars=summary_chars), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    logged = [event for entry in STREAM[:length] for event in live.write([entry])]
    broken = InterruptedAnswer()
    broken.read(event.data for event in logged)
    closing: list[dict[str, Any]] = [
        {"sequence_number": number, **event} for number, event in enumerate(broken.closed(), len(logged))
    ]
    folded = Folded()
    for number, event in enumerate([*parsed(logged), *orjson.loads(orjson.dumps(closing))]):
        folded.take(number, event)
    assert folded.output == broken.output
    assert len(broken.output) > 0 or length == 1
