"""Arguments of server tools: what is sent, what is not and why, and which calls are equal."""

from __future__ import annotations

import json

import pytest

from unisono.core.json_syntax import MAX_LEVELS, leaf_tokens, levels
from unisono.core.tool_arguments import MAX_MEMBER_LEVELS, read_arguments

DIGITS = "7" * 5_000


def nested(depth: int, inner: str = "1") -> str:
    return '{"a":' * depth + inner + "}" * depth


@pytest.mark.parametrize(
    ("text", "sent"),
    {
        "nothing": ("", "{}"),
        "blanks": (" \n", "{}"),
        "blanks around": (' {"a": 1} ', '{"a": 1}'),
        "long integer": (f'{{"a":-{DIGITS}}}', None),
        "exact float": ('{"a":0.1000000000000000055511151231257827}', None),
        "the deepest": (nested(MAX_LEVELS), None),
        "brackets in a string": (json.dumps({"a": "[{" * MAX_LEVELS}), None),
    }.values(),
)
def test_an_object_is_sent_as_it_is_written(text: str, sent: str | None) -> None:
    arguments = read_arguments("f", text)
    assert (arguments.text, arguments.problem) == (text if sent is None else sent, "")


@pytest.mark.parametrize(
    ("text", "problem"),
    {
        "no JSON": ("{", "not a JSON object: Expecting property name"),
        "a list": ("[1]", "not a JSON object but another JSON value"),
        "not a number": ('{"a":-Infinity}', "-Infinity is not a JSON number"),
        "out of range": (f'{{"a":1e{DIGITS}}}', "is out of range"),
        "half a pair": ('{"a":"\\uDFFF"}', "\\udfff, which is half of a surrogate pair"),
        "half a pair as it is": ('{"a":"\ud800"}', "\\ud800, which is half of a surrogate pair"),
        "too deep": (nested(MAX_LEVELS + 1), "nested deeper than 10,000 levels"),
        "too deep and no JSON": ("[" * (MAX_LEVELS + 1), "nested deeper than 10,000 levels"),
        "deep and no object": ("[" * 3_000 + "]" * 3_000, "not a JSON object"),
        "deep and not closed": ('{"a":' * 3_000, "not a JSON object"),
        "deep, out of range": (nested(3_000, "-1e400"), "-1e400 is out of range"),
        "deep, half a pair": (nested(3_000, '"\\ud800"'), "half of a surrogate pair"),
        "deep, half a pair in a name": (nested(3_000, '{"\\ud800" : 1}'), "half of a surrogate pair"),
        "deep, not a number": (nested(3_000, "NaN"), "not a JSON object"),
    }.values(),
)
def test_what_cannot_be_sent_names_its_cause(text: str, problem: str) -> None:
    arguments = read_arguments("f", text)
    assert problem in arguments.problem
    assert len(arguments.problem) < 200
    assert (arguments.text, dict(arguments.members)) == ("{}", {})


def test_members_are_those_that_python_can_represent() -> None:
    assert read_arguments("f", f'{{"a":{DIGITS},"b":[1,2.5]}}').members == {"a": None, "b": [1, 2.5]}
    assert read_arguments("f", nested(MAX_MEMBER_LEVELS)).members
    assert read_arguments("f", nested(MAX_MEMBER_LEVELS + 1)).members == {}


def test_equal_arguments_have_one_digest_however_they_are_spelled() -> None:
    one = read_arguments("f", '{"a":1.0,"b":"\\u00e4"}').digest
    assert read_arguments("f", '{ "b": "ä", "a": 1.00 }').digest == one
    assert read_arguments("g", '{"a":1.0,"b":"ä"}').digest != one
    long = [read_arguments("f", f'{{"a":{digits}}}').digest for digits in (DIGITS, DIGITS, DIGITS + "1")]
    assert long[0] == long[1] != long[2]
    deep = [read_arguments("f", nested(3_000, inner)).digest for inner in ("1", "1", "2")]
    assert deep[0] == deep[1] != deep[2]


@pytest.mark.parametrize(
    ("text", "code"),
    {
        "code": ("print(1)", "print(1)"),
        "wrapped": ('{"code":"print(1)"}', "print(1)"),
        "an object": ('{"a": 1}', '{"a": 1}'),
        "a deep object": (nested(3_000), nested(3_000)),
        "a deeper one": (nested(MAX_LEVELS + 1), nested(MAX_LEVELS + 1)),
    }.values(),
)
def test_every_text_is_code_to_python(text: str, code: str) -> None:
    arguments = read_arguments("python", text)
    assert (arguments.members, json.loads(arguments.text), arguments.problem) == ({"code": code}, {"code": code}, "")


def test_code_with_half_a_character_is_not_sent() -> None:
    assert "half of a surrogate pair" in read_arguments("python", "print('\ud800')").problem


def test_levels_and_leaves_are_those_outside_of_strings() -> None:
    text = '{"[" : ["{", 1.5, {"a\\"":true}], "b":"]"}'
    assert levels(text) == 3
    assert list(leaf_tokens(text)) == ['"["', '"{"', "1.5", '"a\\""', "true", '"b"', '"]"']
    assert levels("[" * 200_000) == MAX_LEVELS + 1
