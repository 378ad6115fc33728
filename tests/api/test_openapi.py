"""OpenAPI document: all routes, valid schemas, consistent with request validation."""

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
from typing import Any, get_args, get_type_hints

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError
from starlette.routing import Route

from tests.api.asgi import Exchange
from unisono.api.chat.schema import ChatRequest
from unisono.api.completions.schema import CompletionRequest
from unisono.api.dependencies import ParsedBody
from unisono.api.layered_app import LayeredApp
from unisono.api.messages.schema import MessagesRequest
from unisono.api.openapi import to_document
from unisono.api.responses.conversations.routes import AddedItems
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.route_table import GatewayRoute
from unisono.app import build
from unisono.bootstrap.fastapi_routes import ROUTES
from unisono.cli import main
from unisono.config import parse

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/guides/conversations.md")
SCHEMAS = {"client.chat.completions.create": "ChatRequest", "client.responses.create": "ResponsesRequest"}
KEY = "sk-the-only-key"
MODEL = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": "http://127.0.0.1:9"}}
CONFIG = {"model_list": [MODEL], "store": {"url": "memory://"}, "general_settings": {"master_key": KEY}}
METHODS = {"get", "post", "patch", "delete"}
# Paths of the web page, which are not part of the document.
PAGE_PATHS = {"/", "/docs", "/page/{name}"}
ALIASES = ("/v1", "/open-responses/v1")


@cache
def document() -> dict[str, Any]:
    return to_document(ROUTES)


@pytest.fixture(scope="module")
def app() -> LayeredApp:
    return build(parse(CONFIG, {}).config)


