"""The OpenAPI document: whole, of this application and no other, and as wide as what is really accepted."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError
from starlette.routing import Route

from tests.api.asgi import Exchange
from unisono.api.chat.schema import ChatRequest
from unisono.api.completions.schema import CompletionRequest
from unisono.api.messages.schema import MessagesRequest
from unisono.api.openapi import to_document
from unisono.api.responses.conversations.schema import AddedItems
from unisono.api.responses.schema import ResponsesRequest
from unisono.app import ROUTES, build
from unisono.cli import main
from unisono.config import parse

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/guides/conversations.md")
SCHEMAS = {"client.chat.completions.create": "ChatRequest", "client.responses.create": "ResponsesRequest"}
KEY = "sk-the-only-key"
MODEL = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": "http://127.0.0.1:9"}}
CONFIG = {"model_list": [MODEL], "store": {"url": "memory://"}, "general_settings": {"master_key": KEY}}
METHODS = {"get", "post", "delete"}
PAGE = {"/", "/page/{name}"}
"""For people."""
ALIASES = ("/v1", "/open-responses/v1")


@cache
def document() -> dict[str, Any]:
    return to_document(ROUTES)


@pytest.fixture
def app() -> FastAPI:
    return build(parse(CONFIG, {}).config)


def faults(name: str, value: Any) -> list[str]:
    """What is wrong with a value by a schema of the document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    """Method and path of every route."""
    plain = [route for route in app.routes if isinstance(route, Route)]
    return {
        (method.lower(), route.path.replace(":path}", "}")) for route in plain for method in (route.methods or set())
    }


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_the_document_has_every_route_and_no_other(app: FastAPI) -> None:
    told = {(method, path) for method, path, _ in operations()}
    aliases = {(method, path.replace("/v1/", "/", 1)) for method, path in told if path.startswith(ALIASES)}
    assert told | aliases == {(m, path) for m, path in routes_of(app) if m in METHODS and path not in PAGE}
    assert {method for method, _ in routes_of(app)} - METHODS == {"head"}


def test_everything_referred_to_is_there() -> None:
    for place in set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document()))):
        found: Any = document()
        for step in place.removeprefix("#/").split("/"):
            found = found[step]
        assert found


