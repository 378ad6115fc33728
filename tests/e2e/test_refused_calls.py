"""Calls that are never emitted, and calls of deferred tools, on every API surface and both kinds of wire."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer, message_of
from tests.e2e.messages import message_in
from tests.e2e.responses import ANSWER, Json, Line, line
from tests.e2e.test_added_tools import called
from tests.e2e.wires import WIRES

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA: Json = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK, HEAR = ({"name": name, "description": f"To {name}.", "input_schema": SCHEMA} for name in ("look", "hear"))
LOOKS = called("look", '{"at":"sky"}')
REMOVAL: Json = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
ASKED: Json = {"role": "user", "content": "Hi"}
REMOVED: list[Json] = [ASKED, {"role": "system", "content": [REMOVAL]}]
UNMET = "The model did not call a tool that it had to call."

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "mlx_server"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(WIRES[request.param]) as running:
        yield running


async def chat(harness: Line, *, stream: bool) -> Answer:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "hear")]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "hear"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    return await harness.gateway.chat(model="gpt-oss", messages=[ASKED], tools=tools, tool_choice=choice, stream=stream)


# Requests of the Messages API that force a call of `hear`.
FORCED: dict[str, Json] = {
    "removed": {"tool_choice": {"type": "any"}, "messages": REMOVED},
    "not named": {"tool_choice": {"type": "tool", "name": "hear"}, "messages": [ASKED]},
}


async def forced(harness: Line, name: str, *, stream: bool) -> tuple[str, list[str], str, Json]:
    """Return the text, the calls, the reason of the end, and the `unisono` object."""
    if name == "not allowed":
        said = message_of(await chat(harness, stream=stream))
        return said.content or "", [call[0] for call in said.calls], said.finish_reason, said.note
    answer = await harness.gateway.messages(model="gpt-oss", tools=[LOOK, HEAR], stream=stream, **FORCED[name])
    message = message_in(answer)
    text = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    calls = [block["name"] for block in message["content"] if block["type"] == "tool_use"]
    return text, calls, message["stop_reason"], message["unisono"]


@both_forms
@pytest.mark.parametrize("name", [*FORCED, "not allowed"])
async def test_a_call_that_is_not_allowed_is_returned_as_text_after_all_retries(
    harness: Line, name: str, stream: bool
) -> None:
    harness.say(LOOKS)
    text, calls, reason, about = await forced(harness, name, stream=stream)
    assert (text, calls) == ('look({"at":"sky"})', [])
    assert reason in ("stop", "end_turn")
    assert about["unmet"] == UNMET
    assert [note for note in about["notes"] if "does not declare or allow" in note]
    assert {"undeclared-tool", "tool-not-allowed"} & {*about["recoveries"]}


@both_forms
@pytest.mark.parametrize("name", [*FORCED, "not allowed"])
async def test_an_answer_instead_of_a_forced_call_is_complete(harness: Line, name: str, stream: bool) -> None:
    harness.say(LOOKS, LOOKS, ANSWER)
    text, calls, reason, about = await forced(harness, name, stream=stream)
    assert (text, calls, about["unmet"]) == ("ok", [], UNMET)
    assert reason in ("stop", "end_turn")
