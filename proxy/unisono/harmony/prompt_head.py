"""Texts of the system message, of the tools section and of the response format.

openai-harmony defines the format of these texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

from unisono.core.conversation import AnswerForm, Preamble
from unisono.errors import InvalidRequest
from unisono.harmony.builtin_tools import builtin_sections, namespace_section
from unisono.harmony.tools import Declaration
from unisono.harmony.ts_writer import function_text

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
