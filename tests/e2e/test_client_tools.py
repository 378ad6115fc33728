"""`shell`, `local_shell` and `apply_patch`: built-in tools of OpenAI that the client runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import KINDS, Desk, Json, answers, calls, desk, responds
from tests.e2e.test_responses_websocket import connected

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHELL = {"type": "shell", "environment": {"type": "local"}}
PATCH = '{"type": "update_file", "path": "a.py", "diff": "@@\\n-1\\n+2"}'
# Tool, arguments of the model, its declaration, fields of the call, and its result with the text for the model.
TOOLS: Mapping[str, tuple[Json, str, str, Json, Json, str]] = {
    "shell": (
        SHELL,
        '{"commands": ["ls", "pwd"], "timeout_ms": 5000}',
        "type shell = (_: {",
        {
            "type": "shell_call",
            "action": {"commands": ["ls", "pwd"], "timeout_ms": 5000, "max_output_length": None},
            "environment": {"type": "local"},
        },
        {
            "type": "shell_call_output",
            "output": [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        "a.py",
    ),
    "local_shell": (
        {"type": "local_shell"},
        '{"command": ["ls", "-l"], "env": {"A": "b"}}',
        "type local_shell = (_: {",
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {"A": "b"},
                "timeout_ms": None,
                "user": None,
                "working_directory": None,
            },
        },
        {"type": "local_shell_call_output", "output": "a.py"},
        "a.py",
    ),
    "apply_patch": (
        {"type": "apply_patch"},
        PATCH,
        "type apply_patch = (_: {",
        {
            "type": "apply_patch_call",
            "operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-1\n+2"},
        },
        {"type": "apply_patch_call_output", "status": "failed", "output": "no such line"},
        "failed: no such line",
    ),
    "local_shell with null": (
        {"type": "local_shell"},
        '{"command": ["ls"], "env": null, "timeout_ms": null}',
        "type local_shell = (_: {",
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls"],
                "env": {},
                "timeout_ms": None,
                "user": None,
                "working_directory": None,
            },
        },
        {"type": "local_shell_call_output", "output": "a.py"},
        "a.py",
    ),
    "apply_patch that deletes": (
        {"type": "apply_patch"},
        '{"type": "delete_file", "path": "a.py", "diff": ""}',
        "type apply_patch = (_: {",
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.py"}},
        {"type": "apply_patch_call_output", "status": "completed"},
        "completed",
    ),
    "apply_patch with a log": (
        {"type": "apply_patch"},
        PATCH,
        "type apply_patch = (_: {",
        {
            "type": "apply_patch_call",
            "operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-1\n+2"},
        },
        {"type": "apply_patch_call_output", "status": "completed", "output": "1 line changed"},
        "1 line changed",
    ),
}
each_tool = pytest.mark.parametrize(
    ("tool", "arguments", "declaration", "fields", "result", "text"), TOOLS.values(), ids=TOOLS
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "vllm, unguided", "mlx_server"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


async def whole(harness: Desk, **fields: Any) -> Json:
    return dict((await responds(harness, stream=False, **fields)).whole)


async def streamed(harness: Desk, **fields: Any) -> Json:
    return dict((await responds(harness, stream=True, **fields)).whole)


async def background(harness: Desk, **fields: Any) -> Json:
    body = json.dumps({"model": "gpt-oss", "input": "Hi", "background": True, **fields}).encode()
    response = (await harness.gateway.post("/v1/responses", body)).body
    async with asyncio.timeout(20):
        while response["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
            response = (await harness.gateway.get(f"/v1/responses/{response['id']}")).body
    return dict(response)


async def socket(harness: Desk, **fields: Any) -> Json:
    async with connected(harness.gateway) as client:
        await client.send(**fields)
        return dict(await client.answer())


WAYS: Mapping[str, Callable[..., Awaitable[Json]]] = {
    "whole": whole,
    "streamed": streamed,
    "background": background,
    "socket": socket,
}
every_way = pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
both_forms = pytest.mark.parametrize("ask", [whole, streamed], ids=["whole", "streamed"])


def said_of(prompt: str) -> str:
    """Return the messages of a prompt after the user's first one."""
    return prompt.partition("<|start|>user<|message|>Hi<|end|>")[2]


