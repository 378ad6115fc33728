"""Tokens to events: what the model wrote, as reasoning, text and tool calls.

The chain is sans-IO and synchronous: repair makes any tokens legal, openai-harmony's parser turns legal tokens into
text, the router names what they belong to. Each body token gives at most one delta, so that cutting the stream
anywhere changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import openai_harmony

from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Finished, Item, Opened, Reasoning, Repaired, Text, ToolCall
from unisono.core.generation import FinishReason, Usage
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import ANALYSIS, COMMENTARY, Header
from unisono.harmony.legal import Body, Legal, Open, Shut
from unisono.harmony.recipients import Kind
from unisono.harmony.repair import Repair
from unisono.harmony.tools import ToolSet


class HarmonyRouter:
    """One answer's router, over all of its generations.

    `new_call_id` gives each tool call its id. `hold_calls` shows a call only once it is complete; without it a call's
    arguments are shown as they come, and a cut one closes incomplete. `calls_allowed` False turns calls into
    reasoning: nobody may run them. `canonical` re-encodes each closed text, for backends whose ids are guesses; it may
    be set at any time.
    """

    def __init__(
        self,
        encoding: Encoding,
        tools: ToolSet,
        new_call_id: Callable[[], str],
        *,
        hold_calls: bool = True,
        calls_allowed: bool = True,
        parallel_calls: bool = True,
        canonical: bool = False,
    ) -> None:
        self._encoding = encoding
        self._tools = tools
        self._new_call_id = new_call_id
        self._hold_calls = hold_calls
        self._calls_allowed = calls_allowed
        self._parallel_calls = parallel_calls
        self.canonical = canonical
        self._items = 0
        self._calls = 0
        self._tokens = 0
        self._reasoning_tokens = 0
        self._repair = Repair(encoding, tools.declared, builtins=tools.builtins)
        self._parser = openai_harmony.StreamableParser(encoding.harmony, None)
        self._inner = self._parser._inner
        self._item: Item | None = None
        self._visible = True
        self._header_tokens: tuple[int, ...] = ()
        self._body_tokens: list[int] = []
        self._delivered = 0
        self._opened: list[Event] = []

    def resume(self, header: Header | None = None, opening: Sequence[int] = ()) -> None:
        """A new generation begins. `opening` are the tokens of the message the prompt leaves open, from its
        `<|start|>`, and `header` says which kind it is; without them the prompt ends in `<|start|>assistant`."""
        position = self._repair.position
        self._repair = Repair(self._encoding, self._tools.declared, header, self._tools.builtins)
        self._repair.position = position
        self._parser = openai_harmony.StreamableParser(self._encoding.harmony, None)
        self._inner = self._parser._inner
        if header is not None and (opened := self._begin(header, tuple(opening))) is not None:
            self._opened.append(opened)

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """Events of some more generated tokens. Never raises on tokens."""
        self._tokens += len(tokens)
        return self._route(self._repair.feed(tokens))

    def end(self, reason: FinishReason, *, stop_hidden: bool = False) -> list[Event]:
        """Events of the generation's end, without Finished. `stop_hidden` as in `Repair.end`."""
        return self._route(self._repair.end(reason, stop_hidden=stop_hidden))

    def finished(self, reason: FinishReason, stop_sequence: str | None = None) -> Finished:
        """The last event of the answer."""
        return Finished(reason, self.usage, stop_sequence, cut_call=self.cut_call)

    @property
    def usage(self) -> Usage:
        """Tokens of the output so far, over all generations."""
        return Usage(completion_tokens=self._tokens, reasoning_tokens=self._reasoning_tokens)

    @property
    def cut_call(self) -> bool:
        """Whether a call was begun and never completed; what nobody may call is no call."""
        return self._repair.cut_call and self._calls_allowed

    # -- legal messages to events

    def _route(self, legal: Sequence[Legal]) -> list[Event]:
        events, self._opened = self._opened, []
        for part in legal:
            match part:
                case Body():
                    self._body(part.tokens, events)
                case Open():
                    opened = self._begin(part.header, self._own(part))
                    if opened is not None:
                        events.append(opened)
                case Shut():
                    self._shut(part, events)
                case Repaired():
                    events.append(part)
        return events

    def _own(self, part: Open) -> tuple[int, ...]:
        """A header's tokens. What came as text came cut by the network; the header is encoded as one."""
        if not (self.canonical and part.header.verbatim):
            return part.tokens
        tokens = tuple(self._encoding.encode_marked(self._encoding.decode(part.tokens)))
        self._tokens += len(tokens) - len(part.tokens)
        return tokens

    def _begin(self, header: Header, tokens: tuple[int, ...]) -> Opened | None:
        process = self._inner.process
        for token in tokens:
            process(token)
        self._header_tokens = tokens
        self._body_tokens, self._delivered = [], 0
        self._item = self._item_of(header)
        held = isinstance(self._item, ToolCall) and self._hold_calls
        self._visible = not held and self._wanted(self._item)
        return Opened(self._item) if self._visible else None

    def _item_of(self, header: Header) -> Item:
        index = self._items
        if header.is_call and self._calls_allowed:
            of_client = header.recipient.kind is Kind.FUNCTION
            name = self._tools.client(header.recipient.name) if of_client else header.recipient.name
            return ToolCall(index, self._calls, self._new_call_id(), name)
        if header.recipient.kind is not Kind.NOBODY or header.channel == ANALYSIS:
            return Reasoning(index)
        return Text(index, Phase.COMMENTARY if header.channel == COMMENTARY else Phase.FINAL)

    def _wanted(self, item: Item) -> bool:
        return not isinstance(item, ToolCall) or self._parallel_calls or self._calls == 0

    def _body(self, tokens: Sequence[int], events: list[Event]) -> None:
        item, inner = self._item, self._inner
        assert item is not None
        process = inner.process
        if isinstance(item, Reasoning):
            self._reasoning_tokens += len(tokens)
        self._body_tokens += tokens
        for token in tokens:
            process(token)
            text = inner.last_content_delta
            if text:
                self._delivered += len(text)
                if self._visible:
                    events.append(Delta(item, text))

    def _shut(self, shut: Shut, events: list[Event]) -> None:
        item = self._item
        assert item is not None
        self._inner.process(shut.token)
        text = self._encoding.decode(self._body_tokens)
        # The parser's deltas are a beginning of the text: it keeps the bytes of a character that never came whole, and
        # whatever stands behind such bytes in the same token.
        if self._visible and (rest := text[self._delivered :]):
            events.append(Delta(item, rest))
        if self.canonical:
            self._recount(item, self._encoding.encode_generated(text))
        self._item = None
        if isinstance(item, ToolCall) and not self._visible:
            if not shut.complete or not self._wanted(item):
                return
            events.append(Opened(item))
            if text:
                events.append(Delta(item, text))
        events.append(Closed(item, text, self._message_tokens(shut), shut.complete))
        self._items += 1
        if isinstance(item, ToolCall):
            self._calls += 1

    def _recount(self, item: Item, body: list[int]) -> None:
        """Tokens are counted as the model's own tokenizer makes them, not as the network cut the text."""
        more = len(body) - len(self._body_tokens)
        self._tokens += more
        if isinstance(item, Reasoning):
            self._reasoning_tokens += more
        self._body_tokens = body

    def _message_tokens(self, shut: Shut) -> tuple[int, ...]:
        return (*self._header_tokens, *self._body_tokens, shut.token) if shut.complete else ()
