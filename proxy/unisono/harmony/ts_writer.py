"""TypeScript text of tools, in the layout of openai-harmony.

openai-harmony itself prints few schemas correctly: it turns many into `any`, loses values and does not escape text. For
the shapes that this package produces, the library's layout is the reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from unisono.harmony.ts_types import NULL, ArrayType, BlockType, InlineType, ObjectField, Shape, UnionType, spelled


def function_text(name: str, lines: Iterable[str], argument: Shape | None) -> str:
    """Return the TypeScript declaration of a function, which ends with an empty line.

    `lines` are the comment lines above it. `argument` is the type of its argument; None for a function without
    arguments.
    """
    written = "()" if argument is None else f"(_: {_written(argument, '')})"
    return "\n".join((*(f"// {line}" for line in lines), f"type {name} = {written} => any;\n"))


def _written(shape: Shape, indent: str) -> str:
    match shape:
        case InlineType():
            return shape.text
        case BlockType(fields, comment):
            above = f"{indent}// {comment}\n" if comment else ""
            return f"{above}{{\n{''.join(_field(field, indent) for field in fields)}{indent}}}"
        case ArrayType(item):
            return f"{_written(item, indent)}[]"
        case UnionType(variants):
            return "".join(f"\n{indent} | {_written(variant, indent + '   ')}" for variant in variants)
        case _:
            assert_never(shape)


def _field(field: ObjectField, indent: str) -> str:
    """Return a property with its comments."""
    name = f"{spelled(field.key)}{'' if field.required else '?'}:"
    default = "" if field.default is None else f"// default: {field.default}"
    only = _without_null(field.shape, indent)
    title, comment = field.title, field.comment
    if isinstance(only, BlockType):
        # The library repeats the description of an object inside the type, so it is part of the title.
        title, comment = ": ".join(text for text in (title, comment) if text), ""
    lines = [f"// {title}", "//"] if title else []
    examples = ["// Examples:", *(f'// - "{example}"' for example in field.examples)] if field.examples else []
    described = [f"// {comment}"] if comment else []
    if isinstance(only, UnionType):
        lines += (*examples, *described, *([default] if default else []), name)
        lines += (f" | {_written(variant, indent + '   ')}" for variant in only.variants)
        lines.append(",")
    else:
        null = "" if only is field.shape else " | null"
        text = f"{name} {_written(only, indent + '    ')}{null},"
        lines += (*described, *examples, f"{text} {default}" if default else text)
    return "".join(f"{indent}{line}\n" for line in lines)


def _without_null(shape: Shape, indent: str) -> Shape:
    """Return the variant of a union of one type and null, if ` | null` can be written after it.

    Any other shape is returned unchanged.
    """
    if not isinstance(shape, UnionType):
        return shape
    rest = [variant for variant in shape.variants if variant != NULL]
    # The library adds ` | null` only if the printed type does not contain the word.
    if len(rest) == 1 and len(rest) < len(shape.variants) and "null" not in _written(rest[0], indent):
        return rest[0]
    return shape
