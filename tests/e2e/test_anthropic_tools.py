"""`bash_*`, `text_editor_*` and `memory_*`: tools of Anthropic that the client runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.messages import message_in
from tests.e2e.obeying import KINDS, Desk, Json, answers, calls, desk
from tests.e2e.surfaces import unisono_object

pytestmark = pytest.mark.asyncio(loop_scope="module")

VIEW = {"command": "view", "path": "/a.py"}
# Type of a tool, its name, an input, and lines of its declaration that the version decides.
TOOLS: Mapping[str, tuple[str, Json, tuple[str, ...]]] = {
    "bash_20241022": ("bash", {"command": "ls"}, ("command?: string,", "restart?: boolean,")),
    "bash_20250124": ("bash", {"restart": True}, ("command?: string,",)),
    "text_editor_20241022": ("str_replace_editor", VIEW, ('"insert" | "undo_edit",', "insert: text to insert.")),
    "text_editor_20250124": ("str_replace_editor", VIEW, ('"insert" | "undo_edit",',)),
    "text_editor_20250429": ("str_replace_based_edit_tool", VIEW, ('"insert",', "insert_text?: string,")),
    "text_editor_20250728": ("str_replace_based_edit_tool", VIEW, ('"insert",', "view_range?: number[],")),
    "text_editor_20991231": ("str_replace_based_edit_tool", VIEW, ('"insert",',)),
    "memory_20250818": ("memory", {"command": "delete", "path": "/memories/a"}, ('"rename",', "old_path?: string,")),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "mlx_server"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


async def send(harness: Desk, **fields: Any) -> Json:
    body = {"model": "gpt-oss", "max_tokens": 1000, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return message_in(await harness.gateway.messages(**body))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("kind", "name", "given", "lines"), [(kind, *case) for kind, case in TOOLS.items()], ids=TOOLS)
async def test_a_call_is_an_ordinary_tool_use(
    harness: Desk, kind: str, name: str, given: Json, lines: tuple[str, ...], stream: bool
) -> None:
    arguments = str(given).replace("'", '"').replace("True", "true")
    model = harness.think(calls(name, arguments), answers("Done."))
    tools = [{"type": kind, "name": name}]
    message = await send(harness, tools=tools, stream=stream)
    assert f"type {name} = (_: {{" in model.asked[0].prompt
    assert [line for line in lines if line not in model.asked[0].prompt] == []
    assert message["stop_reason"] == "tool_use"
    [use] = [block for block in message["content"] if block["type"] == "tool_use"]
    assert (use["name"], use["input"]) == (name, given)
    assert "notes" not in message["unisono"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "fine"}
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": message["content"]}]
    await send(harness, tools=tools, stream=stream, messages=[*history, {"role": "user", "content": [result]}])
    said = model.asked[-1].prompt.partition("<|message|>Hi<|end|>")[2]
    assert f"{arguments}<|call|>" in said
    assert f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>fine<|end|>" in said


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_such_a_tool_may_be_forced(harness: Desk, stream: bool) -> None:
    harness.think(answers("No."), bodies=['{"command":"ls"}'])
    choice = {"type": "tool", "name": "bash"}
    message = await send(harness, tools=[{"type": "bash_20250124", "name": "bash"}], tool_choice=choice, stream=stream)
    assert [block["name"] for block in message["content"] if block["type"] == "tool_use"] == ["bash"]


async def test_the_model_reads_how_much_of_a_file_it_sees(harness: Desk) -> None:
    model = harness.think(answers("Hi."))
    await send(
        harness,
        tools=[{"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 500}],
    )
    assert "A view shows at most 500 characters of a file." in model.asked[0].prompt


async def test_other_tools_of_anthropic_are_left_out(harness: Desk) -> None:
    harness.think(answers("Hi."))
    tools = [{"type": "bash_20250124", "name": "bash"}, {"type": "computer_20250124", "name": "computer"}]
    answer = await harness.gateway.messages(
        model="gpt-oss", max_tokens=100, messages=[{"role": "user", "content": "Hi"}], tools=tools
    )
    assert unisono_object(answer)["notes"] == [
        "tools.1.type: skipped, tools of type 'computer_20250124' are not available"
    ]
