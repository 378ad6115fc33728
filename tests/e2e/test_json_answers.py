"""Answers that have to be JSON of a schema, on every surface, streamed and not: kept to it where the backend can be;
held, judged and written again where it cannot."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from tests.api.responses.mounted import mounted
from tests.e2e.gateway import config_of
from tests.e2e.obeying import KINDS, SURFACES, Desk, answers, calls, desk
from tests.fakes import FakeMlxServer
from tests.schemas.suite import SUITE, Case, closed
from unisono.core.tagged_unions import for_grammar

WIDE = closed(**{f"field_{number}": {"type": ["integer", "null"]} for number in range(400)})
LONG = json.dumps({"text": " ".join(f"Grüße {number} 完了 🙂" for number in range(400))}, ensure_ascii=False)
CASES = {
    **SUITE,
    "wide": Case(
        WIDE,
        (json.dumps({f"field_{number}": number if number % 2 else None for number in range(400)}),),
        {json.dumps({f"field_{number}": number for number in range(399)}): ""},
    ),
    "a long text": Case(closed(text={"type": "string"}), (LONG,), {"{}": ""}),
}
CITY = closed(city={"type": "string"})
PARIS = '{"city":"Paris"}'
UNMET = "The answer does not have the form that was asked for."

pytestmark = pytest.mark.asyncio(loop_scope="module")


def form(schema: Any, *, strict: bool = False) -> Any:
    """`response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def here(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm, unguided", "mlx_server"])
async def free(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    """Backends that nothing can be kept to."""
    async with desk(KINDS[request.param]) as running:
        yield running


both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_each = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)
on_openais = pytest.mark.parametrize("ask", [SURFACES["chat"], SURFACES["responses"]], ids=["chat", "responses"])


@pytest.mark.sampled(one_in=6)
@both_forms
@on_each
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_an_answer_is_what_its_schema_allows(here: Desk, case: Case, ask: Any, stream: bool) -> None:
    right, wrong = case.right[0], next(answer for answer in case.wrong if answer)
    guided = here.kind.guided
    model = here.think(answers(wrong), bodies=[right] if guided else [wrong, right])
    outcome = await ask(here, stream=stream, response_format=form(case.schema, strict=case.strict))
    Draft202012Validator(case.schema).validate(json.loads(outcome.text))
    assert outcome.text == right
    assert (outcome.refusal, outcome.unmet) == ("", "")
    assert outcome.finish in ("stop", "completed")
    assert ("regenerated-answer" in outcome.note["recoveries"]) is not guided
    behind = [asked.behind for asked in model.asked[1:]]
    assert set(behind) == {"<|channel|>final<|message|>"}
    # Nothing is generated twice where the backend is kept to the schema.
    assert len(behind) == (1 if guided else 2)
    held = model.asked[-1].held
    assert (held.schema if held else None) == (for_grammar(case.schema) if guided else None)
    # Messages has no name for a schema.
    name = "response" if ask is SURFACES["messages"] else "answer"
    assert f"# Response Formats\n\n## {name}" in model.asked[0].prompt


@both_forms
@on_openais
async def test_json_of_no_schema_is_an_object(here: Desk, ask: Any, stream: bool) -> None:
    bodies = ['{"a":[1,2]}'] if here.kind.guided else ["[1,2]", '{"a":[1,2]}']
    here.think(answers("Sure!"), bodies=bodies)
    outcome = await ask(here, stream=stream, response_format={"type": "json_object"})
    assert (outcome.text, outcome.unmet) == ('{"a":[1,2]}', "")


@both_forms
@on_each
async def test_tools_are_called_before_the_answer_is_given(here: Desk, ask: Any, stream: bool) -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    here.think(calls("look"), answers("Paris"), bodies=[PARIS])
    outcome = await ask(here, stream=stream, tools=[look], response_format=form(CITY))
    assert (outcome.calls, outcome.text, outcome.unmet) == ([("look", "{}")], "", "")
    here.think(answers("Paris"), bodies=[PARIS])
    outcome = await ask(here, stream=stream, tools=[look], response_format=form(CITY))
    assert (outcome.calls, outcome.text) == ([], PARIS)


@both_forms
@on_each
async def test_a_call_that_nobody_could_answer_is_no_answer(here: Desk, ask: Any, stream: bool) -> None:
    here.think(calls("made_up"), bodies=[PARIS])
    outcome = await ask(here, stream=stream, response_format=form(CITY))
    assert (outcome.calls, outcome.text, outcome.unmet) == ([], PARIS, "")


@both_forms
@on_each
async def test_an_answer_that_cannot_be_had_is_a_refusal(free: Desk, ask: Any, stream: bool) -> None:
    model = free.think(answers("I would rather not."), bodies=["Nor now.", "I am sorry."])
    outcome = await ask(free, stream=stream, response_format=form(CITY, strict=True))
    # No retry is better than the first attempt.
    assert (outcome.text, outcome.refusal) == ("", "I would rather not.")
    assert outcome.unmet == UNMET
    assert outcome.finish in ("stop", "completed")
    assert len(model.asked) == 3
    if not stream and ask is SURFACES["chat"]:
        assert outcome.whole["choices"][0]["message"]["content"] is None


@both_forms
@on_each
async def test_a_code_block_is_taken_off(free: Desk, ask: Any, stream: bool) -> None:
    model = free.think(answers(f"```json\n{PARIS}\n```"))
    outcome = await ask(free, stream=stream, response_format=form(CITY))
    assert (outcome.text, outcome.unmet) == (PARIS, "")
    assert "code-fence" in outcome.note["recoveries"]
    assert len(model.asked) == 1


@both_forms
@on_each
async def test_what_ran_out_of_room_is_no_refusal(free: Desk, ask: Any, stream: bool) -> None:
    free.think(answers(json.dumps({"city": "Llanfair" * 50})))
    limit = {"max_output_tokens" if ask is SURFACES["responses"] else "max_tokens": 40}
    outcome = await ask(free, stream=stream, response_format=form(CITY), **limit)
    assert outcome.text.startswith('{"city": "Llanfair')
    assert outcome.refusal == ""
    assert outcome.finish in ("length", "incomplete")


async def test_the_refusal_is_kept_and_told_again(free: Desk) -> None:
    free.think(answers("No."), bodies=["No."])
    body = {"model": "gpt-oss", "input": "Hi", "text": {"format": {"type": "json_schema", "name": "c", "schema": CITY}}}
    made = (await free.gateway.post("/v1/responses", json.dumps(body).encode())).body
    assert (await free.gateway.get(f"/v1/responses/{made['id']}")).body == made
    assert made["output"][-1]["content"] == [{"type": "refusal", "refusal": "No."}]
    written = {"type": "json_schema", "name": "c", "description": None, "schema": CITY, "strict": False}
    assert made["text"]["format"] == written
    model = free.think(answers("Hm."))
    body = {"model": "gpt-oss", "input": "Why?", "previous_response_id": made["id"]}
    assert (await free.gateway.post("/v1/responses", json.dumps(body).encode())).status == 200
    assert "<|channel|>final<|message|>No.<|end|>" in model.asked[0].prompt


async def test_an_answer_is_streamed_as_it_comes_where_the_backend_is_kept_to_it() -> None:
    async with desk(KINDS["vllm"]) as here:
        here.think(answers("Paris"), bodies=[PARIS])
        answer = await here.gateway.chat(stream=True, response_format=form(CITY))
        deltas = [choice["delta"] for event in answer.events for choice in event["choices"]]
        pieces = [delta["content"] for delta in deltas if delta.get("content")]
        assert "".join(pieces) == PARIS
        assert len(pieces) > 1


async def test_a_stream_says_that_it_lives_while_an_answer_is_held() -> None:
    async with FakeMlxServer() as fake:
        held = answers(f"{PARIS[:-1]}{' ' * 30}}}")
        fake.script = lambda asked: KINDS["mlx_server"].script(held, delay_s=0.02)
        async with mounted(config_of(f"mlx_server@{fake.url}"), keep_alive_s=0.05) as here:
            body = {"model": "gpt-oss", "input": "Hi", "stream": True, "text": {"format": {"type": "json_object"}}}
            frames = (await here.ask("POST", "/v1/responses", body)).body.decode().split("\n\n")
        told = [frame.partition("\n")[0] for frame in frames]
        thought = told.index("event: response.reasoning_text.delta")
        said = told.index("event: response.output_text.delta")
        assert told[thought:said].count(": keep-alive") >= 3
        assert told.count("event: response.output_text.delta") == 1
