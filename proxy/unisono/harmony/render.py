"""Prompts from conversations, as token ids and, for backends that take no ids, as text.

Guarantees:

- The ids are those of openai-harmony for the same messages.
- Outside text never becomes a control token.
- Equal conversations give equal bytes.
- A conversation that grew by one message costs little more than that message.

`HeaderForm` defines the structure of each message. tiktoken encodes the text; it takes linear time and releases the
GIL. Every message begins and ends with a control token, so no other token contains text of two messages. Messages are
therefore rendered and cached one by one.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from hashlib import sha256
from typing import NamedTuple, TypeAlias, assert_never

from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    DeveloperMessage,
    Item,
    Message,
    Phase,
    Preamble,
    Tokens,
    ToolResult,
    UserMessage,
)
from unisono.core.frozen import dataclass
from unisono.core.generation import CALL, CHANNEL, END, FIRST_SPECIAL, MESSAGE, RETURN, START
from unisono.core.lru_cache import LruCache
from unisono.errors import InvalidRequest, well_formed
from unisono.harmony.encoding import Encoding, share_ids
from unisono.harmony.injection_guard import check_structure, neutralise
from unisono.harmony.system_message import form_section, system_text, tools_section
from unisono.harmony.tool_declarations import Declaration, ToolSet, declarations_by_message

# Number of tokens added to the weight of each cached message, for the memory of its key and its entry.
ENTRY_WEIGHT = 32
# Capacity of the caches of tools sections and system texts, in characters.
SECTION_CHARACTERS = 2_000_000

ANSWER = "<|start|>assistant"
PREFILL = ANSWER + "<|channel|>final<|message|>"
INSTRUCTIONS = "# Instructions\n\n"

RUN_TOO_LONG = "A message contains a run of characters that is too long to be tokenized; shorten it."


class HeaderForm(Enum):
    """Header and terminator of each kind of message; `{}` is replaced by a tool's wire name."""

    SYSTEM = ("<|start|>system<|message|>", "<|end|>")
    DEVELOPER = ("<|start|>developer<|message|>", "<|end|>")
    USER = ("<|start|>user<|message|>", "<|end|>")
    REASONING = ("<|start|>assistant<|channel|>analysis<|message|>", "<|end|>")
    COMMENTARY = ("<|start|>assistant<|channel|>commentary<|message|>", "<|end|>")
    FINAL = ("<|start|>assistant<|channel|>final<|message|>", "<|end|>")
    CALL = ("<|start|>assistant to=functions.{}<|channel|>commentary <|constrain|>json<|message|>", "<|call|>")
    # The argument of such a call is free text instead of JSON.
    TEXT_CALL = ("<|start|>assistant to=functions.{}<|channel|>commentary<|message|>", "<|call|>")
    RESULT = ("<|start|>functions.{} to=assistant<|channel|>commentary<|message|>", "<|end|>")
    BUILTIN_CALL = ("<|start|>assistant to={}<|channel|>analysis code<|message|>", "<|call|>")
    BUILTIN_RESULT = ("<|start|>{} to=assistant<|channel|>analysis<|message|>", "<|end|>")
    BUILTIN_ASIDE = ("<|start|>{} to=assistant<|channel|>commentary<|message|>", "<|end|>")

    def __init__(self, header: str, end: str) -> None:
        self.header = header
        self.end = end

    # Keys of the message cache contain a form. `Enum.__hash__` is slow, because it is written in Python.
    __hash__ = object.__hash__


# Names of builtin tools that are legal in a header. A tool with another name is rendered as a function.
_RECIPIENT = re.compile(r"[A-Za-z0-9_.-]{1,64}")

PHASES = {Phase.COMMENTARY: HeaderForm.COMMENTARY, Phase.FINAL: HeaderForm.FINAL}

# For each kind of generated message: its terminator in a later prompt, and the terminators that it may end with when it
# was generated.
CLOSINGS: dict[type, tuple[int, frozenset[int]]] = {
    AssistantReasoning: (END, frozenset((END, RETURN))),
    AssistantMessage: (END, frozenset((END, RETURN))),
    AssistantCall: (CALL, frozenset((CALL, END, RETURN))),
}


class PromptPart(NamedTuple):
    """Message to be rendered from text; `name` is a tool's wire name, if any."""

    form: HeaderForm
    text: str
    name: str = ""

    @property
    def header(self) -> str:
        return self.form.header.format(self.name)


