"""Which schemas vLLM is asked for with a bound on white space: those of which nothing is lost by it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.schemas.suite import SUITE
from unisono.core.generation import JsonSchema
from unisono_adapters._constraints import schema_of
from unisono_adapters._structural_tag import as_tag

TAGGED = {
    "flat",
    "nested",
    "enum and const",
    "anyOf",
    "recursive",
    "a list by reference",
    "arrays",
    "unicode",
    "tagged",
}


@pytest.mark.parametrize("name", SUITE)
def test_a_schema_is_tagged_where_all_of_it_is_kept(name: str) -> None:
    schema = schema_of(JsonSchema(SUITE[name].schema))
    tag = as_tag(schema)
    assert (tag is not None) is (name in TAGGED)
    if tag is not None:
        assert json.loads(tag)["format"]["json_schema"] == schema


HIDDEN: dict[str, Any] = {
    "in a property": {"properties": {"a": {"uniqueItems": True}}},
    "in an item": {"items": {"format": "color"}},
    "in what else there may be": {"additionalProperties": {"multipleOf": 3}},
    "in an alternative": {"anyOf": [{"type": "null"}, {"pattern": "a"}]},
    "in a place of its own": {"prefixItems": [{"allOf": [{}]}]},
    "in a definition": {"$defs": {"a": {"minProperties": 1}}},
    "below all of it": {"properties": {"a": {"items": {"anyOf": [{"properties": {"b": {"not": {}}}}]}}}},
}


@pytest.mark.parametrize("schema", HIDDEN.values(), ids=HIDDEN)
def test_one_keyword_anywhere_is_enough_for_the_plain_way(schema: dict[str, Any]) -> None:
    assert as_tag(schema) is None


def test_names_are_no_keywords() -> None:
    assert as_tag({"properties": {"format": {"type": "string"}, "not": {"const": {"pattern": 1}}}}) is not None
