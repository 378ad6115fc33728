"""LiteLLM's request fields for routing, and the header that selects a deployment.

The fields are read before the body is validated, and removed from it. A pass-through backend therefore never sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from unisono.api.field_types import REFUSALS, shortened
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.route_protocol import DEPLOYMENT_HEADER, RequestedRouting
from unisono.errors import InvalidRequest, NotAllowed, UnisonoError, UnknownModel, UnsupportedValue

# Maximum number of fallbacks, as in LiteLLM. Each fallback may take as long as the model itself.
MAX_FALLBACKS: Final = 5
MAX_RETRIES: Final = 10
MAX_TAGS: Final = 16
MAX_TAG_LENGTH: Final = 128
MAX_MODEL_LENGTH: Final = 256

# `max_retries` is LiteLLM's second name for `num_retries`. If both are set, `num_retries` applies.
RETRY_FIELDS: Final = ("num_retries", "max_retries")
FIELDS: Final = frozenset({"fallbacks", "disable_fallbacks", *RETRY_FIELDS})
# All top-level fields that are read here, except the objects of `TAG_OBJECTS`.
ROUTING_FIELDS: Final = FIELDS | {"tags", "mock_response"}
# Objects in which LiteLLM accepts `tags` too.
TAG_OBJECTS: Final = ("metadata", "litellm_metadata")
TAG_HEADER: Final = "x-litellm-tags"

# Takes the name of a fallback, the name of the requested model, and the caller. Returns the model group of the
# fallback. Raises an error if the fallback is unknown, forbidden to the caller, or unsuitable for the requested model.
FindFallback: TypeAlias = Callable[[str, str, Caller], str]


def _no_fallback(name: str, _model: str, _caller: Caller) -> str:
    raise UnknownModel(f"The model `{name}` does not exist.")


@dataclass(frozen=True, slots=True)
class RoutingFields:
    """Reader of the routing fields. Tags select deployments only if `filters_tags` is True."""

    find_fallback: FindFallback = _no_fallback
    filters_tags: bool = False

    def read(self, body: Mapping[str, Any], caller: Caller, tags: str = "", deployment: str = "") -> RequestedRouting:
        """Return the routing that a body and the headers ask for.

        `tags` is the value of the header that adds tags, separated by commas. `deployment` is the value of the header
        that selects a deployment. Raises InvalidRequest for an invalid field, NotAllowed if `deployment` is set by a
        caller who is not an admin, and the errors of `find_fallback`. Each error names the field or header.
        """
        if body.get("mock_response") is not None:
            raise UnsupportedValue(
                f"Invalid value for 'mock_response': {REFUSALS['mock_response']}", param="mock_response"
            )
        # Only the operator may bypass the selection of a deployment.
        if deployment and not caller.is_operator:
            raise NotAllowed(
                f"'{DEPLOYMENT_HEADER}': only an admin may select a deployment; remove this header.",
                param=DEPLOYMENT_HEADER,
            )
        has_none = _flag(body, "disable_fallbacks")
        fallbacks = self._fallbacks(body, caller)
        retries = [_retries(body[field], field) for field in RETRY_FIELDS if body.get(field) is not None]
        return RequestedRouting(
            fallbacks=fallbacks,
            no_fallbacks=has_none,
            num_retries=next(iter(retries), None),
            tags=tuple(dict.fromkeys(_tags(body, tags))) if self.filters_tags else (),
            deployment=deployment,
            model=model[:MAX_MODEL_LENGTH] if isinstance(model := body.get("model"), str) else "",
        )

    def without(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body without the routing fields that `read` reads."""
        removed = FIELDS | {"tags"} if self.filters_tags else FIELDS
        if self.filters_tags:
            for name in TAG_OBJECTS:
                if isinstance(inner := body.get(name), Mapping) and "tags" in inner:
                    rest = {key: value for key, value in inner.items() if key != "tags"}
                    body = {**body, name: rest or None}
        return body if removed.isdisjoint(body) else {key: value for key, value in body.items() if key not in removed}

    def _fallbacks(self, body: Mapping[str, Any], caller: Caller) -> tuple[str, ...] | None:
        value, model = body.get("fallbacks"), body.get("model")
        if value is None:
            return None
        replaced = model if isinstance(model, str) else ""
        if not isinstance(value, list):
            raise _invalid("fallbacks", "must be a list of model names")
        if len(value) > MAX_FALLBACKS:
            raise _invalid("fallbacks", f"must have at most {MAX_FALLBACKS} models")
        return tuple(
            dict.fromkeys(
                self._fallback(each, f"fallbacks.{index}", replaced, caller) for index, each in enumerate(value)
            )
        )

    def _fallback(self, value: Any, path: str, model: str, caller: Caller) -> str:
        """Return the model group of one fallback for the requested model `model`.

        `value` must be the name of a model, or an object that contains only the field `model`. `path` is the path of
        `value` in the request, for errors.
        """
        if isinstance(value, dict):
            for name in value:
                if name != "model":
                    path = f"{path}.{shortened(name)}"
                    raise UnsupportedValue(
                        f"Invalid value for '{path}': a fallback changes only the model; remove this field", param=path
                    )
            path, value = f"{path}.model", value.get("model")
        if not isinstance(value, str) or not 0 < len(value) <= MAX_MODEL_LENGTH:
            raise _invalid(path, "must be the name of a model")
        try:
            return self.find_fallback(value, model, caller)
        except UnisonoError as error:
            error.param = path
            raise


