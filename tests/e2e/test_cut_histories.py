"""Histories that a client cut between a call and its result, on every API surface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer
from tests.e2e.responses import ANSWER, Line, line
from tests.e2e.surfaces import unisono_object
from tests.e2e.wires import WIRES

Json = dict[str, Any]
GO_ON: Json = {"role": "user", "content": "Go on."}


def chat_call(call_id: str) -> Json:
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return {"role": "assistant", "tool_calls": [call]}


def chat_result(call_id: str) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": "blue"}


def use(call_id: str) -> Json:
    return {"role": "assistant", "content": [{"type": "tool_use", "id": call_id, "name": "look", "input": {}}]}


def tool_result(*call_ids: str) -> Json:
    results = [{"type": "tool_result", "tool_use_id": call_id, "content": "blue"} for call_id in call_ids]
    return {"role": "user", "content": results}


def call(call_id: str) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}"}


def output(call_id: str, kind: str = "function_call_output", **fields: Any) -> Json:
    return {"type": kind, "call_id": call_id, "output": "blue", **fields}


def builtin_call(tool: str) -> Json:
    return {"type": f"{tool}_call", "call_id": "c1", "action": {"commands": ["ls"]}}


LEGACY: Json = {"role": "function", "name": "look", "content": "blue"}
SHELL: Json = output("c9", "shell_call_output", output=[{"stdout": "blue", "stderr": "", "outcome": {"type": "exit"}}])

# Surface, history, tool in the prompt, and the field that the note names.
CUT: dict[str, tuple[str, list[Json], str, str]] = {
    "chat": ("chat", [chat_result("c9"), GO_ON], "functions.unknown_tool", "messages.0.tool_call_id"),
    "chat, newest": ("chat", [GO_ON, chat_result("c9")], "functions.unknown_tool", "messages.1.tool_call_id"),
    "chat, after a waiting call": (
        "chat",
        [chat_call("c1"), chat_result("c9"), GO_ON],
        "functions.unknown_tool",
        "messages.1.tool_call_id",
    ),
    "chat, beside an answered call": (
        "chat",
        [chat_call("c1"), chat_result("c9"), chat_result("c1")],
        "functions.unknown_tool",
        "messages.1.tool_call_id",
    ),
    "chat, by the name of a function": ("chat", [LEGACY, GO_ON], "functions.look", "messages.0.name"),
    "messages": (
        "messages",
        [tool_result("c9"), GO_ON],
        "functions.unknown_tool",
        "messages.0.content.0.tool_use_id",
    ),
    "messages, newest": (
        "messages",
        [GO_ON, tool_result("c9")],
        "functions.unknown_tool",
        "messages.1.content.0.tool_use_id",
    ),
    "messages, after a waiting call": (
        "messages",
        [use("c1"), tool_result("c9"), GO_ON],
        "functions.unknown_tool",
        "messages.1.content.0.tool_use_id",
    ),
    "messages, beside an answered call": (
        "messages",
        [use("c1"), tool_result("c9", "c1")],
        "functions.unknown_tool",
        "messages.1.content.0.tool_use_id",
    ),
    "responses": ("responses", [output("c9"), GO_ON], "functions.unknown_tool", "input.0.call_id"),
    "responses, newest": ("responses", [GO_ON, output("c9")], "functions.unknown_tool", "input.1.call_id"),
    "responses, after a waiting call": (
        "responses",
        [call("c1"), output("c9"), GO_ON],
        "functions.unknown_tool",
        "input.1.call_id",
    ),
    "responses, beside an answered call": (
        "responses",
        [call("c1"), output("c9"), output("c1")],
        "functions.unknown_tool",
        "input.1.call_id",
    ),
    "responses, with the name of the tool": (
        "responses",
        [output("c9", "custom_tool_call_output", name="exec"), GO_ON],
        "functions.exec",
        "input.0.call_id",
    ),
    "responses, a built-in tool of the client": ("responses", [SHELL, GO_ON], "functions.shell", "input.0.call_id"),
    "responses, a built-in tool of the client, newest": (
        "responses",
        [GO_ON, SHELL],
        "functions.shell",
        "input.1.call_id",
    ),
    "responses, by the id of the item": (
        "responses",
        [{"type": "local_shell_call_output", "id": "c9", "output": "blue"}, GO_ON],
        "functions.local_shell",
        "input.0.id",
    ),
    "responses, a built-in tool of the client without an id": (
        "responses",
        [GO_ON, {"type": "shell_call_output", "output": "blue"}],
        "functions.shell",
        "input.1",
    ),
}

# Surface, history whose newest result has a wrong id, and the field that the error names.
MISTAKEN: dict[str, tuple[str, list[Json], str]] = {
    "chat": ("chat", [GO_ON, chat_call("c1"), chat_result("c9")], "messages.2.tool_call_id"),
    "chat, by the name of a function": (
        "chat",
        [GO_ON, chat_call("c1"), LEGACY],
        "'messages.2.name': no earlier assistant message has an unanswered call of 'look'; send the call first.",
    ),
    "messages": ("messages", [GO_ON, use("c1"), tool_result("c9")], "messages.2.content.0.tool_use_id"),
    "responses": ("responses", [GO_ON, call("c1"), output("c9")], "input.2.call_id"),
    "responses, shell": ("responses", [GO_ON, builtin_call("shell"), SHELL], "input.2.call_id"),
    "responses, apply_patch": (
        "responses",
        [GO_ON, builtin_call("apply_patch"), output("c9", "apply_patch_call_output")],
        "input.2.call_id",
    ),
    "responses, local_shell": (
        "responses",
        [GO_ON, builtin_call("local_shell"), {"type": "local_shell_call_output", "id": "c9", "output": "blue"}],
        "input.2.id",
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Line]:
    async with line(WIRES["vllm"]) as running:
        yield running


async def send(harness: Line, surface: str, history: list[Json], **fields: Any) -> Answer:
    harness.say(ANSWER)
    if surface == "responses":
        return await harness.post(input=history, **fields)
    if surface == "chat":
        return await harness.gateway.chat(model="gpt-oss", messages=history, **fields)
    return await harness.gateway.messages(model="gpt-oss", messages=history, **fields)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("surface", "history", "name", "param"), CUT.values(), ids=CUT)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_result_without_its_call_is_in_the_prompt_and_in_a_note(
    harness: Line, surface: str, history: list[Json], name: str, param: str, stream: bool
) -> None:
    answer = await send(harness, surface, history, stream=stream)
    assert answer.status == 200
    assert f"<|start|>{name} to=assistant<|channel|>commentary<|message|>blue<|end|>" in harness.prompts[-1]
    [note] = unisono_object(answer)["notes"]
    assert note.startswith(f"{param}: the model reads this result without its call")


@pytest.mark.parametrize(("surface", "history", "param"), MISTAKEN.values(), ids=MISTAKEN)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_newest_result_with_a_wrong_id_is_refused_and_the_session_continues(
    harness: Line, surface: str, history: list[Json], param: str
) -> None:
    refused = await send(harness, surface, history)
    assert (refused.status, param in refused.raw.decode()) == (400, True)
    continued = await send(harness, surface, [*history, GO_ON])
    assert continued.status == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_a_result_without_its_call_is_refused_after_a_stored_response(harness: Line) -> None:
    first = await send(harness, "responses", [GO_ON])
    refused = await send(harness, "responses", [output("c9")], previous_response_id=first.body["id"])
    assert (refused.status, refused.body["error"]["param"]) == (400, "input.0.call_id")
    continued = await send(harness, "responses", [output("c9"), GO_ON], previous_response_id=first.body["id"])
    assert continued.status == 200
