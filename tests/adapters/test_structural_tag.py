"""Tests of structural tags for vLLM.

They limit whitespace and are used only for schemas whose keywords are all supported.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.schemas.suite import SUITE
from unisono.core.generation import JsonSchema
from unisono_adapters._constraints import as_tag, schema_of

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
def test_schema_is_tagged_only_if_all_keywords_are_supported(name: str) -> None:
    schema = schema_of(JsonSchema(SUITE[name].schema))
    tag = as_tag(schema)
    assert (tag is not None) is (name in TAGGED)
    if tag is not None:
        assert json.loads(tag)["format"]["json_schema"] == schema


UNSUPPORTED: dict[str, Any] = {
    "property": {"properties": {"a": {"uniqueItems": True}}},
    "item": {"items": {"format": "color"}},
    "additional properties": {"additionalProperties": {"multipleOf": 3}},
    "alternative": {"anyOf": [{"type": "null"}, {"pattern": "a"}]},
    "prefix item": {"prefixItems": [{"allOf": [{}]}]},
    "definition": {"$defs": {"a": {"minProperties": 1}}},
    "deeply nested": {"properties": {"a": {"items": {"anyOf": [{"properties": {"b": {"not": {}}}}]}}}},
}


@pytest.mark.parametrize("schema", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_one_unsupported_keyword_anywhere_prevents_a_tag(schema: dict[str, Any]) -> None:
    assert as_tag(schema) is None


def test_property_names_are_not_taken_for_keywords() -> None:
    assert as_tag({"properties": {"format": {"type": "string"}, "not": {"const": {"pattern": 1}}}}) is not None
