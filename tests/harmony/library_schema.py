"""JSON Schema for which openai-harmony prints a TypeScript shape: the reference for the gateway's own text.

Three features of the library suffice: members of a `type` list are printed verbatim, joined by ` | `; an object becomes
a block of commented fields; `oneOf` becomes one variant per line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, assert_never

from openai_harmony import DeveloperContent, Message, RenderOptions, Role, ToolDescription

from unisono.core.generation import MESSAGE
from unisono.harmony.library_parser import load_library
from unisono.harmony.tool_declarations import ToolSet
from unisono.harmony.ts_types import NULL, ArrayType, BlockType, InlineType, ObjectField, Shape, UnionType, spelled

LibrarySchema = dict[str, Any]
_LITERAL_DEFAULT = "literal"


def described(tools: ToolSet) -> list[ToolDescription]:
    """Return the tools as the library takes them."""
    return [
        ToolDescription.new(
            each.name, "\n".join(each.lines), None if each.argument is None else to_library(each.argument)
        )
        for each in tools.declarations
    ]


def section_by_library(tools: ToolSet) -> str:
    """Return the tools section as openai-harmony renders it."""
    library = load_library()
    message = Message.from_role_and_content(
        Role.DEVELOPER, DeveloperContent.new().with_function_tools(described(tools))
    )
    tokens = library.render(message, RenderOptions(conversation_has_function_tools=True))
    text: str = library.decode_utf8(tokens[tokens.index(MESSAGE) + 1 : -1])
    return text


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
