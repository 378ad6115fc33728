"""OpenAPI document, built from the operations table, the request models and the error tree.

It is built on first use and then cached.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from unisono import __version__
from unisono.api.error_responses import FINAL_STATUSES, NO_RETRY_HEADER
from unisono.api.openapi.answers import ANSWERS
from unisono.api.openapi.models import Schema, ref, schemas_of, to_parameters
from unisono.api.openapi.operations import OPERATIONS, Operation
from unisono.errors import UnisonoError

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
ABOUT = (
    "Paths with `/v1` also work without it. Objects may have more fields than listed here. "
    "In a request, such fields have no effect, and the answer contains a note on each."
)
KEYS: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]

HEADERS: dict[str, Schema] = {
    "x-request-id": {"description": "Id of the request in logs and recordings.", "schema": {"type": "string"}},
    "x-unisono-backend": {"description": "Names of the deployments that answered.", "schema": {"type": "string"}},
    "x-unisono-model": {"description": "The requested model, after aliases.", "schema": {"type": "string"}},
    "x-unisono-served-model": {"description": "The model that answered.", "schema": {"type": "string"}},
    "x-unisono-failovers": {"description": "Number of failovers to another deployment.", "schema": {"type": "integer"}},
    "x-unisono-recoveries": {
        "description": "Recovery rules applied to the output; not sent with streams.",
        "schema": {"type": "string"},
    },
    "retry-after": {"description": "Seconds to wait before the next attempt.", "schema": {"type": "integer"}},
    "www-authenticate": {"schema": {"type": "string"}},
    NO_RETRY_HEADER[0]: {
        "description": "`false` if the client should not repeat the request.",
        "schema": {"type": "string"},
    },
}
# Schema names of errors, by format.
FAILURES = {"Failure": "Error", "MessagesFailure": "MessagesError"}
# Parameters of a path.
NAMED = re.compile(r"{(\w+)}")
ANSWER_HEADERS = (
    "x-unisono-backend",
    "x-unisono-model",
    "x-unisono-served-model",
    "x-unisono-failovers",
    "x-unisono-recoveries",
)
# Headers of errors, by status. After tools have run, `retry-after` is absent.
WITH_FAILURE = {
    **dict.fromkeys(FINAL_STATUSES, (NO_RETRY_HEADER[0],)),
    401: ("www-authenticate", NO_RETRY_HEADER[0]),
    429: ("retry-after",),
    503: ("retry-after",),
}


@cache
def document() -> dict[str, Any]:
    """Return the document, which must not be modified."""
    rows = [(tag, operation) for tag, operations in OPERATIONS.items() for operation in operations]
    requests = schemas_of(list(dict.fromkeys(each.body for _, each in rows if each.body is not None)))
    paths: dict[str, Any] = {}
    for tag, operation in rows:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(tag, operation, requests)
    used = sorted({(operation.failure, status) for _, operation in rows for status in operation.failures})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Unisono", "version": __version__, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": {**requests, **ANSWERS},
            "responses": {f"{kind}{status}": _failure(kind, status) for kind, status in used},
            "headers": HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(tag: str, operation: Operation, requests: dict[str, Schema]) -> Schema:
    made: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [tag],
        "security": KEYS if operation.needs_key else [],
    }
    if parameters := list(_parameters(operation)):
        made["parameters"] = parameters
    if operation.body is not None:
        schema = _body(operation.body.__name__, operation.fields, requests)
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    made["responses"] = {"200": _answer(operation)}
    if operation.unready:
        made["responses"]["503"] = {**_answer(operation), "description": "No model is ready."}
    for status in sorted(operation.failures):
        made["responses"][str(status)] = {"$ref": f"#/components/responses/{operation.failure}{status}"}
    return made


def _body(name: str, fields: frozenset[str] | None, requests: dict[str, Schema]) -> Schema:
    if fields is None:
        return ref(name)
    whole = requests[name]
    properties = {field: schema for field, schema in whole["properties"].items() if field in fields}
    return {**whole, "properties": properties}


def _parameters(operation: Operation) -> Iterator[Schema]:
    for name in NAMED.findall(operation.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    if operation.query is not None:
        yield from to_parameters(operation.query)
    yield from operation.parameters


def _answer(operation: Operation) -> Schema:
    headers = ("x-request-id", *(ANSWER_HEADERS if operation.has_answer_headers else ()))
    content: Schema = {TEXT: {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {JSON: {"schema": ref(operation.answer)}}
    if operation.events is not None:
        # The event schema is for human readers: OpenAPI 3.1 has no field for it.
        content[EVENTS] = {"x-event-schema": ref(operation.events)}
    answer = {"description": "Success.", "headers": _headers(headers), "content": content}
    return {**answer, "links": dict(map(_link, operation.leads_to))} if operation.leads_to else answer


def _link(name: str) -> tuple[str, Schema]:
    """Return a link from an answer's id to the first path parameter of another operation."""
    [path] = [each.path for operations in OPERATIONS.values() for each in operations if each.name == name]
    [parameter, *_] = NAMED.findall(path)
    return name, {"operationId": name, "parameters": {parameter: "$response.body#/id"}}


def _failure(kind: str, status: int) -> Schema:
    return {
        "description": f"One of these codes: {', '.join(_codes(status))}.",
        "headers": _headers(("x-request-id", *WITH_FAILURE.get(status, ()))),
        "content": {JSON: {"schema": ref(FAILURES[kind])}},
    }


def _headers(names: tuple[str, ...]) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _codes(status: int) -> list[str]:
    return sorted({kind.code for kind in _kinds(UnisonoError) if kind.status == status})


def _kinds(root: type[UnisonoError]) -> Iterator[type[UnisonoError]]:
    """Yield all error classes of the gateway, without those added by hooks."""
    for kind in root.__subclasses__():
        if kind.__module__ == root.__module__:
            yield kind
            yield from _kinds(kind)
