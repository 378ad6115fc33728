"""`tool_choice` in every form, on every surface, streamed and not, over backends that can be kept to something and over
those that cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import KINDS, SURFACES, Desk, answers, calls, desk

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
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


ALLOWING = {name: ask for name, ask in SURFACES.items() if name != "messages"}
"""Surfaces that may say which tools are allowed."""
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
# The others can write nothing but a tool's name.
on_any_name = pytest.mark.parametrize("here", [name for name, kind in KINDS.items() if not kind.chooses], indirect=True)
on_each = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)
where_some_are_allowed = pytest.mark.parametrize("ask", ALLOWING.values(), ids=ALLOWING)


@both_forms
@on_each
async def test_a_named_tool_is_called(here: Desk, ask: Any, stream: bool) -> None:
    model = here.think(answers("It rains."), bodies=[PARIS])
    outcome = await ask(here, stream=stream, tools=TOOLS, tool_choice=WEATHER)
    assert outcome.calls == [("get_weather", PARIS)]
    assert (outcome.text, outcome.refusal, outcome.unmet) == ("", "", "")
    assert outcome.finish in ("tool_calls", "completed")
    first, second = model.asked
    assert first.held is None
    assert second.behind == "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    assert (second.held is not None) is here.kind.guided
    if second.held is not None:
        assert second.held.schema == CITY


@both_forms
@on_each
async def test_some_tool_is_called_where_one_is_required(here: Desk, ask: Any, stream: bool) -> None:
    model = here.think(answers("Three."), bodies=[NUMBERS], name="add")
    outcome = await ask(here, stream=stream, tools=TOOLS, tool_choice="required")
    assert outcome.calls == [("add", NUMBERS)]
    assert (outcome.text, outcome.unmet) == ("", "")
    naming = model.asked[1]
    assert naming.behind == "<|channel|>commentary to=functions"
    assert (naming.held is not None) is here.kind.chooses
    if naming.held is not None:
        assert naming.held.texts == (".get_weather", ".add")
    assert model.asked[-1].held is None or model.asked[-1].held.schema == SUM


@both_forms
@on_each
async def test_a_call_that_is_required_may_come_by_itself(here: Desk, ask: Any, stream: bool) -> None:
    here.think(calls("add", NUMBERS), bodies=[NUMBERS])
    outcome = await ask(here, stream=stream, tools=TOOLS, tool_choice="required")
    assert (outcome.calls, outcome.text, outcome.unmet) == ([("add", NUMBERS)], "", "")


@both_forms
@where_some_are_allowed
async def test_only_allowed_tools_are_called(here: Desk, ask: Any, stream: bool) -> None:
    model = here.think(calls("add", NUMBERS), answers("Never mind."))
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}
    outcome = await ask(here, stream=stream, tools=TOOLS, tool_choice=allowed)
    assert (outcome.calls, outcome.text) == ([], "Never mind.")
    assert outcome.note["recoveries"][-1] == "tool-not-allowed"
    assert "not available" in model.asked[1].prompt
    here.think(calls("get_weather", PARIS))
    outcome = await ask(here, stream=stream, tools=TOOLS, tool_choice=allowed)
    assert outcome.calls == [("get_weather", PARIS)]


@both_forms
@where_some_are_allowed
async def test_one_of_the_allowed_tools_is_called_where_that_is_required(here: Desk, ask: Any, stream: bool) -> None:
    here.think(calls("get_weather", PARIS), bodies=[NUMBERS])
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ADD]}}
    outcome = await ask(here, stream=stream, tools=TOOLS, tool_choice=allowed)
    assert (outcome.calls, outcome.unmet) == ([("add", NUMBERS)], "")


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": NUMBERS}}
USE = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1, "b": 2}}
# A conversation with a call and its result, in the words of each surface.
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


@both_forms
@on_each
async def test_nothing_is_called_where_nothing_may_be(here: Desk, ask: Any, stream: bool) -> None:
    model = here.think(calls("add", NUMBERS), bodies=["Three."])
    outcome = await ask(here, stream=stream, tools=TOOLS, tool_choice="none")
    assert (outcome.calls, outcome.text) == ([], "Three.")
    assert not [asked.prompt for asked in model.asked if "namespace functions" in asked.prompt]
    assert not [asked.prompt for asked in model.asked if "get_weather" in asked.prompt]


@both_forms
@pytest.mark.parametrize("surface", SURFACES)
async def test_calls_of_the_history_stay_where_nothing_may_be_called(here: Desk, surface: str, stream: bool) -> None:
    model = here.think(answers("Three."))
    outcome = await SURFACES[surface](here, stream=stream, tools=TOOLS, tool_choice="none", **HISTORY[surface])
    assert (outcome.calls, outcome.text) == ([], "Three.")
    [asked] = model.asked
    assert "namespace functions" not in asked.prompt
    assert (
        f"<|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>{NUMBERS}"
        in asked.prompt
    )
    assert "<|start|>functions.add to=assistant<|channel|>commentary<|message|>3<|end|>" in asked.prompt


@both_forms
@on_each
async def test_arguments_that_do_not_match_are_written_again(here: Desk, ask: Any, stream: bool) -> None:
    model = here.think(answers("It rains."), bodies=['{"town":"Paris"}', PARIS])
    outcome = await ask(here, stream=stream, tools=TOOLS, tool_choice=WEATHER)
    assert (outcome.calls, outcome.unmet) == ([("get_weather", PARIS)], "")
    assert "regenerated-call" in outcome.note["recoveries"]
    assert len(model.asked) == 3


@both_forms
@on_each
@on_any_name
async def test_a_call_that_cannot_be_had_is_said_to_be_missing(here: Desk, ask: Any, stream: bool) -> None:
    here.think(answers("No tool."), bodies=["{}"], name="nothing_of_the_kind")
    outcome = await ask(here, stream=stream, tools=TOOLS, tool_choice="required")
    assert outcome.calls == []
    assert outcome.text == "No tool."
    assert outcome.unmet == "The model did not call a tool that it had to call."


@both_forms
async def test_the_old_form_names_a_function_too(here: Desk, stream: bool) -> None:
    here.think(answers("It rains."), bodies=[PARIS])
    functions = [each["function"] for each in TOOLS]
    answer = await here.gateway.chat(stream=stream, functions=functions, function_call={"name": "get_weather"})
    assert answer.status == 200, answer.raw
    if stream:
        deltas = [choice["delta"] for event in answer.events for choice in event["choices"]]
        told = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert "".join(call["arguments"] for call in told) == PARIS
        assert told[0]["name"] == "get_weather"
    else:
        message = answer.body["choices"][0]["message"]
        assert message["function_call"] == {"name": "get_weather", "arguments": PARIS}


@both_forms
async def test_a_custom_tool_is_forced_with_its_text(here: Desk, stream: bool) -> None:
    here.think(answers("No."), bodies=['{"input":"ls -l"}'])
    shell, flat = {"type": "custom", "custom": {"name": "shell"}}, {"type": "custom", "name": "shell"}
    outcome = await SURFACES["responses"](here, stream=stream, tools=[flat], tool_choice=flat)
    [call] = [item for item in outcome.whole["output"] if item["type"] == "custom_tool_call"]
    assert call["input"] == "ls -l"
    assert outcome.whole["tool_choice"] == flat
    answer = await here.gateway.chat(tools=[shell], tool_choice=shell)
    [called] = answer.body["choices"][0]["message"]["tool_calls"]
    assert called["custom"] == {"name": "shell", "input": "ls -l"}


@both_forms
@on_each
async def test_strict_arguments_match_without_being_forced(here: Desk, ask: Any, stream: bool) -> None:
    model = here.think(calls("get_weather", '{"town":"Paris"}'), bodies=[PARIS])
    outcome = await ask(here, stream=stream, tools=[tool("get_weather", CITY, strict=True)])
    assert (outcome.calls, outcome.unmet) == ([("get_weather", PARIS)], "")
    assert len(model.asked) == 2
