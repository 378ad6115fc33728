"""Conversation nouns: append-only and independent of any wire format.

Every API surface translates its request into these nouns, and the renderer turns them into Harmony tokens. An
assistant item may carry the token ids that the model generated for it. The renderer then uses those verbatim, so that
a continued conversation extends exactly the tokens that a backend has cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from unisono.core.frozen import dataclass

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

Tokens: TypeAlias = tuple[int, ...]


class Effort(StrEnum):
    """Reasoning effort of gpt-oss; the three values that its system message defines."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Phase(StrEnum):
    """Kind of a visible message; the value is its Harmony channel."""

    COMMENTARY = "commentary"
    FINAL = "final"


# APIs with one text per answer put a blank line between visible messages.
MESSAGE_SEPARATOR: Final = "\n\n"


def join_messages(texts: Iterable[str]) -> str:
    """Join the visible messages of an answer into one text; empty messages are skipped."""
    return MESSAGE_SEPARATOR.join(filter(None, texts))


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """Grammar of a whole text: a regular expression, or a grammar in the notation of Lark."""

    syntax: Literal["regex", "lark"]
    definition: str
    # The same grammar in the notation of GBNF, if the client used that one.
    gbnf: str = ""


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """Tool that the client runs.

    `name` is the client's own; `parameters` is JSON Schema, None for no parameters. The name of a tool in a
    `namespace` begins with it: `namespace__tool`.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Json] | None = None
    strict: bool = False
    # True if arguments that are not JSON are valid too. The whole text is then the tool's input.
    free_text: bool = False
    namespace: str = ""
    # Description of the namespace, which the model reads before a search.
    namespace_description: str = ""
    # Type of a built-in tool that the client runs, such as `shell`; empty for a function.
    kind: str = ""
    # Grammar of a free text, if it can be enforced.
    grammar: TextGrammar | None = None
    # True if the model does not know the tool until a search finds it.
    deferred: bool = False
    # Label of the server that runs the tool; empty for a tool of the client. Such a tool has only a name here: its
    # description and schema come from the server's tool list, which is read again for every answer.
    server: str = ""


@dataclass(frozen=True, slots=True)
class Builtin:
    """Tool gpt-oss was trained on, declared in its trained form.

    These are `browser`, `python` and `container`.

    `description` replaces the trained description; empty for the trained one. For `python` and `container`, the
    trained description promises behaviour that another implementation need not provide.
    """

    name: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Required form of an answer: JSON that matches `schema`, or any JSON object without one.

    With `choices`, the answer is one of these texts instead, and with `grammar` a text of that grammar. `strict` marks
    a schema that can be enforced exactly.
    """

    name: str = "json"
    schema: Mapping[str, Json] | None = None
    description: str = ""
    strict: bool = False
    choices: tuple[str, ...] = ()
    grammar: TextGrammar | None = None

    @property
    def is_json(self) -> bool:
        """Return whether the answer has to be JSON."""
        return not self.choices and self.grammar is None


@dataclass(frozen=True, slots=True)
class Preamble:
    """Prompt content before the first message.

    Rebuilt per request, byte-stable for equal values. `date` is the conversation's first day as YYYY-MM-DD, pinned so
    that midnight does not break prefix caches. An empty `date` omits the line.
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
    """Instructions in the middle of a conversation; leading ones belong to the preamble."""

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
    """Tool call that the model made.

    `name` is the client's name, or that of a builtin tool (`browser.search`, `python`). `arguments` are the exact
    bytes, as text; for `python`, the code.
    """

    call_id: str
    name: str
    arguments: str
    tokens: Tokens = ()


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str
    name: str
    output: str


@dataclass(frozen=True, slots=True)
class AddedTools:
    """Tools that the model may call from here on, such as the result of a tool search.

    Leading ones belong to the preamble.
    """

    tools: tuple[FunctionTool, ...]


# Item with a text of its own.
Message: TypeAlias = UserMessage | DeveloperMessage | AssistantReasoning | AssistantMessage | AssistantCall | ToolResult
Item: TypeAlias = Message | AddedTools


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation for one prompt.

    `prefill` is the beginning of the answer, written by the client; the model continues it. Reasoning before the item
    at the position `reasoning_from` is left out of the prompt. `deferred` are tools that the model does not know yet: a
    search may add them during the answer. `removed` are the names of tools that the model must not call any more; they
    stay declared, so that cached prompts stay valid.
    """

    preamble: Preamble
    items: tuple[Item, ...] = ()
    prefill: str | None = None
    reasoning_from: int = 0
    deferred: tuple[FunctionTool, ...] = ()
    removed: frozenset[str] = frozenset()

    @property
    def all_tools(self) -> tuple[FunctionTool, ...]:
        """Tools of the client that the model may call now or after a search."""
        if not self.deferred:
            return self.tools
        return (*self.tools, *(tool for tool in self.deferred if not tool.server))

    @property
    def tools(self) -> tuple[FunctionTool, ...]:
        """Client tools that the model may call: those of the preamble, then the added ones.

        The last definition of a name counts.
        """
        if AddedTools not in map(type, self.items):
            return self.preamble.tools
        added = [item for item in self.items if isinstance(item, AddedTools)]
        # Two equal names within one list stay, so that they are refused.
        later = {tool.name: tool for item in added for tool in item.tools if not tool.server}
        first = tuple(later.pop(tool.name, tool) for tool in self.preamble.tools)
        return (*first, *later.values())
