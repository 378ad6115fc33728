"""Comments for JSON Schema constraints that TypeScript cannot express."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.harmony.limits import SchemaBudget, one_line, to_json

# Keywords with a plain value, written as `keyword: value`.
CONSTRAINTS = (
    *("format", "pattern", "minLength", "maxLength", "contentEncoding", "contentMediaType"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minItems", "maxItems", "uniqueItems", "minContains", "maxContains", "minProperties", "maxProperties"),
    "deprecated",
)

# Keywords that hold schemas, written as JSON if short.
CONDITIONS = (
    *("not", "if", "then", "else", "contains", "dependentRequired", "dependentSchemas", "dependencies"),
    *("propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)

MAX_CONDITION_LENGTH = 200

_COMMENTED = frozenset(CONSTRAINTS + CONDITIONS)


def comments_of(schema: Mapping[str, object], budget: SchemaBudget) -> tuple[str, ...]:
    """Return one line per constraint. All text that was read is charged to `budget`."""
    if schema.keys().isdisjoint(_COMMENTED):
        return ()
    notes = []
    for keyword in CONSTRAINTS:
        value = schema.get(keyword)
        if value is not None and value is not False and isinstance(value, str | int | float):
            text = value if isinstance(value, str) else to_json(value)
            budget.spend(characters=len(text))
            notes.append(f"{keyword}: {one_line(text)}")
    for keyword in CONDITIONS:
        if keyword in schema:
            text = to_json(schema[keyword])
            budget.spend(characters=len(text))
            if len(text) <= MAX_CONDITION_LENGTH:
                notes.append(f"{keyword}: {one_line(text)}")
    return tuple(notes)