def errors_of(name: str, value: Any) -> list[str]:
    """Return the validation errors of a value against a schema of the document."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


def all_routes() -> set[tuple[str, str]]:
    """Return method and path of every route."""
    plain = [route for route in ROUTES if isinstance(route, Route)]
    return {
        (method.lower(), route.path.replace(":path}", "}")) for route in plain for method in (route.methods or set())
    }


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_the_document_has_every_route_and_no_other() -> None:
    documented = {(method, path) for method, path, _ in operations()}
    aliases = {(method, path.replace("/v1/", "/", 1)) for method, path in documented if path.startswith(ALIASES)}
    aliases |= {(method, path.replace("/customer/", "/end_user/", 1)) for method, path in documented}
    assert documented | aliases == {(m, path) for m, path in all_routes() if m in METHODS and path not in PAGE_PATHS}
    assert {method for method, _ in all_routes()} - METHODS == {"head"}


def test_every_reference_has_a_target() -> None:
    for reference in set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document()))):
        target: Any = document()
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]
        assert target


def test_every_schema_is_valid_and_referenced() -> None:
    schemas = document()["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    referenced = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document())))
    assert referenced == set(schemas)


def test_operations_have_unique_ids_and_all_path_parameters() -> None:
    names = Counter(operation["operationId"] for _, _, operation in operations())
    assert set(names.values()) == {1}
    for _, path, operation in operations():
        path_parameters = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"]
        assert path_parameters == re.findall(r"{(\w+)}", path)


def test_only_health_needs_no_key() -> None:
    assert {path for _, path, operation in operations() if not operation["security"]} == {
        "/health/liveliness",
        "/health/liveness",
        "/health/readiness",
        "/ping",
    }


SAYS_HI = {"role": "user", "content": "Hi"}
CHAT: dict[str, dict[str, Any]] = {
    "minimal": {},
    "every spelling of an effort": {"reasoning_effort": "minimal", "think": True, "reasoning": {"effort": "xhigh"}},
    "thinking as a boolean": {"thinking": True},
    "stop as a string": {"stop": "\n"},
    "logit bias": {"logit_bias": {"1734": -100}},
    "neutral values": {"logprobs": False, "top_logprobs": 0, "modalities": ["text"], "audio": None},
    "a flat tool": {"tools": [{"type": "function", "name": "look", "parameters": {}}], "tool_choice": "any"},
    "a tool": {
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    },
    "unsupported tool type": {"tools": [{"type": "web_search"}]},
    "legacy function": {"functions": [{"name": "look"}], "function_call": {"name": "look"}},
    "tool result as an object": {
        "messages": [SAYS_HI, {"role": "tool", "tool_call_id": "c", "content": {"degrees": 1}}]
    },
    "call arguments as an object": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": {"at": 1}}}]}
        ]
    },
    "strings among the parts": {"messages": [{"role": "user", "content": ["Hi", {"type": "text", "text": "!"}]}]},
    "unknown fields": {"messages": [{**SAYS_HI, "mood": 1}], "weather": {}},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "a string": {"input": "Hi"},
    "messages without a type": {"input": [SAYS_HI, {**SAYS_HI, "type": None}]},
    "a reference without a type": {"input": [{"id": "msg_1"}]},
    "tool output as a list": {"input": [{"type": "function_call_output", "call_id": "c", "output": [1, None]}]},
    "an item of Open Responses": {"input": [{"type": "unisono:mcp_list_tools", "server_label": "docs", "tools": []}]},
    "ignored item type": {"input": [{"type": "computer_call", "action": {}}]},
    "reasoning with a numeric id and string content": {
        "input": [{"type": "reasoning", "id": 7, "content": "Hm", "summary": []}]
    },
    "conversation as a string": {"input": "Hi", "conversation": "conv_1"},
    "conversation as an object": {"input": "Hi", "conversation": {"id": "conv_1"}},
    "a nested tool": {"input": "Hi", "tools": [{"type": "custom", "custom": {"name": "look"}}]},
    "tool server": {
        "input": "Hi",
        "tools": [{"type": "mcp", "server_label": "docs", "require_approval": "never", "allowed_tools": ["search"]}],
    },
    "a namespace": {"input": "Hi", "tools": [{"type": "namespace", "tools": [{"type": "function", "name": "look"}]}]},
    "include": {"input": "Hi", "include": ["reasoning.encrypted_content"]},
    "JSON schema": {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "prompt as a string": {},
    "list of strings": {"prompt": ["Hi", "Ho"]},
    "token ids": {"prompt": [0, 201087]},
    "lists of token ids": {"prompt": [[0], [1, 2]]},
    "stop as a string": {"stop": "end", "stop_token_ids": [200007]},
    "neutral values": {"logprobs": None, "suffix": "", "ignore_eos": False, "response_format": {"type": "text"}},
}
MESSAGES: dict[str, dict[str, Any]] = {
    "minimal": {},
    "system as a string": {"system": "Be brief."},
    "system as blocks": {"system": [{"type": "text", "text": "Be brief.", "cache_control": None}]},
    "content as blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "a tool without a type": {"tools": [{"name": "look", "input_schema": {"type": "object"}, "type": None}]},
    "a server tool": {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}]},
    "tool choice": {"tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True}},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}},
    "JSON schema": {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
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
def test_accepted_bodies_match_the_document(model: type[BaseModel], body: dict[str, Any]) -> None:
    model.model_validate(body)
    assert errors_of(model.__name__, body) == []


# A file part of each API, with the field of the request and the schema of the part.
FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ChatFilePart": (
        "ChatRequest",
        "messages",
        {"type": "file", "file": {"filename": "a.md", "file_data": "QQ=="}},
    ),
    "InputFilePart": (
        "ResponsesRequest",
        "input",
        {"type": "input_file", "filename": "a.md", "file_data": "data:text/csv;base64,QQ=="},
    ),
    "DocumentPart": (
        "MessagesRequest",
        "messages",
        {"type": "document", "title": "a.md", "source": {"type": "base64", "media_type": "text/plain", "data": "QQ=="}},
    ),
}


@pytest.mark.parametrize("part", FILES)
def test_the_document_has_the_file_part_of_each_api(part: str) -> None:
    request, field, value = FILES[part]
    body = {"model": "m", "max_tokens": 9, field: [{"role": "user", "content": [value]}]}
    assert errors_of(request, body) == errors_of(part, value) == []
    assert errors_of(part, {**value, "type": "telepathy"})
    properties = document()["components"]["schemas"][part]["properties"]
    assert {*value} <= {*properties}


REFUSED: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "no max_tokens": (MessagesRequest, {"model": "m", "messages": [SAYS_HI]}),
    "content as a number": (MessagesRequest, {"model": "m", "max_tokens": 9, "messages": [{**SAYS_HI, "content": 1}]}),
    "no model": (ChatRequest, {"messages": [SAYS_HI]}),
    "no messages": (ChatRequest, {"model": "m", "messages": []}),
    "unknown effort": (ChatRequest, {"model": "m", "messages": [SAYS_HI], "reasoning_effort": "huge"}),
    "number as a string": (ChatRequest, {"model": "m", "messages": [SAYS_HI], "n": "1"}),
    "tool result without a call id": (ChatRequest, {"model": "m", "messages": [{"role": "tool", "content": ""}]}),
    "a part without its text": (
        ResponsesRequest,
        {"model": "m", "input": [{"role": "user", "content": [{"type": "text"}]}]},
    ),
    "call without a function": (
        ChatRequest,
        {"model": "m", "messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}]},
    ),
    "user content as an object": (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": {"a": 1}}]}),
    "a call without an id": (
        ChatRequest,
        {"model": "m", "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]},
    ),
    "a function without a name": (ChatRequest, {"model": "m", "messages": [SAYS_HI], "tools": [{"type": "function"}]}),
    "log probabilities": (ChatRequest, {"model": "m", "messages": [SAYS_HI], "logprobs": 3}),
    "unknown item type": (ResponsesRequest, {"model": "m", "input": [{"type": "telepathy"}]}),
    "a call without a name": (ResponsesRequest, {"model": "m", "input": [{"type": "function_call", "call_id": "c"}]}),
    "a tool without a name": (ResponsesRequest, {"model": "m", "input": "Hi", "tools": [{"type": "function"}]}),
    "a stored prompt": (ResponsesRequest, {"model": "m", "input": "Hi", "prompt": {"id": "p"}}),
    "an empty prompt": (CompletionRequest, {"model": "m", "prompt": ""}),
    "an empty prompt of ids": (CompletionRequest, {"model": "m", "prompt": [[]]}),
    "prompt with an invalid token id": (CompletionRequest, {"model": "m", "prompt": [201088]}),
    "prompt of a string and an id": (CompletionRequest, {"model": "m", "prompt": ["a", 1]}),
    "a suffix": (CompletionRequest, {"model": "m", "prompt": "a", "suffix": "b"}),
    "too many items": (AddedItems, {"items": [SAYS_HI] * 21}),
}


@pytest.mark.parametrize(("model", "body"), REFUSED.values(), ids=REFUSED)
def test_bodies_of_invalid_form_do_not_match_the_document(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(body)
    assert errors_of(model.__name__, body)


def examples() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield method and arguments of every request in the Python code of PAGES.

    Values that are not literals become strings.
    """
    variables: dict[str, Any] = {}
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        for node in ast.walk(ast.parse(block)):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.List() | ast.Dict()):
                    variables[name] = _value(node.value, variables)
                case ast.Call(func=ast.Attribute(attr="create") as function):
                    arguments: dict[str, Any] = {}
                    for keyword in node.keywords:
                        value = _value(keyword.value, variables)
                        arguments |= value if keyword.arg is None else {keyword.arg: value}
                    yield ast.unparse(function), arguments


