"""Seeded cases: deterministic, accepted by the gateway, and increasing in size."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import mean

import pytest

from tests.structured.cases import Case, expression_cases, schema_cases, trained_cases
from unisono.core.conversation import TextGrammar
from unisono.schemas import check, check_grammar
from unisono_adapters._gbnf import regex_grammar


def schema_of(case: Case) -> dict[str, object]:
    schema: dict[str, object] = case.fields["response_format"]["json_schema"]["schema"]
    return schema


@pytest.mark.slow
def test_equal_seeds_give_equal_cases() -> None:
    assert [case.fields for case in schema_cases(1)] == [case.fields for case in schema_cases(1)]
    assert [case.fields for case in schema_cases(1)] != [case.fields for case in schema_cases(2)]
    assert len({json.dumps(schema_of(case)) for case in schema_cases(1)}) > 280
    assert (len(schema_cases(1)), len(expression_cases(1)), len(trained_cases())) == (300, 100, 48)


def test_the_gateway_supports_all_schemas_and_expressions() -> None:
    for case in schema_cases(1):
        check(schema_of(case), "schema")
    for case in expression_cases(1):
        check_grammar(TextGrammar("regex", case.fields["structured_outputs"]["regex"]))


def test_schemas_grow_with_their_level() -> None:
    sizes = defaultdict(list)
    for case in schema_cases(1):
        sizes[case.level].append(len(json.dumps(schema_of(case))))
    averages = [mean(each) for each in sizes.values()]
    assert averages == sorted(averages)


def test_only_the_last_level_of_expressions_has_no_grammar() -> None:
    untranslated = defaultdict(list)
    for case in expression_cases(1):
        untranslated[case.level].append(regex_grammar(case.fields["structured_outputs"]["regex"]) is None)
    *others, last = untranslated.values()
    assert not any(any(each) for each in others)
    assert all(last)


def test_invalid_answers_are_recognised() -> None:
    [case, *_] = schema_cases(1)
    assert not case.is_valid("")
    assert not case.is_valid("[]")
    [case, *_] = trained_cases()
    assert case.is_valid('{"city": "Paris", "country": "France"}')
    assert not case.is_valid('{"city": 1}')
    assert not any(case.is_valid("\x00") for case in expression_cases(1))
