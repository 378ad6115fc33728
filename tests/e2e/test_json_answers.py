"""Answers that must match a JSON schema, on every API, streamed and not.

Backends with guided decoding are constrained to the schema. For others, the answer is buffered, checked and
regenerated.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from tests.api.responses.mounted import mounted
from tests.e2e.gateway import config_of
from tests.e2e.obeying import FRAMINGS, KINDS, SURFACES, Desk, answers, calls, desk, tokens_for
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
REFUSAL_OF_INVALID_JSON = "The answer does not have the form that was asked for."

pytestmark = pytest.mark.asyncio(loop_scope="module")


def form(schema: Any, *, strict: bool = False) -> Any:
    """Build a `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    async with desk(KINDS[request.param]) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm, unguided", "mlx_server"])
async def unguided(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    """Backends without guided decoding."""
    async with desk(KINDS[request.param]) as running:
        yield running


both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
on_each = pytest.mark.parametrize("ask", SURFACES.values(), ids=SURFACES)
on_openais = pytest.mark.parametrize("ask", [SURFACES["chat"], SURFACES["responses"]], ids=["chat", "responses"])


@pytest.mark.sampled(one_in=12)
@both_forms
@on_each
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_an_answer_matches_its_schema(harness: Desk, case: Case, ask: Any, stream: bool) -> None:
    valid, invalid = case.right[0], next(answer for answer in case.wrong if answer)
    guided = harness.kind.guided
    model = harness.think(answers(invalid), bodies=[valid] if guided else [invalid, valid])
    outcome = await ask(harness, stream=stream, response_format=form(case.schema, strict=case.strict))
    Draft202012Validator(case.schema).validate(json.loads(outcome.text))
    assert outcome.text == valid
    assert (outcome.refusal, outcome.unmet) == ("", "")
    assert outcome.finish in ("stop", "completed")
    assert ("regenerated-answer" in outcome.note["recoveries"]) is not guided
    prefixes = [request.behind for request in model.asked[1:]]
    assert set(prefixes) == {"<|channel|>final<|message|>"}
    # A constrained answer is generated once.
    assert len(prefixes) == (1 if guided else 2)
    constraint = model.asked[-1].held
    assert (constraint.schema if constraint else None) == (for_grammar(case.schema) if guided else None)
    # Messages requests have no name for a schema.
    name = "response" if ask is SURFACES["messages"] else "answer"
    assert f"# Response Formats\n\n## {name}" in model.asked[0].prompt


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS)
async def test_text_after_the_header_does_not_count_against_max_tokens(harness: Desk, framing: Any) -> None:
    text = json.dumps({"city": "Llanfairpwllgwyngyll", "code": "abcdefg hij klm nop"})
    harness.think(answers(text), bodies=[text], **framing)
    limit = tokens_for(harness.kind, answers(text), framing)
    outcome = await SURFACES["chat"](harness, stream=False, response_format={"type": "json_object"}, max_tokens=limit)
    assert (outcome.text, outcome.finish, outcome.unmet) == (text, "stop", "")
    assert outcome.whole["usage"]["completion_tokens"] <= limit


@pytest.mark.sampled(one_in=4)
@both_forms
@on_openais
async def test_json_object_without_a_schema_returns_an_object(harness: Desk, ask: Any, stream: bool) -> None:
    bodies = ['{"a":[1,2]}'] if harness.kind.guided else ["[1,2]", '{"a":[1,2]}']
    harness.think(answers("Sure!"), bodies=bodies)
    outcome = await ask(harness, stream=stream, response_format={"type": "json_object"})
    assert (outcome.text, outcome.unmet) == ('{"a":[1,2]}', "")


@pytest.mark.sampled(one_in=4)
@both_forms
@on_each
async def test_tools_are_called_before_a_json_answer(harness: Desk, ask: Any, stream: bool) -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    harness.think(calls("look"), answers("Paris"), bodies=[PARIS])
    outcome = await ask(harness, stream=stream, tools=[look], response_format=form(CITY))
    assert (outcome.calls, outcome.text, outcome.unmet) == ([("look", "{}")], "", "")
    harness.think(answers("Paris"), bodies=[PARIS])
    outcome = await ask(harness, stream=stream, tools=[look], response_format=form(CITY))
    assert (outcome.calls, outcome.text) == ([], PARIS)


@pytest.mark.sampled(one_in=4)
@both_forms
@on_each
async def test_a_call_of_an_unknown_tool_is_replaced_by_an_answer(harness: Desk, ask: Any, stream: bool) -> None:
    harness.think(calls("made_up"), bodies=[PARIS])
    outcome = await ask(harness, stream=stream, response_format=form(CITY))
    assert (outcome.calls, outcome.text, outcome.unmet) == ([], PARIS, "")


@both_forms
@on_each
async def test_an_answer_that_never_matches_is_a_refusal(unguided: Desk, ask: Any, stream: bool) -> None:
    model = unguided.think(answers("I would rather not."), bodies=["Nor now.", "I am sorry."])
    outcome = await ask(unguided, stream=stream, response_format=form(CITY, strict=True))
    # No retry is better than the first attempt.
    assert (outcome.text, outcome.refusal) == ("", "I would rather not.")
    assert outcome.unmet == REFUSAL_OF_INVALID_JSON
    assert outcome.finish in ("stop", "completed")
    assert len(model.asked) == 3
    if not stream and ask is SURFACES["chat"]:
        assert outcome.whole["choices"][0]["message"]["content"] is None


@both_forms
@on_each
async def test_a_code_fence_is_removed(unguided: Desk, ask: Any, stream: bool) -> None:
    model = unguided.think(answers(f"```json\n{PARIS}\n```"))
    outcome = await ask(unguided, stream=stream, response_format=form(CITY))
    assert (outcome.text, outcome.unmet) == (PARIS, "")
    assert "code-fence" in outcome.note["recoveries"]
    assert len(model.asked) == 1


@pytest.mark.parametrize("harness", ["vllm"], indirect=True)
@both_forms
@on_each
async def test_a_code_fence_that_a_constraint_let_through_is_removed_or_reported(
    harness: Desk, ask: Any, stream: bool
) -> None:
    fenced = f"```json\n{PARIS}\n```"
    harness.think(answers(PARIS), bodies=[fenced])
    outcome = await ask(harness, stream=stream, response_format=form(CITY, strict=True))
    # The client of a stream already has the fence.
    assert outcome.text + outcome.refusal == (fenced if stream else PARIS)
    assert outcome.unmet == (REFUSAL_OF_INVALID_JSON if stream else "")
    assert ("code-fence" in outcome.note["recoveries"]) is not stream


JOBS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    # case: (fields, headers)
    "background": ({"background": True}, {}),
    "idempotency key": ({}, {"idempotency_key": "city"}),
}


@pytest.mark.parametrize("harness", ["vllm"], indirect=True)
@pytest.mark.parametrize(("fields", "headers"), JOBS.values(), ids=JOBS)
async def test_a_logged_answer_without_a_stream_is_generated_again(
    harness: Desk, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    model = harness.think(answers(PARIS), bodies=["{}", PARIS])
    text = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    body = {"model": "gpt-oss", "input": "Hi", "text": text, **fields}
    response = (await harness.gateway.post("/v1/responses", json.dumps(body).encode(), **headers)).body
    while response["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
        response = (await harness.gateway.get(f"/v1/responses/{response['id']}")).body
    assert [part["text"] for part in response["output"][-1]["content"]] == [PARIS]
    assert response["unisono"]["recoveries"] == ["regenerated-answer"]
    assert len(model.asked) == 3


@both_forms
@on_each
async def test_a_truncated_answer_is_not_a_refusal(unguided: Desk, ask: Any, stream: bool) -> None:
    unguided.think(answers(json.dumps({"city": "Llanfair" * 50})))
    limit = {"max_output_tokens" if ask is SURFACES["responses"] else "max_tokens": 40}
    outcome = await ask(unguided, stream=stream, response_format=form(CITY), **limit)
    assert outcome.text.startswith('{"city": "Llanfair')
    assert outcome.refusal == ""
    assert outcome.finish in ("length", "incomplete")


NEXT = "<|end|><|start|>assistant<|channel|>"


@both_forms
@on_openais
async def test_a_second_answer_is_not_part_of_the_text(unguided: Desk, ask: Any, stream: bool) -> None:
    unguided.think(answers(f'{PARIS}{NEXT}final<|message|>{{"city":"Oslo"}}'))
    outcome = await ask(unguided, stream=stream, response_format=form(CITY))
    assert (outcome.text, outcome.refusal, outcome.unmet) == (PARIS, "", "")


async def test_a_refusal_is_stored_and_continued(unguided: Desk) -> None:
    unguided.think(answers("No."), bodies=["No."])
    body = {"model": "gpt-oss", "input": "Hi", "text": {"format": {"type": "json_schema", "name": "c", "schema": CITY}}}
    response = (await unguided.gateway.post("/v1/responses", json.dumps(body).encode())).body
    assert (await unguided.gateway.get(f"/v1/responses/{response['id']}")).body == response
    assert response["output"][-1]["content"] == [{"type": "refusal", "refusal": "No."}]
    stored_format = {"type": "json_schema", "name": "c", "description": None, "schema": CITY, "strict": False}
    assert response["text"]["format"] == stored_format
    model = unguided.think(answers("Hm."))
    body = {"model": "gpt-oss", "input": "Why?", "previous_response_id": response["id"]}
    assert (await unguided.gateway.post("/v1/responses", json.dumps(body).encode())).status == 200
    assert "<|channel|>final<|message|>No.<|end|>" in model.asked[0].prompt


async def test_a_guided_answer_streams_incrementally() -> None:
    async with desk(KINDS["vllm"]) as harness:
        harness.think(answers("Paris"), bodies=[PARIS])
        response = await harness.gateway.chat(stream=True, response_format=form(CITY))
        deltas = [choice["delta"] for event in response.events for choice in event["choices"]]
        pieces = [delta["content"] for delta in deltas if delta.get("content")]
        assert "".join(pieces) == PARIS
        assert len(pieces) > 1


async def test_a_stream_sends_keep_alives_while_an_answer_is_buffered() -> None:
    async with FakeMlxServer() as fake:
        output = answers(f"{PARIS[:-1]}{' ' * 30}}}")
        fake.script = lambda request: KINDS["mlx_server"].script(output, delay_s=0.02)
        async with mounted(config_of(f"mlx_server@{fake.url}"), keep_alive_s=0.05) as harness:
            body = {"model": "gpt-oss", "input": "Hi", "stream": True, "text": {"format": {"type": "json_object"}}}
            frames = (await harness.ask("POST", "/v1/responses", body)).body.decode().split("\n\n")
        lines = [frame.partition("\n")[0] for frame in frames]
        reasoning_at = lines.index("event: response.reasoning_text.delta")
        text_at = lines.index("event: response.output_text.delta")
        assert lines[reasoning_at:text_at].count(": keep-alive") >= 3
        assert lines.count("event: response.output_text.delta") == 1