def test_every_schema_is_one_and_has_a_place_where_it_counts() -> None:
    schemas = document()["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    referred = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document())))
    assert referred == set(schemas)


def test_operations_have_names_of_their_own_and_all_parameters_of_their_paths() -> None:
    names = Counter(operation["operationId"] for _, _, operation in operations())
    assert set(names.values()) == {1}
    for _, path, operation in operations():
        given = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"]
        assert given == re.findall(r"{(\w+)}", path)


def test_only_health_needs_no_key() -> None:
    assert {path for _, path, operation in operations() if not operation["security"]} == {
        "/health/liveliness",
        "/health/liveness",
        "/health/readiness",
    }


SAYS_HI = {"role": "user", "content": "Hi"}
CHAT: dict[str, dict[str, Any]] = {
    "the least": {},
    "every spelling of an effort": {"reasoning_effort": "minimal", "think": True, "reasoning": {"effort": "xhigh"}},
    "thinking in a word": {"thinking": True},
    "one stop": {"stop": "\n"},
    "a bias": {"logit_bias": {"1734": -100}},
    "neutral values": {"logprobs": False, "top_logprobs": 0, "modalities": ["text"], "audio": None},
    "a flat tool": {"tools": [{"type": "function", "name": "look", "parameters": {}}], "tool_choice": "any"},
    "a tool": {
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    },
    "a tool of another kind": {"tools": [{"type": "web_search"}]},
    "an old function": {"functions": [{"name": "look"}], "function_call": {"name": "look"}},
    "a result in JSON": {"messages": [SAYS_HI, {"role": "tool", "tool_call_id": "c", "content": {"degrees": 1}}]},
    "a call with an object": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": {"at": 1}}}]}
        ]
    },
    "strings among the parts": {"messages": [{"role": "user", "content": ["Hi", {"type": "text", "text": "!"}]}]},
    "a field nobody knows": {"messages": [{**SAYS_HI, "mood": 1}], "weather": {}},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "a string": {"input": "Hi"},
    "messages without a type": {"input": [SAYS_HI, {**SAYS_HI, "type": None}]},
    "a reference without a type": {"input": [{"id": "msg_1"}]},
    "an output in JSON": {"input": [{"type": "function_call_output", "call_id": "c", "output": [1, None]}]},
    "an item of Open Responses": {"input": [{"type": "unisono:mcp_list_tools", "server_label": "docs", "tools": []}]},
    "an item without a meaning": {"input": [{"type": "computer_call", "action": {}}]},
    "loose reasoning": {"input": [{"type": "reasoning", "id": 7, "content": "Hm", "summary": []}]},
    "a conversation": {"input": "Hi", "conversation": "conv_1"},
    "a conversation in an object": {"input": "Hi", "conversation": {"id": "conv_1"}},
    "a nested tool": {"input": "Hi", "tools": [{"type": "custom", "custom": {"name": "look"}}]},
    "a server": {
        "input": "Hi",
        "tools": [{"type": "mcp", "server_label": "docs", "require_approval": "never", "allowed_tools": ["search"]}],
    },
    "a namespace": {"input": "Hi", "tools": [{"type": "namespace", "tools": [{"type": "function", "name": "look"}]}]},
    "what is to be included": {"input": "Hi", "include": ["reasoning.encrypted_content"]},
    "a schema": {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "a text": {},
    "texts": {"prompt": ["Hi", "Ho"]},
    "ids": {"prompt": [0, 201087]},
    "lists of ids": {"prompt": [[0], [1, 2]]},
    "one stop": {"stop": "end", "stop_token_ids": [200007]},
    "neutral values": {"logprobs": None, "suffix": "", "ignore_eos": False, "response_format": {"type": "text"}},
}
MESSAGES: dict[str, dict[str, Any]] = {
    "the least": {},
    "instructions in a string": {"system": "Be brief."},
    "instructions in blocks": {"system": [{"type": "text", "text": "Be brief.", "cache_control": None}]},
    "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "a tool without a type": {"tools": [{"name": "look", "input_schema": {"type": "object"}, "type": None}]},
    "a server tool": {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]},
    "a choice": {"tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True}},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}},
    "a schema": {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
}
ACCEPTED: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    **{f"chat, {name}": (ChatRequest, {"model": "m", "messages": [SAYS_HI], **body}) for name, body in CHAT.items()},
    **{f"responses, {name}": (ResponsesRequest, {"model": "m", **body}) for name, body in RESPONSES.items()},
    **{
        f"completions, {name}": (CompletionRequest, {"model": "m", "prompt": "Hi", **body})
        for name, body in COMPLETIONS.items()
    },
    **{
        f"messages, {name}": (MessagesRequest, {"model": "m", "max_tokens": 9, "messages": [SAYS_HI], **body})
        for name, body in MESSAGES.items()
    },
    "items": (AddedItems, {"items": [SAYS_HI]}),
}


