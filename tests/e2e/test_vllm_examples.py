"""Requests of vLLM's documentation of structured outputs, unchanged, on every kind of backend.

Source: docs/features/structured_outputs.md and examples/online_serving of vllm-project/vllm (Apache-2.0), for versions
before and after 0.12, which renamed the fields.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.obeying import KINDS, Desk, answers, chat, desk

pytestmark = pytest.mark.asyncio(loop_scope="module")

SENTIMENT = "Classify this sentiment: vLLM is wonderful!"
EMAIL = (
    "Generate an example email address for Alan Turing, who works in Enigma. End in .com and new line. "
    "Example result: alan.turing@enigma.com\n"
)
CAR = "Generate a JSON with the brand, model and car_type of the most iconic car from the 90's"
QUERY = "Generate an SQL query to show the 'username' and 'email' from the 'users' table."
PERSON = "Generate a JSON with the name and age of one random person."

CAR_SCHEMA: dict[str, Any] = {
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
PEOPLE_SCHEMA: dict[str, Any] = {
    "properties": {"name": {"title": "Name", "type": "string"}, "age": {"title": "Age", "type": "integer"}},
    "required": ["name", "age"],
    "title": "People",
    "type": "object",
}
# Indented as in the documentation, where it is a string inside of a function.
SQL_GRAMMAR = """
        root ::= select_statement

        select_statement ::= "SELECT " column " from " table " where " condition

        column ::= "col_1 " | "col_2 "

        table ::= "table_1 " | "table_2 "

        condition ::= column "= " number

        number ::= "1 " | "2 "
    """


def _form(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


SUPRA = '{"brand":"Toyota","model":"Supra","car_type":"Coupe"}'
SELECT = "SELECT col_1  from table_1  where col_1 = 1 "
ADDRESS = "alanturing@enigma.com"

# Request, output of the model, and content that the client receives.
EXAMPLES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "choice": (SENTIMENT, {"structured_outputs": {"choice": ["positive", "negative"]}}, "positive", "positive"),
    "guided_choice": (SENTIMENT, {"guided_choice": ["positive", "negative"]}, "negative", "negative"),
    # The stop string cuts off the line break that the expression requires.
    "regex": (
        EMAIL,
        {"structured_outputs": {"regex": r"\w+@\w+\.com\n"}, "stop": ["\n"]},
        f"{ADDRESS}\n",
        ADDRESS,
    ),
    "guided_regex with a stop string": (
        EMAIL,
        {"guided_regex": r"\w+@\w+\.com\n", "stop": ["\n"]},
        f"{ADDRESS}\n",
        ADDRESS,
    ),
    "guided_regex": (
        EMAIL,
        {"guided_regex": r"[a-z0-9.]{1,20}@\w{6,10}\.com\n"},
        f"{ADDRESS}\n",
        f"{ADDRESS}\n",
    ),
    "guided_json": (CAR, {"guided_json": CAR_SCHEMA}, SUPRA, SUPRA),
    "json": (CAR, {"structured_outputs": {"json": CAR_SCHEMA}}, SUPRA, SUPRA),
    "response_format": (CAR, {"response_format": _form("car-description", CAR_SCHEMA)}, SUPRA, SUPRA),
    "reasoning and response_format": (
        PERSON,
        {"response_format": _form("people", PEOPLE_SCHEMA)},
        '{"name":"Ada","age":36}',
        '{"name":"Ada","age":36}',
    ),
    "grammar": (QUERY, {"structured_outputs": {"grammar": SQL_GRAMMAR}}, SELECT, SELECT),
    "guided_grammar": (QUERY, {"guided_grammar": SQL_GRAMMAR}, SELECT, SELECT),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_gives_an_answer_of_its_form(harness: Desk, name: str, stream: bool) -> None:
    question, fields, output, content = EXAMPLES[name]
    model = harness.think(answers(output), bodies=[output])
    outcome = await chat(harness, stream=stream, messages=_user(question), max_tokens=1024, **fields)
    assert (outcome.text, outcome.refusal, outcome.unmet) == (content, "", "")
    is_enforced = any(request.held is not None for request in model.asked)
    assert is_enforced is (harness.kind.guided and (harness.kind.name != "ollama" or "json" in json.dumps(fields)))


@pytest.mark.parametrize("name", ["choice", "guided_regex", "json", "grammar"])
async def test_an_example_without_a_valid_output_is_a_declared_failure(name: str) -> None:
    question, fields, _, _ = EXAMPLES[name]
    async with desk(KINDS["mlx_server"]) as harness:
        model = harness.think(answers("I cannot."), bodies=["I cannot."])
        outcome = await chat(harness, stream=False, messages=_user(question), **fields)
        assert len(model.asked) > 2
    assert (outcome.text, outcome.refusal) == ("", "I cannot.")
    assert outcome.unmet


STRUCTURAL_TAG = {
    "type": "structural_tag",
    "structures": [
        {
            "begin": "<function=get_weather>",
            "schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            "end": "</function>",
        }
    ],
    "triggers": ["<function="],
}


async def test_the_example_of_a_structural_tag_is_refused(harness: Desk) -> None:
    answer = await harness.gateway.chat(response_format=STRUCTURAL_TAG)
    assert (answer.status, answer.body["error"]["param"]) == (400, "response_format.type"), answer.raw
