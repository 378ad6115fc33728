"""LiteLLM's fields for routing: every value is in effect or an error that names its field."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.api.routing_fields import MAX_FALLBACKS, MAX_RETRIES, MAX_TAGS, RoutingFields
from unisono.core.access import Caller
from unisono.core.route_protocol import NO_ROUTING, RequestedRouting
from unisono.errors import InvalidRequest, ModelNotAllowed, UnisonoError, UnknownModel

CALLER = Caller("t")
GROUPS = {"a": "a", "b": "b", "alias of a": "a"}


def find(name: str, _: str, caller: Caller) -> str:
    if name == "forbidden":
        raise ModelNotAllowed("This key may not use the model.", param="model")
    if name not in GROUPS:
        raise UnknownModel("The model does not exist.", param="model")
    return GROUPS[name]


FIELDS = RoutingFields(find, filters_tags=True)

READ: dict[str, tuple[dict[str, Any], RequestedRouting]] = {
    "nothing": ({}, NO_ROUTING),
    "null": (dict.fromkeys(("fallbacks", "disable_fallbacks", "num_retries", "max_retries", "tags")), NO_ROUTING),
    "names": ({"fallbacks": ["b", "a"]}, RequestedRouting(fallbacks=("b", "a"))),
    "objects": ({"fallbacks": [{"model": "b"}, "a"]}, RequestedRouting(fallbacks=("b", "a"))),
    "aliases and repetitions": ({"fallbacks": ["alias of a", "a", "b"]}, RequestedRouting(fallbacks=("a", "b"))),
    "no fallbacks": ({"fallbacks": []}, RequestedRouting(fallbacks=())),
    "disabled": ({"disable_fallbacks": True}, RequestedRouting(no_fallbacks=True)),
    "not disabled": ({"disable_fallbacks": False}, NO_ROUTING),
    "no retries": ({"num_retries": 0}, RequestedRouting(num_retries=0)),
    "retries": ({"num_retries": MAX_RETRIES}, RequestedRouting(num_retries=MAX_RETRIES)),
    "the other name": ({"max_retries": 0}, RequestedRouting(num_retries=0)),
    "both names": ({"max_retries": 1, "num_retries": 3}, RequestedRouting(num_retries=3)),
    "tags": ({"tags": ["x", "y", "x"]}, RequestedRouting(tags=("x", "y"))),
    "no tags": ({"tags": []}, NO_ROUTING),
    "tags in metadata": (
        {"tags": ["x"], "metadata": {"tags": ["y"]}, "litellm_metadata": {"tags": ["z"]}},
        RequestedRouting(tags=("x", "y", "z")),
    ),
}


@pytest.mark.parametrize(("body", "expected"), READ.values(), ids=READ)
def test_fields_are_read_and_removed(body: dict[str, Any], expected: RequestedRouting) -> None:
    assert FIELDS.read(body, CALLER) == expected
    assert FIELDS.without({"model": "m", **body}).keys() <= {"model", "metadata", "litellm_metadata"}


def test_other_metadata_stays() -> None:
    body = {"metadata": {"tags": ["x"], "user_id": "u"}, "litellm_metadata": {"tags": []}}
    assert FIELDS.without(body) == {"metadata": {"user_id": "u"}, "litellm_metadata": None}
    assert FIELDS.without(body := {"metadata": {"user_id": "u"}, "user": "u"}) is body


def test_tags_that_select_nothing_stay_for_the_notes() -> None:
    body = {"tags": ["x"], "metadata": {"tags": 5}}
    unfiltered = RoutingFields(find)
    assert unfiltered.read(body, CALLER) == NO_ROUTING
    assert unfiltered.without(body) is body


INVALID: dict[str, tuple[dict[str, Any], str, int]] = {
    "text": ({"fallbacks": "b"}, "fallbacks", 400),
    "false": ({"fallbacks": False}, "fallbacks", 400),
    "LiteLLM's form of the configuration": ({"fallbacks": [{"a": ["b"]}]}, "fallbacks.0.a", 400),
    "other messages": ({"fallbacks": ["a", {"model": "b", "messages": []}]}, "fallbacks.1.messages", 400),
    "empty object": ({"fallbacks": [{}]}, "fallbacks.0.model", 400),
    "empty name": ({"fallbacks": [""]}, "fallbacks.0", 400),
    "number": ({"fallbacks": [1]}, "fallbacks.0", 400),
    "too many": ({"fallbacks": ["a"] * (MAX_FALLBACKS + 1)}, "fallbacks", 400),
    "unknown model": ({"fallbacks": ["a", "x"]}, "fallbacks.1", 404),
    "forbidden model": ({"fallbacks": [{"model": "forbidden"}]}, "fallbacks.0.model", 403),
    "text for a flag": ({"disable_fallbacks": "true"}, "disable_fallbacks", 400),
    "0 for a flag": ({"disable_fallbacks": 0}, "disable_fallbacks", 400),
    "negative": ({"num_retries": -1}, "num_retries", 400),
    "too often": ({"num_retries": MAX_RETRIES + 1}, "num_retries", 400),
    "fraction": ({"num_retries": 1.0}, "num_retries", 400),
    "boolean": ({"num_retries": False}, "num_retries", 400),
    "text for a number": ({"max_retries": "2"}, "max_retries", 400),
    "tags as text": ({"tags": "x"}, "tags", 400),
    "tags with a number": ({"tags": ["x", 1]}, "tags.1", 400),
    "empty tag": ({"metadata": {"tags": [""]}}, "metadata.tags.0", 400),
    "too many tags": ({"tags": ["x"] * (MAX_TAGS + 1)}, "tags", 400),
    "mock": ({"mock_response": "Hi"}, "mock_response", 400),
    "empty mock": ({"mock_response": ""}, "mock_response", 400),
}


@pytest.mark.parametrize(("body", "param", "status"), INVALID.values(), ids=INVALID)
def test_an_error_names_the_field(body: dict[str, Any], param: str, status: int) -> None:
    with pytest.raises(UnisonoError) as caught:
        FIELDS.read(body, CALLER)
    assert (caught.value.param, caught.value.status) == (param, status)
    assert isinstance(caught.value, InvalidRequest | ModelNotAllowed)
