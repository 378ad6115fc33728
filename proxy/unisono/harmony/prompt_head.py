"""Text of the system message and of the tools section.

openai-harmony writes both, since it defines their format. Its tokenizer takes quadratic time on long runs and
holds the GIL, so no outside text passes through it. Each outside text is replaced by a short mark while the
library writes, and restored afterwards. All outside text is masked, so none of it can imitate a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from openai_harmony import (
    Content,
    DeveloperContent,
    HarmonyEncoding,
    Message,
    ReasoningEffort,
    RenderOptions,
    Role,
    SystemContent,
    ToolDescription,
)

from unisono.core.conversation import AnswerForm, Effort, Preamble
from unisono.core.generation import MESSAGE
from unisono.errors import InvalidRequest
from unisono.harmony.builtin_tools import namespaces
from unisono.harmony.tools import Declaration
from unisono.harmony.ts_types import LibrarySchema

EFFORTS = {
    Effort.LOW: ReasoningEffort.LOW,
    Effort.MEDIUM: ReasoningEffort.MEDIUM,
    Effort.HIGH: ReasoningEffort.HIGH,
}

# Channels by whether there are tools of any kind. Without tools `commentary` is not offered: replies would get lost
# there.
CHANNELS = {True: ["analysis", "commentary", "final"], False: ["analysis", "final"]}

ANY_OBJECT = {"type": "object"}
_UNTITLED = re.compile(r"[^A-Za-z0-9_.-]")

_MARK = re.compile("\ue000([0-9]+)\ue001")


class Mask:
    """Texts that are replaced by marks while the library writes."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def hide(self, text: str) -> str:
        self._texts.append(text)
        return f"\ue000{len(self._texts) - 1}\ue001"

    def reveal(self, written: str) -> str:
        return _MARK.sub(lambda mark: self._texts[int(mark[1])], written)


def system_text(harmony: HarmonyEncoding, preamble: Preamble, *, with_tools: bool) -> str:
    """Return the body of the system message; empty values omit their line.

    `with_tools` means that functions are declared after it.
    """
    mask = Mask()
    hide: Callable[[str], str | None] = lambda text: mask.hide(text) if text else None  # noqa: E731
    content = SystemContent(
        model_identity=hide(preamble.identity),
        knowledge_cutoff=hide(preamble.knowledge_cutoff),
        conversation_start_date=hide(preamble.date),
        reasoning_effort=EFFORTS[preamble.effort],
        tools=namespaces(preamble.builtins, mask.hide) or None,
    ).with_required_channels(CHANNELS[with_tools or bool(preamble.builtins)])
    return mask.reveal(_written(harmony, Role.SYSTEM, content, with_tools=with_tools))


def tools_section(harmony: HarmonyEncoding, declarations: Iterable[Declaration]) -> str:
    """Return `# Tools` and the namespace of function tools.

    Raises InvalidRequest if the library cannot write them.
    """
    mask = Mask()
    described = [_description(declaration, mask) for declaration in declarations]
    content = DeveloperContent.new().with_function_tools(described)
    try:
        return mask.reveal(_written(harmony, Role.DEVELOPER, content, with_tools=True))
    except BaseException as failure:
        # The library's own panics are not derived from Exception.
        if isinstance(failure, Exception) or type(failure).__name__ == "PanicException":
            raise InvalidRequest("The tools cannot be declared to the model.", param="tools") from failure
        raise


def form_section(form: AnswerForm) -> str:
    """Return `# Response Formats`, the end of the developer message.

    Raises InvalidRequest for a schema that JSON cannot express.
    """
    try:
        schema = json.dumps(form.schema if form.schema is not None else ANY_OBJECT, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as failure:
        raise InvalidRequest("The schema contains a value that JSON cannot represent; remove it.") from failure
    name = _UNTITLED.sub("_", form.name) or "json"
    described = "".join(f"// {line}\n" for line in form.description.splitlines())
    return f"# Response Formats\n\n## {name}\n\n{described}{schema}"


def _written(harmony: HarmonyEncoding, role: Role, content: Content, *, with_tools: bool) -> str:
    message = Message.from_role_and_content(role, content)
    tokens = harmony.render(message, RenderOptions(conversation_has_function_tools=with_tools))
    text: str = harmony.decode_utf8(tokens[tokens.index(MESSAGE) + 1 : -1])
    return text


def _description(declaration: Declaration, mask: Mask) -> ToolDescription:
    return ToolDescription.new(
        name=mask.hide(declaration.name),
        description="\n".join(mask.hide(line) for line in declaration.lines),
        parameters=None if declaration.parameters is None else _masked(declaration.parameters, mask),
    )


def _masked(schema: LibrarySchema, mask: Mask) -> LibrarySchema:
    keys = {key: mask.hide(key) for key in schema.get("properties", ())}
    treat: dict[str, Callable[[Any], Any]] = {
        "type": lambda kind: kind if isinstance(kind, str) else [mask.hide(text) for text in kind],
        "title": mask.hide,
        "description": mask.hide,
        "default": mask.hide,
        "examples": lambda texts: [mask.hide(text) for text in texts],
        "properties": lambda fields: {keys[key]: _masked(field, mask) for key, field in fields.items()},
        "required": lambda names: [keys[name] for name in names],
        "items": lambda item: _masked(item, mask),
        "oneOf": lambda variants: [_masked(variant, mask) for variant in variants],
        # Marks that only control the library.
        "enum": lambda values: values,
        "nullable": lambda value: value,
    }
    return {keyword: treat[keyword](value) for keyword, value in schema.items()}
