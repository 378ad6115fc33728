"""TypeScript shapes of tool parameters, and the JSON Schema that the library prints as such.

The library prints few schemas correctly: it turns many into `any`, loses values and does not escape text. Three
of its features suffice to print everything correctly, and this module uses no others: members of a `type` list
are printed verbatim, joined by ` | `; an object becomes a block of commented fields; `oneOf` becomes one
variant per line. A shape is one line of text if possible, else a block, an array of blocks, or a union that
contains one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

# Subset of JSON Schema that is sent to the library, whose own input is untyped.
LibrarySchema: TypeAlias = dict[str, Any]

_IDENTIFIER = re.compile(r"(?:[^\W\d]|\$)[\w$]*")
_LITERAL_DEFAULT = "literal"


@dataclass(frozen=True, slots=True)
class InlineType:
    """Type on one line: one of `options`, each a TypeScript type."""

    options: tuple[str, ...]

    @property
    def text(self) -> str:
        return " | ".join(self.options)


@dataclass(frozen=True, slots=True)
class ObjectField:
    """Property with the name `key`; `default` is the text after `default: `."""

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
    """Return a union without null: arguments are always present."""
    return union_of(v for v in shape.variants if v != NULL) if isinstance(shape, UnionType) else shape


def to_library(shape: Shape) -> LibrarySchema:
    """Return the schema for which the library prints `shape`."""
    match shape:
        case InlineType(options):
            return {"type": list(options)}
        case BlockType(fields, comment):
            block: LibrarySchema = {
                "type": "object",
                "properties": {spelled(field.key): _field_to_library(field) for field in fields},
                "required": [spelled(field.key) for field in fields if field.required],
            }
            return {"description": comment} | block if comment else block
        case ArrayType(item):
            return {"type": "array", "items": to_library(item)}
        case UnionType(variants):
            return _union_to_library(variants)
        case _:
            assert_never(shape)


def spelled(key: str) -> str:
    """Return a property name in TypeScript: bare if it is an identifier, else quoted."""
    return key if _IDENTIFIER.fullmatch(key) else json.dumps(key, ensure_ascii=False)


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


def _union_to_library(variants: Sequence[InlineType | BlockType | ArrayType]) -> LibrarySchema:
    rest = [variant for variant in variants if variant != NULL]
    if len(rest) == 1 and len(rest) < len(variants):
        only = to_library(rest[0])
        # The library adds ` | null` only if the printed type does not contain the word yet.
        if "null" not in json.dumps(only, ensure_ascii=False):
            return only | {"nullable": True}
    return {"oneOf": [to_library(variant) for variant in variants]}


def _field_to_library(field: ObjectField) -> LibrarySchema:
    schema = to_library(field.shape)
    # The library repeats an object's description inside the type; as a title it is printed once, above the
    # field.
    if schema.get("type") == "object":
        title = ": ".join(text for text in (field.title, field.comment) if text)
        schema |= {"title": title} if title else {}
    else:
        schema |= {"title": field.title} if field.title else {}
        schema |= {"description": field.comment} if field.comment else {}
    if field.examples:
        schema["examples"] = list(field.examples)
    if field.default is not None:
        # Together with an `enum`, the library prints a string default without additional quotes.
        schema |= {"default": field.default, "enum": [_LITERAL_DEFAULT]}
    return schema


def _inline_field(field: ObjectField) -> str:
    notes = [field.comment or field.title]
    if field.default is not None:
        notes.append(f"default: {field.default}")
    comment = " ".join(note for note in notes if note).replace("*/", "* /")
    mark = "" if field.required else "?"
    return f"{spelled(field.key)}{mark}: {inline(field.shape).text}" + (f" /* {comment} */" if comment else "")


def _tight(line: InlineType) -> str:
    return f"({line.text})" if len(line.options) > 1 else line.text