@pytest.mark.parametrize(("model", "body"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_accepted_is_in_the_document(model: type[BaseModel], body: dict[str, Any]) -> None:
    model.model_validate(body)
    assert faults(model.__name__, body) == []


REFUSED: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "no bound": (MessagesRequest, {"model": "m", "messages": [SAYS_HI]}),
    "content in a number": (MessagesRequest, {"model": "m", "max_tokens": 9, "messages": [{**SAYS_HI, "content": 1}]}),
    "no model": (ChatRequest, {"messages": [SAYS_HI]}),
    "no messages": (ChatRequest, {"model": "m", "messages": []}),
    "an effort nobody has": (ChatRequest, {"model": "m", "messages": [SAYS_HI], "reasoning_effort": "huge"}),
    "a number in a string": (ChatRequest, {"model": "m", "messages": [SAYS_HI], "n": "1"}),
    "a result of no call": (ChatRequest, {"model": "m", "messages": [{"role": "tool", "content": ""}]}),
    "a part without its text": (
        ResponsesRequest,
        {"model": "m", "input": [{"role": "user", "content": [{"type": "text"}]}]},
    ),
    "a call of nothing": (
        ChatRequest,
        {"model": "m", "messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}]},
    ),
    "bare JSON that is no result": (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": {"a": 1}}]}),
    "a call without an id": (
        ChatRequest,
        {"model": "m", "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]},
    ),
    "a function without a name": (ChatRequest, {"model": "m", "messages": [SAYS_HI], "tools": [{"type": "function"}]}),
    "log probabilities": (ChatRequest, {"model": "m", "messages": [SAYS_HI], "logprobs": True}),
    "an item of no kind": (ResponsesRequest, {"model": "m", "input": [{"type": "telepathy"}]}),
    "a call without a name": (ResponsesRequest, {"model": "m", "input": [{"type": "function_call", "call_id": "c"}]}),
    "a tool without a name": (ResponsesRequest, {"model": "m", "input": "Hi", "tools": [{"type": "function"}]}),
    "a stored prompt": (ResponsesRequest, {"model": "m", "input": "Hi", "prompt": {"id": "p"}}),
    "an empty prompt": (CompletionRequest, {"model": "m", "prompt": ""}),
    "an empty prompt of ids": (CompletionRequest, {"model": "m", "prompt": [[]]}),
    "a prompt of ids there are not": (CompletionRequest, {"model": "m", "prompt": [201088]}),
    "a prompt of both": (CompletionRequest, {"model": "m", "prompt": ["a", 1]}),
    "a suffix": (CompletionRequest, {"model": "m", "prompt": "a", "suffix": "b"}),
    "too many items": (AddedItems, {"items": [SAYS_HI] * 21}),
}


@pytest.mark.parametrize(("model", "body"), REFUSED.values(), ids=REFUSED)
def test_what_is_of_the_wrong_shape_is_not_in_the_document(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(body)
    assert faults(model.__name__, body)


def examples() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield method and arguments of every request in the programs of PAGES. Unknown values become strings."""
    known: dict[str, Any] = {}
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        for node in ast.walk(ast.parse(block)):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.List() | ast.Dict()):
                    known[name] = _value(node.value, known)
                case ast.Call(func=ast.Attribute(attr="create") as called):
                    given: dict[str, Any] = {}
                    for keyword in node.keywords:
                        value = _value(keyword.value, known)
                        given |= value if keyword.arg is None else {keyword.arg: value}
                    yield ast.unparse(called), given


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    match node:
        case ast.Dict():
            return {
                ast.literal_eval(key): _value(value, known)
                for key, value in zip(node.keys, node.values, strict=True)
                if key is not None
            }
        case ast.List():
            return [_value(each, known) for each in node.elts]
        case ast.Constant():
            return node.value
        case ast.Name():
            return known[node.id]
        case _:
            return ast.unparse(node)


def test_the_requests_on_the_pages_match_the_document() -> None:
    bodies = [(SCHEMAS[method], body) for method, body in examples() if method in SCHEMAS]
    assert {schema for schema, _ in bodies} == set(SCHEMAS.values())
    for schema, body in bodies:
        assert faults(schema, body) == []


async def test_the_document_is_for_who_has_a_key(app: FastAPI) -> None:
    assert (await Exchange(app, "GET", "/openapi.json").run()).status == 401
    answer = await Exchange(app, "GET", "/openapi.json", headers=[("authorization", f"Bearer {KEY}")]).run()
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == document()


def test_the_command_prints_the_document() -> None:
    printed = CliRunner().invoke(main, ["openapi"])
    assert printed.exit_code == 0
    assert json.loads(printed.output) == document()


def test_the_schemas_of_answers_are_built_on_first_use() -> None:
    code = """
import json, sys
from unisono.app import ROUTES, build
from unisono.config import parse
from unisono.api.answer_types import AnswerModel
app = build(parse(json.loads(sys.argv[1]), {}).config)
assert not hasattr(app.state, "document")
kinds = AnswerModel.__subclasses__()
assert len(kinds) > 50
assert [kind.__name__ for kind in kinds if kind.__pydantic_complete__] == []
"""
    subprocess.run([sys.executable, "-c", code, json.dumps(CONFIG)], check=True)


@pytest.mark.parametrize("path", sorted(document()["paths"]))
async def test_a_wrong_method_is_told_all_that_the_document_has(app: FastAPI, path: str) -> None:
    headers = [("authorization", f"Bearer {KEY}")]
    wrong = await Exchange(app, "PATCH", re.sub(r"{\w+}", "one", path), headers=headers).run()
    told = {method.upper() for method in document()["paths"][path]}
    assert wrong.status == 405
    assert set(re.split(r",\s*", wrong.headers["allow"])) - {"HEAD"} == told
