"""What the operator says about answers of a model, budgets of requests, and forced tools that the gateway runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.hosting import calls as called
from tests.e2e.hosting import desk as hosting_desk
from tests.e2e.hosting import made
from tests.e2e.obeying import KINDS, SURFACES, answers, desk
from tests.e2e.responses import ANSWER, text_of
from tests.fakes import VllmScript
from tests.mcp.conftest import Upstream, start_upstream
from unisono.engine.deps import NO_CALLS
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
SCHEMA = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "object", "required": ["city"]}}}
LONG = "<|channel|>analysis<|message|>" + " ".join(f"point {number}," for number in range(200)) + "<|end|>"
THINKER = f"{LONG}<|start|>assistant<|channel|>final<|message|>At last.<|return|>"

both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_both = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)


@pytest.mark.parametrize("kind", ["vllm", "mlx_server"])
@both_forms
@on_both
async def test_a_rule_that_is_off_mends_nothing(kind: str, ask: Any, stream: bool) -> None:
    async with desk(
        KINDS["vllm, unguided" if kind == "vllm" else kind], recoveries={"regenerated-answer": "off"}
    ) as here:
        model = here.think(answers("No."), bodies=['{"city":"Paris"}'])
        outcome = await ask(here, stream=stream, response_format=SCHEMA)
        assert (outcome.text, outcome.refusal) == ("", "No.")
        assert len(model.asked) == 1


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("kind", ["vllm", "mlx_server"])
@both_forms
async def test_forbidden_tools_stay_in_the_prompt_with_a_note(kind: str, stream: bool) -> None:
    async with desk(KINDS[kind], forbidden_tools="note") as here:
        for ask in SURFACES.values():
            model = here.think(answers("Fine."))
            allowed = await ask(here, stream=stream, tools=[TOOL])
            forbidden = await ask(here, stream=stream, tools=[TOOL], tool_choice="none")
            assert (allowed.text, forbidden.text) == ("Fine.", "Fine.")
            first, second = (asked.prompt for asked in model.asked)
            note = second.removeprefix(first.removesuffix("<|start|>assistant"))
            assert note == f"<|start|>developer<|message|># Instructions\n\n{NO_CALLS}<|end|><|start|>assistant"


@pytest.mark.parametrize("name", KINDS)
@both_forms
async def test_the_models_budget_ends_thoughts(name: str, stream: bool) -> None:
    async with desk(KINDS[name], reasoning_budget=20) as here:
        model = here.think(THINKER, bodies=["Enough."])
        outcome = await SURFACES["responses"](here, stream=stream)
        assert outcome.text == "Enough."
        assert outcome.note["recoveries"].count("reasoning-budget") == 1
        [thought] = [item for item in outcome.whole["output"] if item["type"] == "reasoning"]
        # Text comes cut as the network cuts it, and counts so while it comes.
        text = thought["content"][0]["text"]
        assert LONG.partition("<|message|>")[2].startswith(text)
        assert (20 if name not in ("ollama", "mlx_server") else 10) <= len(ENCODING.encode_text(text)) <= 24
        assert model.asked[1].behind == "<|channel|>final<|message|>"


BUDGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "Chat": ("chat", {"reasoning": {"max_tokens": 20}}),
    "Chat, as vLLM has it": ("chat", {"thinking_token_budget": 20}),
    "Responses": ("responses", {"reasoning": {"max_tokens": 20}}),
    "Messages": ("messages", {"reasoning": {"max_tokens": 20}}),
}


@pytest.mark.parametrize(("surface", "fields"), BUDGETS.values(), ids=BUDGETS)
@both_forms
async def test_a_requests_budget_ends_thoughts(surface: str, fields: dict[str, Any], stream: bool) -> None:
    async with desk(KINDS["vllm"]) as here:
        here.think(THINKER, bodies=["Enough."])
        assert (await SURFACES[surface](here, stream=stream, **fields)).text == "Enough."
        here.think(THINKER)
        assert (await SURFACES[surface](here, stream=stream)).text == "At last."


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


NAMED: dict[str, Any] = {
    "by its name": {"type": "mcp", "server_label": "docs", "name": "echo"},
    "among those allowed": {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "mcp", "server_label": "docs", "name": "echo"}],
    },
}


@pytest.mark.parametrize("choice", NAMED.values(), ids=NAMED)
@both_forms
async def test_a_tool_that_the_gateway_runs_is_forced(upstream: Upstream, choice: Any, stream: bool) -> None:
    async with hosting_desk(upstream) as here:
        body = VllmScript(tokens=ENCODING.encode_marked('{"text":"forced"}<|call|>'))
        here.say(ANSWER, body, ANSWER)
        response = await here.responds(stream=stream, tool_choice=choice)
        [call] = made(response)
        assert (call["name"], call["arguments"], call["output"]) == ("echo", '{"text":"forced"}', "forced")
        assert text_of(response) == "ok"
        assert response["tool_choice"] == choice
        assert "unmet" not in response["unisono"]


@both_forms
async def test_tools_that_are_not_allowed_are_not_run(upstream: Upstream, stream: bool) -> None:
    async with hosting_desk(upstream) as here:
        here.say(called("echo", text="not allowed"), ANSWER)
        facts = {"type": "mcp", "server_label": "docs", "name": "facts"}
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [facts]}
        response = await here.responds(stream=stream, tool_choice=choice)
        assert made(response) == []
        assert upstream.noted("not allowed") == []
        assert text_of(response) == "ok"
