"""Texts of the system message, of the tools section and of the response format.

openai-harmony defines the format of these texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final, assert_never

from unisono.core.conversation import AnswerForm, Preamble
from unisono.errors import InvalidRequest
from unisono.harmony.builtin_tools import builtin_sections, namespace_section
from unisono.harmony.tool_declarations import Declaration
from unisono.harmony.ts_types import NULL, ArrayType, BlockType, InlineType, ObjectField, Shape, UnionType, spelled


def function_text(name: str, lines: Iterable[str], argument: Shape | None) -> str:
    """Return the TypeScript declaration of a function, which ends with an empty line.

    `lines` are the comment lines above the declaration. `argument` is the type of the function's argument; None for a
    function without arguments.
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


TOOLS: Final = "# Tools"
# Without tools, the channel `commentary` is not offered: clients take text on it for a preamble, not for the answer.
CHANNELS: Final = "# Valid channels: analysis, final. Channel must be included for every message."
CHANNELS_WITH_TOOLS: Final = (
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
CALLS_ON_COMMENTARY: Final = "\nCalls to these tools must go to the commentary channel: 'functions'."

ANY_OBJECT = {"type": "object"}
_UNTITLED = re.compile(r"[^A-Za-z0-9_.-]")


def system_text(preamble: Preamble, *, with_tools: bool) -> str:
    """Return the body of the system message; the line of an empty value is omitted.

    `with_tools` means that the developer message declares functions.
    """
    about = [
        preamble.identity,
        f"Knowledge cutoff: {preamble.knowledge_cutoff}" if preamble.knowledge_cutoff else "",
        f"Current date: {preamble.date}" if preamble.date else "",
    ]
    head = "\n".join(filter(None, about))
    tools = [TOOLS, *builtin_sections(preamble.builtins)] if preamble.builtins else []
    channels = CHANNELS_WITH_TOOLS if with_tools or preamble.builtins else CHANNELS
    calls = CALLS_ON_COMMENTARY if with_tools else ""
    sections = [head] if head else []
    return "\n\n".join((*sections, f"Reasoning: {preamble.effort}", *tools, channels + calls))


def tools_section(declarations: Iterable[Declaration]) -> str:
    """Return the section `# Tools`, with the namespace that declares the function tools."""
    functions = (function_text(each.name, each.lines, each.argument) for each in declarations)
    return "\n\n".join((TOOLS, namespace_section("functions", (), functions)))


def form_section(form: AnswerForm) -> str:
    """Return the section `# Response Formats`, which ends the developer message.

    Raises InvalidRequest for a schema that JSON cannot express.
    """
    name = _UNTITLED.sub("_", form.name) or "json"
    described = "".join(f"// {line}\n" for line in form.description.splitlines())
    return f"# Response Formats\n\n## {name}\n\n{described}{_format_text(form)}"


def _format_text(form: AnswerForm) -> str:
    if form.choices:
        return "// The answer is exactly one of these texts, and nothing else:\n" + "\n".join(form.choices)
    if form.grammar is not None:
        notation = "regular expression" if form.grammar.syntax == "regex" else "grammar"
        return f"// The whole answer matches this {notation}:\n{form.grammar.gbnf or form.grammar.definition}"
    try:
        return json.dumps(form.schema if form.schema is not None else ANY_OBJECT, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as failure:
        raise InvalidRequest("The schema contains a value that JSON cannot represent; remove it.") from failure
