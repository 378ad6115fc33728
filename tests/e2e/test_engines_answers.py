"""Forced tools and JSON answers in front of real engines with the demo model, which knows of neither."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from tests.e2e.gateway import config_of, gateway
from tests.e2e.obeying import KINDS, SURFACES, Desk
from tests.e2e.test_engines import PINNED, mlx_lm_server
from tests.example_tool import EXAMPLE_TOOL
from tests.schemas.suite import closed

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TIME = {
    "type": "function",
    "function": {"name": "get_time", "description": "Gets the time.", "parameters": closed(zone={"type": "string"})},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMAS: dict[str, Any] = {
    "an enum": closed(country={"enum": ["France", "Japan"]}, sure={"type": "boolean"}),
    "nested": closed(a=closed(b={"type": ["integer", "null"]}), c={"const": 1}),
    "alternatives": closed(x={"anyOf": [{"type": "null"}, closed(y={"enum": ["no", "yes"]})]}),
    "a list by reference": {
        **closed(head={"$ref": "#/$defs/node"}),
        "$defs": {"node": closed(value={"enum": [1, 2]}, next={"type": "null"})},
    },
    "unicode": closed(città={"enum": ["日本", "🙂"]}),
}

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_both = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["mlx", "mlx_server"])
async def here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    """mlx can be kept to a schema, and mlx_lm.server cannot."""
    if request.param == "mlx":
        async with gateway(config_of("mlx/demo", unisono=PINNED)) as running:
            yield Desk(KINDS["vllm"], None, running)
        return
    log = tmp_path_factory.mktemp("mlx_lm.server") / "log"
    async with mlx_lm_server(log) as (url, _), gateway(config_of(f"mlx_server@{url}", unisono=PINNED)) as running:
        yield Desk(KINDS["mlx_server"], None, running)


def asked(surface: Any, text: str, most: int = 400) -> dict[str, Any]:
    """Fields that ask for the likeliest answer."""
    if surface is SURFACES["chat"]:
        return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": most}
    return {"input": text, "temperature": 0, "max_output_tokens": most}


@pytest.mark.slow
@both_forms
@on_both
@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
async def test_a_tool_is_called_that_the_model_would_not_call(here: Desk, ask: Any, stream: bool, choice: Any) -> None:
    outcome = await ask(here, stream=stream, tools=[EXAMPLE_TOOL], tool_choice=choice, **asked(ask, "Hello!"))
    [(name, arguments)] = outcome.calls
    assert name == "get_weather"
    assert isinstance(json.loads(arguments)["location"], str)
    assert (outcome.text, outcome.unmet) == ("", "")


@pytest.mark.slow
@on_both
async def test_some_tool_is_called_where_one_is_required(here: Desk, ask: Any) -> None:
    outcome = await ask(here, stream=True, tools=[TIME, EXAMPLE_TOOL], tool_choice="required", **asked(ask, "Hello!"))
    if not outcome.calls:
        assert not here.kind.guided
        assert outcome.unmet
        return
    [(name, arguments)] = outcome.calls
    wanted = {"get_weather": EXAMPLE_TOOL, "get_time": TIME}[name]["function"]
    Draft202012Validator(wanted["parameters"]).validate(json.loads(arguments))  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ask", "stream"),
    [(SURFACES["chat"], True), (SURFACES["responses"], False), (SURFACES["messages"], True)],
    ids=["chat", "responses", "messages"],
)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_an_answer_is_json_of_the_schema_or_a_refusal(here: Desk, schema: Any, ask: Any, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    outcome = await ask(here, stream=stream, response_format=form, **asked(ask, "Hello!"))
    assert outcome.calls == []
    if outcome.refusal or outcome.finish in ("length", "incomplete"):
        assert not here.kind.guided, "it can be kept to the schema"
        assert outcome.unmet
        return
    Draft202012Validator(schema).validate(json.loads(outcome.text))
    assert outcome.unmet == ""


@both_forms
async def test_thoughts_end_with_their_budget(here: Desk, stream: bool) -> None:
    chat = SURFACES["chat"]
    outcome = await chat(here, stream=stream, reasoning={"max_tokens": 3}, **asked(chat, "Hello!", 60))
    assert outcome.text
    assert "reasoning-budget" in outcome.note["recoveries"]
