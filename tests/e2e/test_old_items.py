"""Items of earlier turns that could not be used: clients send them again with every later request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer
from tests.e2e.responses import ANSWER, Line, line
from tests.e2e.surfaces import unisono_object
from tests.e2e.wires import WIRES

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
FIRST: Json = {"role": "user", "content": "First."}
LATER: list[Json] = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "Go on."}]
# A strict schema has to close its objects.
OPEN: Json = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOSE: Json = {"type": "function", "name": "look", "strict": True, "parameters": OPEN}
SEARCH: Json = {"type": "tool_search_call", "call_id": "s1", "execution": "client", "arguments": {}}
FOUND: Json = {"type": "tool_search_output", "call_id": "s1", "execution": "client", "tools": [LOOSE]}
FORMAT: Json = {"type": "json_schema", "name": "place", "schema": OPEN, "strict": True}
UPDATE: Json = {"type": "configuration_update", "text": {"format": FORMAT}}
UNSUPPORTED: Json = {"type": "object", "properties": {"at": {"$ref": "https://example.org/place.json"}}}
FAR_UPDATE: Json = {"type": "configuration_update", "text": {"format": {**FORMAT, "schema": UNSUPPORTED}}}
REQUEST: Json = {
    "type": "mcp_approval_request",
    "id": "mcpr_1",
    "server_label": "docs",
    "name": "find",
    "arguments": "{}",
}


def decided(approve: bool) -> Json:
    return {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": approve}


# Items, part of the prompt, and the beginning of the note.
OLD: dict[str, tuple[list[Json], str, str]] = {
    "a result without id and name": (
        [{"type": "function_call_output", "output": "blue"}],
        "<|start|>functions.unknown_tool to=assistant<|channel|>commentary<|message|>blue<|end|>",
        "input.1.call_id: the model reads this result without its call, because it has no 'call_id'",
    ),
    "a repeated decision": ([REQUEST, decided(True), decided(True)], "", "input.3: no effect, because it repeats"),
    "another decision": ([REQUEST, decided(True), decided(False)], "", "input.3: no effect, because the approval"),
    "an added tool": (
        [{"type": "additional_tools", "role": "developer", "tools": [LOOSE]}],
        "type look = ",
        "input.1.tools.0.strict: no effect, because 'input.1.tools.0.parameters.additionalProperties' must be false",
    ),
    "a found tool": ([SEARCH, FOUND], "type look = ", "input.2.tools.0.strict: no effect, because "),
    "a format": ([UPDATE], "## place", "input.1.text.format.strict: no effect, because 'input.1.text.format.schema."),
    "an unsupported schema": (
        [FAR_UPDATE],
        "## place",
        "input.1.text.format.schema: no effect, because 'input.1.text.format.schema.properties.at.$ref'",
    ),
}
# Items that no output of the model follows, and the field that the error names.
NEWEST: dict[str, tuple[list[Json], str]] = {
    "a result without id beside a waiting call": (
        [
            {"type": "function_call", "call_id": "c1", "name": "look"},
            {"type": "function_call_output", "output": "blue"},
        ],
        "input.2.call_id",
    ),
    "another decision": ([REQUEST, decided(True), decided(False)], "input.3.approval_request_id"),
    "a format": ([UPDATE, LATER[1]], "input.1.text.format.schema.additionalProperties"),
    "an unsupported schema": ([FAR_UPDATE, LATER[1]], "input.1.text.format.schema.properties.at.$ref"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Line]:
    async with line(WIRES["vllm"]) as running:
        yield running


async def send(harness: Line, items: list[Json], **fields: Any) -> Answer:
    has_format = any(item.get("type") == "configuration_update" for item in items)
    harness.say('<|channel|>final<|message|>{"at":"sky"}<|return|>' if has_format else ANSWER)
    return await harness.post(input=[FIRST, *items], **fields)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("items", "prompt", "note"), OLD.values(), ids=OLD)
async def test_an_old_item_never_fails_the_session(
    harness: Line, items: list[Json], prompt: str, note: str, stream: bool
) -> None:
    answer = await send(harness, [*items, *LATER], stream=stream)
    assert answer.status == 200, answer.raw
    assert prompt in harness.prompts[-1]
    assert [each for each in unisono_object(answer)["notes"] if each.startswith(note)]


@pytest.mark.parametrize(("items", "prompt", "note"), OLD.values(), ids=OLD)
async def test_a_stored_old_item_never_fails_the_session(
    harness: Line, items: list[Json], prompt: str, note: str
) -> None:
    first = await send(harness, [*items, *LATER])
    second = await harness.post(input="And now?", previous_response_id=first.body["id"])
    assert second.status == 200, second.raw
    assert prompt in harness.prompts[-1]


@pytest.mark.parametrize(("items", "param"), NEWEST.values(), ids=NEWEST)
async def test_a_new_item_is_refused(harness: Line, items: list[Json], param: str) -> None:
    answer = await send(harness, items)
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
