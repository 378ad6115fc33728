"""What each field of a request does to the prompt, to what a backend is asked and to the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import gateway
from tests.e2e.responses import ANSWER, CALL, OK, THOUGHT, TOOL, Json, Line, kinds, line, refusal, text_of
from tests.e2e.wires import ENCODING, WIRES, asked, deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ONE = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES.values(), ids=WIRES)
async def talk(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(request.param) as here:
        yield here


ECHOED: dict[str, Json] = {
    "metadata": {"metadata": {"a": "b", "c": ""}},
    "the user": {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
    "sampling": {"temperature": 0.25, "top_p": 0.5, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    "limits": {"max_output_tokens": 100, "max_tool_calls": 3},
    "instructions": {"instructions": "Be brief."},
    "truncation": {"truncation": "auto"},
    "flags": {"parallel_tool_calls": False, "tool_choice": "none", "store": False},
}
DEFAULTS: Json = {
    "metadata": {},
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "instructions": None,
    "truncation": "disabled",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "store": True,
    "background": False,
    "tools": [],
    "top_logprobs": 0,
    "service_tier": "default",
    "previous_response_id": None,
    "conversation": None,
    "reasoning": {"effort": "medium", "summary": None},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
}


@pytest.mark.parametrize("fields", ECHOED.values(), ids=ECHOED)
async def test_a_response_repeats_what_was_asked(talk: Line, fields: Json) -> None:
    talk.say(ANSWER)
    for stream in (False, True):
        response = await talk.responds(stream=stream, **fields)
        assert {key: response[key] for key in DEFAULTS} == DEFAULTS | fields
        assert "notes" not in response["unisono"]


async def test_sampling_reaches_the_backend(talk: Line) -> None:
    talk.say(ANSWER)
    await talk.whole(temperature=0.25, top_p=0.5, seed=7, max_output_tokens=100)
    sent = asked(talk.fake)[-1].json
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"]) == (0.25, 0.5, 100)
    if talk.wire.name == "vllm":
        assert sent["seed"] == 7


NOTED: dict[str, tuple[Json, str]] = {
    "an unknown field": ({"colour": "red"}, "colour: no effect"),
    "a field inside": ({"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary: no effect"),
    "a service tier": ({"service_tier": "flex"}, "service_tier: no effect"),
    "cache retention": ({"prompt_cache_retention": "24h"}, "prompt_cache_retention: no effect"),
    "context management": ({"context_management": [{"type": "compaction"}]}, "context_management: no effect"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity: no effect"),
    "a summary": (
        {"reasoning": {"summary": "auto"}},
        "reasoning.summary: no effect, because summaries are not supported",
    ),
    "results": (
        {"include": ["file_search_call.results"]},
        "include: 'file_search_call.results' has no effect",
    ),
    "a tool nobody configured": (
        {"tools": [{"type": "web_search"}, TOOL]},
        "tools.0.type: skipped, tools of type 'web_search' are not available; the operator can enable them with "
        "`unisono.builtin_tools.browser`",
    ),
}


@pytest.mark.parametrize(("fields", "note"), NOTED.values(), ids=NOTED)
async def test_what_has_no_effect_is_told_at_the_end_and_kept(talk: Line, fields: Json, note: str) -> None:
    talk.say(ANSWER)
    for stream in (False, True):
        response = await talk.responds(stream=stream, **fields)
        assert response["unisono"]["notes"] == [note]
        assert (await talk.kept(response))["unisono"] == response["unisono"]


NEUTRAL: Json = {
    "top_logprobs": 0,
    "service_tier": None,
    "include": [],
    "tools": [],
    "prompt": None,
    "modalities": ["text"],
    "stream_options": {"include_obfuscation": True},
    "text": {"format": {"type": "text"}},
    "reasoning": {},
    "context_management": None,
    "moderation": None,
    "previous_response_id": None,
    "conversation": None,
}


async def test_neutral_values_ask_for_nothing(talk: Line) -> None:
    talk.say(ANSWER)
    await talk.whole()
    plain = talk.said
    for stream in (False, True):
        response = await talk.responds(stream=stream, **NEUTRAL)
        assert "notes" not in response["unisono"]
        assert talk.said == plain


REFUSED: dict[str, tuple[Json, str, str]] = {
    "log probabilities": ({"top_logprobs": 2}, "top_logprobs", "unsupported_value"),
    "included log probabilities": ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_value"),
    "a prompt template": ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_value"),
    "sound": ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
    "only tools nobody configured": ({"tools": [{"type": "web_search"}]}, "tools.0.type", "unsupported_value"),
    "a tool of no kind": ({"tools": [{"name": "x"}]}, "tools.0.type", "invalid_value"),
    "too hot": ({"temperature": 2.5}, "temperature", "invalid_value"),
    "no room": ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    "a run nobody can fetch": ({"background": True, "store": False}, "store", "invalid_value"),
}


@WAYS
@pytest.mark.parametrize(("fields", "param", "code"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_had_is_refused_by_name(
    talk: Line, fields: Json, param: str, code: str, stream: bool
) -> None:
    talk.say(ANSWER)
    refusal(await talk.post(stream=stream, **fields), 400, param, code)
    assert talk.prompts == []


TYPED = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FORMS: dict[str, tuple[Json, str, Json]] = {
    "a function": (
        {"type": "function", "name": "look", "description": "Looks.", "parameters": TYPED},
        ONE.format("look", '{"at":"sky"}'),
        {"type": "function_call", "name": "look", "arguments": '{"at":"sky"}'},
    ),
    "a function as Chat has it": (
        {"type": "function", "function": {"name": "look", "parameters": TYPED}},
        ONE.format("look", '{"at":"sky"}'),
        {"type": "function_call", "name": "look", "arguments": '{"at":"sky"}'},
    ),
    "a custom tool": (
        {"type": "custom", "name": "look", "format": {"type": "text"}},
        ONE.format("look", '{"input":"at \\"it\\""}'),
        {"type": "custom_tool_call", "name": "look", "input": 'at "it"'},
    ),
    "a custom tool that got bare text": (
        {"type": "custom", "name": "look"},
        ONE.format("look", '["a", 1]'),
        {"type": "custom_tool_call", "name": "look", "input": '["a", 1]'},
    ),
    "a tool in a namespace": (
        {"type": "namespace", "name": "eyes", "tools": [TOOL]},
        ONE.format("eyes__look", "{}"),
        {"type": "function_call", "name": "look", "namespace": "eyes", "arguments": "{}"},
    ),
    "a custom tool in a namespace": (
        {"type": "namespace", "name": "eyes", "tools": [{"type": "custom", "name": "look"}]},
        ONE.format("eyes__look", '{"input":"up"}'),
        {"type": "custom_tool_call", "name": "look", "namespace": "eyes", "input": "up"},
    ),
}


@WAYS
@pytest.mark.parametrize(("tool", "output", "item"), FORMS.values(), ids=FORMS)
async def test_a_call_comes_back_in_the_form_its_tool_was_declared_in(
    talk: Line, tool: Json, output: str, item: Json, stream: bool
) -> None:
    talk.say(THOUGHT + output)
    first = await talk.responds(stream=stream, tools=[tool, {"type": "web_search"}])
    [called] = first["output"][1:]
    assert {key: called[key] for key in called if key not in ("id", "call_id", "status")} == item
    assert called["status"] == "completed"
    # Answered in its own form, by the chain and by the items alone.
    answer = {"type": f"{item['type']}_output", "call_id": called["call_id"], "output": "blue"}
    talk.say(ANSWER)
    await talk.whole(input=[answer], previous_response_id=first["id"], tools=[tool])
    chained = talk.said
    assert "<|message|>blue<|end|>" in chained
    await talk.whole(input=[{"role": "user", "content": "Hi"}, *first["output"], answer], tools=[tool])
    assert talk.said == chained


@WAYS
async def test_a_name_the_model_made_up_can_be_sent_again(talk: Line, stream: bool) -> None:
    talk.say(THOUGHT + ONE.format("lo!ok?", "{}"))
    first = await talk.responds(stream=stream, tools=[TOOL])
    called = first["output"][-1]
    assert called["name"] == "lo_ok_"
    talk.say(ANSWER)
    answer = {"type": "function_call_output", "call_id": called["call_id"], "output": "There is no such tool."}
    again = [{"role": "user", "content": "Hi"}, *first["output"], answer]
    assert (await talk.responds(stream=stream, input=again, tools=[TOOL]))["status"] == "completed"


@WAYS
async def test_without_tool_choice_no_call_is_made(talk: Line, stream: bool) -> None:
    talk.say(THOUGHT + ONE.format("look", "{}"))
    response = await talk.responds(stream=stream, tools=[TOOL], tool_choice="none")
    assert "function_call" not in kinds(response["output"])
    assert response["tool_choice"] == "none"


@WAYS
@pytest.mark.parametrize("parallel", [True, False])
async def test_calls_come_together_unless_they_may_not(talk: Line, parallel: bool, stream: bool) -> None:
    two = ONE.format("look", '{"at":"sky"}').replace("<|call|>", "<|end|><|start|>assistant")
    talk.say(THOUGHT + two + ONE.format("look", '{"at":"sea"}'))
    response = await talk.responds(stream=stream, tools=[TOOL], parallel_tool_calls=parallel)
    calls = [item["arguments"] for item in response["output"] if item["type"] == "function_call"]
    assert calls == ['{"at":"sky"}', '{"at":"sea"}'][: 1 + parallel]


async def test_phases_are_told_and_understood_again(talk: Line) -> None:
    talk.say("<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant" + ANSWER, ANSWER)
    first = await talk.streamed()
    phases = [event["item"].get("phase") for event in first.events if event["type"] == "response.output_item.added"]
    assert phases == ["commentary", None, "final_answer"]
    assert [item.get("phase") for item in first.last["output"]] == phases
    loose = [{**item, "id": "x"} for item in first.last["output"]]
    await talk.whole(input=[{"role": "user", "content": "Hi"}, *loose, {"role": "user", "content": "u"}], store=False)
    assert "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>" in talk.said


# -- reasoning that the client carries


@WAYS
async def test_sealed_reasoning_comes_back_with_its_tokens_and_only_to_its_gateway(talk: Line, stream: bool) -> None:
    asked = {"store": False, "include": ["reasoning.encrypted_content"], "tools": [TOOL]}
    talk.say(CALL)
    first = await talk.responds(stream=stream, **asked)
    thought, call = first["output"]
    assert thought["encrypted_content"].startswith("uns1.")
    assert "Hm." not in thought["encrypted_content"]
    bare = {"type": "reasoning", "id": thought["id"], "summary": [], "encrypted_content": thought["encrypted_content"]}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "o"}
    begun = talk.prompts[-1]
    talk.say(ANSWER)
    given = [{"role": "user", "content": "Hi"}, bare, call, result]
    second = await talk.responds(stream=stream, input=given, **asked)
    assert "notes" not in second["unisono"]
    assert talk.prompts[-1].startswith(begun + CALL)
    # Elsewhere it is what another server sealed: no error, and nothing of it in the prompt.
    async with line(talk.wire) as other:
        third = await other.responds(stream=stream, input=given, **asked)
        assert len(third["unisono"]["notes"]) == 1
        assert "Hm." not in other.said


async def test_reasoning_is_sealed_only_where_it_is_asked_for(talk: Line) -> None:
    talk.say(ANSWER)
    assert "encrypted_content" not in (await talk.whole(store=False))["output"][0]
    kept = await talk.whole(include=["reasoning.encrypted_content"])
    assert "encrypted_content" in (await talk.kept(kept))["output"][0]


# -- windows


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow() -> AsyncIterator[Line]:
    wire = WIRES["vllm"]
    async with wire.fake(context=1000) as fake, gateway({"model_list": [deployment("gpt-oss", wire, fake)]}) as running:
        yield Line(wire, fake, running)


WORDS = "word " * 150


@WAYS
async def test_a_conversation_too_long_is_refused_unless_turns_may_be_left_out(narrow: Line, stream: bool) -> None:
    narrow.say(f"<|channel|>final<|message|>{WORDS}<|return|>")
    conversation = await narrow.conversation()
    response: Json = {"id": None}
    for n in range(3):
        response = await narrow.whole(input=f"{n} {WORDS}", previous_response_id=response["id"], truncation="auto")
        await narrow.whole(input=f"{n} {WORDS}", conversation=conversation, truncation="auto", max_output_tokens=200)
    items = await narrow.items(conversation)
    narrow.say(ANSWER)
    leaning: tuple[Json, ...] = ({"previous_response_id": response["id"]}, {"conversation": conversation})
    for lean in leaning:
        refused: tuple[Json, ...] = ({}, {"truncation": "disabled"})
        for fields in refused:
            answer = await narrow.post(stream=stream, input=f"3 {WORDS}", **lean, **fields)
            refusal(answer, 400, "input", "context_length_exceeded")
        assert narrow.prompts == []
        fitted = await narrow.responds(stream=stream, input=f"3 {WORDS}", truncation="auto", store=False, **lean)
        assert fitted["unisono"]["left_out"] == 2
        assert (f"0 {WORDS}" in narrow.said, f"3 {WORDS}" in narrow.said) == (False, True)
        narrow.fake.requests.clear()
    assert (await narrow.items(conversation))[: len(items)] == items
    refusal(await narrow.post(stream=stream, input=WORDS * 9, truncation="auto"), 400, "input")
    assert "left_out" not in (await narrow.whole())["unisono"]


async def test_an_answer_that_fills_the_window_is_incomplete(narrow: Line) -> None:
    narrow.say(f"<|channel|>final<|message|>{' '.join(map(str, range(900)))}<|return|>")
    for stream in (False, True):
        response = await narrow.responds(stream=stream)
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["completed_at"] is None
        assert response["usage"]["total_tokens"] == 1000


# -- where turns go


async def test_turns_of_one_conversation_go_to_one_deployment() -> None:
    wire = WIRES["vllm"]
    async with AsyncExitStack() as stack:
        fakes = [wire.fake() for _ in range(3)]
        for fake in fakes:
            await stack.enter_async_context(fake)
            fake.script = lambda asked: wire.script(OK)  # type: ignore[assignment]
        config = {"model_list": [deployment("gpt-oss", wire, fake) for fake in fakes]}
        running = await stack.enter_async_context(gateway(config))
        talk = Line(wire, fakes[0], running)
        async with asyncio.timeout(10):
            # Until all are known to be well, whoever is goes first.
            while not all(asked(fake) for fake in fakes):
                await talk.whole(store=False)

        async def served(**fields: Any) -> tuple[str, Json]:
            response = await talk.whole(**fields)
            return response["unisono"]["backend"], response

        for key in range(6):
            name, _ = await served(prompt_cache_key=f"key {key}", store=False)
            assert {(await served(prompt_cache_key=f"key {key}"))[0] for _ in range(4)} == {name}
            first, response = await served()
            for _ in range(3):
                later, response = await served(previous_response_id=response["id"])
                assert later == first
            conversation = await talk.conversation()
            assert len({(await served(conversation=conversation))[0] for _ in range(4)}) == 1
        # What belongs to nothing takes turns.
        assert len({(await served(store=False))[0] for _ in range(6)}) == 3


async def test_what_the_model_thought_is_said_in_plain_text(talk: Line) -> None:
    talk.say(ANSWER)
    response = await talk.whole()
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert response["output"][0]["summary"] == []
    assert text_of(response) == "ok"
    assert ENCODING.decode(ENCODING.encode_marked(talk.prompts[-1])) == talk.prompts[-1]
