"""Conversation: what is said to the model, append-only and free of any wire format.

Every API surface translates its request into these nouns, and the renderer turns them into Harmony tokens. An
assistant item may carry the token ids the model generated for it; the renderer then uses those verbatim, so that a
continued conversation extends the very tokens a backend has cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

Tokens: TypeAlias = tuple[int, ...]


class Effort(StrEnum):
    """How long gpt-oss thinks; the three values its system message knows."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Phase(StrEnum):
    """Which kind of visible text a message is; the value is its Harmony channel."""

    COMMENTARY = "commentary"
    FINAL = "final"


# APIs with one text per answer put a blank line between visible messages.
MESSAGE_SEPARATOR: Final = "\n\n"


def join_messages(texts: Iterable[str]) -> str:
    """The visible messages of an answer as one text; empty ones leave no trace."""
    return MESSAGE_SEPARATOR.join(text for text in texts if text)


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A tool the client runs. `name` is the client's own; `parameters` is JSON Schema, None for no parameters."""

    name: str
    description: str = ""
    parameters: Mapping[str, Json] | None = None
    strict: bool = False
    free_text: bool = False
    """Whether arguments that are no JSON are good too: then all of them is the text that the tool takes."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """A tool gpt-oss was trained on (`browser`, `python`, `container`), declared in the form it was trained with.
    `description` stands in the place of the trained one, which for `python` and `container` promises what another
    implementation need not keep; empty for the trained one."""

    name: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer has to be: JSON that `schema` allows, or any JSON object where there is none. `strict` says that
    the schema is one of those that can be kept to the letter."""

    name: str = "json"
    schema: Mapping[str, Json] | None = None
    description: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Preamble:
    """What stands before the first message; rebuilt for every request, byte-stable for equal values.

    `date` is the conversation's first day as YYYY-MM-DD, pinned so that midnight does not break prefix caches; empty
    leaves the line out.
    """

    instructions: str = ""
    tools: tuple[FunctionTool, ...] = ()
    effort: Effort = Effort.MEDIUM
    date: str = ""
    identity: str = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str = "2024-06"
    builtins: tuple[Builtin, ...] = ()
    form: AnswerForm | None = None


@dataclass(frozen=True, slots=True)
class UserMessage:
    text: str


@dataclass(frozen=True, slots=True)
class DeveloperMessage:
    """Instructions given in the middle of a conversation; leading ones belong to the preamble."""

    text: str


@dataclass(frozen=True, slots=True)
class AssistantReasoning:
    text: str
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    text: str
    phase: Phase = Phase.FINAL
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True)
class AssistantCall:
    """A tool call the model made. `name` is the client's name, or that of a builtin tool (`browser.search`, `python`);
    `arguments` are the exact bytes, as text: for `python` the code."""

    call_id: str
    name: str
    arguments: str
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str
    name: str
    output: str


Item: TypeAlias = UserMessage | DeveloperMessage | AssistantReasoning | AssistantMessage | AssistantCall | ToolResult


@dataclass(frozen=True, slots=True)
class Conversation:
    """`prefill` is the beginning of the answer the client wrote itself; the model continues it."""

    preamble: Preamble
    items: tuple[Item, ...] = ()
    prefill: str | None = None
