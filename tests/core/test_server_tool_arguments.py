"""Arguments of server tools: sent and rejected text, and digests of equal calls."""

from __future__ import annotations

import json

import pytest

from unisono.core.json_syntax import MAX_LEVELS, leaf_tokens, levels
from unisono.core.server_tool_arguments import MAX_MEMBER_LEVELS, read_arguments

DIGITS = "7" * 5_000


def nested(depth: int, inner: str = "1") -> str:
    return '{"a":' * depth + inner + "}" * depth


@pytest.mark.parametrize(
    ("text", "sent"),
    {
        "empty": ("", "{}"),
        "blanks": (" \n", "{}"),
        "blanks around": (' {"a": 1} ', '{"a": 1}'),
        "long integer": (f'{{"a":-{DIGITS}}}', None),
        "exact float": ('{"a":0.1000000000000000055511151231257827}', None),
        "deepest nesting": (nested(MAX_LEVELS), None),
        "brackets in a string": (json.dumps({"a": "[{" * MAX_LEVELS}), None),
    }.values(),
)
def test_an_object_is_sent_unchanged(text: str, sent: str | None) -> None:
    arguments = read_arguments("f", text)
    assert (arguments.text, arguments.problem) == (text if sent is None else sent, "")


@pytest.mark.parametrize(
    ("text", "problem"),
    {
        "not JSON": ("{", "not a JSON object: Expecting property name"),
        "a list": ("[1]", "not a JSON object but another JSON value"),
        "not a number": ('{"a":-Infinity}', "-Infinity is not a JSON number"),
        "out of range": (f'{{"a":1e{DIGITS}}}', "is out of range"),
        "escaped lone surrogate": ('{"a":"\\uDFFF"}', "\\udfff, which is half of a surrogate pair"),
        "lone surrogate": ('{"a":"\ud800"}', "\\ud800, which is half of a surrogate pair"),
        "too deep": (nested(MAX_LEVELS + 1), "nested deeper than 10,000 levels"),
        "too deep and not JSON": ("[" * (MAX_LEVELS + 1), "nested deeper than 10,000 levels"),
        "deep and not an object": ("[" * 3_000 + "]" * 3_000, "not a JSON object"),
        "deep and not closed": ('{"a":' * 3_000, "not a JSON object"),
        "deep, out of range": (nested(3_000, "-1e400"), "-1e400 is out of range"),
        "deep, lone surrogate": (nested(3_000, '"\\ud800"'), "half of a surrogate pair"),
        "deep, lone surrogate in a name": (nested(3_000, '{"\\ud800" : 1}'), "half of a surrogate pair"),
        "deep, not a number": (nested(3_000, "NaN"), "not a JSON object"),
    }.values(),
)
def test_invalid_arguments_are_reported_with_their_cause(text: str, problem: str) -> None:
    arguments = read_arguments("f", text)
    assert problem in arguments.problem
    assert len(arguments.problem) < 200
    assert (arguments.text, dict(arguments.members)) == ("{}", {})


def test_members_are_limited_to_values_that_python_can_represent() -> None:
    assert read_arguments("f", f'{{"a":{DIGITS},"b":[1,2.5]}}').members == {"a": None, "b": [1, 2.5]}
    assert read_arguments("f", nested(MAX_MEMBER_LEVELS)).members
    assert read_arguments("f", nested(MAX_MEMBER_LEVELS + 1)).members == {}


def test_the_digest_does_not_depend_on_the_spelling() -> None:
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
        "an object beyond the level limit": (nested(MAX_LEVELS + 1), nested(MAX_LEVELS + 1)),
    }.values(),
)
def test_any_text_is_code_for_the_python_tool(text: str, code: str) -> None:
    arguments = read_arguments("python", text)
    assert (arguments.members, json.loads(arguments.text), arguments.problem) == ({"code": code}, {"code": code}, "")


def test_code_with_a_lone_surrogate_is_rejected() -> None:
    assert "half of a surrogate pair" in read_arguments("python", "print('\ud800')").problem


def test_levels_and_leaves_ignore_brackets_in_strings() -> None:
    text = '{"[" : ["{", 1.5, {"a\\"":true}], "b":"]"}'
    assert levels(text) == 3
    assert list(leaf_tokens(text)) == ['"["', '"{"', "1.5", '"a\\""', "true", '"b"', '"]"']
    assert levels("[" * 200_000) == MAX_LEVELS + 1
