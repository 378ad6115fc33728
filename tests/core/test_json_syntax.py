"""Recognition of JSON with deep nesting and long numbers."""

from __future__ import annotations

import random

import orjson
import pytest

from unisono.api.messages.tool_input import to_arguments, to_json, to_wire
from unisono.core.json_syntax import MAX_LEVELS, _deep_kind, json_kind
from unisono.engine.interventions.policy import BodyFault, fault_of
from unisono.harmony.incomplete_header import is_json_object
from unisono.schemas import violation

DEEP = 3_000
LONG = "9" * 5_000
INTEGER = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 7}}}


@pytest.mark.parametrize(
    ("text", "fault"),
    {
        "long integer": (f'{{"a":{LONG}}}', BodyFault.NONE),
        "long negative integer": (f'{{"a":-{LONG}}}', BodyFault.NONE),
        "deep objects": ('{"a":' * DEEP + "1" + "}" * DEEP, BodyFault.NONE),
        "deep lists in an object": ('{"a":' + "[" * DEEP + "]" * DEEP + "}", BodyFault.NONE),
        "deep list": ("[" * DEEP + "]" * DEEP, BodyFault.BROKEN),
        "deep and not closed": ('{"a":' * DEEP + "1" + "}" * (DEEP - 1), BodyFault.BROKEN),
        "deep and closed twice": ('{"a":' * DEEP + "1" + "}" * (DEEP + 1), BodyFault.BROKEN),
        "deep with the wrong end": ('{"a":' * DEEP + "1" + "]" * DEEP, BodyFault.BROKEN),
        "not a number": ('{"a":NaN}', BodyFault.BROKEN),
    }.values(),
)
def test_objects_are_recognised_beyond_the_limits_of_python(text: str, fault: BodyFault) -> None:
    assert fault_of(text, objects=True) is fault


def test_the_parser_for_deep_json_agrees_with_the_standard_parser() -> None:
    random.seed(5)
    pieces = ["{", "}", "[", "]", ",", ":", '"a"', "1", "-", "0", "1.5e3", "true", " ", '"\x01"', '{"a":', "[1,", "NaN"]
    valid = 0
    for _ in range(20_000):
        text = "".join(random.choices(pieces, k=random.randrange(1, 8)))
        kind = json_kind(text)
        deep = _deep_kind(text)
        assert ((deep is None), (deep is dict)) == ((kind is None), (kind is dict)), text
        valid += kind is not None
    assert valid > 500


def test_long_integers_are_validated_against_the_schema() -> None:
    assert violation(INTEGER, f'{{"a":-{LONG}}}') is None
    assert violation(INTEGER, f'{{"a":{LONG}}}') == "$.a must be at most 7, not a number of more than 60 digits."
    multiple = {"type": "object", "properties": {"a": {"multipleOf": 2}}}
    assert violation(multiple, f'{{"a":{LONG[:-1]}8}}') is None
    assert violation(multiple, f'{{"a":{LONG}}}') is not None


@pytest.mark.parametrize("text", [f'{{"a":{LONG}}}', '{"a":1e999}', '{"a":' * DEEP + "1" + "}" * DEEP])
def test_objects_that_no_request_may_contain_reach_clients_as_text(text: str) -> None:
    assert to_wire(text) == {"unparsed_arguments": text}
    assert orjson.loads(to_json(text)) == to_wire(text)
    assert to_arguments(to_wire(text)) == text
    assert is_json_object(text)


def test_json_beyond_the_limit_of_levels_is_rejected() -> None:
    for levels, kind in ((MAX_LEVELS, list), (MAX_LEVELS + 1, None)):
        assert json_kind("[" * levels + "]" * levels) is kind
