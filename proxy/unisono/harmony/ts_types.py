"""TypeScript shapes of tool parameters, and the JSON Schema that makes openai-harmony print them.

The library prints few schemas well: it turns many into `any`, loses values and leaves text unescaped. Three of its
habits suffice to print everything right, and this module uses no others: the members of a `type` list come out as they
are written, joined by ` | `; an object becomes a block of commented fields; `oneOf` becomes one variant per line.
A shape is one line of text wherever it can be, else a block, an array of blocks, or a union that holds one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

LibrarySchema: TypeAlias = dict[str, Any]
"""The subset of JSON Schema that goes to the library; it is the library's own untyped input."""

_IDENTIFIER = re.compile(r"(?:[^\W\d]|\$)[\w$]*")
_LITERAL_DEFAULT = "literal"


@dataclass(frozen=True, slots=True)
class InlineType:
    """A type on one line: one of `options`, each a TypeScript type."""

    options: tuple[str, ...]

    @property
    def text(self) -> str:
        return " | ".join(self.options)


@dataclass(frozen=True, slots=True)
class ObjectField:
    """One property. `key` is the property's own name; `default` is the text after `default: `."""

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
    """Items that take several lines: a block, or an array of blocks."""

    item: BlockType | ArrayType


@dataclass(frozen=True, slots=True)
class UnionType:
    """At least one variant takes several lines."""

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
    """The union, flattened, each variant once, in order. Of nothing: `never`. `any` swallows the rest."""
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
    """The shape on one line; field comments become `/* ... */`."""
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
    """A union without its null: arguments are always there."""
    return union_of(v for v in shape.variants if v != NULL) if isinstance(shape, UnionType) else shape


def to_library(shape: Shape) -> LibrarySchema:
    """The schema for which the library prints `shape`."""
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
    """A property name as TypeScript writes it: bare when it is an identifier, quoted otherwise."""
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
        # The library adds ` | null` only where the printed type does not hold the word yet.
        if "null" not in json.dumps(only, ensure_ascii=False):
            return only | {"nullable": True}
    return {"oneOf": [to_library(variant) for variant in variants]}


def _field_to_library(field: ObjectField) -> LibrarySchema:
    schema = to_library(field.shape)
    # The library repeats an object's description inside the type; under a title it stands once, above the field.
    if schema.get("type") == "object":
        title = ": ".join(text for text in (field.title, field.comment) if text)
        schema |= {"title": title} if title else {}
    else:
        schema |= {"title": field.title} if field.title else {}
        schema |= {"description": field.comment} if field.comment else {}
    if field.examples:
        schema["examples"] = list(field.examples)
    if field.default is not None:
        # Beside an `enum` the library prints a string default without quotes of its own.
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
