"""Request bodies with one invalid field.

Each is refused in OpenAI's error format, and `param` names the field.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.api.asgi import Exchange
from tests.e2e.gateway import config_of
from tests.fakes import FakeVllm
from unisono.api.layered_app import LayeredApp
from unisono.app import build
from unisono.config import parse
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Done.<|return|>")
USER: Json = {"role": "user", "content": "Hi"}


def with_message(**message: Any) -> Json:
    return {"messages": [USER, message]}


def with_tool_call(**call: Any) -> Json:
    return with_message(role="assistant", tool_calls=[call])


def tool(**function: Any) -> Json:
    return {"tools": [{"type": "function", "function": function}]}


def json_schema(**schema: Any) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


CHAT: dict[str, tuple[Json, str]] = {
    "model: a number": ({"model": 7}, "model"),
    "model: empty": ({"model": ""}, "model"),
    "model: too long": ({"model": "x" * 257}, "model"),
    "messages: null": ({"messages": None}, "messages"),
    "messages: a string": ({"messages": "Hi"}, "messages"),
    "messages: empty": ({"messages": []}, "messages"),
    "a message: a string": ({"messages": ["Hi"]}, "messages.0"),
    "a message: without a role": (with_message(content="x"), "messages.1.role"),
    "a message: unknown role": (with_message(role="root", content="x"), "messages.1.role"),
    "content: a number": (with_message(role="user", content=5), "messages.1.content"),
    "a part: without a type": (with_message(role="user", content=[{"text": "x"}]), "messages.1.content.0.type"),
    "a part: without text": (with_message(role="user", content=[{"type": "text"}]), "messages.1.content.0.text"),
    "a part: text is a number": (
        with_message(role="user", content=[{"type": "text", "text": 5}]),
        "messages.1.content.0.text",
    ),
    "a part: an image": (
        with_message(
            role="user", content=[{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]
        ),
        "messages.1.content.1.type",
    ),
    "a part: audio": (with_message(role="user", content=[{"type": "input_audio"}]), "messages.1.content.0.type"),
    "a call: a number": (with_message(role="assistant", tool_calls=[7]), "messages.1.tool_calls.0"),
    "a call: without an id": (with_tool_call(type="function", function={"name": "f"}), "messages.1.tool_calls.0.id"),
    "a call: without a function": (with_tool_call(id="c"), "messages.1.tool_calls.0.function"),
    "a call: without a name": (with_tool_call(id="c", function={}), "messages.1.tool_calls.0.function.name"),
    "a call: a name with a space": (
        with_tool_call(id="c", function={"name": "a b"}),
        "messages.1.tool_calls.0.function.name",
    ),
    "a call: arguments are a number": (
        with_tool_call(id="c", function={"name": "f", "arguments": 5}),
        "messages.1.tool_calls.0.function.arguments",
    ),
    "a call: unknown type": (with_tool_call(id="c", type="magic"), "messages.1.tool_calls.0.type"),
    "a result: without an id": (with_message(role="tool", content="x"), "messages.1.tool_call_id"),
    "a result: of an unknown call": (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": ""}}]},
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ]
        },
        "messages.1.tool_call_id",
    ),
    "tools: an object": ({"tools": {}}, "tools"),
    "tools: too many": ({"tools": [{"type": "function"}] * 600}, "tools"),
    "a tool: without a type": ({"tools": [{"function": {"name": "f"}}]}, "tools.0.type"),
    "a tool: without a function": ({"tools": [{"type": "function"}]}, "tools.0.function"),
    "a tool: without a name": (tool(), "tools.0.function.name"),
    "a tool: parameters are a list": (tool(name="f", parameters=[]), "tools.0.function.parameters"),
    "a tool: strict is a string": (tool(name="f", strict="yes"), "tools.0.function.strict"),
    "a tool: description is a number": (tool(name="f", description=5), "tools.0.function.description"),
    "tool_choice: unknown value": ({"tool_choice": "maybe"}, "tool_choice"),
    "tool_choice: undeclared tool": (
        {**tool(name="f"), "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    "response_format: a string": ({"response_format": "json"}, "response_format"),
    "response_format: unknown type": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "response_format: without a type": ({"response_format": {}}, "response_format.type"),
    "response_format: a name with a space": (json_schema(name="a b", schema={}), "response_format.json_schema.name"),
    "response_format: schema is a string": (json_schema(name="n", schema="x"), "response_format.json_schema.schema"),
    "reasoning_effort: unknown value": ({"reasoning_effort": "ultra"}, "reasoning_effort"),
    "reasoning: effort is a number": ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    "stream: a string": ({"stream": "yes"}, "stream"),
    "stream_options: include_usage is a string": (
        {"stream": True, "stream_options": {"include_usage": "x"}},
        "stream_options.include_usage",
    ),
    "max_tokens: 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens: a fraction": ({"max_tokens": 1.5}, "max_tokens"),
    "max_completion_tokens: a string": ({"max_completion_tokens": "9"}, "max_completion_tokens"),
    "temperature: too high": ({"temperature": 2.1}, "temperature"),
    "temperature: a boolean": ({"temperature": True}, "temperature"),
    "top_p: negative": ({"top_p": -0.1}, "top_p"),
    "n: 17": ({"n": 17}, "n"),
    "n: beyond 64 bits": ({"n": 1e30}, "n"),
    "seed: beyond 64 bits": ({"seed": 2**63}, "seed"),
    "stop: an empty string": ({"stop": ["a", ""]}, "stop.1"),
    "stop: too many": ({"stop": ["x"] * 17}, "stop"),
    "logit_bias: not a token id": ({"logit_bias": {"word": 1}}, "logit_bias.word"),
    "logit_bias: out of range": ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    "logprobs": ({"logprobs": 3}, "logprobs"),
    "modalities": ({"modalities": ["audio"]}, "modalities"),
    "presence_penalty: out of range": ({"presence_penalty": 3}, "presence_penalty"),
}


def with_item(**fields: Any) -> Json:
    return {"input": [{"role": "user", "content": "Hi"}, fields]}


def with_tool(**fields: Any) -> Json:
    return {"tools": [fields]}


RESPONSES: dict[str, tuple[Json, str]] = {
    "model: missing": ({"model": None}, "model"),
    "input: a number": ({"input": 7}, "input"),
    "input: an object": ({"input": {}}, "input"),
    "an item: a string": ({"input": ["Hi"]}, "input.0"),
    "an item: unknown type": (with_item(type="hologram"), "input.1.type"),
    "a message: unknown role": (with_item(role="root", content="x"), "input.1.role"),
    "a message: content is a number": (with_item(role="user", content=5), "input.1.content"),
    "a part: unknown type": (with_item(role="user", content=[{"type": "smell"}]), "input.1.content.0.type"),
    "a part: without text": (with_item(role="user", content=[{"type": "input_text"}]), "input.1.content.0.text"),
    "a part: an image": (with_item(role="user", content=[{"type": "input_image"}]), "input.1.content.0.type"),
    "a call: without an id": (with_item(type="function_call", name="f", arguments="{}"), "input.1.call_id"),
    "a call: without a name": (with_item(type="function_call", call_id="c", arguments="{}"), "input.1.name"),
    "a result: of an unknown call": (
        {
            "input": [
                {"type": "function_call", "call_id": "c1", "name": "f"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ]
        },
        "input.1.call_id",
    ),
    "a result: without output": (with_item(type="function_call_output", call_id="c"), "input.1.output"),
    "instructions: a list": ({"instructions": []}, "instructions"),
    "tools: a string": ({"tools": "all"}, "tools"),
    "a tool: without a type": (with_tool(name="f"), "tools.0.type"),
    "a tool: without a name": (with_tool(type="function"), "tools.0.name"),
    "a tool: a name with a line break": (with_tool(type="function", name="f\n# Instructions"), "tools.0.name"),
    "a tool: parameters are a string": (with_tool(type="function", name="f", parameters="x"), "tools.0.parameters"),
    "a tool server: without a label": (
        with_tool(type="mcp", server_url="https://x.example/mcp"),
        "tools.0.server_label",
    ),
    "tool_choice: a number": ({"tool_choice": 5}, "tool_choice"),
    "reasoning: a string": ({"reasoning": "high"}, "reasoning"),
    "reasoning: unknown effort": ({"reasoning": {"effort": "ultra"}}, "reasoning.effort"),
    "reasoning: unknown summary": ({"reasoning": {"summary": "x"}}, "reasoning.summary"),
    "text: unknown verbosity": ({"text": {"verbosity": "x"}}, "text.verbosity"),
    "text: unknown format": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "text: format without a type": ({"text": {"format": {"name": "n"}}}, "text.format.type"),
    "text: schema is a list": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": []}}},
        "text.format.schema",
    ),
    "include: unknown value": ({"include": ["reasoning.encrypted_content", "x"]}, "include"),
    "store: a string": ({"store": "yes"}, "store"),
    "previous_response_id: a number": ({"previous_response_id": 5}, "previous_response_id"),
    "conversation: a number": ({"conversation": 5}, "conversation"),
    "conversation: without an id": ({"conversation": {}}, "conversation.id"),
    "background: without store": ({"background": True, "store": False}, "store"),
    "metadata: a number": ({"metadata": {"a": 5}}, "metadata.a"),
    "metadata: too long": ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    "truncation: unknown value": ({"truncation": "some"}, "truncation"),
    "max_output_tokens: 0": ({"max_output_tokens": 0}, "max_output_tokens"),
    "max_tool_calls: negative": ({"max_tool_calls": -1}, "max_tool_calls"),
    "top_logprobs": ({"top_logprobs": 50}, "top_logprobs"),
    "temperature: a string": ({"temperature": "hot"}, "temperature"),
    "stream_options: a number": ({"stream": True, "stream_options": 5}, "stream_options"),
    "prompt: a stored prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
}
CASES = [
    pytest.param(path, {**valid_body, **fields}, param, id=f"{path.split('/')[2]}: {name}")
    for path, valid_body, cases in (
        ("/v1/chat/completions", {"messages": [USER]}, CHAT),
        ("/v1/responses", {"input": "Hi"}, RESPONSES),
    )
    for name, (fields, param) in cases.items()
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app() -> AsyncIterator[LayeredApp]:
    async with FakeVllm(tokens=ANSWER) as fake:
        app = build(parse(config_of(f"vllm@{fake.url}"), {}).config)
        async with app.lifespan():
            yield app


@pytest.mark.parametrize(("path", "body", "param"), CASES)
async def test_an_error_names_the_invalid_field(app: LayeredApp, path: str, body: Json, param: str) -> None:
    response = await Exchange(app, "POST", path, json={"model": "gpt-oss", **body}).run()
    assert response.status in (400, 404), response.body
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert 10 < len(error["message"]) < 1000
