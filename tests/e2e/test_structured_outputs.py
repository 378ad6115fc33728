"""Structured output fields of vLLM, SGLang and llama.cpp on Chat Completions, on every kind of backend.

The requests are those of vLLM's documentation (structured outputs), under the old and the new names of the fields.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import KINDS, START, Asked, Desk, Model, answers, chat, desk
from tests.fakes.constraints import Held

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAR: dict[str, Any] = {
    "$defs": {"CarType": {"enum": ["sedan", "SUV", "Truck", "Coupe"], "title": "CarType", "type": "string"}},
    "properties": {
        "brand": {"title": "Brand", "type": "string"},
        "model": {"title": "Model", "type": "string"},
        "car_type": {"$ref": "#/$defs/CarType"},
    },
    "required": ["brand", "model", "car_type"],
    "title": "CarDescription",
    "type": "object",
}
COUPE = '{"brand":"Toyota","model":"Supra","car_type":"Coupe"}'
SQL = """
root ::= select_statement

select_statement ::= "SELECT " column " from " table " where " condition

column ::= "col_1 " | "col_2 "

table ::= "table_1 " | "table_2 "

condition ::= column "= " number

number ::= "1 " | "2 "
"""
SELECT = "SELECT col_1  from table_1  where col_1 = 1 "
LARK = 'start: "yes" | "no"\n'
EMAIL = r"[a-z0-9.]{1,20}@\w{6,10}\.com"
MOODS = ["positive", "negative"]

# Fields, a valid answer, an invalid answer, and the kind of the constraint.
CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "structured_outputs.choice": ({"structured_outputs": {"choice": MOODS}}, "positive", "Positive!", "choice"),
    "structured_outputs.regex": ({"structured_outputs": {"regex": EMAIL}}, "alan.turing@enigma.com", "alan", "regex"),
    "structured_outputs.json": ({"structured_outputs": {"json": CAR}}, COUPE, "{}", "json"),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": SQL}}, SELECT, "SELECT 1", "grammar"),
    "structured_outputs.json_object": ({"structured_outputs": {"json_object": True}}, "{}", "[]", "json"),
    "guided_choice": ({"guided_choice": MOODS}, "negative", "neutral", "choice"),
    "guided_regex": ({"guided_regex": EMAIL}, "ada@lovelace.com", "ada", "regex"),
    "guided_json": ({"guided_json": CAR}, COUPE, '{"brand":1}', "json"),
    "guided_json as text": ({"guided_json": json.dumps(CAR)}, COUPE, "{", "json"),
    "guided_grammar": ({"guided_grammar": SQL}, SELECT, "col_1", "grammar"),
    "guided_grammar of Lark": ({"guided_grammar": LARK}, "yes", "maybe", "grammar"),
    "grammar of Lark with a prefix": ({"grammar": f"?{LARK}"}, "no", "maybe", "grammar"),
    "grammar of Lark with attributes": ({"grammar": 'start[max_tokens=5]: "yes"\n'}, "yes", "maybe", "grammar"),
    "regex": ({"regex": "(Paris|London)"}, "Paris", "Rome", "regex"),
    "ebnf": ({"ebnf": 'root ::= "Hello" | "Hi"'}, "Hi", "Hey", "grammar"),
    "grammar": ({"grammar": 'root ::= ("1" | "2")+'}, "1212", "123", "grammar"),
    "json_schema": ({"json_schema": CAR}, COUPE, "{}", "json"),
    "regex without a translation": ({"regex": r"(?i)paris|\bRome\b"}, "PARIS", "London", "regex"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


@pytest.mark.sampled(one_in=9)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CASES)
async def test_an_answer_has_the_required_form(harness: Desk, name: str, stream: bool) -> None:
    fields, valid, invalid, kind = CASES[name]
    model = harness.think(answers(invalid), bodies=[invalid, valid])
    says = model.says
    # A backend that enforces the constraint cannot write the invalid answer.
    model.says = lambda prompt, held: says(prompt, held) if held is None else _enforced(model, prompt, held, valid)  # type: ignore[method-assign]
    outcome = await chat(harness, stream=stream, **fields)
    assert outcome.text == valid
    assert (outcome.refusal, outcome.unmet) == ("", "")
    # The constraint applies to the answer only: the reasoning before it is free.
    assert model.asked[0].held is None
    assert {request.behind for request in model.asked[1:]} == {"<|channel|>final<|message|>"}
    assert "# Response Formats\n\n## response" in model.asked[0].prompt
    if harness.kind.name == "vllm" and harness.kind.guided:
        assert model.asked[1].held is not None
        assert kind == "json" or model.requests[1]["structured_outputs"][kind]
    # Every constraint is sent, except a grammar of Lark and expressions without a translation.
    if harness.kind.name == "llamacpp":
        field = "json_schema" if kind == "json" else "grammar"
        assert (field in model.requests[1]) is not ("Lark" in name or name == "regex without a translation")


def _enforced(model: Model, prompt: str, held: Held, text: str) -> str:
    model.asked.append(Asked(prompt, prompt.rpartition(START)[2], held))
    return f"{text}<|return|>"


@pytest.mark.parametrize("name", ["structured_outputs.choice", "guided_regex", "guided_grammar"])
async def test_an_answer_that_never_has_the_form_is_a_declared_failure(name: str) -> None:
    fields, _, invalid, _ = CASES[name]
    async with desk(KINDS["mlx_server"]) as harness:
        harness.think(answers(invalid), bodies=[invalid])
        outcome = await chat(harness, stream=False, **fields)
    assert (outcome.text, outcome.refusal) == ("", invalid)
    assert outcome.unmet == "The answer does not have the form that was asked for."


async def test_two_forms_are_an_error_that_names_the_second(harness: Desk) -> None:
    for fields, at in (
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ):
        answer = await harness.gateway.chat(**fields)
        assert (answer.status, answer.body["error"]["param"]) == (400, at)


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"guided_regex": "("}, "guided_regex"),
    "lookahead": ({"guided_regex": "a(?=b)"}, "guided_regex"),
    "grammar": ({"guided_grammar": "root ::= missing"}, "guided_grammar"),
    "schema text": ({"guided_json": "{"}, "guided_json"),
    "schema": ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json.type"),
    "no choices": ({"guided_choice": []}, "guided_choice"),
    "structural tag": ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
}


@pytest.mark.parametrize(("fields", "at"), INVALID.values(), ids=INVALID)
async def test_a_form_that_cannot_be_enforced_is_an_error(harness: Desk, fields: dict[str, Any], at: str) -> None:
    answer = await harness.gateway.chat(**fields)
    assert (answer.status, answer.body["error"]["param"]) == (400, at), answer.raw
