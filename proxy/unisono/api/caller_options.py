"""Request options that are added to the request's Caller: guardrails and routing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from starlette.requests import HTTPConnection, Request

from unisono.api.request_headers import request_headers
from unisono.api.routing_fields import ROUTING_FIELDS, TAG_HEADER, TAG_OBJECTS, RoutingFields
from unisono.api.unused_fields import HEADER_NOTES
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.route_protocol import DEPLOYMENT_HEADER
from unisono.errors import InvalidRequest

# Takes the caller, the id of an end user, and the request field with this id. Returns the caller with the end user's
# limits. Raises NotAllowed if the end user is blocked.
ApplyEndUser: TypeAlias = Callable[[Caller, str, str], Awaitable[Caller]]


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Operator's rules for all requests to models.

    If `needs_user` is True, a request must name its end user. `guardrails` are the names of the guardrails that a
    request may select. `routing` reads the routing fields of a request. `apply_end_user` adds the limits of an end user
    to the caller; if it is None, end users have no limits.
    """

    needs_user: bool = False
    guardrails: frozenset[str] = frozenset()
    routing: RoutingFields = field(default_factory=RoutingFields)
    apply_end_user: ApplyEndUser | None = None


NO_RULES: Final = RequestRules()
# Request field with the names of guardrails.
GUARDRAILS: Final = "guardrails"
# Fields that may contain an option.
OPTION_FIELDS: Final = ROUTING_FIELDS | {GUARDRAILS, *TAG_OBJECTS}
# Names of the routing headers as ASGI gives them, and the values of a missing header.
_TAG_HEADER_BYTES: Final = TAG_HEADER.lower().encode()
_DEPLOYMENT_HEADER_BYTES: Final = DEPLOYMENT_HEADER.lower().encode()
_OPTION_HEADERS: Final = frozenset((_TAG_HEADER_BYTES, _DEPLOYMENT_HEADER_BYTES))
_NO_VALUES: Final = ("",)
# Key of the rules in the request's state.
RULES: Final = "request_rules"
# Key of the requested model in the request's state.
REQUESTED_MODEL: Final = "requested_model"


def with_options(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Move the guardrails and routing options of a body to the caller in the request's state.

    Returns the body without these options, and stores the requested model in the state. Raises the errors of
    `caller_with_options`.
    """
    state = state_of(request)
    # Nearly all requests have no options.
    has_options = not (OPTION_FIELDS.isdisjoint(body) and _OPTION_HEADERS.isdisjoint(request_headers(request.scope)))
    if has_options:
        state["caller"] = caller_with_options(request, state["caller"], body)
    if isinstance(model := body.get("model"), str):
        state[REQUESTED_MODEL] = model
    return without_options(request, body) if has_options else body


def without_options(connection: HTTPConnection, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body without the fields that `caller_with_options` reads."""
    rest = {name: value for name, value in body.items() if name != GUARDRAILS} if GUARDRAILS in body else body
    for name in TAG_OBJECTS:
        if isinstance(inner := rest.get(name), dict) and GUARDRAILS in inner:
            left = {key: value for key, value in inner.items() if key != GUARDRAILS}
            rest = {**rest, name: left or None}
    return _rules_of(connection).routing.without(rest)


def caller_with_options(connection: HTTPConnection, caller: Caller, body: Mapping[str, Any]) -> Caller:
    """Return the caller with the guardrails and routing options of a request's body and headers.

    Raises InvalidRequest for an unknown guardrail and for an invalid routing option. The error names the field.
    """
    rules, headers = _rules_of(connection), request_headers(connection.scope)
    tags = headers.get(_TAG_HEADER_BYTES, _NO_VALUES)[0]
    if tags and not rules.routing.filters_tags:
        state_of(connection)[HEADER_NOTES] = (f"{TAG_HEADER}: no effect",)
    deployment = unquote(headers.get(_DEPLOYMENT_HEADER_BYTES, _NO_VALUES)[0])
    routing = rules.routing.read(body, caller, tags, deployment)
    if routing != caller.routing:
        caller = replace(caller, routing=routing)
    names = frozenset(_guardrails(body, rules.guardrails))
    return replace(caller, guardrails=names) if names else caller


def _guardrails(body: Mapping[str, Any], known: Collection[str]) -> Iterator[str]:
    """Yield the guardrails named in a body, at the top level or in an object such as `metadata`.

    Raises InvalidRequest for a value that is not a list of strings, and for a name that is not in `known`.
    """
    objects = [("", body)]
    for name in TAG_OBJECTS:
        if isinstance(inner := body.get(name), dict):
            objects.append((f"{name}.", inner))
    for prefix, values in objects:
        path, names = f"{prefix}{GUARDRAILS}", values.get(GUARDRAILS)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidRequest(f"Invalid value for '{path}': must be a list of names.", param=path)
        for name in names:
            if name not in known:
                raise InvalidRequest(
                    f"'{path}': this gateway has no guardrail '{name[:64]}'. Remove it, or ask the operator to add it.",
                    param=path,
                )
            yield name


def _rules_of(connection: HTTPConnection) -> RequestRules:
    rules: RequestRules = state_of(connection).get(RULES, NO_RULES)
    return rules


def state_of(connection: HTTPConnection) -> dict[str, Any]:
    """Return the state of a request as a dict. `connection.state` gives access as attributes."""
    state: dict[str, Any] = connection.scope.setdefault("state", {})
    return state
