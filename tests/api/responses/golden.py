"""Golden events: one stream of every kind in OpenAI's wire format.

The tests compare the gateway's events with the files. The suites of the official SDKs parse the same files with
their own types. `python -m tests.api.responses.golden` regenerates the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from tests.api.responses.folding import Event, parsed
from tests.api.responses.frames import NOW, TOOLBOX, frame, ids, request_of, streamed
from tests.api.scripted import call, commentary, final, finished, hosted, listing, reasoning, request
from unisono.api.responses.items import to_wire
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.core import events as engine_events
from unisono.core.conversation import DeveloperMessage, Phase, ToolResult, UserMessage
from unisono.core.events import Closed, Delta, Opened, Text
from unisono.core.generation import FinishReason
from unisono.engine.request import GenerationReport
from unisono.errors import BackendUnavailable

FOLDER = Path(__file__).parents[2] / "golden" / "responses"
EVENTS, ITEMS = FOLDER / "events.jsonl", FOLDER / "items.jsonl"

TOOLS = [
    {"type": "function", "name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "free", "description": "Free text."},
    {
        "type": "namespace",
        "name": "files",
        "description": "Files.",
        "tools": [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}],
    },
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "local_shell"},
    {"type": "apply_patch"},
]
TRUNCATED = Text(1, Phase.FINAL)
STREAMS: list[list[engine_events.Event]] = [
    [*reasoning(0, "h", "m"), *final(1, "Hi", "!"), finished()],
    [*commentary(0, "Look."), *call(1, 0, "files__read", '{"path"', ':"a"}'), finished()],
    [*call(0, 0, "f"), *call(1, 1, "free", "ls -l"), finished()],
    [
        *listing(0, "find"),
        *listing(1, error="It is gone."),
        *hosted(0, '{"q"', ':"a"}', said="found"),
        *hosted(1, "{}", said="no", error=True),
        *hosted(2, "{}", approval="mcpr_1"),
        *request(3, '{"q":"b"}'),
        finished(),
    ],
    [
        *call(0, 0, "shell", '{"commands":["ls","pwd"]}'),
        *call(1, 1, "local_shell", '{"command":["ls"]}'),
        *call(2, 2, "apply_patch", '{"type":"create_file","path":"a","diff":"+1"}'),
        *call(3, 3, "apply_patch", '{"type":"delete_file","path":"a","diff":""}'),
        *call(4, 4, "shell", "ls"),
        finished(),
    ],
    [
        *reasoning(0, "hm"),
        *(Opened(TRUNCATED), Delta(TRUNCATED, "Half an"), Closed(TRUNCATED, "Half an", complete=False)),
        finished(FinishReason.LENGTH),
    ],
]


def events() -> Iterator[Event]:
    """Return the events of all streams, then of one that was queued, refused and failed."""
    body = request_of(
        tools=TOOLS,
        instructions="Be brief.",
        conversation="conv_1",
        metadata={"a": "b"},
        reasoning={"effort": "high", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        safety_identifier="s",
        user="u",
        max_output_tokens=100,
    )
    response_frame = frame(body, seal=lambda item: "sealed", summary_chars=600)
    for stream in STREAMS:
        yield from streamed(
            [[event] for event in stream], response_frame, GenerationReport("vllm-1", 1, ["missing-end"])
        )[0]
    failed = ResponseEvents(response_frame, GenerationReport(), new_id=ids(), clock=lambda: NOW)
    first_events = [*failed.first_events(queued=True), *failed.refuse("No."), *failed.write(final(1, "Hi")[:2])]
    yield from parsed([*first_events, *failed.fail(BackendUnavailable("It is gone.")), failed.last()])


def items() -> Iterator[Event]:
    """Return the items that occur only in input; the events cover the items of responses."""
    messages = (UserMessage("Hi"), DeveloperMessage("Be brief."))
    results = (ToolResult("c", name, "x") for name in ("f", "free", "shell", "local_shell", "apply_patch"))
    for number, item in enumerate((*messages, *results)):
        yield to_wire(item, f"item_{number}", TOOLBOX)


def lines(values: Iterator[Event]) -> bytes:
    return b"".join(orjson.dumps(value) + b"\n" for value in values)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    EVENTS.write_bytes(lines(events()))
    ITEMS.write_bytes(lines(items()))
