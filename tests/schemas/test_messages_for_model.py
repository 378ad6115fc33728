"""Messages about invalid answers: correct, with the place of the violation, and limited in time."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from time import process_time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from tests.schemas.suite import SUITE, TEXT, Case, closed
from unisono.errors import InvalidRequest
from unisono.schemas import check, violation
from unisono.schemas.keyword_table import KEYWORDS
from unisono.schemas.validation import (
    CHECKS,
    FORMAT_STEPS,
    FRACTION_STEPS,
    MISMATCH_STEPS,
    READ_BY_OTHERS,
    Validator,
)

RIGHT = [pytest.param(case, text, id=f"{name}: {text}") for name, case in SUITE.items() for text in case.right]
WRONG = [
    pytest.param(case, text, word, id=f"{name}: {text}")
    for name, case in SUITE.items()
    for text, word in case.wrong.items()
]


@pytest.mark.parametrize(("case", "text"), RIGHT)
def test_a_valid_answer_has_no_violation(case: Case, text: str) -> None:
    assert violation(case.schema, text) is None


@pytest.mark.parametrize(("case", "text", "word"), WRONG)
def test_a_violation_is_described_with_its_place(case: Case, text: str, word: str) -> None:
    message = violation(case.schema, text)
    assert message is not None
    assert word in message
    assert message.endswith(".")


def test_every_supported_keyword_is_checked() -> None:
    assert KEYWORDS.keys() == CHECKS.keys() | READ_BY_OTHERS


def test_a_message_lists_at_most_five_violations() -> None:
    message = violation(closed(**dict.fromkeys("abcdefgh", TEXT)), '{"a":1,"b":2}')
    assert message is not None
    assert message.count("must") == 5


def test_a_percent_encoded_reference_is_resolved() -> None:
    schema = {"$defs": {"A<b>": {"type": "object"}}, "properties": {"a": {"$ref": "#/$defs/A%3Cb%3E"}}}
    assert violation(schema, '{"a":{}}') is None
    assert "must be of type object" in (violation(schema, '{"a":1}') or "")


def test_a_long_value_is_not_repeated() -> None:
    message = violation({"enum": ["x"]}, json.dumps("secret " * 10_000))
    assert message is not None
    assert len(message) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, "", "a", "x-a", "user", "S", "日本"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "b", "kind", "name", "children", "x-a", "xs", "n", "s"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("case", SUITE.values(), ids=SUITE)
@settings(max_examples=examples(60), deadline=None)
@given(value=JSON)
def test_the_result_equals_that_of_the_reference_library(case: Case, value: Any) -> None:
    reference = jsonschema.Draft202012Validator(case.schema)
    assert (violation(case.schema, json.dumps(value)) is None) is reference.is_valid(value)


def nested(depth: int) -> str:
    return '{"name":"a","children":[' * depth + '{"name":"b","children":[]}' + "]}" * depth


STEPS = 40


def doubling(step: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return a chain of definitions; `step` builds each one from a reference to the next, without recursion."""
    chain = {f"d{n}": step({"$ref": f"#/$defs/d{n + 1}"}) for n in range(STEPS)}
    return {"$defs": {**chain, f"d{STEPS}": TEXT}, "$ref": "#/$defs/d0"}


