"""Route `GET /openapi.json`: the OpenAPI document that FastAPI generates from the routes.

The route requires a key. The document is generated on the first request. Headers and errors are written by hand:
FastAPI has no components for them and would repeat them in every operation.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from unisono import __version__
from unisono.api.answer_types import AnswerModel, Object
from unisono.api.error_responses import FINAL_STATUSES, NO_RETRY_HEADER
from unisono.api.route_table import GatewayRoute, RouteTable, header_refs
from unisono.errors import UnisonoError

DOCUMENT = RouteTable("gateway", prefixes=("",))
ABOUT = (
    "Paths with `/v1` also work without it. Operations with a model also have the paths of Azure, "
    "`/openai/deployments/{model}/...`, and `/engines/{model}/...`. Objects may have more fields than listed here. "
    "In a request, such fields have no effect, and the answer contains a note on each."
)
Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
HEADERS: dict[str, Schema] = {
    "x-request-id": {"description": "Id of the request in logs and recordings.", "schema": TEXT},
    "x-unisono-backend": {"description": "Names of the deployments that answered, percent-encoded.", "schema": TEXT},
    "x-unisono-model": {"description": "The requested model, after aliases.", "schema": TEXT},
    "x-unisono-served-model": {"description": "The model that answered.", "schema": TEXT},
    "x-unisono-failovers": {"description": "Number of failovers to another deployment.", "schema": {"type": "integer"}},
    "x-unisono-recoveries": {
        "description": "Recovery rules applied to the output; not sent with streams.",
        "schema": TEXT,
    },
    "x-unisono-notes": {"description": "Fields of the request without effect.", "schema": TEXT},
    "retry-after": {"description": "Seconds to wait before the next attempt.", "schema": {"type": "integer"}},
    "www-authenticate": {"schema": TEXT},
    NO_RETRY_HEADER[0]: {"description": "`false` if the client should not repeat the request.", "schema": TEXT},
}
KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "azure": {"type": "apiKey", "in": "header", "name": "api-key"},
}
# Headers of errors, by status. After tools have run, `retry-after` is absent.
WITH_FAILURE = {
    **dict.fromkeys(FINAL_STATUSES, (NO_RETRY_HEADER[0],)),
    401: ("www-authenticate", NO_RETRY_HEADER[0]),
    429: ("retry-after", NO_RETRY_HEADER[0]),
    503: ("retry-after",),
}


def _object(**fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": [*fields]}


# Name and schema of the error body, by error format. An error response is named after its format and status, such as
# `Failure404`.
FAILURES = {
    "Failure": (
        "Error",
        _object(error=_object(message=TEXT, type=TEXT, param={"type": ["string", "null"]}, code=TEXT)),
    ),
    "MessagesFailure": (
        "MessagesError",
        _object(
            type={"const": "error"},
            error=_object(type=TEXT, message=TEXT, details=_object(error_code=TEXT)),
            request_id=TEXT,
        ),
    ),
    "ModelsFailure": (
        "ModelsError",
        {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Error", "MessagesError")]},
    ),
}
# Patterns: a reference to an error response, a reference to a schema, and the qualified name that Pydantic gives to a
# model whose name occurs in several packages.
_FAILURE = re.compile(r'"#/components/responses/([A-Za-z]+)(\d+)"')
_SCHEMA = re.compile(r'"#/components/schemas/([^"]+)"')
_QUALIFIED = re.compile(r"unisono__api__(\w+?)__\w+__(\w+)")


class OpenApiDocument(AnswerModel):
    openapi: str
    info: Object
    paths: Object
    components: Object


@DOCUMENT.add("GET", "/openapi.json", answer=OpenApiDocument)
async def get_document(request: Request) -> Response:
    """Return this document."""
    state = request.app.state
    if not hasattr(state, "document"):
        state.document = orjson.dumps(await asyncio.to_thread(to_document, request.app.router.routes))
    return Response(state.document, media_type="application/json")


def to_document(routes: Sequence[BaseRoute]) -> Schema:
    """Return the document of `routes`."""
    described = [route.described for route in routes if isinstance(route, GatewayRoute) and route.include_in_schema]
    made = get_openapi(title="Unisono", version=__version__, description=ABOUT, routes=described)
    text = _QUALIFIED.sub(lambda found: found[1].capitalize() + found[2], json.dumps(made))
    document: Schema = json.loads(text)
    for operations in document["paths"].values():
        for operation in operations.values():
            # The gateway answers invalid values with 400.
            operation["responses"].pop("422", None)
    components = {name: _tidy(each) for name, each in document["components"].items()}
    components["responses"] = {kind + status: _failure(kind, int(status)) for kind, status in _FAILURE.findall(text)}
    components["schemas"] = _used({**components["schemas"], **dict(FAILURES.values())}, document["paths"], components)
    components.update(headers=HEADERS, securitySchemes=KEY_SCHEMES)
    return {**document, "paths": _tidy(document["paths"]), "components": components}


def _used(schemas: dict[str, Schema], *places: Schema) -> dict[str, Schema]:
    """Return the schemas to which `places` (parts of the document) refer, also indirectly.

    FastAPI also lists types that exist only inside the gateway, such as the types to which fields are converted.
    """
    places = tuple({name: value for name, value in each.items() if name != "schemas"} for each in places)
    found = list(dict.fromkeys(_SCHEMA.findall(json.dumps(places))))
    # The list grows during the iteration, so references within referenced schemas are found too.
    for name in found:
        found += [other for other in _SCHEMA.findall(json.dumps(schemas[name])) if other not in found]
    return {name: schemas[name] for name in sorted(found)}


def _tidy(value: Any) -> Any:
    """Return a schema without titles and null defaults.

    Titles repeat names. A null default marks a field that may be absent.
    """
    if isinstance(value, list):
        return [_tidy(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _tidy(each)
        for name, each in value.items()
        if not (name == "title" and isinstance(each, str)) and not (name == "default" and each is None)
    }


def _failure(kind: str, status: int) -> Schema:
    codes = sorted({each.code for each in _kinds(UnisonoError) if each.status == status})
    return {
        "description": f"One of these codes: {', '.join(codes)}.",
        "headers": header_refs(("x-request-id", *WITH_FAILURE.get(status, ()))),
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{FAILURES[kind][0]}"}}},
    }


def _kinds(root: type[UnisonoError]) -> Iterator[type[UnisonoError]]:
    """Yield all error classes of the gateway, but not the error classes of hooks."""
    for kind in root.__subclasses__():
        if kind.__module__ == root.__module__:
            yield kind
            yield from _kinds(kind)
