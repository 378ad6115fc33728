"""Schemas that cannot be honoured are refused by the path of the keyword, before anything is generated."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest

from tests.schemas.suite import SUITE, TEXT, TREE, Case, closed
from unisono.errors import InvalidRequest
from unisono.schemas import check

AT = "response_format.json_schema.schema"


@pytest.mark.parametrize("case", SUITE.values(), ids=SUITE)
def test_the_suite_is_let_through(case: Case) -> None:
    check(case.schema, AT, strict=case.strict)
    check(case.schema, AT)


@pytest.mark.parametrize("name", [name for name, case in SUITE.items() if not case.strict])
def test_what_is_not_of_the_strict_subset_is_refused_as_strict(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check(SUITE[name].schema, AT, strict=True)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


REFUSED: dict[str, tuple[Any, str, str]] = {
    "no schema": ([], "", "must be a JSON schema"),
    "an unknown type": ({"type": "text"}, ".type", "one or more of null"),
    "no types": ({"type": []}, ".type", "one or more of null"),
    "properties as a list": ({"properties": ["a"]}, ".properties", "an object of schemas"),
    "a property that is a name": ({"properties": {"a": "string"}}, ".properties", "an object of schemas"),
    "required as a flag": ({"properties": {"a": {"required": True}}}, ".properties.a.required", "property names"),
    "an empty enum": ({"enum": []}, ".enum", "at least one value"),
    "an empty anyOf": ({"items": {"anyOf": []}}, ".items.anyOf", "at least one schema"),
    "a negative length": ({"minLength": -1}, ".minLength", "non-negative"),
    "a bound that is no number": ({"maximum": True}, ".maximum", "a number"),
    "a factor of 0": ({"multipleOf": 0}, ".multipleOf", "greater than 0"),
    "items of an older draft": ({"items": [{"type": "string"}]}, ".items", "a schema"),
    "dependencies of an older draft": ({"dependencies": {}}, ".dependencies", "dependentRequired"),
    "unevaluated": ({"unevaluatedProperties": False}, ".unevaluatedProperties", "additionalProperties"),
    "an anchor": ({"$defs": {"a": {"$anchor": "x"}}}, ".$defs.a.$anchor", "JSON pointer"),
    "a name within": ({"$defs": {"a": {"$id": "x"}}}, ".$defs.a.$id", "below the root"),
    "a draft within": ({"items": {"$schema": "x"}}, ".items.$schema", "below the root"),
    "a reference to elsewhere": ({"$ref": "http://10.0.0.1/x.json"}, ".$ref", "only references within"),
    "a reference to a file": ({"items": {"$ref": "other.json#/a"}}, ".items.$ref", "only references within"),
    "a reference by anchor": ({"$ref": "#a"}, ".$ref", "begin with '#/'"),
    "a reference to nothing": ({"anyOf": [{"$ref": "#/$defs/x"}]}, ".anyOf.0.$ref", "does not point to a schema"),
    "a reference into a value": ({"enum": [{"a": 1}], "items": {"$ref": "#/enum/0"}}, ".items.$ref", "not point to"),
    "a reference to itself": ({"$ref": "#"}, "", "back to itself"),
    "a ring of references": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, TEXT]}}},
        ".$defs.",
        "back to itself",
    ),
    "look-ahead": ({"pattern": "(?=a)b"}, ".pattern", "look-around"),
    "a back reference": ({"patternProperties": {"(a)\\1": {}}}, ".patternProperties", "backreferences"),
    "no expression": ({"pattern": "("}, ".pattern", "unclosed group"),
    "an expression that multiplies": ({"pattern": "((a{50}){50}){50}"}, ".pattern", "repetitions"),
    "a long expression": ({"pattern": "a" * 1_001}, ".pattern", "1,000 characters"),
    "many costly expressions": (
        {"anyOf": [{"pattern": f"\\w{{200}}{n}"} for n in range(4)]}, ".anyOf.", "work in regular expressions",
    ),
    "too deep": (deep(100), ".items" * 64, "64 levels"),
    "too many schemas": ({"anyOf": [{"not": {}}] * 5_001}, "", "more than 10,000 schemas"),
    "too many properties": ({"properties": {f"p{n}": True for n in range(5_001)}}, ".properties", "5,000 properties"),
    "too many choices": ({"enum": list(range(1_001))}, ".enum", "1,000 values"),
    "too many characters": ({"enum": ["x" * 60_001] * 2}, ".enum", "120,000 characters"),
    "a deep value": ({"const": [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]}, ".const", "16 levels"),
}  # fmt: skip

BY_B = {"propertyName": "b"}
REFUSED_AS_STRICT: dict[str, tuple[Any, str, str]] = {
    "no object at the root": ({"type": "array", "items": TEXT}, ".type", "must be 'object'"),
    "alternatives at the root": ({**closed(), "anyOf": [closed()]}, ".type", "not a union"),
    "branches that overlap": (
        closed(a={"discriminator": BY_B, "oneOf": [closed(b={"const": 1}), closed(b={"enum": [1, 2]})]}),
        ".properties.a.oneOf", "does not tell apart",
    ),
    "a branch of any tag": (
        closed(a={"discriminator": BY_B, "oneOf": [closed(b={"const": 1}), closed(b=TEXT)]}),
        ".properties.a.oneOf", "does not tell apart",
    ),
    "oneOf without a tag": (closed(a={"oneOf": [TEXT]}), ".properties.a.oneOf", "not supported in a strict schema"),
    "open": ({"type": "object", "properties": {}}, ".additionalProperties", "must be false"),
    "open within": (
        closed(a={"type": ["object", "null"], "properties": {}}), ".properties.a.additionalProperties", "false",
    ),
    "not required": ({**closed(a=TEXT, b=TEXT), "required": ["a"]}, ".required", "does not name 'b'"),
    "allOf": (closed(a={"allOf": [TEXT]}), ".properties.a.allOf", "not supported in a strict schema"),
    "uniqueItems": (closed(a={"type": "array", "uniqueItems": True}), ".properties.a.uniqueItems", "not supported"),
    "a format": (closed(a={"type": "string", "format": "color"}), ".properties.a.format", "date-time"),
    "a schema that is a flag": (closed(a=True), ".properties.a", "must be an object"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "place", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_named(schema: Any, place: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(schema, AT)
    assert caught.value.param is not None
    assert caught.value.param.startswith(AT + place)
    assert why in caught.value.message


@pytest.mark.parametrize(("schema", "place", "why"), REFUSED_AS_STRICT.values(), ids=REFUSED_AS_STRICT)
def test_what_is_not_strict_is_named(schema: Any, place: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(schema, AT, strict=True)
    assert caught.value.param == AT + place
    assert why in caught.value.message


TAKEN: dict[str, Any] = {
    "empty": {},
    "annotations": {**TREE, "$schema": "http://json-schema.org/draft-07/schema#", "$id": "tree", "x-order": [1]},
    "an unknown format": {"type": "string", "format": "color"},
    "a property that is called as a keyword": {"properties": {"$ref": TEXT, "enum": TEXT, "type": TEXT}},
    "escaped names": {"$defs": {"a/b~c": TEXT}, "items": {"$ref": "#/$defs/a~1b~0c"}},
    "definitions of an older draft": {"definitions": {"x": TEXT}, "items": {"$ref": "#/definitions/x"}},
    "a long chain": {"$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(50)} | {"50": TEXT}},
    "repeats one after the other": {"pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
    "names of hosts": {"pattern": r"^[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63}){0,8}\.[a-z]{2,63}$"},
    "one expression many times": {"items": {"anyOf": [{"pattern": r"^[\w .-]{1,200}$"}] * 100}},
    "unicode classes": {"pattern": r"^[\p{L}\d _.\-/]{1,64}$"},
}


@pytest.mark.parametrize("schema", TAKEN.values(), ids=TAKEN)
def test_what_means_no_harm_is_let_through(schema: Any) -> None:
    check(schema, AT)


def test_the_largest_schema_is_looked_through_in_time() -> None:
    chain = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"type": "null"}]} for n in range(3_000)}
    began = process_time()
    check({"$defs": {**chain, "d3000": TEXT}, "items": {"$ref": "#/$defs/d0"}}, AT)
    assert process_time() - began < 3.0


LETTERS: dict[str, str] = {
    # \w, hundreds of ranges each, in ways of writing it 800 times
    "written out": r"\w" * 400,
    "within a class": r"[\w\d]{800}",
    "a bracket in front": r"[]\w]{800}",
    "a class within": r"[a[^\w]]{800}",
    "a dash alone": r"[-]\w{800}",
    "a property": r"\p{L}{800}",
    "a property in short": r"\pL{800}",
    "in groups": r"(?:(?P<a>\w{20}){40})",
    "zeros in front": r"\w{00000000000800}",
    "at least": r"\w{800,}",
    "at most": r"\w{0,800}",
    "repeats of repeats": r"\w{40}{20}",
    "lazy": r"\w{800}?",
    "a bracket that is escaped": r"\[\w{800}",
    "an escape in a class": r"[\]]\w{800}",
    "spaces left out": r"(?x)\w {800}",
    "spaces left out within": r"(?ix-s:\w {800})",
}


@pytest.mark.parametrize("pattern", LETTERS.values(), ids=LETTERS)
def test_an_expression_that_takes_long_to_compile_is_refused_before_it_is(pattern: str) -> None:
    began = process_time()
    with pytest.raises(InvalidRequest) as caught:
        check({"pattern": pattern}, AT)
    assert "repetitions" in caught.value.message or "flag x" in caught.value.message
    assert process_time() - began < 0.02


@pytest.mark.parametrize("piece", [r"\w{0}", r"\w", "[a-z]", r"(?i)[\x{80}-\x{10ffff}]"], ids=str)
def test_many_expressions_are_looked_through_in_time(piece: str) -> None:
    patterns = [f"{piece * 30}{n}" for n in range(2_000)]
    began = process_time()
    with pytest.raises(InvalidRequest):
        check({"properties": {str(n): {"pattern": pattern} for n, pattern in enumerate(patterns)}}, AT)
    assert process_time() - began < 2.0
