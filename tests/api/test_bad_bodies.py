"""Bodies with one fault: each is refused in OpenAI's shape, with the field named where it stands in the request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI

from tests.api.asgi import Exchange
from tests.e2e.gateway import config_of
from tests.fakes import FakeVllm
from unisono.app import build
from unisono.config import parse
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Done.<|return|>")
USER: Json = {"role": "user", "content": "Hi"}


def said(**message: Any) -> Json:
    return {"messages": [USER, message]}


def called(**call: Any) -> Json:
    return said(role="assistant", tool_calls=[call])


def tool(**function: Any) -> Json:
    return {"tools": [{"type": "function", "function": function}]}


def form(**schema: Any) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


CHAT: dict[str, tuple[Json, str]] = {
    "model: a number": ({"model": 7}, "model"),
    "model: empty": ({"model": ""}, "model"),
    "model: too long": ({"model": "x" * 257}, "model"),
    "messages: null": ({"messages": None}, "messages"),
    "messages: text": ({"messages": "Hi"}, "messages"),
    "messages: none": ({"messages": []}, "messages"),
    "a message: text": ({"messages": ["Hi"]}, "messages.0"),
    "a message: without a role": (said(content="x"), "messages.1.role"),
    "a message: of a role nobody has": (said(role="root", content="x"), "messages.1.role"),
    "content: a number": (said(role="user", content=5), "messages.1.content"),
    "a part: without a type": (said(role="user", content=[{"text": "x"}]), "messages.1.content.0.type"),
    "a part: without text": (said(role="user", content=[{"type": "text"}]), "messages.1.content.0.text"),
    "a part: text that is a number": (
        said(role="user", content=[{"type": "text", "text": 5}]),
        "messages.1.content.0.text",
    ),
    "a part: an image": (
        said(role="user", content=[{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]),
        "messages.1.content.1.type",
    ),
    "a part: a sound": (said(role="user", content=[{"type": "input_audio"}]), "messages.1.content.0.type"),
    "a call: a number": (said(role="assistant", tool_calls=[7]), "messages.1.tool_calls.0"),
    "a call: without an id": (called(type="function", function={"name": "f"}), "messages.1.tool_calls.0.id"),
    "a call: of no function": (called(id="c"), "messages.1.tool_calls.0.function"),
    "a call: without a name": (called(id="c", function={}), "messages.1.tool_calls.0.function.name"),
    "a call: a name with a space": (called(id="c", function={"name": "a b"}), "messages.1.tool_calls.0.function.name"),
    "a call: arguments that are a number": (
        called(id="c", function={"name": "f", "arguments": 5}),
        "messages.1.tool_calls.0.function.arguments",
    ),
    "a call: of another kind": (called(id="c", type="magic"), "messages.1.tool_calls.0.type"),
    "a result: without an id": (said(role="tool", content="x"), "messages.1.tool_call_id"),
    "a result: of no call": (said(role="tool", tool_call_id="c", content="x"), "messages.1.tool_call_id"),
    "tools: an object": ({"tools": {}}, "tools"),
    "tools: too many": ({"tools": [{"type": "function"}] * 600}, "tools"),
    "a tool: without a type": ({"tools": [{"function": {"name": "f"}}]}, "tools.0.type"),
    "a tool: without a function": ({"tools": [{"type": "function"}]}, "tools.0.function"),
    "a tool: without a name": (tool(), "tools.0.function.name"),
    "a tool: parameters that are a list": (tool(name="f", parameters=[]), "tools.0.function.parameters"),
    "a tool: strict that is text": (tool(name="f", strict="yes"), "tools.0.function.strict"),
    "a tool: a description that is a number": (tool(name="f", description=5), "tools.0.function.description"),
    "tool_choice: a word nobody knows": ({"tool_choice": "maybe"}, "tool_choice"),
    "tool_choice: a tool that is not there": (
        {**tool(name="f"), "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    "response_format: text": ({"response_format": "json"}, "response_format"),
    "response_format: of a kind nobody knows": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "response_format: without a type": ({"response_format": {}}, "response_format.type"),
    "response_format: a name with a space": (form(name="a b", schema={}), "response_format.json_schema.name"),
    "response_format: a schema that is text": (form(name="n", schema="x"), "response_format.json_schema.schema"),
    "reasoning_effort: a word nobody knows": ({"reasoning_effort": "ultra"}, "reasoning_effort"),
    "reasoning: effort that is a number": ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    "stream: text": ({"stream": "yes"}, "stream"),
    "stream_options: a word": (
        {"stream": True, "stream_options": {"include_usage": "x"}},
        "stream_options.include_usage",
    ),
    "max_tokens: 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens: half a token": ({"max_tokens": 1.5}, "max_tokens"),
    "max_completion_tokens: text": ({"max_completion_tokens": "9"}, "max_completion_tokens"),
    "temperature: too hot": ({"temperature": 2.1}, "temperature"),
    "temperature: a yes": ({"temperature": True}, "temperature"),
    "top_p: 0": ({"top_p": 0}, "top_p"),
    "n: 17": ({"n": 17}, "n"),
    "n: beyond 64 bits": ({"n": 1e30}, "n"),
    "seed: beyond 64 bits": ({"seed": 2**63}, "seed"),
    "stop: an empty word": ({"stop": ["a", ""]}, "stop.1"),
    "stop: too many": ({"stop": ["x"] * 17}, "stop"),
    "logit_bias: of a word": ({"logit_bias": {"word": 1}}, "logit_bias.word"),
    "logit_bias: too strong": ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    "logprobs": ({"logprobs": True}, "logprobs"),
    "modalities": ({"modalities": ["audio"]}, "modalities"),
    "presence_penalty: too strong": ({"presence_penalty": 3}, "presence_penalty"),
}


def item(**fields: Any) -> Json:
    return {"input": [{"role": "user", "content": "Hi"}, fields]}


def spec(**fields: Any) -> Json:
    return {"tools": [fields]}


RESPONSES: dict[str, tuple[Json, str]] = {
    "model: missing": ({"model": None}, "model"),
    "input: a number": ({"input": 7}, "input"),
    "input: an object": ({"input": {}}, "input"),
    "an item: text": ({"input": ["Hi"]}, "input.0"),
    "an item: of a kind nobody knows": (item(type="hologram"), "input.1.type"),
    "a message: of a role nobody has": (item(role="root", content="x"), "input.1.role"),
    "a message: content that is a number": (item(role="user", content=5), "input.1.content"),
    "a part: of a kind nobody knows": (item(role="user", content=[{"type": "smell"}]), "input.1.content.0.type"),
    "a part: without text": (item(role="user", content=[{"type": "input_text"}]), "input.1.content.0.text"),
    "a part: an image": (item(role="user", content=[{"type": "input_image"}]), "input.1.content.0.type"),
    "a call: without an id": (item(type="function_call", name="f", arguments="{}"), "input.1.call_id"),
    "a call: without a name": (item(type="function_call", call_id="c", arguments="{}"), "input.1.name"),
    "a result: without an id": (item(type="function_call_output", output="x"), "input.1.call_id"),
    "a result: of no call": (item(type="function_call_output", call_id="c", output="x"), "input.1.call_id"),
    "a result: missing": (item(type="function_call_output", call_id="c"), "input.1.output"),
    "instructions: a list": ({"instructions": []}, "instructions"),
    "tools: text": ({"tools": "all"}, "tools"),
    "a tool: without a type": (spec(name="f"), "tools.0.type"),
    "a tool: without a name": (spec(type="function"), "tools.0.name"),
    "a tool: a name with a line break": (spec(type="function", name="f\n# Instructions"), "tools.0.name"),
    "a tool: parameters that are text": (spec(type="function", name="f", parameters="x"), "tools.0.parameters"),
    "a tool server: without a label": (spec(type="mcp", server_url="https://x.example/mcp"), "tools.0.server_label"),
    "tool_choice: a number": ({"tool_choice": 5}, "tool_choice"),
    "reasoning: text": ({"reasoning": "high"}, "reasoning"),
    "reasoning: an effort nobody knows": ({"reasoning": {"effort": "ultra"}}, "reasoning.effort"),
    "reasoning: a summary nobody knows": ({"reasoning": {"summary": "x"}}, "reasoning.summary"),
    "text: a verbosity nobody knows": ({"text": {"verbosity": "x"}}, "text.verbosity"),
    "text: a form nobody knows": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "text: a form without a type": ({"text": {"format": {"name": "n"}}}, "text.format.type"),
    "text: a schema that is a list": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": []}}},
        "text.format.schema",
    ),
    "include: a thing nobody has": ({"include": ["reasoning.encrypted_content", "x"]}, "include"),
    "store: text": ({"store": "yes"}, "store"),
    "previous_response_id: a number": ({"previous_response_id": 5}, "previous_response_id"),
    "conversation: a number": ({"conversation": 5}, "conversation"),
    "conversation: without an id": ({"conversation": {}}, "conversation.id"),
    "background: unstored": ({"background": True, "store": False}, "store"),
    "metadata: a number": ({"metadata": {"a": 5}}, "metadata.a"),
    "metadata: too long": ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    "truncation: a word nobody knows": ({"truncation": "some"}, "truncation"),
    "max_output_tokens: 0": ({"max_output_tokens": 0}, "max_output_tokens"),
    "max_tool_calls: below 0": ({"max_tool_calls": -1}, "max_tool_calls"),
    "top_logprobs": ({"top_logprobs": 5}, "top_logprobs"),
    "temperature: text": ({"temperature": "hot"}, "temperature"),
    "stream_options: a number": ({"stream": True, "stream_options": 5}, "stream_options"),
    "prompt: from elsewhere": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
}
CASES = [
    pytest.param(path, {**sound, **fields}, param, id=f"{path.split('/')[2]}: {name}")
    for path, sound, table in (
        ("/v1/chat/completions", {"messages": [USER]}, CHAT),
        ("/v1/responses", {"input": "Hi"}, RESPONSES),
    )
    for name, (fields, param) in table.items()
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app() -> AsyncIterator[FastAPI]:
    async with FakeVllm(tokens=ANSWER) as fake:
        app = build(parse(config_of(f"vllm@{fake.url}"), {}).config)
        async with app.router.lifespan_context(app):
            yield app


@pytest.mark.parametrize(("path", "body", "param"), CASES)
async def test_a_fault_is_named_where_it_stands(app: FastAPI, path: str, body: Json, param: str) -> None:
    answer = await Exchange(app, "POST", path, json={"model": "gpt-oss", **body}).run()
    assert answer.status in (400, 404), answer.body
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert 10 < len(error["message"]) < 1000