@pytest.mark.sampled(one_in=4)
@every_way
@each_tool
async def test_a_call_has_the_form_of_its_tool_and_its_result_is_read(
    harness: Desk,
    ask: Callable[..., Awaitable[Json]],
    tool: Json,
    arguments: str,
    declaration: str,
    fields: Json,
    result: Json,
    text: str,
) -> None:
    name = tool["type"]
    model = harness.think(calls(name, arguments), answers("Done."), bodies=[arguments])
    first = await ask(harness, tools=[tool])
    assert declaration in model.asked[0].prompt
    assert first["tools"][0]["type"] == name
    [call] = [item for item in first["output"] if item["type"] != "reasoning"]
    assert call == {"id": call["id"], "call_id": call["call_id"], "status": "completed", **fields}
    assert "notes" not in first["unisono"]
    # The SDK's type of a result of `local_shell` has no other link to the call than its own id.
    links = [{"id": call["call_id"]}, {"id": call["id"]}] if name == "local_shell" else [{"call_id": call["call_id"]}]
    for link in links:
        histories = [
            {"previous_response_id": first["id"], "input": [{**result, **link}]},
            {"input": [{"role": "user", "content": "Hi"}, *first["output"], {**result, **link}], "store": False},
        ]
        prompts = []
        for history in histories:
            harness.think(answers("Done."))
            second = await whole(harness, tools=[tool], **history)
            assert second["output"][-1]["content"][0]["text"] == "Done."
            prompts.append(harness.model.asked[-1].prompt)
        # The call has exactly the tokens of the model, in whichever way it comes back.
        assert prompts[0] == prompts[1]
        assert f"{arguments}<|call|>" in said_of(prompts[0])
        assert f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{text}<|end|>" in prompts[0]


# Arguments that the tool's schema does not allow.
UNSUITABLE = {
    "shell": (SHELL, '{"cmd": "ls"}'),
    "shell without commands": (SHELL, '{"commands": []}'),
    "shell, not JSON": (SHELL, "ls -l"),
    "local_shell": ({"type": "local_shell"}, '{"command": "ls"}'),
    "apply_patch of an unknown type": ({"type": "apply_patch"}, '{"type": "move_file", "path": "a", "diff": ""}'),
    "apply_patch without a diff": ({"type": "apply_patch"}, '{"type": "update_file", "path": "a"}'),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("harness", ["vllm, unguided", "mlx_server"], indirect=True)
@both_forms
@pytest.mark.parametrize(("tool", "arguments"), UNSUITABLE.values(), ids=UNSUITABLE)
async def test_unsuitable_arguments_are_regenerated_and_then_handed_over_as_text(
    harness: Desk, ask: Callable[..., Awaitable[Json]], tool: Json, arguments: str
) -> None:
    name, right = tool["type"], TOOLS[tool["type"]][1]
    harness.think(calls(name, arguments), bodies=[right])
    response = await ask(harness, tools=[tool])
    assert response["output"][-1]["type"] == f"{name}_call"
    assert "regenerated-call" in response["unisono"]["recoveries"]
    harness.think(calls(name, arguments), bodies=[arguments])
    response = await ask(harness, tools=[tool])
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][-1]["content"][0]["text"] == f"{name}({arguments})"
    assert response["unisono"]["unmet"] == "The arguments of a call do not match the tool's schema."
    # The next prompt is the same, whether the gateway or the client kept the text.
    prompts = []
    user = {"role": "user", "content": "Hi"}
    for history in (
        {"previous_response_id": response["id"], "input": [user]},
        {"input": [user, *response["output"], user]},
    ):
        harness.think(answers("Done."))
        await whole(harness, tools=[tool], **history)
        prompts.append(harness.model.asked[-1].prompt)
    assert prompts[0] == prompts[1]


@both_forms
@pytest.mark.parametrize("name", ["shell", "apply_patch"])
async def test_a_built_in_tool_of_the_client_may_be_forced(
    harness: Desk, ask: Callable[..., Awaitable[Json]], name: str
) -> None:
    tool, arguments, _, fields, *_ = TOOLS[name]
    harness.think(answers("No."), bodies=[arguments])
    response = await ask(harness, tools=[tool, {"type": "local_shell"}], tool_choice={"type": name})
    assert response["output"][-1].items() >= fields.items()
    assert response["tool_choice"] == {"type": name}


async def test_a_shell_in_a_container_of_the_server_is_not_available(harness: Desk) -> None:
    harness.think(answers("No."))
    hosted = {"type": "shell", "environment": {"type": "container_auto"}}
    response = await whole(harness, tools=[{"type": "apply_patch"}, hosted])
    assert response["unisono"]["notes"] == ["tools.1.type: skipped, tools of type 'shell' are not available"]
    body = {"model": "gpt-oss", "input": "Hi", "tools": [hosted]}
    assert (await harness.gateway.post("/v1/responses", json.dumps(body).encode())).status == 400


async def test_the_model_reads_the_skills_of_the_shell(harness: Desk) -> None:
    model = harness.think(answers("No."))
    skill = {"name": "csv", "description": "Reads\nCSV.", "path": "/skills/csv"}
    await whole(harness, tools=[{"type": "shell", "environment": {"type": "local", "skills": [skill]}}])
    assert "// Skill csv: Reads CSV. Instructions: /skills/csv/SKILL.md" in model.asked[0].prompt


async def test_tools_in_an_item_have_the_same_form(harness: Desk) -> None:
    tool, arguments, _, fields, *_ = TOOLS["shell"]
    harness.think(calls("shell", arguments), bodies=[arguments])
    added = {"type": "additional_tools", "role": "developer", "tools": [tool]}
    first = await whole(harness, input=[{"role": "user", "content": "Hi"}, added])
    assert first["output"][-1].items() >= fields.items()
    second = await whole(harness, input="Again", previous_response_id=first["id"])
    assert second["output"][-1].items() >= fields.items()