# Message to be rendered, or the unchanged tokens of one that the model generated.
Piece: TypeAlias = PromptPart | Tokens


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Messages of a prompt, and the tokens of the messages that are cached.

    `cold_chars` is the number of characters that must be tokenized. `pieces` are the messages. `pieces` is None if
    sections of tools have to be written before the messages can be looked up. `keys` contains the cache key of each
    message, or None for a generated message. `known` contains the cached tokens of each message, or None.
    """

    cold_chars: int
    pieces: Sequence[Piece] | None = None
    keys: Sequence[PromptPart | None] = ()
    known: Sequence[Tokens | None] = ()


class Renderer:
    """Renderer that turns conversations into prompts, with a cache of rendered messages.

    The cache holds at most `cache_tokens` tokens. Threads may share a renderer.
    """

    def __init__(self, encoding: Encoding, *, cache_tokens: int = 2_000_000) -> None:
        self.encoding = encoding
        # The keys hold the texts of the messages: hashing and comparing them is much faster than a digest.
        self._messages: LruCache[PromptPart | None, Tokens] = LruCache(cache_tokens)
        self._checked: LruCache[bytes, bool] = LruCache(cache_tokens // ENTRY_WEIGHT)
        self._sections: LruCache[bytes, str] = LruCache(SECTION_CHARACTERS)
        self._systems: LruCache[tuple[Hashable, ...], str] = LruCache(SECTION_CHARACTERS)
        # The headers and terminators of all messages, except those headers that contain the name of a tool.
        self._headers = {form: encoding.encode_marked(form.header) for form in HeaderForm}
        self._ends = {form: encoding.encode_marked(form.end) for form in HeaderForm}
        self._commentary = tuple(encoding.encode_marked("<|channel|>commentary"))
        self._answer = encoding.encode_marked(ANSWER)
        self._prefill = encoding.encode_marked(PREFILL)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the cache, including `ENTRY_WEIGHT` tokens for each message."""
        return self._messages.weight

    def plan(self, conversation: Conversation, tools: ToolSet) -> PromptPlan:
        """Look up the messages of a prompt in the cache, without tokenizing or writing anything."""
        cold = len(conversation.prefill or "")
        first, added = declarations_by_message(conversation, tools)
        sections = [part for part in (first, *added.values()) if part] if first or added else []
        if sections and any(self._sections.get(_section_key(tools, section)) is None for section in sections):
            # Writing a section is expensive, so all text of the conversation is counted as not cached.
            cold += tools.characters + len(conversation.preamble.instructions)
            parts = self._messages_of(conversation, tools, {})
            return PromptPlan(cold + sum(len(part.text) for part in parts if isinstance(part, PromptPart)))
        return self._planned(self._pieces(conversation, tools), cold)

    def _planned(self, pieces: list[Piece], cold: int = 0) -> PromptPlan:
        keys = [piece if isinstance(piece, PromptPart) else None for piece in pieces]
        known = self._messages.get_all(keys)
        if None in known:
            missing = [piece for piece, tokens in zip(pieces, known, strict=True) if tokens is None]
            cold += sum(len(piece.text) for piece in missing if isinstance(piece, PromptPart))
        return PromptPlan(cold, pieces, keys, known)

    def prompt(self, conversation: Conversation, tools: ToolSet, plan: PromptPlan | None = None) -> list[int]:
        """Return the prompt's token ids; a `plan` for the same arguments saves the cache lookups.

        The ids end in `<|start|>assistant`, or in the open message of a prefill. `tools` must be made from the tools in
        `conversation.preamble`. Raises InvalidRequest for a run of characters that is too long for the tokenizer, and
        for a tool schema with a value that JSON cannot express.
        """
        if plan is None or plan.pieces is None:
            plan = self._planned(self._pieces(conversation, tools))
        ids: list[int] = []
        # Much faster than an iteration over all ids.
        for tokens in self._rendered(plan):
            ids += tokens
        ids += self._answer if conversation.prefill is None else self.opening(conversation)
        return ids

    def opening(self, conversation: Conversation) -> Tokens:
        """Return the tokens of the message that the prompt leaves open; empty without a prefill."""
        if conversation.prefill is None:
            return ()
        return (*self._prefill, *self._encoded(conversation.prefill))

    def text_prompt(self, conversation: Conversation, tools: ToolSet) -> str:
        """Return the prompt as text, for a backend that reads control tokens in text.

        Control tokens that are spelled in text from clients or tools are broken up. Raises InvalidRequest if the
        control tokens that the backend would read still differ from the rendered ones.
        """
        pieces = self._pieces(conversation, tools)
        texts = [self._spelled(piece) for piece in pieces]
        keys = [_key(piece) for piece in pieces]
        for key, checked, piece, text in zip(keys, self._checked.get_all(keys), pieces, texts, strict=True):
            if not checked:
                [tokens] = self._rendered(self._planned([piece]))
                self._check(text, tokens)
                self._checked.put(key, True, 1)
        if conversation.prefill is None:
            return "".join(texts) + ANSWER
        last = PREFILL + neutralise(well_formed(conversation.prefill))
        self._check(last, self._prefill)
        return "".join(texts) + last

    def item(self, item: Message, tools: ToolSet) -> Tokens:
        """Return the tokens of one message of a conversation, from `<|start|>` to its terminator."""
        [tokens] = self._rendered(self._planned([_piece(item, tools)]))
        return tokens

    def _pieces(self, conversation: Conversation, tools: ToolSet) -> list[Piece]:
        preamble = conversation.preamble
        pieces: list[Piece] = [PromptPart(HeaderForm.SYSTEM, self._system(preamble, with_tools=bool(tools.declared)))]
        first, added = declarations_by_message(conversation, tools)
        sections = []
        if preamble.instructions:
            sections.append(INSTRUCTIONS + preamble.instructions)
        if first:
            sections.append(self._section(tools, first))
        if preamble.form is not None:
            sections.append(form_section(preamble.form))
        if sections:
            pieces.append(PromptPart(HeaderForm.DEVELOPER, "\n\n".join(sections)))
        return pieces + self._messages_of(conversation, tools, added)

    def _messages_of(
        self, conversation: Conversation, tools: ToolSet, added: Mapping[int, tuple[Declaration, ...]]
    ) -> list[Piece]:
        """Return the messages of the prompt, without the reasoning before the last final answer.

        `added` maps the index of each `AddedTools` item to its declarations; an item without declarations is left out.
        """
        answered = _last_answer(conversation.items)
        aside: set[str] = set()
        pieces: list[Piece] = []
        for index, item in enumerate(conversation.items):
            if isinstance(item, AssistantReasoning) and index < answered:
                continue
            if isinstance(item, AddedTools):
                # Declarations are appended where the tools were found, so that the prompt before them stays the same.
                if new := added.get(index):
                    pieces.append(PromptPart(HeaderForm.DEVELOPER, self._section(tools, new)))
                continue
            piece = _piece(item, tools)
            if isinstance(item, AssistantCall) and tools.trained(item.name) and self._is_aside(piece):
                aside.add(item.call_id)
            elif isinstance(item, ToolResult) and item.call_id in aside and isinstance(piece, PromptPart):
                # A builtin tool answers on the channel of its call.
                piece = piece._replace(form=HeaderForm.BUILTIN_ASIDE)
            pieces.append(piece)
        return pieces

    def _is_aside(self, call: Piece) -> bool:
        """Return whether a generated call is on `commentary`."""
        header = call[: call.index(MESSAGE)] if not isinstance(call, PromptPart) and MESSAGE in call else ()
        at = header.index(CHANNEL) if CHANNEL in header else len(header)
        return header[at : at + len(self._commentary)] == self._commentary

    def _rendered(self, plan: PromptPlan) -> list[Tokens]:
        assert plan.pieces is not None
        rendered: list[Tokens] = []
        for key, known, piece in zip(plan.keys, plan.known, plan.pieces, strict=True):
            if known is not None:
                rendered.append(known)
            elif isinstance(piece, PromptPart):
                rendered.append(self._render(piece))
                self._messages.put(key, rendered[-1], len(rendered[-1]) + ENTRY_WEIGHT)
            else:
                rendered.append(piece)
        return rendered

    def _render(self, part: PromptPart) -> Tokens:
        header = self.encoding.encode_marked(part.header) if part.name else self._headers[part.form]
        ids = [*header, *self._encoded(part.text), *self._ends[part.form]]
        return tuple(share_ids(ids))

    def _encoded(self, text: str) -> list[int]:
        try:
            return self.encoding.encode_text(text)
        except ValueError as failure:
            raise InvalidRequest(RUN_TOO_LONG) from failure

    def _spelled(self, piece: Piece) -> str:
        if isinstance(piece, PromptPart):
            return piece.header + neutralise(well_formed(piece.text)) + piece.form.end
        decode = self.encoding.decode
        texts: list[str] = []
        begin = 0
        for position in [position for position, token in enumerate(piece) if token >= FIRST_SPECIAL]:
            texts += (neutralise(decode(piece[begin:position])), decode(piece[position : position + 1]))
            begin = position + 1
        return "".join(texts)

    def _check(self, text: str, tokens: Tokens | list[int]) -> None:
        try:
            check_structure(self.encoding, text, tokens)
        except ValueError as failure:
            raise InvalidRequest(RUN_TOO_LONG) from failure

    def _section(self, tools: ToolSet, declarations: tuple[Declaration, ...]) -> str:
        key = _section_key(tools, declarations)
        section = self._sections.get(key)
        if section is None:
            section = tools_section(declarations)
            self._sections.put(key, section, len(section))
        return section

    def _system(self, preamble: Preamble, *, with_tools: bool) -> str:
        fields = (preamble.identity, preamble.knowledge_cutoff, preamble.date, preamble.effort, preamble.builtins)
        key = (*fields, with_tools)
        text = self._systems.get(key)
        if text is None:
            text = system_text(preamble, with_tools=with_tools)
            self._systems.put(key, text, 2 * len(text))
        return text


