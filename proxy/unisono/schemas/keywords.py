"""Table of the JSON Schema 2020-12 keywords: permitted values, nested schemas, and support.

An unlisted keyword is an annotation, as the specification defines. The few unsupported ones that would change the
meaning of a schema are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")


class Holds(Enum):
    """Location of the schemas in a keyword's value."""

    NOTHING = auto()
    ONE = auto()
    SEVERAL = auto()
    NAMED = auto()


@dataclass(frozen=True, slots=True)
class Keyword:
    """One keyword.

    `fits` and `what` check and describe its value; by default `holds` determines both. `strict` keywords belong to the
    subset for strict schemas. The schemas of an `in_place` keyword apply to the same value as their parent schema.
    """

    holds: Holds = Holds.NOTHING
    fits: Callable[[object], bool] = lambda value: True
    what: str = ""
    strict: bool = False
    in_place: bool = False


def _is_schema(value: object) -> bool:
    return isinstance(value, Mapping | bool)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and value > 0


def _are_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _are_types(value: object) -> bool:
    named = [value] if isinstance(value, str) else value
    return isinstance(named, list | tuple) and bool(named) and all(each in TYPES for each in named)


def _are_values(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value)


def _names_by_name(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_are_names, value.values()))


_A_COUNT = (_is_count, "a whole number that is not negative")
_A_NUMBER = (_is_number, "a number")
_TEXT = (lambda value: isinstance(value, str), "a string")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_NOTHING = Holds.NOTHING

KEYWORDS: Mapping[str, Keyword] = {
    "type": Keyword(_NOTHING, _are_types, f"one or more of {', '.join(TYPES)}", strict=True),
    "enum": Keyword(_NOTHING, _are_values, "a list of at least one value", strict=True),
    "const": Keyword(strict=True),
    "$ref": Keyword(_NOTHING, *_TEXT, strict=True, in_place=True),
    "$defs": Keyword(Holds.NAMED, strict=True),
    "definitions": Keyword(Holds.NAMED, strict=True),
    "anyOf": Keyword(Holds.SEVERAL, strict=True, in_place=True),
    "oneOf": Keyword(Holds.SEVERAL, in_place=True),
    "allOf": Keyword(Holds.SEVERAL, in_place=True),
    "not": Keyword(Holds.ONE, in_place=True),
    "if": Keyword(Holds.ONE, in_place=True),
    "then": Keyword(Holds.ONE, in_place=True),
    "else": Keyword(Holds.ONE, in_place=True),
    "properties": Keyword(Holds.NAMED, strict=True),
    "patternProperties": Keyword(Holds.NAMED),
    "additionalProperties": Keyword(Holds.ONE, strict=True),
    "propertyNames": Keyword(Holds.ONE),
    "required": Keyword(_NOTHING, _are_names, "a list of names", strict=True),
    "minProperties": Keyword(_NOTHING, *_A_COUNT),
    "maxProperties": Keyword(_NOTHING, *_A_COUNT),
    "dependentRequired": Keyword(_NOTHING, _names_by_name, "an object of lists of names"),
    "dependentSchemas": Keyword(Holds.NAMED, in_place=True),
    "items": Keyword(Holds.ONE, strict=True),
    "prefixItems": Keyword(Holds.SEVERAL),
    "contains": Keyword(Holds.ONE),
    "minContains": Keyword(_NOTHING, *_A_COUNT),
    "maxContains": Keyword(_NOTHING, *_A_COUNT),
    "minItems": Keyword(_NOTHING, *_A_COUNT, strict=True),
    "maxItems": Keyword(_NOTHING, *_A_COUNT, strict=True),
    "uniqueItems": Keyword(_NOTHING, *_FLAG),
    "minLength": Keyword(_NOTHING, *_A_COUNT, strict=True),
    "maxLength": Keyword(_NOTHING, *_A_COUNT, strict=True),
    "pattern": Keyword(_NOTHING, *_TEXT, strict=True),
    "format": Keyword(_NOTHING, *_TEXT, strict=True),
    "minimum": Keyword(_NOTHING, *_A_NUMBER, strict=True),
    "maximum": Keyword(_NOTHING, *_A_NUMBER, strict=True),
    "exclusiveMinimum": Keyword(_NOTHING, *_A_NUMBER, strict=True),
    "exclusiveMaximum": Keyword(_NOTHING, *_A_NUMBER, strict=True),
    "multipleOf": Keyword(_NOTHING, _is_factor, "a number above 0", strict=True),
}

REFUSED: Mapping[str, str] = {
    "$anchor": "references go by JSON pointer only",
    "$dynamicRef": "references go by JSON pointer only",
    "$dynamicAnchor": "references go by JSON pointer only",
    "$recursiveRef": "references go by JSON pointer only",
    "$recursiveAnchor": "references go by JSON pointer only",
    "unevaluatedProperties": "additionalProperties is what can be honoured",
    "unevaluatedItems": "items is what can be honoured",
    "additionalItems": "it is of an older draft; write items beside prefixItems",
    "dependencies": "it is of an older draft; write dependentRequired or dependentSchemas",
}
"""Unsupported keywords that affect validation, with the reason or a replacement."""

SHAPES: Mapping[Holds, tuple[Callable[[object], bool], str]] = {
    Holds.ONE: (_is_schema, "a schema"),
    Holds.SEVERAL: (
        lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_is_schema, value)),
        "a list of at least one schema",
    ),
    Holds.NAMED: (
        lambda value: isinstance(value, Mapping) and all(map(_is_schema, value.values())),
        "an object of schemas",
    ),
}
"""Checks and descriptions of values that contain schemas."""


def schemas_in(keyword: Keyword, value: object) -> Mapping[str, object]:
    """Return the schemas in a keyword's value by their path; the empty path is the value itself."""
    match keyword.holds:
        case Holds.ONE:
            return {"": value}
        case Holds.SEVERAL:
            return {str(number): each for number, each in enumerate(value)} if isinstance(value, list | tuple) else {}
        case Holds.NAMED:
            return value if isinstance(value, Mapping) else {}
        case Holds.NOTHING:
            return {}
