"""Schemas as clients send them, each with valid and invalid answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """Schema with valid answers in `right`; `wrong` maps invalid answers to a part of the error message."""

    schema: dict[str, Any]
    right: tuple[str, ...]
    wrong: dict[str, str]
    strict: bool = True


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of a strict object."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
TREE = {
    **closed(name=TEXT, children={"type": "array", "items": {"$ref": "#"}}),
}
LINKED = {
    **closed(head={"$ref": "#/$defs/node"}),
    "$defs": {"node": closed(value=WHOLE, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})},
}
DOG = closed(kind={"enum": ["dog", "puppy"]}, name=TEXT)

SUITE: dict[str, Case] = {
    "flat": Case(
        closed(city=TEXT, days=WHOLE),
        ('{"city":"Paris","days":3}', '\n{"days": 3.0, "city": ""} '),
        {
            "": "empty",
            "Paris": "not valid JSON",
            '```json\n{"city":"Paris","days":3}\n```': "code block",
            '{"city":"Paris"}': 'property "days"',
            '{"city":"Paris","days":"3"}': "$.days must be of type integer",
            '{"city":"Paris","days":3.5}': "$.days must be of type integer",
            '{"city":"Paris","days":true}': "$.days must be of type integer",
            '{"city":"Paris","days":3,"x":1}': 'must not have the property "x"',
            '{"city":"Paris","days":3} and more': "not valid JSON",
            '{"city":"Paris","days":3': "not valid JSON",
            '{"city":"Paris","days":NaN}': "not valid JSON",
            "[]": "The answer must be of type object",
        },
    ),
    "nested": Case(
        closed(a=closed(b=closed(c={"type": ["string", "null"]}))),
        ('{"a":{"b":{"c":null}}}', '{"a":{"b":{"c":"x"}}}'),
        {'{"a":{"b":{"c":1}}}': "$.a.b.c must be of type string or null", '{"a":{"b":null}}': "$.a.b must be"},
    ),
    "enum and const": Case(
        closed(size={"enum": ["S", "M", 1, None]}, kind={"const": {"x": [1]}}),
        ('{"size":"S","kind":{"x":[1.0]}}', '{"size":1.0,"kind":{"x":[1]}}', '{"size":null,"kind":{"x":[1]}}'),
        {
            '{"size":true,"kind":{"x":[1]}}': '$.size must be one of "S", "M", 1, null, not true',
            '{"size":"L","kind":{"x":[1]}}': 'not "L"',
            '{"size":"S","kind":{"x":[true]}}': "$.kind must be an object",
        },
    ),
    "anyOf": Case(
        closed(item={"anyOf": [closed(kind={"const": "user"}, age=WHOLE), closed(kind={"const": "bot"}, url=TEXT)]}),
        ('{"item":{"kind":"user","age":1}}', '{"item":{"kind":"bot","url":"x"}}'),
        {'{"item":{"kind":"bot","age":1}}': "no other alternative", '{"item":7}': "$.item must be"},
    ),
    "recursive": Case(
        TREE,
        ('{"name":"a","children":[{"name":"b","children":[]}]}',),
        {'{"name":"a","children":[{"name":"b","children":[{}]}]}': "$.children[0].children[0] must have"},
    ),
    "a list by reference": Case(
        LINKED,
        ('{"head":{"value":1,"next":{"value":2,"next":null}}}',),
        {'{"head":{"value":1,"next":{"value":"2","next":null}}}': "$.head.next.value must be of type integer"},
    ),
    "arrays": Case(
        closed(xs={"type": "array", "items": WHOLE, "minItems": 1, "maxItems": 2}),
        ('{"xs":[1]}', '{"xs":[1,2]}'),
        {
            '{"xs":[]}': "at least 1 items",
            '{"xs":[1,2,3]}': "at most 2 items, not 3",
            '{"xs":[1,"2"]}': "$.xs[1] must be of type integer",
        },
    ),
    "numbers": Case(
        closed(n={"type": "number", "minimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.1}),
        ('{"n":0}', '{"n":0.3}', '{"n":0.9}'),
        {'{"n":1}': "below 1", '{"n":-0.1}': "at least 0", '{"n":0.25}': "multiple of 0.1"},
    ),
    "strings": Case(
        closed(s={"type": "string", "minLength": 2, "maxLength": 3, "pattern": "^[a-zé]+$"}),
        ('{"s":"ab"}', '{"s":"\\u00e9\\u00e9\\u00e9"}'),
        {'{"s":"a"}': "at least 2 characters", '{"s":"aaaa"}': "at most 3", '{"s":"aB"}': "match the pattern"},
    ),
    "unicode": Case(
        closed(città={"enum": ["日本", "🙂", 'a"b\\c\n']}),
        ('{"città":"日本"}', '{"citt\\u00e0":"\\ud83d\\ude42"}', '{"città":"a\\"b\\\\c\\n"}'),
        {'{"città":"日"}': '"日本"', '{"citta":"日本"}': '"città"'},
    ),
    "formats": Case(
        closed(
            at={"type": "string", "format": "date-time"},
            day={"type": "string", "format": "date"},
            id={"type": "string", "format": "uuid"},
            to={"type": "string", "format": "email"},
        ),
        (
            '{"at":"2026-02-28T23:59:59.123456789Z","day":"2024-02-29",'
            '"id":"123e4567-e89b-12d3-a456-426614174000","to":"a@b.example"}',
        ),
        {
            '{"at":"2026-02-28","day":"2024-02-29","id":"1","to":"a@b"}': "$.at must have the format date-time",
            '{"at":"2026-02-28T23:59:59Z","day":"2023-02-29","id":"1","to":"@"}': "$.day must have the format date",
        },
    ),
    "open": Case(
        {
            "type": "object",
            "patternProperties": {"^x-": TEXT},
            "additionalProperties": WHOLE,
            "propertyNames": {"maxLength": 4},
            "minProperties": 1,
            "dependentRequired": {"a": ["b"]},
        },
        ('{"x-a":"1","n":2}', '{"a":1,"b":2}'),
        {
            "{}": "at least 1 properties",
            '{"x-a":1}': "$.x-a must be of type string",
            '{"n":"1"}': "$.n must be of type integer",
            '{"a":1}': 'property "b"',
            '{"abcde":1}': "whose name must have at most 4",
        },
        strict=False,
    ),
    "tagged": Case(
        {
            **closed(pet={"discriminator": {"propertyName": "kind"}, "oneOf": [{"$ref": "#/$defs/cat"}, DOG]}),
            "$defs": {"cat": closed(kind={"const": "cat"}, lives=WHOLE)},
        },
        ('{"pet":{"kind":"cat","lives":9}}', '{"pet":{"kind":"dog","name":"Rex"}}'),
        {
            '{"pet":{"kind":"dog","lives":9}}': "no other alternative",
            '{"pet":{"kind":"cat"}}': "no other alternative",
            '{"pet":{"kind":"cow","lives":9}}': "$.pet",
        },
    ),
    "combined": Case(
        {
            "allOf": [{"type": "object"}, {"required": ["kind"]}],
            "oneOf": [{"properties": {"kind": {"const": 1}}}, {"properties": {"kind": {"enum": [1, 2]}}}],
            "if": {"properties": {"kind": {"const": 2}}},
            "then": {"required": ["two"]},
            "else": {"required": ["other"]},
            "not": {"required": ["never"]},
        },
        ('{"kind":2,"two":1}',),
        {
            '{"kind":1,"other":1}': "exactly one alternative",
            '{"kind":2}': 'property "two"',
            '{"kind":2,"two":1,"never":1}': "the keyword not",
            "{}": 'property "kind"',
        },
        strict=False,
    ),
    "tuples": Case(
        {
            "type": "array",
            "prefixItems": [TEXT, WHOLE],
            "items": {"type": "boolean"},
            "uniqueItems": True,
            "contains": {"const": True},
            "maxContains": 1,
        },
        ('["a",1,true]', '["a",1,true,false]'),
        {
            '["a",1,1]': "$[2] must be of type boolean",
            "[1,1,true]": "$[0] must be of type string",
            '["a",1]': "from 1 to 1 items",
            '["a",1,true,true]': "the same item twice",
        },
        strict=False,
    ),
}