def _section_key(tools: ToolSet, declarations: tuple[Declaration, ...]) -> bytes:
    if declarations is tools.declarations:
        return tools.digest
    # The order of the names and the definitions depend on the conversation.
    names = "\0".join(each.name + each.digest.hex() for each in declarations)
    return sha256(tools.digest + names.encode(), usedforsecurity=False).digest()


def _piece(item: Message, tools: ToolSet) -> Piece:
    match item:
        case UserMessage():
            return PromptPart(HeaderForm.USER, item.text)
        case AssistantMessage():
            return _generated(item) or PromptPart(PHASES[item.phase], item.text)
        case AssistantCall():
            form = HeaderForm.TEXT_CALL if item.name in tools.texts else HeaderForm.CALL
            return _generated(item) or _named(item.name, item.arguments, tools, form, HeaderForm.BUILTIN_CALL)
        case ToolResult():
            return _named(item.name, item.output, tools, HeaderForm.RESULT, HeaderForm.BUILTIN_RESULT)
        case AssistantReasoning():
            return _generated(item) or PromptPart(HeaderForm.REASONING, item.text)
        case DeveloperMessage():
            return PromptPart(HeaderForm.DEVELOPER, INSTRUCTIONS + item.text)
        case _:
            assert_never(item)


def _named(name: str, text: str, tools: ToolSet, form: HeaderForm, trained: HeaderForm) -> PromptPart:
    """Return a call or a result, in the `trained` form if gpt-oss was trained on the tool."""
    if tools.trained(name) and _RECIPIENT.fullmatch(name):
        return PromptPart(trained, text, name)
    return PromptPart(form, text, tools.wire(name))


def _generated(item: AssistantReasoning | AssistantMessage | AssistantCall) -> Tokens | None:
    """Return the generated ids of `item` with the terminator that a later prompt needs.

    Return None if `item` has no ids, or if its ids are not one whole message.
    """
    tokens = item.tokens
    if not tokens:
        return None
    closing, accepted = CLOSINGS[type(item)]
    if tokens[0] != START or tokens[-1] not in accepted:
        return None
    return tokens if tokens[-1] == closing else (*tokens[:-1], closing)


def _last_answer(items: Sequence[Item]) -> int:
    """Return the index of the last message on `final`, or -1; preambles do not count."""
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if isinstance(item, AssistantMessage) and item.phase is Phase.FINAL:
            return index
    return -1


def _key(piece: Piece) -> bytes:
    """Return a digest of a message, so that a cache can hold many."""
    if isinstance(piece, PromptPart):
        content = f"{piece.form.header}\0{piece.name}\0{piece.text}".encode("utf-8", "surrogatepass")
    else:
        content = array("I", piece).tobytes()
    return sha256(content).digest()
