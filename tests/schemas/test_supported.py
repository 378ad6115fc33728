"""Unsupported schemas are rejected with the path of the keyword, before generation starts."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest

from tests.schemas.suite import SUITE, TEXT, TREE, Case, closed
from unisono.errors import InvalidRequest
from unisono.schemas import ANTHROPIC, OPENAI, check

AT = "response_format.json_schema.schema"


@pytest.mark.parametrize("case", SUITE.values(), ids=SUITE)
def test_the_suite_is_accepted(case: Case) -> None:
    check(case.schema, AT, strict=OPENAI if case.strict else None)
    check(case.schema, AT)


@pytest.mark.parametrize("name", [name for name, case in SUITE.items() if not case.strict])
def test_a_schema_outside_the_strict_subset_is_rejected_as_strict(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check(SUITE[name].schema, AT, strict=OPENAI)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


REFUSED: dict[str, tuple[Any, str, str]] = {
    "not a schema": ([], "", "must be a JSON schema"),
    "unknown type": ({"type": "text"}, ".type", "one or more of null"),
    "empty type list": ({"type": []}, ".type", "one or more of null"),
    "properties as a list": ({"properties": ["a"]}, ".properties", "an object of schemas"),
    "property schema as text": ({"properties": {"a": "string"}}, ".properties", "an object of schemas"),
    "required as a boolean": ({"properties": {"a": {"required": True}}}, ".properties.a.required", "property names"),
    "empty enum": ({"enum": []}, ".enum", "at least one value"),
    "empty anyOf": ({"items": {"anyOf": []}}, ".items.anyOf", "at least one schema"),
    "negative length": ({"minLength": -1}, ".minLength", "non-negative"),
    "bound that is not a number": ({"maximum": True}, ".maximum", "a number"),
    "multipleOf 0": ({"multipleOf": 0}, ".multipleOf", "greater than 0"),
    "items of an older draft": ({"items": [{"type": "string"}]}, ".items", "a schema"),
    "dependencies of an older draft": ({"dependencies": {}}, ".dependencies", "dependentRequired"),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, ".unevaluatedProperties", "additionalProperties"),
    "anchor": ({"$defs": {"a": {"$anchor": "x"}}}, ".$defs.a.$anchor", "JSON pointer"),
    "$id below the root": ({"$defs": {"a": {"$id": "x"}}}, ".$defs.a.$id", "only at the root"),
    "$schema below the root": ({"items": {"$schema": "x"}}, ".items.$schema", "only at the root"),
    "reference to a URL": ({"$ref": "http://10.0.0.1/x.json"}, ".$ref", "only references within"),
    "reference to a file": ({"items": {"$ref": "other.json#/a"}}, ".items.$ref", "only references within"),
    "reference to an anchor": ({"$ref": "#a"}, ".$ref", "begin with '#/'"),
    "reference without a target": ({"anyOf": [{"$ref": "#/$defs/x"}]}, ".anyOf.0.$ref", "does not point to a schema"),
    "encoded name": ({"$defs": {"%41": TEXT}, "items": {"$ref": "#/$defs/%41"}}, ".items.$ref", "not point to"),
    "reference into a value": ({"enum": [{"a": 1}], "items": {"$ref": "#/enum/0"}}, ".items.$ref", "not point to"),
    "reference to itself": ({"$ref": "#"}, "", "back to itself"),
    "cycle of references": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, TEXT]}}},
        ".$defs.",
        "back to itself",
    ),
    "lookahead": ({"pattern": "(?=a)b"}, ".pattern", "look-around"),
    "backreference": ({"patternProperties": {"(a)\\1": {}}}, ".patternProperties", "backreferences"),
    "invalid pattern": ({"pattern": "("}, ".pattern", "unclosed group"),
    "pattern with nested repetitions": ({"pattern": "((a{50}){50}){50}"}, ".pattern", "repetitions"),
    "long pattern": ({"pattern": "a" * 1_001}, ".pattern", "1,000 characters"),
    "many costly patterns": (
        {"anyOf": [{"pattern": f"\\w{{200}}{n}"} for n in range(4)]}, ".anyOf.", "work in regular expressions",
    ),
    "too deep": (deep(100), ".items" * 64, "64 levels"),
    "too many schemas": ({"anyOf": [{"not": {}}] * 5_001}, "", "more than 10,000 schemas"),
    "too many properties": ({"properties": {f"p{n}": True for n in range(5_001)}}, ".properties", "5,000 properties"),
    "too many enum values": ({"enum": list(range(1_001))}, ".enum", "1,000 values"),
    "too many enum characters": ({"enum": ["x" * 60_001] * 2}, ".enum", "120,000 characters"),
    "deep const value": ({"const": [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]}, ".const", "16 levels"),
}  # fmt: skip

BY_B = {"propertyName": "b"}
REFUSED_AS_STRICT: dict[str, tuple[Any, str, str]] = {
    "no object at the root": ({"type": "array", "items": TEXT}, ".type", "must be 'object'"),
    "anyOf at the root": ({**closed(), "anyOf": [closed()]}, ".type", "not a union"),
    "branches with overlapping tags": (
        closed(a={"discriminator": BY_B, "oneOf": [closed(b={"const": 1}), closed(b={"enum": [1, 2]})]}),
        ".properties.a.oneOf", "cannot distinguish",
    ),
    "branch without a fixed tag": (
        closed(a={"discriminator": BY_B, "oneOf": [closed(b={"const": 1}), closed(b=TEXT)]}),
        ".properties.a.oneOf", "cannot distinguish",
    ),
    "untagged oneOf": (closed(a={"oneOf": [TEXT]}), ".properties.a.oneOf", "not supported in a strict schema"),
    "additional properties allowed": ({"type": "object", "properties": {}}, ".additionalProperties", "must be false"),
    "additional properties allowed in a property": (
        closed(a={"type": ["object", "null"], "properties": {}}), ".properties.a.additionalProperties", "false",
    ),
    "optional property": ({**closed(a=TEXT, b=TEXT), "required": ["a"]}, ".required", "does not name 'b'"),
    "allOf": (closed(a={"allOf": [TEXT]}), ".properties.a.allOf", "not supported in a strict schema"),
    "uniqueItems": (closed(a={"type": "array", "uniqueItems": True}), ".properties.a.uniqueItems", "not supported"),
    "unsupported format": (closed(a={"type": "string", "format": "color"}), ".properties.a.format", "date-time"),
    "boolean schema": (closed(a=True), ".properties.a", "must be an object"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "place", "why"), REFUSED.values(), ids=REFUSED)
def test_an_unsupported_keyword_is_rejected_with_its_path(schema: Any, place: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(schema, AT)
    assert caught.value.param is not None
    assert caught.value.param.startswith(AT + place)
    assert why in caught.value.message


@pytest.mark.parametrize(("schema", "place", "why"), REFUSED_AS_STRICT.values(), ids=REFUSED_AS_STRICT)
def test_a_keyword_outside_the_strict_subset_is_rejected_with_its_path(schema: Any, place: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(schema, AT, strict=OPENAI)
    assert caught.value.param == AT + place
    assert why in caught.value.message


STRICT_IN_MESSAGES: dict[str, Any] = {
    "optional property": {**closed(a=TEXT, b=TEXT), "required": ["a"]},
    "no required property": {"type": "object", "properties": {"a": TEXT}, "additionalProperties": False},
    "allOf": closed(a={"allOf": [TEXT]}),
    "uri": closed(a={"type": "string", "format": "uri"}),
}


@pytest.mark.parametrize("schema", STRICT_IN_MESSAGES.values(), ids=STRICT_IN_MESSAGES)
def test_anthropics_rules_for_strict_schemas_permit_more_than_openais(schema: Any) -> None:
    check(schema, AT, strict=ANTHROPIC)
    with pytest.raises(InvalidRequest):
        check(schema, AT, strict=OPENAI)


@pytest.mark.parametrize("name", ["no object at the root", "additional properties allowed", "unsupported format"])
def test_anthropics_rules_refuse_open_objects_and_formats_without_a_check(name: str) -> None:
    schema, place, why = REFUSED_AS_STRICT[name]
    with pytest.raises(InvalidRequest) as caught:
        check(schema, AT, strict=ANTHROPIC)
    assert caught.value.param == AT + place
    assert why in caught.value.message


ACCEPTED: dict[str, Any] = {
    "empty": {},
    "annotations": {**TREE, "$schema": "http://json-schema.org/draft-07/schema#", "$id": "tree", "x-order": [1]},
    "unknown format": {"type": "string", "format": "color"},
    "properties named like keywords": {"properties": {"$ref": TEXT, "enum": TEXT, "type": TEXT}},
    "escaped names": {"$defs": {"a/b~c": TEXT}, "items": {"$ref": "#/$defs/a~1b~0c"}},
    "percent-encoded names": {"$defs": {"A<b>": TEXT}, "items": {"$ref": "#/$defs/A%3Cb%3E"}},
    "percent-encoded separators": {"$defs": {"a/b": TEXT}, "items": {"$ref": "#/%24defs%2Fa~1b"}},
    "name with a percent sign": {"$defs": {"50%": TEXT}, "items": {"anyOf": [{"$ref": "#/$defs/50%25"}]}},
    "definitions of an older draft": {"definitions": {"x": TEXT}, "items": {"$ref": "#/definitions/x"}},
    "long chain of references": {"$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(50)} | {"50": TEXT}},
    "consecutive repetitions": {"pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
    "host names": {"pattern": r"^[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63}){0,8}\.[a-z]{2,63}$"},
    "one pattern many times": {"items": {"anyOf": [{"pattern": r"^[\w .-]{1,200}$"}] * 100}},
    "unicode classes": {"pattern": r"^[\p{L}\d _.\-/]{1,64}$"},
}


@pytest.mark.parametrize("schema", ACCEPTED.values(), ids=ACCEPTED)
def test_harmless_schemas_are_accepted(schema: Any) -> None:
    check(schema, AT)


def test_the_largest_schema_is_checked_in_time() -> None:
    chain = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"type": "null"}]} for n in range(3_000)}
    started_at = process_time()
    check({"$defs": {**chain, "d3000": TEXT}, "items": {"$ref": "#/$defs/d0"}}, AT)
    assert process_time() - started_at < 3.0


COSTLY_PATTERNS: dict[str, str] = {
    # 800 repetitions of `\w`, which has hundreds of ranges, in different notations.
    "repeated text": r"\w" * 400,
    "inside a class": r"[\w\d]{800}",
    "bracket at the start of a class": r"[]\w]{800}",
    "nested class": r"[a[^\w]]{800}",
    "class of a dash": r"[-]\w{800}",
    "Unicode property": r"\p{L}{800}",
    "short Unicode property": r"\pL{800}",
    "groups": r"(?:(?P<a>\w{20}){40})",
    "leading zeros": r"\w{00000000000800}",
    "minimum repetitions": r"\w{800,}",
    "maximum repetitions": r"\w{0,800}",
    "nested repetitions": r"\w{40}{20}",
    "lazy repetitions": r"\w{800}?",
    "escaped bracket": r"\[\w{800}",
    "escape in a class": r"[\]]\w{800}",
    "verbose flag": r"(?x)\w {800}",
    "verbose flag of a group": r"(?ix-s:\w {800})",
}


@pytest.mark.parametrize("pattern", COSTLY_PATTERNS.values(), ids=COSTLY_PATTERNS)
def test_a_costly_pattern_is_rejected_before_compilation(pattern: str) -> None:
    started_at = process_time()
    with pytest.raises(InvalidRequest) as caught:
        check({"pattern": pattern}, AT)
    assert "repetitions" in caught.value.message or "flag x" in caught.value.message
    assert process_time() - started_at < 0.02


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("piece", [r"\w{0}", r"\w", "[a-z]", r"(?i)[\x{80}-\x{10ffff}]"], ids=str)
def test_many_patterns_are_checked_in_time(piece: str) -> None:
    patterns = [f"{piece * 30}{n}" for n in range(2_000)]
    started_at = process_time()
    with pytest.raises(InvalidRequest):
        check({"properties": {str(n): {"pattern": pattern} for n, pattern in enumerate(patterns)}}, AT)
    assert process_time() - started_at < 2.0
