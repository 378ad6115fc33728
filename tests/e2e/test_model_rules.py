"""Model settings for recoveries, reasoning budgets and forced server tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.hosting import calls as server_call
from tests.e2e.hosting import desk as hosting_desk
from tests.e2e.hosting import made
from tests.e2e.obeying import KINDS, SURFACES, answers, desk
from tests.e2e.responses import ANSWER, text_of
from tests.fakes import VllmScript
from tests.mcp.conftest import Upstream
from unisono.engine.deps import NO_CALLS
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
SCHEMA = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "object", "required": ["city"]}}}
LONG = "<|channel|>analysis<|message|>" + " ".join(f"point {number}," for number in range(200)) + "<|end|>"
THINKER = f"{LONG}<|start|>assistant<|channel|>final<|message|>At last.<|return|>"

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_every_api = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kind", ["vllm", "mlx_server"])
@both_forms
@on_every_api
async def test_a_disabled_recovery_regenerates_nothing(kind: str, ask: Any, stream: bool) -> None:
    async with desk(
        KINDS["vllm, unguided" if kind == "vllm" else kind], recoveries={"regenerated-answer": "off"}
    ) as harness:
        model = harness.think(answers("No."), bodies=['{"city":"Paris"}'])
        outcome = await ask(harness, stream=stream, response_format=SCHEMA)
        assert (outcome.text, outcome.refusal) == ("", "No.")
        assert len(model.asked) == 1


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("kind", ["vllm", "mlx_server"])
@both_forms
async def test_note_keeps_forbidden_tools_in_the_prompt(kind: str, stream: bool) -> None:
    async with desk(KINDS[kind], forbidden_tools="note") as harness:
        for ask in SURFACES.values():
            model = harness.think(answers("Fine."))
            allowed = await ask(harness, stream=stream, tools=[TOOL])
            forbidden = await ask(harness, stream=stream, tools=[TOOL], tool_choice="none")
            assert (allowed.text, forbidden.text) == ("Fine.", "Fine.")
            first, second = (request.prompt for request in model.asked)
            note = second.removeprefix(first.removesuffix("<|start|>assistant"))
            assert note == f"<|start|>developer<|message|># Instructions\n\n{NO_CALLS}<|end|><|start|>assistant"


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", KINDS)
@both_forms
async def test_the_reasoning_budget_of_a_model_ends_reasoning(name: str, stream: bool) -> None:
    async with desk(KINDS[name], reasoning_budget=20) as harness:
        model = harness.think(THINKER, bodies=["Enough."])
        outcome = await SURFACES["responses"](harness, stream=stream)
        assert outcome.text == "Enough."
        assert outcome.note["recoveries"].count("reasoning-budget") == 1
        [reasoning] = [item for item in outcome.whole["output"] if item["type"] == "reasoning"]
        # A text backend counts tokens of the chunks, which may be split differently.
        text = reasoning["content"][0]["text"]
        assert LONG.partition("<|message|>")[2].startswith(text)
        assert (20 if name not in ("ollama", "mlx_server") else 10) <= len(ENCODING.encode_text(text)) <= 24
        assert model.asked[1].behind == "<|channel|>final<|message|>"


BUDGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "Chat": ("chat", {"reasoning": {"max_tokens": 20}}),
    "Chat, field of vLLM": ("chat", {"thinking_token_budget": 20}),
    "Responses": ("responses", {"reasoning": {"max_tokens": 20}}),
    "Messages": ("messages", {"reasoning": {"max_tokens": 20}}),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("surface", "fields"), BUDGETS.values(), ids=BUDGETS)
@both_forms
async def test_the_reasoning_budget_of_a_request_ends_reasoning(
    surface: str, fields: dict[str, Any], stream: bool
) -> None:
    async with desk(KINDS["vllm"]) as harness:
        harness.think(THINKER, bodies=["Enough."])
        assert (await SURFACES[surface](harness, stream=stream, **fields)).text == "Enough."
        harness.think(THINKER)
        assert (await SURFACES[surface](harness, stream=stream)).text == "At last."


FORCED: dict[str, Any] = {
    "by name": {"type": "mcp", "server_label": "docs", "name": "echo"},
    "in allowed_tools": {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "mcp", "server_label": "docs", "name": "echo"}],
    },
}


@pytest.mark.parametrize("choice", FORCED.values(), ids=FORCED)
@both_forms
async def test_a_server_tool_can_be_forced(upstream: Upstream, choice: Any, stream: bool) -> None:
    async with hosting_desk(upstream) as harness:
        body = VllmScript(tokens=ENCODING.encode_marked('{"text":"forced"}<|call|>'))
        harness.say(ANSWER, body, ANSWER)
        response = await harness.responds(stream=stream, tool_choice=choice)
        [call] = made(response)
        assert (call["name"], call["arguments"], call["output"]) == ("echo", '{"text":"forced"}', "forced")
        assert text_of(response) == "ok"
        assert response["tool_choice"] == choice
        assert "unmet" not in response["unisono"]


@pytest.mark.sampled(one_in=2)
@both_forms
async def test_server_tools_outside_of_allowed_tools_are_not_run(upstream: Upstream, stream: bool) -> None:
    async with hosting_desk(upstream) as harness:
        harness.say(server_call("echo", text="not allowed"), ANSWER)
        facts = {"type": "mcp", "server_label": "docs", "name": "facts"}
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [facts]}
        response = await harness.responds(stream=stream, tool_choice=choice)
        assert made(response) == []
        assert upstream.noted("not allowed") == []
        assert text_of(response) == "ok"
