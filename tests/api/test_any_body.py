"""Bodies generated from the request models, valid and invalid.

Each body is answered, or refused as a client error that names a field of the body.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.api.asgi import Exchange
from tests.depth import DEEP, examples
from tests.e2e.gateway import config_of
from tests.fakes import FakeVllm
from unisono.api.chat.schema import ChatRequest
from unisono.api.messages.schema import MessagesRequest
from unisono.api.messages.server_tools import result_text
from unisono.api.passthrough_estimates import estimated_input
from unisono.api.passthrough_requests import readable_text
from unisono.api.responses.schema import ResponsesRequest
from unisono.app import build
from unisono.config import parse
from unisono.harmony.encoding import load_encoding

Json = dict[str, Any]
ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Done.<|return|>")
SURFACES: dict[str, tuple[type[BaseModel], Json]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
    "/v1/messages": (MessagesRequest, {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}),
}
FIELD_IN_MESSAGE = re.compile(r"^([\w.]+): |'([^']+)'")
MAX_DEPTH = 4
# A quick run sends every 47th body. 47 is coprime to the number of odd values, so that each of these values is sent.
STEP = 1 if DEEP else 47

texts = st.one_of(
    st.sampled_from(["", "auto", "none", "user", "function", "text", "json_object", "call_1", "<|end|>", "a b", "\0"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
numbers = st.one_of(st.integers(-2, 3), st.sampled_from([-(2**70), 2**31, 2**64, 10**30]))
other_values = st.one_of(st.none(), st.booleans(), numbers, st.floats(-3, 3), texts, st.just([]), st.just({}))


def values(schema: Json, root: Json, depth: int = 0) -> st.SearchStrategy[Any]:
    """Return a strategy for values that a JSON schema allows, and sometimes any other value."""
    return st.one_of(*[_values(schema, root, depth)] * 4, other_values)


def _values(schema: Json, root: Json, depth: int) -> st.SearchStrategy[Any]:
    if depth > MAX_DEPTH:
        return other_values
    if "$ref" in schema:
        return _values(root["$defs"][schema["$ref"].rpartition("/")[2]], root, depth)
    if "anyOf" in schema:
        return st.one_of([_values(each, root, depth) for each in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from([schema["const"]] if "const" in schema else schema["enum"])
    match schema.get("type"):
        case "object":
            return _objects(schema, root, depth)
        case "array":
            return st.lists(values(schema.get("items", {}), root, depth + 1), max_size=3)
        case "string":
            return texts
        case "boolean":
            return st.booleans()
        case "integer" | "number":
            return numbers if schema["type"] == "integer" else st.floats(-3, 3)
        case "null":
            return st.none()
        case _:
            return other_values


def _objects(schema: Json, root: Json, depth: int) -> st.SearchStrategy[Any]:
    members = {name: values(each, root, depth + 1) for name, each in schema.get("properties", {}).items()}
    if not members:
        return st.dictionaries(texts, other_values, max_size=2)
    required = schema.get("required", [])
    return st.fixed_dictionaries(
        {name: members[name] for name in required},
        optional={name: strategy for name, strategy in members.items() if name not in required},
    )


def fields(model: type[BaseModel]) -> st.SearchStrategy[Json]:
    """Return a strategy for a few fields of a request.

    With many fields, only the first invalid one would ever be tested.
    """
    schema = model.model_json_schema()
    strategies = {name: values(each, schema) for name, each in schema["properties"].items()}
    return st.lists(st.sampled_from(sorted(strategies)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: strategies[name] for name in names})
    )


bodies = {path: fields(model) for path, (model, _) in SURFACES.items()}


class RunningApp:
    """Application with its backend, on an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, app: Any) -> None:
        self._runner = runner
        self._app = app

    def post(self, path: str, body: Json) -> Exchange:
        raw = json.dumps(body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(raw)))]
        return self._runner.run(Exchange(self._app, "POST", path, body=raw, headers=headers).run())


@pytest.fixture(scope="module")
def running_app() -> Iterator[RunningApp]:
    async def start(stack: AsyncExitStack) -> Any:
        fake = await stack.enter_async_context(FakeVllm(tokens=ANSWER))
        app = build(parse(config_of(f"vllm@{fake.url}", router_settings={"allowed_fails": 10**6}), {}).config)
        await stack.enter_async_context(app.lifespan())
        return app

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        app = runner.run(start(stack))
        try:
            yield RunningApp(runner, app)
        finally:
            runner.run(stack.aclose())


def check(response: Exchange, body: Json, model: type[BaseModel]) -> None:
    if response.status == 200:
        return
    assert 400 <= response.status < 500, (response.status, response.body)
    error = response.json()["error"]
    if model is MessagesRequest:
        # Anthropic's errors name the field only in the message.
        assert set(error) == {"message", "type", "details"}
        match = FIELD_IN_MESSAGE.search(error["message"])
        error["param"] = None if match is None else match[1] or match[2]
    else:
        assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] is not None, error
    assert error["param"].partition(".")[0] in model.model_fields, error
    assert has_path(body, error["param"]), error


def has_path(node: Any, param: str) -> bool:
    """Return whether a dotted path exists in a body. Its last step may be missing."""
    for step in param.split(".")[:-1]:
        if isinstance(node, dict) and step in node:
            node = node[step]
        elif isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        else:
            return False
    return True


