"""Differences of request shapes: what an agent adds or removes, and what the gateway does not support."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents.wire_log import WireLog
from tests.agents.wire_shapes import (
    LOCKED,
    WireShape,
    body_lines,
    changes,
    header_lines,
    read_sessions,
    report,
    write_session,
)

Json = dict[str, Any]
BODY: Json = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "arguments": "{}"},
    ],
    "tools": [{"type": "function", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}],
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low", "summary": None},
    "text": {"type": "a type that is a sentence"},
}
LINES = {
    "input: array",
    "input[]<message>: object",
    "input[]<message>.role = user",
    "input[]<message>.content: array",
    "input[]<message>.content[]<input_text>: object",
    "input[]<message>.content[]<input_text>.text: string",
    "input[]<user>: object",
    "input[]<user>.content: string",
    "input[]<function_call>: object",
    "input[]<function_call>.arguments: string",
    "tools: array",
    "tools[]<function>: object",
    "tools[]<function>.parameters: object",
    "include: array",
    "include[] = reasoning.encrypted_content",
    "reasoning: object",
    "reasoning.effort = low",
    "reasoning.summary: null",
    "text: object",
    "text.type: string",
}


def test_a_body_becomes_paths_with_kinds_and_types() -> None:
    assert set(body_lines(BODY)) == LINES


def test_arguments_of_calls_have_no_paths() -> None:
    body = {"content": [{"type": "tool_use", "input": {"path": "a"}}]}
    assert {line for line in body_lines(body) if "path" in line} == set()


def test_headers_become_names_and_features() -> None:
    headers = [(b"Authorization", b"Bearer x"), (b"anthropic-beta", b"one, two")]
    assert [*header_lines(headers)] == [
        "header authorization",
        "header anthropic-beta",
        "header anthropic-beta = one",
        "header anthropic-beta = two",
    ]


async def shape_of(body: Json, status: int, answer: Json | None, *, stream: bool = False) -> WireShape:
    """Return the shape of one request that is answered with `answer`."""
    log = WireLog()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": []})
        text = f"event: x\ndata: {json.dumps(answer)}\n\n" if stream else json.dumps(answer)
        for place in range(0, len(text), 7):
            await send({"type": "http.response.body", "body": text[place : place + 7].encode(), "more_body": True})
        await send({"type": "http.response.body"})

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": [(b"accept", b"*/*")]}
    await log.wrap(app)(scope, receive, send)
    return log.shape


OLD: Json = {"input": [{"type": "message", "role": "user", "content": "Hi"}], "store": False}
NEW: Json = {"input": [*OLD["input"], {"type": "dream", "text": "z"}, {"type": "message", "content": []}], "seed": 1}
DREAM = "POST /v1/responses input[]<dream>: object"
# Status and answer to the newer request, and its kinds that are not supported.
ANSWERS: dict[str, tuple[int, Json, set[str]]] = {
    "no report": (200, {"unisono": {}}, set()),
    "a note": (200, {"response": {"unisono": {"notes": ["input.1: no effect, because"]}}}, {DREAM}),
    "a note on the type": (200, {"unisono": {"notes": ["input.1.type: no effect"]}}, {DREAM}),
    "a note on a field": (200, {"unisono": {"notes": ["input.1.text: no effect"]}}, set()),
    "a note on a known kind": (200, {"unisono": {"notes": ["input.2: no effect"]}}, set()),
    "a note on a setting": (200, {"unisono": {"notes": ["seed: no effect"]}}, set()),
    "an error": (400, {"error": {"message": "must be known", "param": "input.1.type"}}, {DREAM}),
    "an error in a field": (400, {"error": {"message": "'input.1.text' is wrong", "param": None}}, {DREAM}),
    "another error": (400, {"error": {"message": "'seed' is wrong", "param": "seed"}}, set()),
    "an error of the server": (500, {"error": {"message": "'input.1.text' is wrong"}}, set()),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("status", "answer", "unsupported"), ANSWERS.values(), ids=ANSWERS)
async def test_an_added_kind_is_unsupported_if_the_gateway_reports_it(
    status: int, answer: Json, unsupported: set[str], stream: bool
) -> None:
    before = await shape_of(OLD, 200, {})
    change = changes(before.lines, await shape_of(NEW, status, answer, stream=stream))
    assert set(change.unsupported) == unsupported
    assert change.added == (
        DREAM.replace(": object", ".text: string"),
        DREAM,
        "POST /v1/responses input[]<message>.content: array",
        "POST /v1/responses seed: number",
    )
    assert change.removed == ("POST /v1/responses store: boolean",)
    # A known kind that is reported is no change.
    after = await shape_of(NEW, status, answer, stream=stream)
    assert changes(after.lines, after).unsupported == {}


async def test_frames_of_a_websocket_are_requests() -> None:
    log = WireLog()
    frames = iter([{"type": "websocket.receive", "text": json.dumps(NEW)}])
    error = {"type": "error", "error": {"message": "'input.1.type' is unknown"}}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.send", "text": json.dumps(error)})

    async def receive() -> Any:
        return next(frames)

    async def send(message: Any) -> None:
        pass

    await log.wrap(app)({"type": "websocket", "path": "/v1/responses", "headers": []}, receive, send)
    assert "WS /v1/responses input[]<dream>: object" in log.shape.lines
    assert [*log.shape.reported] == ["input[]<dream>: object"]


def test_sessions_of_an_agent_are_compared_together(tmp_path: Path) -> None:
    for number, line in enumerate("ab"):
        (tmp_path / str(number)).mkdir()
        write_session(tmp_path / str(number) / "wire.json", "codex", WireShape({line}, {line: "why"}))
    shape = read_sessions(tmp_path)["codex"]
    assert shape == WireShape({"a", "b"}, {"a": "why", "b": "why"})
    assert [*report("codex", changes("bc", shape), is_partial=False)] == [
        "codex: 1 lines added, 1 removed",
        "  + a",
        "  - c",
    ]
    assert [*report("codex", changes("abc", shape), is_partial=True)] == ["codex: no changes of its requests"]


def test_the_recorded_shapes_are_sorted() -> None:
    shapes = json.loads(LOCKED.read_text())
    assert shapes
    assert all(lines == sorted(set(lines)) for lines in shapes.values())
