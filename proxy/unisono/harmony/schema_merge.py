"""Merging of two JSON Schemas that both apply: `allOf`, and keywords beside a `$ref`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Combine = Callable[[object, object], object]

# Maximum number of compared pairs of enum values; beyond it, the first list is used.
LARGEST_COMPARISON = 2_500


def merged(first: Mapping[str, object], second: Mapping[str, object]) -> Mapping[str, object]:
    """Return one schema for both; the first's value is used if two cannot be combined."""
    result = dict(first)
    for key, value in second.items():
        result[key] = COMBINE.get(key, _keep)(result[key], value) if key in result else value
    return result


def _keep(first: object, second: object) -> object:
    return first


def _both(first: object, second: object) -> object:
    """Combine two schemas of one keyword; the reader merges them in turn."""
    return first if first == second else {"allOf": [first, second]}


def _properties(first: object, second: object) -> object:
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return first
    shared = {key: _both(first[key], value) if key in first else value for key, value in second.items()}
    return {**first, **shared}


def _joined(first: object, second: object) -> object:
    if not isinstance(first, list) or not isinstance(second, list):
        return first
    known = {value for value in first if isinstance(value, str)}
    return first + [value for value in second if isinstance(value, str) and value not in known]


def _common(first: object, second: object) -> object:
    if not isinstance(first, list) or not isinstance(second, list):
        return first
    if len(first) * len(second) > LARGEST_COMPARISON:
        return first
    return [value for value in first if value in second] or first


def _narrower_type(first: object, second: object) -> object:
    ours = first if isinstance(first, list) else [first]
    theirs = second if isinstance(second, list) else [second]
    # Every integer is a number.
    common = [
        "integer" if name == "number" and "number" not in theirs else name
        for name in ours
        if name in theirs or (name == "number" and "integer" in theirs) or (name == "integer" and "number" in theirs)
    ]
    return (common[0] if len(common) == 1 else common) if common else first


def _number(pick: Callable[[float, float], float]) -> Combine:
    def combine(first: object, second: object) -> object:
        if isinstance(first, int | float) and isinstance(second, int | float):
            return pick(first, second)
        return first

    return combine


def _alternatives(first: object, second: object) -> object:
    """Combine two lists of alternatives: every pair, or the first list if there are many."""
    if not isinstance(first, list) or not isinstance(second, list) or first == second:
        return first
    if len(first) * len(second) > 16:
        return first
    return [{"allOf": [one, other]} for one in first for other in second]


# Merge function by keyword; for all other keywords the first value is used.
COMBINE: dict[str, Combine] = {
    "properties": _properties,
    "patternProperties": _properties,
    "$defs": _keep,
    "required": _joined,
    "type": _narrower_type,
    "enum": _common,
    "items": _both,
    "anyOf": _alternatives,
    "oneOf": _alternatives,
    "minimum": _number(max),
    "exclusiveMinimum": _number(max),
    "minLength": _number(max),
    "minItems": _number(max),
    "minProperties": _number(max),
    "maximum": _number(min),
    "exclusiveMaximum": _number(min),
    "maxLength": _number(min),
    "maxItems": _number(min),
    "maxProperties": _number(min),
    "nullable": lambda first, second: first is True and second is True,
}