EXPENSIVE: dict[str, tuple[dict[str, Any], str]] = {
    "backtracking pattern": (
        {"type": "string", "pattern": "^(a+)+$"},
        json.dumps("a" * 100_000 + "b"),
    ),
    "multiplying alternatives": (
        {
            "$defs": {"x": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/x"}}] * 8 + [{"const": 1}]}},
            "$ref": "#/$defs/x",
        },
        "[" * 30 + '"x"' + "]" * 30,
    ),
    "doubling references": (doubling(lambda ref: {"allOf": [ref, ref]}), '"x"'),
    "doubling references below a property": (
        doubling(lambda ref: {"allOf": [{"properties": {"a": ref}}] * 2}),
        '{"a":' * STEPS + '"x"' + "}" * STEPS,
    ),
    "late alternative for every item": (
        {"items": {"anyOf": [{"minLength": 1_000 - n} for n in range(1_000)]}},
        json.dumps(["x"] * 100_000),
    ),
    "unique items": ({"uniqueItems": True}, json.dumps([{"a": [n]} for n in range(60_000)])),
    "long enum": (
        {"items": {"enum": [f"value {n}" for n in range(1_000)]}},
        json.dumps(["no"] * 50_000),
    ),
    "many names and patterns": (
        {"patternProperties": {f"^{n}[a-z]+$": {"type": "null"} for n in range(100)}},
        json.dumps({f"{n}abc": 1 for n in range(20_000)}),
    ),
    "repeatedly compiled patterns": (
        {"items": {"anyOf": [{"pattern": rf"^\\w{n}$"} for n in range(200)]}},
        json.dumps(["abc"] * 1_000),
    ),
    "pattern with many paths": ({"pattern": "[ab]*a[ab]{900}c"}, json.dumps("abbab" * 100_000)),
    "pattern with many paths and a random text": (
        {"pattern": "[ab]*a[ab]{900}c"},
        json.dumps("".join(Random(1).choices("ab", k=990_000))),
    ),
    "too deep": (SUITE["recursive"].schema, nested(40)),
    "too deep to parse": ({}, "[" * 2_000 + "]" * 2_000),
    "too long": ({}, json.dumps("x" * 1_000_001)),
    "very large number": ({"multipleOf": 1e-300}, "1e300"),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("schema", "text"), EXPENSIVE.values(), ids=EXPENSIVE)
def test_expensive_validations_end_in_time(schema: dict[str, Any], text: str) -> None:
    check(schema, "schema")
    started_at = process_time()
    violation(schema, text)
    assert process_time() - started_at < 3.0


# case: (schema, value, number of steps of the validation). An ordinary keyword takes one step.
COSTS: dict[str, tuple[dict[str, Any], Any, int]] = {
    "an ordinary keyword": ({"minLength": 1}, "x", 1),
    "branches that match": ({"allOf": [{"minLength": 1}] * 10}, "x", 11),
    "branches that fail": ({"anyOf": [{"minLength": 2}] * 10}, "x", 1 + 10 * (1 + MISMATCH_STEPS)),
    "a format": ({"format": "uuid"}, "x", 1 + FORMAT_STEPS),
    "a division": ({"multipleOf": 2}, 4, 1 + FRACTION_STEPS),
    "a division of a large integer": ({"multipleOf": 2}, 2**10_000, 1 + FRACTION_STEPS + 10),
}


@pytest.mark.parametrize(("schema", "value", "steps"), COSTS.values(), ids=COSTS)
def test_slow_work_counts_as_several_steps(schema: dict[str, Any], value: Any, steps: int) -> None:
    validator = Validator(schema)
    list(validator.validate(schema, value))
    assert validator._steps == steps


class CountedSchema(dict[str, Any]):
    """Schema that counts the uses of its definitions."""

    uses = 0

    def __getitem__(self, name: str) -> Any:
        self.uses += name == "$defs"
        return super().__getitem__(name)


def test_a_reference_is_resolved_once() -> None:
    schema = CountedSchema({"$defs": {"a": {"minLength": 1}}, "items": {"allOf": [{"$ref": "#/$defs/a"}] * 100}})
    assert list(Validator(schema).validate(schema, ["x"] * 10)) == []
    assert schema.uses == 1


@pytest.mark.slow
def test_exceeded_limits_count_as_violations() -> None:
    schema, text = EXPENSIVE["unique items"]
    assert violation(schema, text) is None
    assert "too large" in str(violation(*EXPENSIVE["multiplying alternatives"]))
    assert "too large" in str(violation(*EXPENSIVE["doubling references"]))
    assert "too deep" in str(violation(*EXPENSIVE["too deep"]))


@given(text=st.text(max_size=40))
def test_no_answer_text_raises(text: str) -> None:
    for case in SUITE.values():
        message = violation(case.schema, text)
        assert message is None or message.endswith(".")


@given(schema=st.dictionaries(st.sampled_from([*KEYWORDS, "title", "x"]), JSON, max_size=4), value=JSON)
@settings(max_examples=examples(300), deadline=None)
def test_no_accepted_schema_raises(schema: dict[str, Any], value: Any) -> None:
    try:
        check(schema, "schema")
    except InvalidRequest:
        return
    violation(schema, json.dumps(value))
