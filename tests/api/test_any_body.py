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
from tests.depth import examples
from tests.e2e.gateway import config_of
from tests.fakes import FakeVllm
from unisono.api.chat.schema import ChatRequest
from unisono.api.messages.schema import MessagesRequest
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
