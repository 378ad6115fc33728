"""FastAPI dependencies of endpoints: objects of the application, bodies and callers.

This module is imported with the routes that need FastAPI, at the first request to such a route.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

from fastapi import Depends, Path
from pydantic import BaseModel
from starlette.requests import Request

from unisono.api.body import off_loop, read_json
from unisono.api.field_types import shortened
from unisono.api.route_table import GatewayRoute, dependency
from unisono.core.access import Caller
from unisono.errors import UnsupportedValue

# Values with which an unknown query parameter is accepted, because they request nothing. LiteLLM's clients send
# parameters with such values in every request.
NEUTRAL_PARAMETERS: Final = frozenset({"", "false", "False", "0", "null", "None"})

Kind = TypeVar("Kind")
Model = TypeVar("Model", bound=BaseModel)

# No operation accepts an empty id.
PathId = Annotated[str, Path(json_schema_extra={"minLength": 1})]


def provided(kind: type[Kind]) -> Any:
    """Return a FastAPI dependency that finds the `kind` object that `provide` has registered."""

    async def find(request: Request) -> Kind:
        return dependency(request, kind)

    return Depends(find)


async def _parsed_body(request: Request) -> BaseModel:
    """Parse the body of a request as the model that the route declares.

    If the body is optional, a missing body is read as an empty object. Raises the errors of `read_json`, and Pydantic's
    ValidationError. FastAPI's own parsing has none of the limits of `read_json`, and validates large bodies on the
    event loop.
    """
    route: GatewayRoute = request.scope["route"]
    body = {} if route.has_optional_body and not await request.body() else await read_json(request)
    return await off_loop(lambda: route.body_model.model_validate(body), len(await request.body()))


# Body of a request. The model must be the one that the route declares with `body`.
ParsedBody = Annotated[Model, Depends(_parsed_body)]


async def check_query(request: Request) -> None:
    """Raise UnsupportedValue for unknown and repeated query parameters.

    If the gateway ignored an unknown filter, the response would contain more than the client asked for.
    """
    known: frozenset[str] = request.scope["route"].query_parameters
    sent = request.query_params.multi_items()
    for name, value in sent:
        if name not in known and value not in NEUTRAL_PARAMETERS:
            others = f"accepts only {', '.join(sorted(known))}" if known else "accepts no query parameters"
            raise UnsupportedValue(
                f"'{shortened(name)}': unknown query parameter; this route {others}.", param=shortened(name)
            )
        if name in known and request.query_params.getlist(name) != [value]:
            raise UnsupportedValue(f"'{name}': send this query parameter once.", param=name)


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


CurrentCaller = Annotated[Caller, Depends(_caller)]
