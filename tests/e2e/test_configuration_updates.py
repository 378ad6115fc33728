"""`configuration_update` items change the effort and the format of the responses after them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.responses import ANSWER, Line, line
from tests.e2e.wires import WIRES

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"star": {"type": "string"}}, "required": ["star"]}
FORM = {"format": {"type": "json_schema", "name": "star", "schema": SCHEMA}}
ASKED = {"role": "user", "content": "Which star?"}
STAR = '<|channel|>final<|message|>{"star":"Polaris"}<|return|>'


def update(**fields: Any) -> Json:
    return {"type": "configuration_update", **fields}


LOW, HIGH, TEXT = (
    update(reasoning={"effort": "low"}),
    update(reasoning={"effort": "high"}),
    {"format": {"type": "text"}},
)

# Input, effort in the prompt, and if the answer must have the format.
UPDATES: dict[str, tuple[list[Json], str, bool]] = {
    "an effort": ([ASKED, LOW], "low", False),
    "an effort before the message": ([LOW, ASKED], "low", False),
    "the last effort": ([HIGH, ASKED, LOW], "low", False),
    "a format": ([ASKED, update(text=FORM)], "high", True),
    "an effort keeps the format": ([update(text=FORM), LOW, ASKED], "low", True),
    "plain text again": ([update(text=FORM), ASKED, update(text=TEXT)], "high", False),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[Line]:
    async with line(WIRES["vllm"]) as running:
        yield running


def assert_settings(harness: Line, effort: str, has_format: bool) -> None:
    assert f"Reasoning: {effort}" in harness.prompts[-1]
    assert ("# Response Formats" in harness.prompts[-1]) == has_format
    assert ('"properties"' in harness.prompts[-1]) == has_format


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("given", "effort", "has_format"), UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.asyncio(loop_scope="module")
async def test_an_update_replaces_the_setting_of_the_request(
    harness: Line, given: list[Json], effort: str, has_format: bool, stream: bool
) -> None:
    harness.say(STAR if has_format else ANSWER)
    fields: Json = {"reasoning": {"effort": "high"}, "stream": stream}
    first = await harness.responds(input=given, **fields)
    assert_settings(harness, effort, has_format)
    assert "notes" not in first["unisono"]
    await harness.responds(
        input="And now?", previous_response_id=first["id"], reasoning={"effort": "high"}, stream=stream
    )
    assert_settings(harness, effort, has_format)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_update_stays_in_a_conversation(harness: Line) -> None:
    harness.say(ANSWER)
    conversation = await harness.conversation({"type": "message", **ASKED}, LOW)
    await harness.whole(input="Now?", conversation=conversation)
    assert_settings(harness, "low", has_format=False)
    harness.say(STAR)
    await harness.whole(input=[HIGH, update(text=FORM), ASKED], conversation=conversation)
    await harness.whole(input="And now?", conversation=conversation)
    assert_settings(harness, "high", has_format=True)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (update(reasoning={"effort": "huge"}), "input.0.reasoning.effort"),
        (update(text={}), "input.0.text.format"),
        (update(text={"format": {"type": "yaml"}}), "input.0.text.format.type"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_invalid_update_is_refused_by_name(harness: Line, item: Json, param: str) -> None:
    answer = await harness.post(input=[item, ASKED])
    assert (answer.status, answer.body["error"]["param"]) == (400, param)
