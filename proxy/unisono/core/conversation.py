"""Types of a conversation, independent of any wire format.

Every API surface translates its request into these types, and the renderer turns them into Harmony tokens. An
assistant item may contain the token ids that the model generated for it. The renderer then uses these ids unchanged, so
that the prompt of a continued conversation begins with exactly the tokens that a backend has cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
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
    """Grammar of a whole text: a regular expression, or a grammar in Lark notation."""

    syntax: Literal["regex", "lark"]
    definition: str
    # The same grammar in GBNF notation, if the client sent the grammar in GBNF; else empty.
    gbnf: str = ""


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """Tool that the client runs.

    `name` is the name that the client uses. `parameters` is a JSON Schema, None for no parameters. The name of a tool
    in a `namespace` begins with the namespace: `namespace__tool`.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Json] | None = None
    strict: bool = False
    # True if the arguments need not be JSON. The whole text is then the input of the tool.
    free_text: bool = False
    namespace: str = ""
    # Description of the namespace, which the prompt contains before a search finds its tools.
    namespace_description: str = ""
    # Type of a built-in tool that the client runs, such as `shell`; empty for a function.
    kind: str = ""
    # Grammar of the free text, if the gateway can enforce the grammar.
    grammar: TextGrammar | None = None
    # True if the prompt does not declare the tool until a search finds it.
    deferred: bool = False
    # Label of the server that runs the tool; empty for a tool of the client. A tool of a server has only a name here.
    # Its description and schema are in the server's tool list, which is requested again for every answer.
    server: str = ""
    # Path of the declaration in the request, for errors; empty if the tool was declared elsewhere.
    path: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Builtin:
    """Tool on which gpt-oss was trained: `browser`, `python` or `container`.

    The prompt declares the tool as in the training. `description` replaces the trained description; if it is empty, the
    trained description is used. For `python` and `container`, the trained description promises behaviour that a
    different implementation need not provide.
    """

    name: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Required form of an answer: by default, JSON that matches `schema`.

    If `schema` is None, any JSON object has the required form.

    If `choices` is not empty, the answer must be one of these texts instead. If `grammar` is not None, the answer must
    be a text that matches the grammar. `strict` marks a schema that can be enforced exactly. If
    `keeps_preambles` is True, preambles are emitted as text, because clients can tell them from the answer. Otherwise,
    preambles are emitted as reasoning, so that clients do not parse them as a part of the answer.
    """

    name: str = "json"
    schema: Mapping[str, Json] | None = None
    description: str = ""
    strict: bool = False
    choices: tuple[str, ...] = ()
    grammar: TextGrammar | None = None
    keeps_preambles: bool = field(default=False, compare=False)

    @property
    def is_json(self) -> bool:
        """Return whether the answer has to be JSON."""
        return not self.choices and self.grammar is None


@dataclass(frozen=True, slots=True)
class Preamble:
    """Prompt content before the first message.

    It is rendered again for each request; equal values always give the same bytes. `date` is the date of the
    conversation's first request as YYYY-MM-DD. It does not change at midnight, so that backends can use their prefix
    caches. If `date` is empty, the prompt contains no date.
    """

    instructions: str = ""
    tools: tuple[FunctionTool, ...] = ()
    effort: Effort = Effort.MEDIUM
    date: str = ""
    identity: str = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str = "2024-06"
    builtins: tuple[Builtin, ...] = ()
    form: AnswerForm | None = None


# Prefixes of a user message that contains the summary of a compaction instead of the user's words. The second prefix
# means that the items of the compaction replace the whole conversation. Only earlier versions wrote the first prefix:
# the client then kept the user's newest messages itself.
SUMMARY_HEADING: Final = "[Summary of the conversation before this point, as you wrote it]\n\n"
WHOLE_SUMMARY_HEADING: Final = "[Summary of the whole conversation before this point, as you wrote it]\n\n"
SUMMARY_HEADINGS: Final = (SUMMARY_HEADING, WHOLE_SUMMARY_HEADING)


@dataclass(frozen=True, slots=True)
class UserMessage:
    text: str


@dataclass(frozen=True, slots=True)
class DeveloperMessage:
    """Instructions after the first message; earlier instructions belong to the preamble."""

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

    `name` is the client's name of the tool, or the name of a built-in tool (`browser.search`, `python`). `arguments` is
    the exact text that the model generated; for `python`, it is the code.
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
    """Tools that the model may call from this item on, such as the result of a tool search.

    Tools that are known before the first message belong to the preamble.
    """

    tools: tuple[FunctionTool, ...]


# Item that contains text.
Message: TypeAlias = UserMessage | DeveloperMessage | AssistantReasoning | AssistantMessage | AssistantCall | ToolResult
Item: TypeAlias = Message | AddedTools


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation for one prompt.

    `prefill` is the beginning of the answer if the client wrote one; the model continues this text. Reasoning before
    the item with the 0-based index `reasoning_from` is left out of the prompt. `deferred` are tools that the prompt
    does not declare yet; a search may add them during the answer. `removed` are the names of tools that the model must
    not call any more. Their declarations stay in the prompt, so that backends can use their prefix caches.
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
        """Client tools that the model may call: the tools of the preamble, then the added tools.

        If a name is defined several times, the last definition applies.
        """
        if AddedTools not in map(type, self.items):
            return self.preamble.tools
        added = [item for item in self.items if isinstance(item, AddedTools)]
        # Duplicate names within the preamble are preserved, so that the request is refused later.
        later = {tool.name: tool for item in added for tool in item.tools if not tool.server}
        first = tuple(later.pop(tool.name, tool) for tool in self.preamble.tools)
        return (*first, *later.values())
