"""What is said about answers: right, in words that name the place, and within bounds whatever comes."""

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
from unisono.schemas.keywords import KEYWORDS
from unisono.schemas.validation import CHECKS, READ_BY_OTHERS

RIGHT = [pytest.param(case, text, id=f"{name}: {text}") for name, case in SUITE.items() for text in case.right]
WRONG = [
    pytest.param(case, text, word, id=f"{name}: {text}")
    for name, case in SUITE.items()
    for text, word in case.wrong.items()
]


@pytest.mark.parametrize(("case", "text"), RIGHT)
def test_what_matches_is_not_complained_about(case: Case, text: str) -> None:
    assert violation(case.schema, text) is None


@pytest.mark.parametrize(("case", "text", "word"), WRONG)
def test_what_does_not_match_is_named_with_its_place(case: Case, text: str, word: str) -> None:
    said = violation(case.schema, text)
    assert said is not None
    assert word in said
    assert said.endswith(".")


def test_every_supported_keyword_is_checked() -> None:
    assert KEYWORDS.keys() == CHECKS.keys() | READ_BY_OTHERS


def test_several_faults_are_told_at_once_and_not_too_many() -> None:
    said = violation(closed(**dict.fromkeys("abcdefgh", TEXT)), '{"a":1,"b":2}')
    assert said is not None
    assert said.count("must") == 5


def test_a_long_value_is_not_repeated() -> None:
    said = violation({"enum": ["x"]}, json.dumps("secret " * 10_000))
    assert said is not None
    assert len(said) < 200


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


@pytest.mark.parametrize("case", SUITE.values(), ids=SUITE)
@settings(max_examples=examples(60), deadline=None)
@given(value=JSON)
def test_its_verdict_is_that_of_the_reference_library(case: Case, value: Any) -> None:
    reference = jsonschema.Draft202012Validator(case.schema)
    assert (violation(case.schema, json.dumps(value)) is None) is reference.is_valid(value)


def nested(depth: int) -> str:
    return '{"name":"a","children":[' * depth + '{"name":"b","children":[]}' + "]}" * depth


STEPS = 40


def doubling(step: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A chain of definitions; `step` makes one of a reference to the next. No reference is recursive."""
    chain = {f"d{n}": step({"$ref": f"#/$defs/d{n + 1}"}) for n in range(STEPS)}
    return {"$defs": {**chain, f"d{STEPS}": TEXT}, "$ref": "#/$defs/d0"}


HARD: dict[str, tuple[dict[str, Any], str]] = {
    "an expression that backtracks": (
        {"type": "string", "pattern": "^(a+)+$"},
        json.dumps("a" * 100_000 + "b"),
    ),
    "alternatives that multiply": (
        {
            "$defs": {"x": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/x"}}] * 8 + [{"const": 1}]}},
            "$ref": "#/$defs/x",
        },
        "[" * 30 + '"x"' + "]" * 30,
    ),
    "references that double": (doubling(lambda ref: {"allOf": [ref, ref]}), '"x"'),
    "references that double below a property": (
        doubling(lambda ref: {"allOf": [{"properties": {"a": ref}}] * 2}),
        '{"a":' * STEPS + '"x"' + "}" * STEPS,
    ),
    "a late alternative for every item": (
        {"items": {"anyOf": [{"minLength": 1_000 - n} for n in range(1_000)]}},
        json.dumps(["x"] * 100_000),
    ),
    "items that have to differ": ({"uniqueItems": True}, json.dumps([{"a": [n]} for n in range(60_000)])),
    "a long list of choices": (
        {"items": {"enum": [f"value {n}" for n in range(1_000)]}},
        json.dumps(["no"] * 50_000),
    ),
    "many names, many expressions": (
        {"patternProperties": {f"^{n}[a-z]+$": {"type": "null"} for n in range(100)}},
        json.dumps({f"{n}abc": 1 for n in range(20_000)}),
    ),
    "expressions that are compiled again and again": (
        {"items": {"anyOf": [{"pattern": rf"^\\w{n}$"} for n in range(200)]}},
        json.dumps(["abc"] * 1_000),
    ),
    "an expression with many ways": ({"pattern": "[ab]*a[ab]{900}c"}, json.dumps("abbab" * 100_000)),
    "an expression with many ways and a text of no pattern": (
        {"pattern": "[ab]*a[ab]{900}c"},
        json.dumps("".join(Random(1).choices("ab", k=990_000))),
    ),
    "too deep": (SUITE["recursive"].schema, nested(40)),
    "too deep to be read": ({}, "[" * 2_000 + "]" * 2_000),
    "too long": ({}, json.dumps("x" * 1_000_001)),
    "a very large number": ({"multipleOf": 1e-300}, "1e300"),
}


@pytest.mark.parametrize(("schema", "text"), HARD.values(), ids=HARD)
def test_hard_ones_end_in_time(schema: dict[str, Any], text: str) -> None:
    check(schema, "schema")
    began = process_time()
    violation(schema, text)
    assert process_time() - began < 3.0


@pytest.mark.slow
def test_what_is_too_much_counts_as_wrong() -> None:
    schema, text = HARD["items that have to differ"]
    assert violation(schema, text) is None
    assert "too large" in str(violation(*HARD["alternatives that multiply"]))
    assert "too large" in str(violation(*HARD["references that double"]))
    assert "too deep" in str(violation(*HARD["too deep"]))


@given(text=st.text(max_size=40))
def test_no_text_raises(text: str) -> None:
    for case in SUITE.values():
        said = violation(case.schema, text)
        assert said is None or said.endswith(".")


@given(schema=st.dictionaries(st.sampled_from([*KEYWORDS, "title", "x"]), JSON, max_size=4), value=JSON)
@settings(max_examples=examples(300), deadline=None)
def test_no_schema_that_is_let_through_raises(schema: dict[str, Any], value: Any) -> None:
    try:
        check(schema, "schema")
    except InvalidRequest:
        return
    violation(schema, json.dumps(value))
