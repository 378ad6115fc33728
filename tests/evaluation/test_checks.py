"""Checks of answers against expectations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unisono.evaluation.cases import Case, Expected, ExpectedCall, bundled_cases
from unisono.evaluation.checks import fault_of, is_accepted

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def case(**expected: Any) -> Case:
    return Case("s", "c", {"messages": [], "tools": TOOLS}, Expected(**expected))


def called(*calls: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    written = [{"function": {"name": name, "arguments": json.dumps(value)}} for name, value in calls]
    return {"content": None, "tool_calls": written, **fields}


TWO = (ExpectedCall("f", {"a": [1]}), ExpectedCall("f", {"a": [2, 3], "b": ["", "x"]}))

FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "both calls in any order": ({"calls": TWO}, called(("f", {"a": 3, "b": "X"}), ("f", {"a": 1})), ""),
    "a call too few": ({"calls": TWO}, called(("f", {"a": 1})), "1 calls instead of 2: f"),
    "a wrong value": ({"calls": TWO}, called(("f", {"a": 1}), ("f", {"a": 4})), "f: a is 4"),
    "another tool": ({"calls": TWO[:1]}, called(("g", {"a": 1})), "no call of f"),
    "a missing argument": ({"calls": TWO[:1]}, called(("f", {})), "f lacks a"),
    "an unexpected argument": ({"calls": TWO[:1]}, called(("f", {"a": 1, "z": 1})), "f has an unexpected argument z"),
    "a forbidden call": ({"calls": ()}, called(("f", {})), "1 calls instead of 0: f"),
    "an undeclared tool": ({}, called(("h", {})), "calls h, which is not declared"),
    "arguments that are a list": ({}, called(("f", [1])), "the arguments of f are not a JSON object: [1]"),
    "special tokens": ({}, {"content": "a<|end|>"}, "the text contains special tokens of Harmony"),
    "a refusal": ({}, {"content": None, "refusal": "no"}, "refused: no"),
    "the text": ({"text": "blue"}, {"content": "Light BLUE."}, ""),
    "another text": ({"text": "blue"}, {"content": "red"}, "the text is 'red'"),
    "valid JSON": ({"schema": SCHEMA}, {"content": '{"n": 1}'}, ""),
    "invalid JSON": ({"schema": SCHEMA}, {"content": '{"n": "x"}'}, '$.n must be of type integer, not "x".'),
    "something else than JSON": ({"schema": SCHEMA}, {"content": "n = 1"}, "the text is not JSON: n = 1"),
    "no reasoning": ({"has_reasoning": True}, {"content": "1"}, "no reasoning"),
    "reasoning": ({"has_reasoning": True}, {"content": "1", "reasoning_content": "Hm."}, ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    expected, message, fault = FAULTS[name]
    assert fault_of(case(**expected), message) == fault


@pytest.mark.parametrize(
    ("value", "accepted", "is_equal"),
    [
        ("New York", ["new-york"], True),
        ("New York", ["York"], False),
        (5, [5.0], True),
        (True, [1], False),
        (1, [True], False),
        ("5", [5], False),
        ([1, "A"], [[1, "a"]], True),
        ([1], [[1, 2]], False),
        ({"a": 1}, [{"a": [1, 2], "b": ["", 3]}], True),
        ({"a": 1, "c": 1}, [{"a": [1]}], False),
        ({}, [{"a": [1]}], False),
        (None, [None], True),
    ],
)
def test_accepted_values(value: Any, accepted: list[Any], is_equal: bool) -> None:
    assert is_accepted(value, accepted) is is_equal


# A correct and a wrong text for each case with an expected text.
TEXTS: dict[str, tuple[str, str]] = {
    "no-call-for-greeting": ("Good morning!", "!"),
    "no-call-for-knowledge": ("Paris.", "Rome."),
    "no-call-with-choice-none": ("I cannot look.", ""),
    "answer-from-tool-result": ("It is -7 °C.", "It is 27 °C."),
    "two-results-in-order": ("Rome", "Paris"),
    "injection-in-result": ("14 degrees", "99 degrees"),
    "injection-in-question": ("It begins the final answer.", ""),
    "json-flat": ('{"name": "Ada Lovelace", "age": 36}', '{"name": "Ada Lovelace", "age": 37}'),
    "json-enum": ('{"sentiment": "positive"}', '{"sentiment": "negative"}'),
    "json-list": (
        '{"items": [{"name": "lemon", "amount": 2}, {"name": "melon", "amount": 1}, {"name": "fig", "amount": 5}]}',
        '{"items": [{"name": "fig", "amount": 5}]}',
    ),
    "json-nested": (
        '{"title": "Pride", "author": {"first": "Jane", "last": "Austen"}, "year": 1813}',
        '{"title": "Pride", "author": "Jane Austen", "year": 1813}',
    ),
    "json-object": ('{"answer": 42}', "42"),
    "one-word": ("Blue.", "The sky is blue."),
    "arithmetic": ("17:25", "16:85"),
    "reasoning-is-separate": ("391", "392"),
    "system-instruction": ("ROME.", "Rome."),
    "memory-of-turns": ("Rex", "Max"),
    "stop-string": ("1, 2, 3, 4, ", ""),
}


def test_bundled_cases_can_be_solved() -> None:
    """Every case accepts a correct answer, and refuses a wrong text."""
    cases = bundled_cases()
    assert len({each.id for each in cases}) == len(cases) == 34
    for each in cases:
        calls = [
            (call.name, {name: _whole(values[0]) for name, values in call.arguments.items() if values[0] != ""})
            for call in each.expected.calls or ()
        ]
        right, wrong = TEXTS.get(each.id, ("", None))
        answer = called(*calls, content=right, reasoning_content="Hm.")
        assert fault_of(each, answer) == "", each.id
        if wrong is not None:
            assert fault_of(each, {**answer, "content": wrong}), each.id
    checked = {each.id for each in cases if each.expected.text or each.expected.schema}
    assert checked == TEXTS.keys()


def test_calls_are_paired_as_a_whole() -> None:
    """The first expected call also fits the call that only the second one fits."""
    expected = (ExpectedCall("f", {"a": [1, 2]}), ExpectedCall("f", {"a": [1]}))
    assert fault_of(case(calls=expected), called(("f", {"a": 1}), ("f", {"a": 2}))) == ""
    assert fault_of(case(calls=expected), called(("f", {"a": 2}), ("f", {"a": 2}))) == "f: a is 2"
    same = (ExpectedCall("f", {"a": [1]}), ExpectedCall("f", {"a": [1]}))
    assert "matched by the same call only" in fault_of(case(calls=same), called(("f", {"a": 1}), ("f", {"a": 3})))


def test_exact_texts_are_compared_exactly() -> None:
    expected = {"calls": (ExpectedCall("f", {"a": ["It's a-b"]}),), "is_exact": True}
    assert fault_of(case(**expected), called(("f", {"a": "It's a-b"}))) == ""
    assert fault_of(case(**expected), called(("f", {"a": "its ab"})))


def _whole(value: Any) -> Any:
    return {name: _whole(values[0]) for name, values in value.items()} if isinstance(value, dict) else value
