"""Table of the JSON Schema 2020-12 keywords: permitted values, nested schemas, and support.

An unlisted keyword is an annotation, as the specification defines. The few unsupported ones that would change the
meaning of a schema are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

TYPES = ("null", "boolean", "object", "array", "number", "integer", "string")


class Subschemas(Enum):
    """Form of a keyword's value: no schema, one schema, a list of schemas, or schemas by name."""

    NONE = auto()
    ONE = auto()
    LIST = auto()
    BY_NAME = auto()


@dataclass(frozen=True, slots=True)
class Keyword:
    """One keyword.

    `is_permitted` checks a value without subschemas, and `expected` describes the permitted values. For values with
    subschemas, the table `SHAPES` contains both. Keywords with `strict` belong to OpenAI's subset for strict schemas.
    The subschemas of a keyword with `in_place` apply to the same value as their parent schema.
    """

    subschemas: Subschemas = Subschemas.NONE
    is_permitted: Callable[[object], bool] = lambda value: True
    expected: str = ""
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
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list | tuple) and bool(names) and all(name in TYPES for name in names)


def _are_values(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value)


def _names_by_name(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_are_names, value.values()))


_A_COUNT = (_is_count, "a non-negative integer below 2^31")
_A_NUMBER = (_is_number, "a number")
_TEXT = (lambda value: isinstance(value, str), "a string")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_NONE = Subschemas.NONE

KEYWORDS: Mapping[str, Keyword] = {
    "type": Keyword(_NONE, _are_types, f"one or more of {', '.join(TYPES)}", strict=True),
    "enum": Keyword(_NONE, _are_values, "a list of at least one value", strict=True),
    "const": Keyword(strict=True),
    "$ref": Keyword(_NONE, *_TEXT, strict=True, in_place=True),
    "$defs": Keyword(Subschemas.BY_NAME, strict=True),
    "definitions": Keyword(Subschemas.BY_NAME, strict=True),
    "anyOf": Keyword(Subschemas.LIST, strict=True, in_place=True),
    "oneOf": Keyword(Subschemas.LIST, in_place=True),
    "allOf": Keyword(Subschemas.LIST, in_place=True),
    "not": Keyword(Subschemas.ONE, in_place=True),
    "if": Keyword(Subschemas.ONE, in_place=True),
    "then": Keyword(Subschemas.ONE, in_place=True),
    "else": Keyword(Subschemas.ONE, in_place=True),
    "properties": Keyword(Subschemas.BY_NAME, strict=True),
    "patternProperties": Keyword(Subschemas.BY_NAME),
    "additionalProperties": Keyword(Subschemas.ONE, strict=True),
    "propertyNames": Keyword(Subschemas.ONE),
    "required": Keyword(_NONE, _are_names, "a list of property names", strict=True),
    "minProperties": Keyword(_NONE, *_A_COUNT),
    "maxProperties": Keyword(_NONE, *_A_COUNT),
    "dependentRequired": Keyword(_NONE, _names_by_name, "an object of lists of property names"),
    "dependentSchemas": Keyword(Subschemas.BY_NAME, in_place=True),
    "items": Keyword(Subschemas.ONE, strict=True),
    "prefixItems": Keyword(Subschemas.LIST),
    "contains": Keyword(Subschemas.ONE),
    "minContains": Keyword(_NONE, *_A_COUNT),
    "maxContains": Keyword(_NONE, *_A_COUNT),
    "minItems": Keyword(_NONE, *_A_COUNT, strict=True),
    "maxItems": Keyword(_NONE, *_A_COUNT, strict=True),
    "uniqueItems": Keyword(_NONE, *_FLAG),
    "minLength": Keyword(_NONE, *_A_COUNT, strict=True),
    "maxLength": Keyword(_NONE, *_A_COUNT, strict=True),
    "pattern": Keyword(_NONE, *_TEXT, strict=True),
    "format": Keyword(_NONE, *_TEXT, strict=True),
    "minimum": Keyword(_NONE, *_A_NUMBER, strict=True),
    "maximum": Keyword(_NONE, *_A_NUMBER, strict=True),
    "exclusiveMinimum": Keyword(_NONE, *_A_NUMBER, strict=True),
    "exclusiveMaximum": Keyword(_NONE, *_A_NUMBER, strict=True),
    "multipleOf": Keyword(_NONE, _is_factor, "a number greater than 0", strict=True),
}

_POINTERS_ONLY = "use $ref with a JSON pointer such as '#/$defs/name'"

# Unsupported keywords that would constrain values, each with its replacement.
REFUSED: Mapping[str, str] = {
    "$anchor": _POINTERS_ONLY,
    "$dynamicRef": _POINTERS_ONLY,
    "$dynamicAnchor": _POINTERS_ONLY,
    "$recursiveRef": _POINTERS_ONLY,
    "$recursiveAnchor": _POINTERS_ONLY,
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "additionalItems": "it belongs to an older draft; use items with prefixItems",
    "dependencies": "it belongs to an older draft; use dependentRequired or dependentSchemas",
}

# For values that contain schemas: the check of a value, and a description of the permitted values.
SHAPES: Mapping[Subschemas, tuple[Callable[[object], bool], str]] = {
    Subschemas.ONE: (_is_schema, "a schema"),
    Subschemas.LIST: (
        lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_is_schema, value)),
        "a list of at least one schema",
    ),
    Subschemas.BY_NAME: (
        lambda value: isinstance(value, Mapping) and all(map(_is_schema, value.values())),
        "an object of schemas",
    ),
}


def schemas_in(keyword: Keyword, value: object) -> Mapping[str, object]:
    """Return the schemas in a keyword's value, by their path within this value.

    The path is empty if the value itself is the schema.
    """
    match keyword.subschemas:
        case Subschemas.ONE:
            return {"": value}
        case Subschemas.LIST:
            return {str(index): each for index, each in enumerate(value)} if isinstance(value, list | tuple) else {}
        case Subschemas.BY_NAME:
            return value if isinstance(value, Mapping) else {}
        case Subschemas.NONE:
            return {}
