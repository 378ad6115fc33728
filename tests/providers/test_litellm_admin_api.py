"""The admin API against LiteLLM's own OpenAPI document.

LiteLLM's proxy cannot answer these requests without its database, whose engine it downloads. The document is generated
by the pinned version of its package, and describes fields, parameters and answers.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from bench import peer_env
from tests.e2e.administered import AdminClient, administered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]
PRINT_DOCUMENT = """
import json
from litellm.proxy.proxy_server import app
print(json.dumps(app.openapi()))
"""
# Bodies that need no further field. `%d` is replaced with another number in each request.
BODIES: Mapping[str, Mapping[str, Any]] = {
    "/key/generate": {},
    "/key/update": {"key": "KEY"},
    "/key/block": {"key": "KEY"},
    "/key/unblock": {"key": "KEY"},
    "/key/{key}/regenerate": {},
    "/team/new": {},
    "/team/update": {"team_id": "team"},
    "/team/block": {"team_id": "team"},
    "/team/unblock": {"team_id": "team"},
    "/user/new": {},
    "/user/update": {"user_id": "user"},
    "/customer/new": {"user_id": "customer %d"},
    "/customer/update": {"user_id": "customer"},
    "/budget/new": {"budget_id": "budget %d", "max_budget": 1},
    "/budget/update": {"budget_id": "budget"},
    "/utils/token_counter": {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]},
}
# Queries that need no further parameter.
QUERIES: Mapping[str, str] = {
    "/key/info": "key=KEY",
    "/key/list": "return_full_object=true",
    "/team/info": "team_id=team",
    "/team/list": "",
    "/user/info": "user_id=user",
    "/user/list": "",
    "/customer/info": "end_user_id=customer",
    "/customer/list": "",
    "/budget/list": "",
    "/spend/logs": "summarize=false",
    "/spend/tags": "",
    "/global/spend/report": "",
    "/user/daily/activity": "start_date=2026-01-01&end_date=2026-12-31",
    "/model/info": "",
    "/model_group/info": "",
    "/health": "",
}
# Reports for which LiteLLM's document names the type of a request's log. Its documentation shows other answers.
MISTYPED = frozenset({"/spend/tags", "/global/spend/report"})


class LitellmDocument:
    """LiteLLM's OpenAPI document."""

    def __init__(self, document: Any) -> None:
        self._document = document

    def operation(self, method: str, path: str) -> Any:
        return self._document["paths"][path][method]

    def resolved(self, schema: Any) -> Any:
        """Follow references, and take the alternative that is not null."""
        while True:
            if "$ref" in schema:
                schema = self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            elif "anyOf" in schema:
                schema = next(each for each in schema["anyOf"] if self.resolved(each).get("type") != "null")
            else:
                return schema

    def body_fields(self, path: str) -> Mapping[str, Any]:
        schema = self.operation("post", path)["requestBody"]["content"]["application/json"]["schema"]
        return self.resolved(schema)["properties"]  # type: ignore[no-any-return]

    def value(self, schema: Any) -> Any:
        """Return a value of the schema that is neither empty nor false."""
        schema = self.resolved(schema)
        if "enum" in schema:
            return schema["enum"][0]
        match schema.get("type"):
            case "integer":
                return 7
            case "number":
                return 1.5
            case "boolean":
                return True
            case "array":
                return [self.value(schema.get("items", {}))]
            case "object":
                return {"some": "text"}
            case _:
                return "some-text"

    def mismatches(self, method: str, path: str, answer: Any) -> list[str]:
        """Return the places in which an answer is not of the documented type."""
        content = self.operation(method, path)["responses"]["200"]["content"]["application/json"]
        schema = {**content["schema"], "components": self._document["components"]}
        errors = Draft202012Validator(schema).iter_errors(answer)
        return [f"{error.json_path}: {error.message}" for each in errors for error in _causes(each)]


def _causes(error: Any) -> Iterator[Any]:
    if error.context:
        for each in error.context:
            yield from _causes(each)
    elif error.validator != "type" or error.validator_value != "null":
        yield error


