"""Effects of each request field on the prompt, the backend request and the response."""

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
from unisono.core.generation import SEEDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAM_MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CALL_TEMPLATE = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES.values(), ids=WIRES)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(request.param) as running:
        yield running


ECHOED: dict[str, Json] = {
    "metadata": {"metadata": {"a": "b", "c": ""}},
    "user": {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
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
async def test_a_response_echoes_the_request_fields(harness: Line, fields: Json) -> None:
    harness.say(ANSWER)
    for stream in (False, True):
        response = await harness.responds(stream=stream, **fields)
        assert {key: response[key] for key in DEFAULTS} == DEFAULTS | fields
        assert "notes" not in response["unisono"]


async def test_sampling_reaches_the_backend(harness: Line) -> None:
    harness.say(ANSWER)
    await harness.whole(temperature=0.25, top_p=0.5, seed=7, max_output_tokens=100)
    body = asked(harness.fake)[-1].json
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.25, 0.5, 100)
    if harness.wire.name == "vllm":
        assert body["seed"] == 7


async def test_the_backend_chooses_the_most_likely_token_for_a_top_p_of_0(harness: Line) -> None:
    harness.say(ANSWER)
    response = await harness.whole(top_p=0)
    assert (response["temperature"], response["top_p"]) == (1.0, 0.0)
    body = asked(harness.fake)[-1].json
    assert (body["temperature"], body["top_p"]) == (0.0, 1.0)


async def test_the_backend_receives_a_seed_that_every_engine_accepts(harness: Line) -> None:
    harness.say(ANSWER)
    await harness.whole(seed=-1)
    if harness.wire.name == "vllm":
        assert asked(harness.fake)[-1].json["seed"] == SEEDS - 1


IGNORED: dict[str, tuple[Json, str]] = {
    "unknown field": ({"colour": "red"}, "colour: no effect"),
    "unknown nested field": ({"reasoning": {"colour": "red"}}, "reasoning.colour: no effect"),
    "service tier": ({"service_tier": "flex"}, "service_tier: no effect"),
    "cache retention": ({"prompt_cache_retention": "24h"}, "prompt_cache_retention: no effect"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity: no effect"),
    "included results": (
        {"include": ["file_search_call.results"]},
        "include: 'file_search_call.results' has no effect",
    ),
    "built-in tool without a server": (
        {"tools": [{"type": "web_search"}, TOOL]},
        "tools.0.type: skipped, tools of type 'web_search' are not available; the operator can enable them with "
        "`unisono.builtin_tools.browser`",
    ),
}


@pytest.mark.parametrize(("fields", "note"), IGNORED.values(), ids=IGNORED)
async def test_ignored_fields_are_noted_in_the_response_and_stored(harness: Line, fields: Json, note: str) -> None:
    harness.say(ANSWER)
    for stream in (False, True):
        response = await harness.responds(stream=stream, **fields)
        assert response["unisono"]["notes"] == [note]
        assert (await harness.kept(response))["unisono"] == response["unisono"]


NEUTRAL: Json = {
    "top_logprobs": 0,
    "service_tier": None,
    "include": [],
    "tools": [],
    "prompt": None,
    "modalities": ["text"],
    "stream_options": {"include_obfuscation": False},
    "text": {"format": {"type": "text"}},
    "reasoning": {},
    "context_management": None,
    "moderation": None,
    "previous_response_id": None,
    "conversation": None,
}


async def test_neutral_values_have_no_effect(harness: Line) -> None:
    harness.say(ANSWER)
    await harness.whole()
    expected = harness.said
    for stream in (False, True):
        response = await harness.responds(stream=stream, **NEUTRAL)
        assert "notes" not in response["unisono"]
        assert harness.said == expected


REJECTED: dict[str, tuple[Json, str, str]] = {
    "too many log probabilities": ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "prompt template": ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_value"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
    "only tools without a server": ({"tools": [{"type": "web_search"}]}, "tools.0.type", "unsupported_value"),
    "tool without a type": ({"tools": [{"name": "x"}]}, "tools.0.type", "invalid_value"),
    "temperature too high": ({"temperature": 2.5}, "temperature", "invalid_value"),
    "max_output_tokens 0": ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    "unstored background response": ({"background": True, "store": False}, "store", "invalid_value"),
}


@STREAM_MODES
@pytest.mark.parametrize(("fields", "param", "code"), REJECTED.values(), ids=REJECTED)
async def test_unsupported_requests_are_rejected_with_their_field(
    harness: Line, fields: Json, param: str, code: str, stream: bool
) -> None:
    harness.say(ANSWER)
    refusal(await harness.post(stream=stream, **fields), 400, param, code)
    assert harness.prompts == []


TYPED = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOL_FORMS: dict[str, tuple[Json, str, Json]] = {
    "function": (
        {"type": "function", "name": "look", "description": "Looks.", "parameters": TYPED},
        CALL_TEMPLATE.format("look", '{"at":"sky"}'),
        {"type": "function_call", "name": "look", "arguments": '{"at":"sky"}'},
    ),
    "function in the form of Chat": (
        {"type": "function", "function": {"name": "look", "parameters": TYPED}},
        CALL_TEMPLATE.format("look", '{"at":"sky"}'),
        {"type": "function_call", "name": "look", "arguments": '{"at":"sky"}'},
    ),
    "custom tool": (
        {"type": "custom", "name": "look", "format": {"type": "text"}},
        CALL_TEMPLATE.format("look", '{"input":"at \\"it\\""}'),
        {"type": "custom_tool_call", "name": "look", "input": 'at "it"'},
    ),
    "custom tool with input that is not an object": (
        {"type": "custom", "name": "look"},
        CALL_TEMPLATE.format("look", '["a", 1]'),
        {"type": "custom_tool_call", "name": "look", "input": '["a", 1]'},
    ),
    "function in a namespace": (
        {"type": "namespace", "name": "eyes", "tools": [TOOL]},
        CALL_TEMPLATE.format("eyes__look", "{}"),
        {"type": "function_call", "name": "look", "namespace": "eyes", "arguments": "{}"},
    ),
    "custom tool in a namespace": (
        {"type": "namespace", "name": "eyes", "tools": [{"type": "custom", "name": "look"}]},
        CALL_TEMPLATE.format("eyes__look", '{"input":"up"}'),
        {"type": "custom_tool_call", "name": "look", "namespace": "eyes", "input": "up"},
    ),
}


@pytest.mark.sampled(one_in=3)
@STREAM_MODES
@pytest.mark.parametrize(("tool", "output", "item"), TOOL_FORMS.values(), ids=TOOL_FORMS)
async def test_a_call_is_returned_in_the_form_of_its_tool(
    harness: Line, tool: Json, output: str, item: Json, stream: bool
) -> None:
    harness.say(THOUGHT + output)
    first = await harness.responds(stream=stream, tools=[tool, {"type": "web_search"}])
    [call] = first["output"][1:]
    assert {key: call[key] for key in call if key not in ("id", "call_id", "status")} == item
    assert call["status"] == "completed"
    # The result works with the chain and with the items alone.
    result = {"type": f"{item['type']}_output", "call_id": call["call_id"], "output": "blue"}
    harness.say(ANSWER)
    await harness.whole(input=[result], previous_response_id=first["id"], tools=[tool])
    chained = harness.said
    assert "<|message|>blue<|end|>" in chained
    await harness.whole(input=[{"role": "user", "content": "Hi"}, *first["output"], result], tools=[tool])
    assert harness.said == chained


@STREAM_MODES
async def test_a_call_of_an_unknown_tool_can_be_sent_back(harness: Line, stream: bool) -> None:
    harness.say(ANSWER)
    call = {"type": "function_call", "call_id": "call_1", "name": "lo_ok_", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "There is no such tool."}
    history = [{"role": "user", "content": "Hi"}, call, result]
    assert (await harness.responds(stream=stream, input=history, tools=[TOOL]))["status"] == "completed"


@STREAM_MODES
async def test_tool_choice_none_returns_no_call(harness: Line, stream: bool) -> None:
    harness.say(THOUGHT + CALL_TEMPLATE.format("look", "{}"))
    response = await harness.responds(stream=stream, tools=[TOOL], tool_choice="none")
    assert "function_call" not in kinds(response["output"])
    assert response["tool_choice"] == "none"


@STREAM_MODES
@pytest.mark.parametrize("parallel", [True, False])
async def test_parallel_calls_are_returned_together_unless_disabled(
    harness: Line, parallel: bool, stream: bool
) -> None:
    first_call = CALL_TEMPLATE.format("look", '{"at":"sky"}').replace("<|call|>", "<|end|><|start|>assistant")
    harness.say(THOUGHT + first_call + CALL_TEMPLATE.format("look", '{"at":"sea"}'))
    response = await harness.responds(stream=stream, tools=[TOOL], parallel_tool_calls=parallel)
    calls = [item["arguments"] for item in response["output"] if item["type"] == "function_call"]
    assert calls == ['{"at":"sky"}', '{"at":"sea"}'][: 1 + parallel]


async def test_phases_are_returned_and_accepted_as_input(harness: Line) -> None:
    harness.say("<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant" + ANSWER, ANSWER)
    first = await harness.streamed()
    phases = [event["item"].get("phase") for event in first.events if event["type"] == "response.output_item.added"]
    assert phases == ["commentary", None, "final_answer"]
    assert [item.get("phase") for item in first.last["output"]] == phases
    items = [{**item, "id": "x"} for item in first.last["output"]]
    await harness.whole(
        input=[{"role": "user", "content": "Hi"}, *items, {"role": "user", "content": "u"}], store=False
    )
    assert "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>" in harness.said


# Reasoning that the client sends back


@STREAM_MODES
async def test_sealed_reasoning_restores_its_tokens_only_in_its_gateway(harness: Line, stream: bool) -> None:
    fields = {"store": False, "include": ["reasoning.encrypted_content"], "tools": [TOOL]}
    harness.say(CALL)
    first = await harness.responds(stream=stream, **fields)
    reasoning, call = first["output"]
    assert reasoning["encrypted_content"].startswith("uns1.")
    assert "Hm." not in reasoning["encrypted_content"]
    sealed = {
        "type": "reasoning",
        "id": reasoning["id"],
        "summary": [],
        "encrypted_content": reasoning["encrypted_content"],
    }
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "o"}
    prompt = harness.prompts[-1]
    harness.say(ANSWER)
    history = [{"role": "user", "content": "Hi"}, sealed, call, result]
    second = await harness.responds(stream=stream, input=history, **fields)
    assert "notes" not in second["unisono"]
    assert harness.prompts[-1].startswith(prompt + CALL)
    # Another gateway cannot open it: no error, and nothing of it in the prompt.
    async with line(harness.wire) as other_gateway:
        third = await other_gateway.responds(stream=stream, input=history, **fields)
        assert len(third["unisono"]["notes"]) == 1
        assert "Hm." not in other_gateway.said


async def test_reasoning_is_sealed_only_if_requested(harness: Line) -> None:
    harness.say(ANSWER)
    assert "encrypted_content" not in (await harness.whole(store=False))["output"][0]
    response = await harness.whole(include=["reasoning.encrypted_content"])
    assert "encrypted_content" in (await harness.kept(response))["output"][0]


# Context windows


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow_harness() -> AsyncIterator[Line]:
    wire = WIRES["vllm"]
    async with wire.fake(context=1000) as fake, gateway({"model_list": [deployment("gpt-oss", wire, fake)]}) as running:
        yield Line(wire, fake, running)


WORDS = "word " * 150


@STREAM_MODES
async def test_a_conversation_over_the_window_is_rejected_without_truncation(
    narrow_harness: Line, stream: bool
) -> None:
    narrow_harness.say(f"<|channel|>final<|message|>{WORDS}<|return|>")
    conversation = await narrow_harness.conversation()
    response: Json = {"id": None}
    for n in range(3):
        response = await narrow_harness.whole(
            input=f"{n} {WORDS}", previous_response_id=response["id"], truncation="auto"
        )
        await narrow_harness.whole(
            input=f"{n} {WORDS}", conversation=conversation, truncation="auto", max_output_tokens=200
        )
    items = await narrow_harness.items(conversation)
    narrow_harness.say(ANSWER)
    continuations: tuple[Json, ...] = ({"previous_response_id": response["id"]}, {"conversation": conversation})
    for continuation in continuations:
        untruncated: tuple[Json, ...] = ({}, {"truncation": "disabled"})
        for fields in untruncated:
            reply = await narrow_harness.post(stream=stream, input=f"3 {WORDS}", **continuation, **fields)
            refusal(reply, 400, "input", "context_length_exceeded")
        assert narrow_harness.prompts == []
        shortened: Json = {"input": f"3 {WORDS}", "truncation": "auto", **continuation}
        counted = await narrow_harness.post("/input_tokens", **shortened)
        truncated = await narrow_harness.responds(stream=stream, store=False, **shortened)
        assert counted.body["input_tokens"] == truncated["usage"]["input_tokens"]
        assert truncated["unisono"]["left_out"] == 3
        assert (f"0 {WORDS}" in narrow_harness.said, f"3 {WORDS}" in narrow_harness.said) == (False, True)
        narrow_harness.fake.requests.clear()
    assert (await narrow_harness.items(conversation))[: len(items)] == items
    refusal(await narrow_harness.post(stream=stream, input=WORDS * 9, truncation="auto"), 400, "input")
    assert "left_out" not in (await narrow_harness.whole())["unisono"]


async def test_an_answer_that_fills_the_window_is_incomplete(narrow_harness: Line) -> None:
    narrow_harness.say(f"<|channel|>final<|message|>{' '.join(map(str, range(900)))}<|return|>")
    for stream in (False, True):
        response = await narrow_harness.responds(stream=stream)
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["completed_at"] is None
        assert response["usage"]["total_tokens"] == 1000


# Routing of conversations


async def test_turns_of_one_conversation_go_to_one_deployment() -> None:
    wire = WIRES["vllm"]
    async with AsyncExitStack() as stack:
        fakes = [wire.fake() for _ in range(3)]
        for fake in fakes:
            await stack.enter_async_context(fake)
            fake.script = lambda request: wire.script(OK)  # type: ignore[assignment]
        config = {"model_list": [deployment("gpt-oss", wire, fake) for fake in fakes]}
        running = await stack.enter_async_context(gateway(config))
        harness = Line(wire, fakes[0], running)
        async with asyncio.timeout(10):
            # Until every deployment is known to be healthy, one of them is preferred.
            while not all(asked(fake) for fake in fakes):
                await harness.whole(store=False)

        async def backend_of(**fields: Any) -> tuple[str, Json]:
            response = await harness.whole(**fields)
            return response["unisono"]["backend"], response

        for key in range(6):
            name, _ = await backend_of(prompt_cache_key=f"key {key}", store=False)
            assert {(await backend_of(prompt_cache_key=f"key {key}"))[0] for _ in range(4)} == {name}
            first, response = await backend_of()
            for _ in range(3):
                later, response = await backend_of(previous_response_id=response["id"])
                assert later == first
            conversation = await harness.conversation()
            assert len({(await backend_of(conversation=conversation))[0] for _ in range(4)}) == 1
        # Requests without any affinity are distributed.
        assert len({(await backend_of(store=False))[0] for _ in range(6)}) == 3


async def test_reasoning_is_returned_as_plain_text(harness: Line) -> None:
    harness.say(ANSWER)
    response = await harness.whole()
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert response["output"][0]["summary"] == []
    assert text_of(response) == "ok"
    assert ENCODING.decode(ENCODING.encode_marked(harness.prompts[-1])) == harness.prompts[-1]
