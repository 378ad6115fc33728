"""Bodies made from the surfaces' own models, right and wrong in any place: each is answered or refused as the client's
own fault, by a name that stands in it."""

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
NAMED = re.compile(r"^([\w.]+): |'([^']+)'")
DEEPEST = 4

words = st.one_of(
    st.sampled_from(["", "auto", "none", "user", "function", "text", "json_object", "call_1", "<|end|>", "a b", "\0"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
numbers = st.one_of(st.integers(-2, 3), st.sampled_from([-(2**70), 2**31, 2**64, 10**30]))
odd = st.one_of(st.none(), st.booleans(), numbers, st.floats(-3, 3), words, st.just([]), st.just({}))


def values(schema: Json, whole: Json, depth: int = 0) -> st.SearchStrategy[Any]:
    """What a model's JSON schema allows, and now and then anything else."""
    return st.one_of(*[_values(schema, whole, depth)] * 4, odd)


def _values(schema: Json, whole: Json, depth: int) -> st.SearchStrategy[Any]:
    if depth > DEEPEST:
        return odd
    if "$ref" in schema:
        return _values(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole, depth)
    if "anyOf" in schema:
        return st.one_of([_values(each, whole, depth) for each in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from([schema["const"]] if "const" in schema else schema["enum"])
    match schema.get("type"):
        case "object":
            return _objects(schema, whole, depth)
        case "array":
            return st.lists(values(schema.get("items", {}), whole, depth + 1), max_size=3)
        case "string":
            return words
        case "boolean":
            return st.booleans()
        case "integer" | "number":
            return numbers if schema["type"] == "integer" else st.floats(-3, 3)
        case "null":
            return st.none()
        case _:
            return odd


def _objects(schema: Json, whole: Json, depth: int) -> st.SearchStrategy[Any]:
    members = {name: values(each, whole, depth + 1) for name, each in schema.get("properties", {}).items()}
    if not members:
        return st.dictionaries(words, odd, max_size=2)
    needed = schema.get("required", [])
    return st.fixed_dictionaries(
        {name: members[name] for name in needed},
        optional={name: made for name, made in members.items() if name not in needed},
    )


def fields(model: type[BaseModel]) -> st.SearchStrategy[Json]:
    """A few fields of a request: with many of them at once only the first that is wrong is ever looked at."""
    schema = model.model_json_schema()
    some = {name: values(each, schema) for name, each in schema["properties"].items()}
    return st.lists(st.sampled_from(sorted(some)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: some[name] for name in names})
    )


bodies = {path: fields(model) for path, (model, _) in SURFACES.items()}


class Place:
    def __init__(self, runner: asyncio.Runner, app: Any) -> None:
        self._runner = runner
        self._app = app

    def post(self, path: str, body: Json) -> Exchange:
        raw = json.dumps(body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(raw)))]
        return self._runner.run(Exchange(self._app, "POST", path, body=raw, headers=headers).run())


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    async def opened(stack: AsyncExitStack) -> Any:
        fake = await stack.enter_async_context(FakeVllm(tokens=ANSWER))
        app = build(parse(config_of(f"vllm@{fake.url}", router_settings={"allowed_fails": 10**6}), {}).config)
        await stack.enter_async_context(app.router.lifespan_context(app))
        return app

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        app = runner.run(opened(stack))
        try:
            yield Place(runner, app)
        finally:
            runner.run(stack.aclose())


def check(answer: Exchange, body: Json, model: type[BaseModel]) -> None:
    if answer.status == 200:
        return
    assert 400 <= answer.status < 500, (answer.status, answer.body)
    error = answer.json()["error"]
    if model is MessagesRequest:
        # Anthropic's errors name the field in the message alone.
        assert set(error) == {"message", "type", "details"}
        named = NAMED.search(error["message"])
        error["param"] = None if named is None else named[1] or named[2]
    else:
        assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] is not None, error
    assert error["param"].partition(".")[0] in model.model_fields, error
    assert stands_in(body, error["param"]), error


def stands_in(node: Any, param: str) -> bool:
    """Whether a dotted path leads somewhere in a body, but for its last step, which may be what is missing."""
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
def test_any_body_is_answered_or_refused_by_the_name_of_a_field(place: Place, path: str, data: st.DataObject) -> None:
    model, sound = SURFACES[path]
    body = {"model": "gpt-oss", **sound, **data.draw(bodies[path])}
    check(place.post(path, body), body, model)