@pytest.fixture(scope="module")
def documented() -> LitellmDocument:
    python = peer_env.program("litellm").parent / "python"
    environ = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    printed = subprocess.run(
        [str(python), "-W", "ignore", "-c", PRINT_DOCUMENT], capture_output=True, check=True, env=environ
    ).stdout
    return LitellmDocument(json.loads(printed.splitlines()[-1]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin() -> AsyncIterator[AdminClient]:
    async with administered("memory://", price={"input": 1.0, "output": 2.0}) as running:
        await running.made("/team/new", team_id="team", members_with_roles=[{"role": "user", "user_id": "user"}])
        await running.made("/customer/new", user_id="customer", max_budget=1)
        await running.made("/budget/new", budget_id="budget", max_budget=1)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def key(admin: AdminClient) -> str:
    """Return the id of a key that has answered a request."""
    made = await admin.made(
        "/key/generate", team_id="team", max_budget=1.0, object_permission={"mcp_servers": ["search"]}
    )
    assert (await admin.gateway.chat_as(made["key"])).status == 200
    return str(made["token"])


@pytest.mark.parametrize("path", BODIES)
async def test_each_body_field_has_an_effect_or_is_named(
    path: str, documented: LitellmDocument, admin: AdminClient, key: str
) -> None:
    odd = []
    for number, (name, schema) in enumerate(documented.body_fields(path).items()):
        if name in BODIES[path]:
            continue
        text = json.dumps({**BODIES[path], name: documented.value(schema)})
        body = json.loads(text.replace("KEY", key).replace("%d", str(number)))
        answer = await admin.post(path.format(key=key), **body)
        param = "" if answer.status == 200 else answer.body["error"]["param"]
        if answer.status != 200 and not (answer.status in (400, 404, 409) and param.partition(".")[0] == name):
            odd.append((name, answer.raw))
    assert not odd


@pytest.mark.parametrize("path", QUERIES)
async def test_each_query_parameter_has_an_effect_or_is_named(
    path: str, documented: LitellmDocument, admin: AdminClient, key: str
) -> None:
    base, odd = QUERIES[path].replace("KEY", key), []
    for parameter in documented.operation("get", path).get("parameters", ()):
        name = parameter["name"]
        if parameter["in"] != "query" or f"{name}=" in base:
            continue
        value = "2026-01-01" if name.endswith("_date") else str(documented.value(parameter["schema"]))
        answer = await admin.get(f"{path}?{base}&{name}={value}")
        param = "" if answer.status == 200 else answer.body["error"]["param"]
        if answer.status != 200 and not (answer.status in (400, 404, 409) and param == name):
            odd.append((name, answer.raw))
    assert not odd


async def test_lists_filter_by_each_accepted_parameter(admin: AdminClient, key: str) -> None:
    """A parameter that is accepted must not select everything."""
    nothing = {
        "/key/list": ("user_id", "team_id", "key_hash", "key_alias", "search"),
        "/team/list": ("user_id", "team_id", "team_alias"),
        "/user/list": ("user_id", "user_ids", "user_email", "role", "search"),
        "/customer/list": ("user_id",),
        "/spend/logs": ("api_key", "user_id", "team_id", "model"),
        "/global/spend/report": ("api_key", "internal_user_id", "user_id", "team_id", "model"),
        "/user/daily/activity": ("api_key", "user_id", "team_id", "model"),
        "/health": ("model", "model_id"),
    }
    for path, names in nothing.items():
        everything = (await admin.get(f"{path}?{QUERIES[path]}")).body
        for name in names:
            found = (await admin.get(f"{path}?{QUERIES[path]}&{name}=other")).body
            assert _entries(everything) > 0 == _entries(found), (path, name)


def _entries(answer: Any) -> int:
    if isinstance(answer, list):
        return len(answer)
    return sum(len(answer.get(name, ())) for name in ("keys", "users", "teams", "results", "healthy_endpoints"))


@pytest.mark.parametrize("path", sorted({*QUERIES} - MISTYPED))
async def test_answers_to_queries_have_the_documented_types(
    path: str, documented: LitellmDocument, admin: AdminClient, key: str
) -> None:
    answer = await admin.get(f"{path}?{QUERIES[path].replace('KEY', key)}")
    assert answer.status == 200
    assert not documented.mismatches("get", path, answer.body)


@pytest.mark.parametrize("path", BODIES)
async def test_answers_to_changes_have_the_documented_types(
    path: str, documented: LitellmDocument, admin: AdminClient, key: str
) -> None:
    body = json.loads(json.dumps(BODIES[path]).replace("KEY", key).replace("%d", "typed"))
    answer = await admin.post(path.format(key=key), **body)
    assert answer.status == 200, answer.raw
    assert not documented.mismatches("post", path, answer.body)
