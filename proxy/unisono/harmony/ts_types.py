"""TypeScript shapes of tool parameters.

A shape is one line of text if possible. Otherwise it is a block of several lines, an array of blocks, or a union that
contains a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias, assert_never

from unisono.core.frozen import dataclass
from unisono.harmony.declaration_limits import SchemaBudget, one_line, to_json

# Comments for JSON Schema constraints that TypeScript cannot express.

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
    """Return one comment per constraint. The text of all constraints is charged to `budget`."""
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


# Merging of two JSON Schemas that both apply: `allOf`, and keywords beside a `$ref`.

Combine = Callable[[object, object], object]

# Maximum number of pairs of enum values that are compared. If two lists have more pairs, the first list is used.
LARGEST_COMPARISON = 2_500


def merged(first: Mapping[str, object], second: Mapping[str, object]) -> Mapping[str, object]:
    """Return one schema with all keywords; `first` wins if two values cannot be combined."""
    result = dict(first)
    for key, value in second.items():
        result[key] = COMBINE.get(key, _keep)(result[key], value) if key in result else value
    return result


def _keep(first: object, second: object) -> object:
    return first


def _both(first: object, second: object) -> object:
    """Combine the two values of a keyword into an `allOf`, which is merged when it is read."""
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
    """Combine two lists of alternatives into all pairs; keep only `first` if there are over 16."""
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


_IDENTIFIER = re.compile(r"(?:[^\W\d]|\$)[\w$]*")


@dataclass(frozen=True, slots=True)
class InlineType:
    """Type on one line: one of `options`, each a TypeScript type."""

    options: tuple[str, ...]

    @property
    def text(self) -> str:
        return " | ".join(self.options)


@dataclass(frozen=True, slots=True)
class ObjectField:
    """Property with the name `key`; `default` is the text of its default value, if any."""

    key: str
    shape: Shape
    required: bool
    title: str = ""
    comment: str = ""
    default: str | None = None
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockType:
    fields: tuple[ObjectField, ...]
    comment: str = ""


@dataclass(frozen=True, slots=True)
class ArrayType:
    """Array of items that take several lines: a block, or an array of blocks."""

    item: BlockType | ArrayType


@dataclass(frozen=True, slots=True)
class UnionType:
    """Union with at least one variant that takes several lines."""

    variants: tuple[InlineType | BlockType | ArrayType, ...]


Shape: TypeAlias = InlineType | BlockType | ArrayType | UnionType

ANY = InlineType(("any",))
NEVER = InlineType(("never",))
NULL = InlineType(("null",))


def array_of(item: Shape) -> InlineType | ArrayType:
    match item:
        case BlockType() | ArrayType():
            return ArrayType(item)
        case InlineType() | UnionType():
            return InlineType((f"{_tight(inline(item))}[]",))
        case _:
            assert_never(item)


def union_of(shapes: Iterable[Shape]) -> Shape:
    """Return the flattened union in order, without duplicates.

    An empty union is `never`. A union with `any` is `any`.
    """
    variants = tuple(variant for variant in dict.fromkeys(_variants(shapes)) if variant != NEVER)
    if ANY in variants:
        return ANY
    if len(variants) == 1:
        return variants[0]
    options = tuple(variant.text for variant in variants if isinstance(variant, InlineType))
    if len(options) < len(variants):
        return UnionType(variants)
    return InlineType(options) if options else NEVER


def inline(shape: Shape) -> InlineType:
    """Convert a shape to one that fits on one line; field comments become `/* ... */`."""
    match shape:
        case InlineType():
            return shape
        case BlockType(fields):
            return InlineType((f"{{ {', '.join(map(_inline_field, fields))} }}" if fields else "{}",))
        case ArrayType(item):
            return InlineType((f"{_tight(inline(item))}[]",))
        case UnionType(variants):
            return InlineType(tuple(inline(variant).text for variant in variants))
        case _:
            assert_never(shape)


def without_null(shape: Shape) -> Shape:
    """Return a union without null, because the argument of a call is always present."""
    return union_of(v for v in shape.variants if v != NULL) if isinstance(shape, UnionType) else shape


def spelled(key: str) -> str:
    """Return the property name `key` in TypeScript: quoted unless it is an identifier."""
    return key if _IDENTIFIER.fullmatch(key) else to_json(key)


def _variants(shapes: Iterable[Shape]) -> Iterator[InlineType | BlockType | ArrayType]:
    for shape in shapes:
        match shape:
            case InlineType(options):
                yield from (InlineType((option,)) for option in options)
            case BlockType() | ArrayType():
                yield shape
            case UnionType(variants):
                yield from variants
            case _:
                assert_never(shape)


def _inline_field(field: ObjectField) -> str:
    notes = [field.comment or field.title]
    if field.default is not None:
        notes.append(f"default: {field.default}")
    comment = " ".join(note for note in notes if note).replace("*/", "* /")
    mark = "" if field.required else "?"
    return f"{spelled(field.key)}{mark}: {inline(field.shape).text}" + (f" /* {comment} */" if comment else "")


def _tight(line: InlineType) -> str:
    return f"({line.text})" if len(line.options) > 1 else line.text