@pytest.mark.parametrize("path", SURFACES)
@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_body_is_answered_or_refused_with_the_name_of_a_field(
    running_app: RunningApp, path: str, data: st.DataObject
) -> None:
    model, valid_body = SURFACES[path]
    body = {"model": "gpt-oss", **valid_body, **data.draw(bodies[path])}
    check(running_app.post(path, body), body, model)


SCHEMA = {"type": "object", "properties": {"at": {"type": ["string", "null"], "enum": ["a", None]}}, "required": ["at"]}
URL = "https://example.com/a.png"
SAMPLES: dict[str, list[Json]] = {
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Hi"}, {"type": "file", "file": {"file_id": "f"}}],
                },
                {
                    "role": "assistant",
                    "content": [{"type": "refusal", "refusal": "No."}],
                    "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "so"}]},
                {"role": "user", "content": "And?"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": False}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "stream_options": {"include_usage": True},
            "reasoning": {"effort": "low"},
            "metadata": {"a": "b"},
        }
    ],
    "/v1/responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": URL}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "so"}]},
                {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}, "status": "completed"},
                {
                    "type": "shell_call_output",
                    "call_id": "s",
                    "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}],
                },
                {"type": "tool_search_call", "call_id": "t", "execution": "client", "arguments": {"q": ["a"]}},
                {
                    "type": "tool_search_output",
                    "call_id": "t",
                    "execution": "client",
                    "tools": [{"type": "function", "name": "g", "parameters": SCHEMA}],
                },
                {
                    "type": "web_search_call",
                    "id": "ws_1",
                    "status": "completed",
                    "action": {"type": "search", "query": "q"},
                },
                {
                    "type": "mcp_call",
                    "id": "mcp_1",
                    "server_label": "s",
                    "name": "n",
                    "arguments": "{}",
                    "error": {"a": 1},
                },
                {"type": "compaction", "encrypted_content": "x"},
                {"type": "configuration_update", "model": "gpt-oss"},
                {"role": "user", "content": "And?"},
            ],
            "tools": [
                {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False},
                {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
                {"type": "local_shell"},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "m", "parameters": SCHEMA}]},
                {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
            ],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "context_management": [{"type": "compaction"}],
            "include": ["reasoning.encrypted_content"],
            "store": False,
        }
    ],
    "/v1/messages": [
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Hi"},
                        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}},
                        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
                        {
                            "type": "search_result",
                            "source": "s",
                            "title": "t",
                            "content": [{"type": "text", "text": "x"}],
                        },
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_fetch", "input": {"url": "u"}},
                        {
                            "type": "web_fetch_tool_result",
                            "tool_use_id": "srvtoolu_1",
                            "content": {
                                "type": "web_fetch_result",
                                "url": "u",
                                "content": {"type": "document", "source": {"type": "text", "data": "x"}},
                            },
                        },
                        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"at": "a"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": [
                                {"type": "text", "text": "so"},
                                {"type": "image", "source": {"type": "url", "url": URL}},
                                {"type": "document", "source": {"type": "base64", "media_type": "a/b", "data": "QQ=="}},
                            ],
                        }
                    ],
                },
            ],
            "tools": [
                {"name": "f", "input_schema": SCHEMA},
                {"type": "web_search_20250305", "name": "web_search", "allowed_domains": ["a.com"]},
            ],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "context_management": {
                "edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}}]
            },
            "metadata": {"user_id": "u"},
        }
    ],
}
DEEPEST: Any = json.loads("[" * 120 + "]" * 120)
ODD_VALUES: list[Any] = [[], {}, 7, 1e300, True, None, "x", [{"type": []}], {"type": {}}, DEEPEST]


def with_odd_values(node: Any) -> Iterator[Any]:
    """Yield copies of `node`. In each copy, one value at any depth is replaced by an odd value."""
    yield from ODD_VALUES
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            for changed in with_odd_values(child):
                copy: Any = node.copy()
                copy[key] = changed
                yield copy


@pytest.mark.parametrize("path", SURFACES)
def test_a_value_of_any_type_in_any_field_is_no_failure(running_app: RunningApp, path: str) -> None:
    for sample in SAMPLES[path]:
        for number, body in enumerate(with_odd_values({"model": "gpt-oss", **sample})):
            if isinstance(body, dict) and number % STEP == 0:
                response = running_app.post(path, body)
                assert response.status < 500, (body, response.body)


NO_STRING: dict[str, tuple[Json, str]] = {
    "a document": ({"type": "document", "source": {"type": [], "data": "x"}}, "messages.0.content.0.source.type"),
    "an image": ({"type": "image", "source": {"type": ["url"]}}, "messages.0.content.0"),
    "a part": ({"type": [], "text": "x"}, "messages.0.content.0.type"),
}


@pytest.mark.parametrize(("block", "param"), NO_STRING.values(), ids=NO_STRING)
def test_the_type_of_a_part_must_be_a_string(running_app: RunningApp, block: Json, param: str) -> None:
    messages = [{"role": "user", "content": [block]}]
    response = running_app.post("/v1/messages", {"model": "gpt-oss", "max_tokens": 9, "messages": messages})
    assert response.status == 400, response.body
    assert param in response.json()["error"]["message"]


def test_types_that_are_no_strings_are_read_in_results() -> None:
    assert result_text({"type": "web_fetch_result", "source": {"type": ["text"], "data": "x"}}) == "x"


def test_the_text_of_a_body_with_types_that_are_lists_is_counted() -> None:
    assert estimated_input({"tools": [{"parameters": SCHEMA}]}) > (0, 0)
    assert readable_text([{"type": ["text"], "text": "Hi"}]) == "Hi"