def chosen_fields(routing: RequestedRouting, body: Mapping[str, Any]) -> list[str]:
    """Return the paths of the routing fields and headers that a request sets.

    `body` is the original body of the request.
    """
    values = {
        "fallbacks": routing.fallbacks is not None,
        "disable_fallbacks": routing.no_fallbacks,
        next((field for field in RETRY_FIELDS if body.get(field) is not None), ""): routing.num_retries is not None,
        path_of("tags", body) or TAG_HEADER: bool(routing.tags),
        DEPLOYMENT_HEADER: bool(routing.deployment),
    }
    return [path for path, is_chosen in values.items() if is_chosen]


def path_of(field: str, body: Mapping[str, Any]) -> str:
    """Return the path of a list in the body or in an object of `TAG_OBJECTS`.

    The path is empty if the list is missing or empty.
    """
    if body.get(field):
        return field
    objects = ((name, body.get(name)) for name in TAG_OBJECTS)
    return next((f"{name}.{field}" for name, inner in objects if isinstance(inner, Mapping) and inner.get(field)), "")


def _flag(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise _invalid(field, "must be true or false")
    return value is True


def _retries(value: Any, field: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_RETRIES:
        raise _invalid(field, f"must be a whole number from 0 to {MAX_RETRIES}")
    return value


def _tags(body: Mapping[str, Any], header: str) -> Iterator[str]:
    """Yield the tags of a body and of the header. Raises InvalidRequest for invalid tags."""
    found = [("tags", body.get("tags")), (TAG_HEADER, [tag.strip() for tag in header.split(",") if tag.strip()])]
    for name in TAG_OBJECTS:
        if isinstance(inner := body.get(name), Mapping):
            found.append((f"{name}.tags", inner.get("tags")))
    for path, value in found:
        if value is None:
            continue
        if not isinstance(value, list) or len(value) > MAX_TAGS:
            raise _invalid(path, f"must be a list of at most {MAX_TAGS} strings")
        for index, tag in enumerate(value):
            if not isinstance(tag, str) or not 0 < len(tag) <= MAX_TAG_LENGTH:
                raise _invalid(f"{path}.{index}", f"must be a string of 1 to {MAX_TAG_LENGTH} characters")
            yield tag


def _invalid(path: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{path}': {reason}", param=path)
