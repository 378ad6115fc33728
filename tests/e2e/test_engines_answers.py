"""Forced tools and JSON answers with real engines and the demo model, which knows neither."""

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

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TIME = {
    "type": "function",
    "function": {"name": "get_time", "description": "Gets the time.", "parameters": closed(zone={"type": "string"})},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMAS: dict[str, Any] = {
    "enum": closed(country={"enum": ["France", "Japan"]}, sure={"type": "boolean"}),
    "nested": closed(a=closed(b={"type": ["integer", "null"]}), c={"const": 1}),
    "alternatives": closed(x={"anyOf": [{"type": "null"}, closed(y={"enum": ["no", "yes"]})]}),
    "recursive reference": {
        **closed(head={"$ref": "#/$defs/node"}),
        "$defs": {"node": closed(value={"enum": [1, 2]}, next={"type": "null"})},
    },
    "unicode": closed(città={"enum": ["日本", "🙂"]}),
}

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_every_surface = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["mlx", "mlx_server"])
async def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    """Gateways with mlx, which supports schemas, and mlx_lm.server, which does not."""
    if request.param == "mlx":
        async with gateway(config_of("mlx/demo", unisono=PINNED)) as running:
            yield Desk(KINDS["vllm"], None, running)
        return
    log = tmp_path_factory.mktemp("mlx_lm.server") / "log"
    async with mlx_lm_server(log) as (url, _), gateway(config_of(f"mlx_server@{url}", unisono=PINNED)) as running:
        yield Desk(KINDS["mlx_server"], None, running)


def fields_for(surface: Any, text: str, max_tokens: int = 400) -> dict[str, Any]:
    """Return request fields for a greedy answer."""
    if surface is SURFACES["chat"]:
        return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens}
    return {"input": text, "temperature": 0, "max_output_tokens": max_tokens}


@both_forms
@on_every_surface
@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
async def test_forced_tool_is_called_by_a_model_that_would_not_call_it(
    harness: Desk, ask: Any, stream: bool, choice: Any
) -> None:
    outcome = await ask(harness, stream=stream, tools=[EXAMPLE_TOOL], tool_choice=choice, **fields_for(ask, "Hello!"))
    [(name, arguments)] = outcome.calls
    assert name == "get_weather"
    assert isinstance(json.loads(arguments)["location"], str)
    assert (outcome.text, outcome.unmet) == ("", "")


@on_every_surface
async def test_required_tool_choice_calls_some_tool(harness: Desk, ask: Any) -> None:
    outcome = await ask(
        harness, stream=True, tools=[TIME, EXAMPLE_TOOL], tool_choice="required", **fields_for(ask, "Hello!")
    )
    if not outcome.calls:
        assert not harness.kind.guided
        assert outcome.unmet
        return
    [(name, arguments)] = outcome.calls
    function = {"get_weather": EXAMPLE_TOOL, "get_time": TIME}[name]["function"]
    Draft202012Validator(function["parameters"]).validate(json.loads(arguments))  # type: ignore[index]


@pytest.mark.parametrize(
    ("ask", "stream"),
    [(SURFACES["chat"], True), (SURFACES["responses"], False), (SURFACES["messages"], True)],
    ids=["chat", "responses", "messages"],
)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_json_answer_matches_its_schema_or_is_a_refusal(
    harness: Desk, schema: Any, ask: Any, stream: bool
) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    outcome = await ask(harness, stream=stream, response_format=response_format, **fields_for(ask, "Hello!"))
    assert outcome.calls == []
    if outcome.refusal or outcome.finish in ("length", "incomplete"):
        assert not harness.kind.guided, "a guided backend must satisfy the schema"
        assert outcome.unmet
        return
    Draft202012Validator(schema).validate(json.loads(outcome.text))
    assert outcome.unmet == ""


@both_forms
async def test_reasoning_ends_with_its_budget(harness: Desk, stream: bool) -> None:
    chat = SURFACES["chat"]
    outcome = await chat(harness, stream=stream, reasoning={"max_tokens": 3}, **fields_for(chat, "Hello!", 60))
    assert outcome.text
    assert "reasoning-budget" in outcome.note["recoveries"]