def _value(node: ast.expr, variables: dict[str, Any]) -> Any:
    match node:
        case ast.Dict():
            return {
                ast.literal_eval(key): _value(value, variables)
                for key, value in zip(node.keys, node.values, strict=True)
                if key is not None
            }
        case ast.List():
            return [_value(each, variables) for each in node.elts]
        case ast.Constant():
            return node.value
        case ast.Name():
            return variables[node.id]
        case _:
            return ast.unparse(node)


def test_requests_in_the_documentation_match_the_document() -> None:
    bodies = [(SCHEMAS[method], body) for method, body in examples() if method in SCHEMAS]
    assert {schema for schema, _ in bodies} == set(SCHEMAS.values())
    for schema, body in bodies:
        assert errors_of(schema, body) == []


async def test_the_document_requires_a_key(app: LayeredApp) -> None:
    assert (await Exchange(app, "GET", "/openapi.json").run()).status == 401
    response = await Exchange(app, "GET", "/openapi.json", headers=[("authorization", f"Bearer {KEY}")]).run()
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == document()


@pytest.mark.slow
def test_the_command_prints_the_document() -> None:
    printed = CliRunner().invoke(main, ["openapi"])
    assert printed.exit_code == 0
    assert json.loads(printed.output) == document()


def test_each_endpoint_parses_the_body_that_its_route_declares() -> None:
    (marker,) = get_args(ParsedBody)[1:]
    parsed = [
        (route.endpoint, get_args(hint)[0], route.body_model)
        for route in ROUTES
        if isinstance(route, GatewayRoute)
        for hint in get_type_hints(route.endpoint, include_extras=True).values()
        if marker in get_args(hint)
    ]
    assert len(parsed) > 30
    assert [each for each in parsed if each[1] is not each[2]] == []


def test_response_schemas_are_built_on_first_use() -> None:
    code = """
import json, sys
from unisono.app import build
from unisono.bootstrap.fastapi_routes import ROUTES
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
async def test_a_wrong_method_gets_the_documented_methods_in_allow(app: LayeredApp, path: str) -> None:
    headers = [("authorization", f"Bearer {KEY}")]
    response = await Exchange(app, "PUT", re.sub(r"{\w+}", "one", path), headers=headers).run()
    documented = {method.upper() for method in document()["paths"][path]}
    assert response.status == 405
    assert set(re.split(r",\s*", response.headers["allow"])) - {"HEAD"} == documented
