"""`tool_choice` in every form, on every API, streamed and whole.

The backends support constrained decoding or not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import FRAMINGS, KINDS, SURFACES, Desk, answers, calls, desk, tokens_for

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
SUM = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}


def tool(name: str, parameters: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("get_weather", CITY), tool("add", SUM)]
WEATHER = {"type": "function", "function": {"name": "get_weather"}}
ADD = {"type": "function", "function": {"name": "add"}}
PARIS, NUMBERS = '{"city":"Paris"}', '{"a":1,"b":2}'

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


# API surfaces with a list of allowed tools.
ALLOWING = {name: ask for name, ask in SURFACES.items() if name != "messages"}
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
# The other backends can generate nothing but a tool's name.
without_choice_constraint = pytest.mark.parametrize(
    "harness", [name for name, kind in KINDS.items() if not kind.chooses], indirect=True
)
on_every_surface = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)
with_allowed_tools = pytest.mark.parametrize("ask", ALLOWING.values(), ids=ALLOWING)


@pytest.mark.sampled(one_in=4)
@both_forms
@on_every_surface
async def test_named_tool_is_called(harness: Desk, ask: Any, stream: bool) -> None:
    model = harness.think(answers("It rains."), bodies=[PARIS])
    outcome = await ask(harness, stream=stream, tools=TOOLS, tool_choice=WEATHER)
    assert outcome.calls == [("get_weather", PARIS)]
    assert (outcome.text, outcome.refusal, outcome.unmet) == ("", "", "")
    assert outcome.finish in ("tool_calls", "completed")
    first, second = model.asked
    assert first.held is None
    assert second.behind == "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    assert (second.held is not None) is harness.kind.guided
    if second.held is not None:
        assert second.held.schema == CITY


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS)
async def test_a_forced_call_fits_max_tokens_with_every_framing(harness: Desk, framing: Any) -> None:
    harness.think(calls("add", NUMBERS), bodies=[PARIS], **framing)
    limit = tokens_for(harness.kind, calls("get_weather", PARIS), framing)
    outcome = await SURFACES["chat"](harness, stream=False, tools=TOOLS, tool_choice=WEATHER, max_tokens=limit)
    assert (outcome.calls, outcome.finish, outcome.unmet) == ([("get_weather", PARIS)], "tool_calls", "")


@pytest.mark.sampled(one_in=4)
@both_forms
@on_every_surface
async def test_required_tool_choice_calls_some_tool(harness: Desk, ask: Any, stream: bool) -> None:
    model = harness.think(answers("Three."), bodies=[NUMBERS], name="add")
    outcome = await ask(harness, stream=stream, tools=TOOLS, tool_choice="required")
    assert outcome.calls == [("add", NUMBERS)]
    assert (outcome.text, outcome.unmet) == ("", "")
    naming = model.asked[1]
    assert naming.behind == "<|channel|>commentary to=functions"
    assert (naming.held is not None) is harness.kind.chooses
    if naming.held is not None:
        assert naming.held.texts == (".get_weather", ".add")
    assert model.asked[-1].held is None or model.asked[-1].held.schema == SUM


@pytest.mark.sampled(one_in=4)
@both_forms
@on_every_surface
async def test_required_call_may_come_without_forcing(harness: Desk, ask: Any, stream: bool) -> None:
    harness.think(calls("add", NUMBERS), bodies=[NUMBERS])
    outcome = await ask(harness, stream=stream, tools=TOOLS, tool_choice="required")
    assert (outcome.calls, outcome.text, outcome.unmet) == ([("add", NUMBERS)], "", "")


@pytest.mark.sampled(one_in=4)
@both_forms
@with_allowed_tools
async def test_only_allowed_tools_are_called(harness: Desk, ask: Any, stream: bool) -> None:
    model = harness.think(calls("add", NUMBERS), answers("Never mind."))
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}
    outcome = await ask(harness, stream=stream, tools=TOOLS, tool_choice=allowed)
    assert (outcome.calls, outcome.text) == ([], "Never mind.")
    assert outcome.note["recoveries"][-1] == "tool-not-allowed"
    assert "not available" in model.asked[1].prompt
    harness.think(calls("get_weather", PARIS))
    outcome = await ask(harness, stream=stream, tools=TOOLS, tool_choice=allowed)
    assert outcome.calls == [("get_weather", PARIS)]


@pytest.mark.sampled(one_in=4)
@both_forms
@with_allowed_tools
async def test_required_mode_calls_one_of_the_allowed_tools(harness: Desk, ask: Any, stream: bool) -> None:
    harness.think(calls("get_weather", PARIS), bodies=[NUMBERS])
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ADD]}}
    outcome = await ask(harness, stream=stream, tools=TOOLS, tool_choice=allowed)
    assert (outcome.calls, outcome.unmet) == ([("add", NUMBERS)], "")


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": NUMBERS}}
USE = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1, "b": 2}}
# A conversation with a call and its result, in the format of each API.
HISTORY: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        ]
    },
    "responses": {
        "input": [
            {"type": "message", "role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": NUMBERS},
            {"type": "function_call_output", "call_id": "call_1", "output": "3"},
        ]
    },
    "messages": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "3"}]},
        ]
    },
}


@pytest.mark.sampled(one_in=4)
@both_forms
@on_every_surface
async def test_tool_choice_none_prevents_calls(harness: Desk, ask: Any, stream: bool) -> None:
    model = harness.think(calls("add", NUMBERS), bodies=["Three."])
    outcome = await ask(harness, stream=stream, tools=TOOLS, tool_choice="none")
    assert (outcome.calls, outcome.text) == ([], "Three.")
    assert not [generation.prompt for generation in model.asked if "namespace functions" in generation.prompt]
    assert not [generation.prompt for generation in model.asked if "get_weather" in generation.prompt]


@pytest.mark.sampled(one_in=4)
@both_forms
@pytest.mark.parametrize("surface", SURFACES)
async def test_tool_choice_none_keeps_calls_of_the_history(harness: Desk, surface: str, stream: bool) -> None:
    model = harness.think(answers("Three."))
    outcome = await SURFACES[surface](harness, stream=stream, tools=TOOLS, tool_choice="none", **HISTORY[surface])
    assert (outcome.calls, outcome.text) == ([], "Three.")
    [generation] = model.asked
    assert "namespace functions" not in generation.prompt
    assert (
        f"<|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>{NUMBERS}"
        in generation.prompt
    )
    assert "<|start|>functions.add to=assistant<|channel|>commentary<|message|>3<|end|>" in generation.prompt


@pytest.mark.sampled(one_in=4)
@both_forms
@on_every_surface
async def test_arguments_that_violate_the_schema_are_regenerated(harness: Desk, ask: Any, stream: bool) -> None:
    model = harness.think(answers("It rains."), bodies=['{"town":"Paris"}', PARIS])
    outcome = await ask(harness, stream=stream, tools=TOOLS, tool_choice=WEATHER)
    assert (outcome.calls, outcome.unmet) == ([("get_weather", PARIS)], "")
    assert "regenerated-call" in outcome.note["recoveries"]
    assert len(model.asked) == 3


@pytest.mark.sampled(one_in=3)
@both_forms
@on_every_surface
@without_choice_constraint
async def test_missing_required_call_is_reported_as_unmet(harness: Desk, ask: Any, stream: bool) -> None:
    harness.think(answers("No tool."), bodies=["{}"], name="nothing_of_the_kind")
    outcome = await ask(harness, stream=stream, tools=TOOLS, tool_choice="required")
    assert outcome.calls == []
    assert outcome.text == "No tool."
    assert outcome.unmet == "The model did not call a tool that it had to call."


@both_forms
async def test_legacy_function_call_forces_a_function(harness: Desk, stream: bool) -> None:
    harness.think(answers("It rains."), bodies=[PARIS])
    functions = [each["function"] for each in TOOLS]
    answer = await harness.gateway.chat(stream=stream, functions=functions, function_call={"name": "get_weather"})
    assert answer.status == 200, answer.raw
    if stream:
        deltas = [choice["delta"] for event in answer.events for choice in event["choices"]]
        function_calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert "".join(call["arguments"] for call in function_calls) == PARIS
        assert function_calls[0]["name"] == "get_weather"
    else:
        message = answer.body["choices"][0]["message"]
        assert message["function_call"] == {"name": "get_weather", "arguments": PARIS}


@both_forms
async def test_custom_tool_is_forced_with_its_input(harness: Desk, stream: bool) -> None:
    harness.think(answers("No."), bodies=['{"input":"ls -l"}'])
    shell, flat = {"type": "custom", "custom": {"name": "shell"}}, {"type": "custom", "name": "shell"}
    outcome = await SURFACES["responses"](harness, stream=stream, tools=[flat], tool_choice=flat)
    [call] = [item for item in outcome.whole["output"] if item["type"] == "custom_tool_call"]
    assert call["input"] == "ls -l"
    assert outcome.whole["tool_choice"] == flat
    answer = await harness.gateway.chat(tools=[shell], tool_choice=shell)
    [called] = answer.body["choices"][0]["message"]["tool_calls"]
    assert called["custom"] == {"name": "shell", "input": "ls -l"}


@pytest.mark.sampled(one_in=4)
@both_forms
@on_every_surface
async def test_strict_tool_arguments_match_without_forcing(harness: Desk, ask: Any, stream: bool) -> None:
    model = harness.think(calls("get_weather", '{"town":"Paris"}'), bodies=[PARIS])
    outcome = await ask(harness, stream=stream, tools=[tool("get_weather", CITY, strict=True)])
    assert (outcome.calls, outcome.unmet) == ([("get_weather", PARIS)], "")
    assert len(model.asked) == 2
