"""Events from tokens: the model's output as reasoning, text and tool calls.

The pipeline is synchronous and does no I/O. Repair makes any tokens legal, openai-harmony's parser turns legal
tokens into text, and the router assigns the text to items. Each body token gives at most one delta, so the way
the stream is split changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import openai_harmony

from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Finished, Item, Opened, Reasoning, Repaired, Text, ToolCall
from unisono.core.generation import FinishReason, Usage
from unisono.harmony.blanks import BlankFilter
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate import Gate, Stopped
from unisono.harmony.header import ANALYSIS, COMMENTARY, Header
from unisono.harmony.message_parts import BodyPart, ClosedPart, Legal, OpenPart
from unisono.harmony.recipients import RecipientKind
from unisono.harmony.repair import Repair
from unisono.harmony.tools import ToolSet

ANY_HEADER: Final = "<|start|>assistant<|message|>"
"""Replacement for every header in the library's parser.

The parser reads a body the same after any header, and a header token costs as much as a dozen body tokens.
"""


class HarmonyRouter:
    """Router of one answer, across all of its generations.

    `new_call_id` returns the id of each tool call. With `hold_calls` a call is emitted only when it is
    complete; otherwise its arguments are emitted as they arrive, and a truncated call closes as incomplete. If
    `calls_allowed` is False, calls become reasoning, since nothing may run them. `canonical` re-encodes each
    closed text, for backends whose ids are guesses; it may be set at any time. If a `gate` stops reading,
    `stopped` holds the position, and nothing more is read until `reread`.
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
        gate: Gate | None = None,
    ) -> None:
        self._encoding = encoding
        self._tools = tools
        self._new_call_id = new_call_id
        self._hold_calls = hold_calls
        self._calls_allowed = calls_allowed
        self._parallel_calls = parallel_calls
        self.canonical = canonical
        self.stopped: Stopped | None = None
        self._gate = gate
        self._open = OpenPart(Header(), ())
        self._items = 0
        self._calls = 0
        self._tokens = 0
        self._generated = 0
        self._reasoning_tokens = 0
        self._is_answered = False  # this step has an answer or a call
        self._repair = self._new_repair()
        self._any_header = encoding.encode_marked(ANY_HEADER)
        self._inner = self._new_parser()
        self._item: Item | None = None
        self._visible = True
        self._header_tokens: tuple[int, ...] = ()
        self._body_tokens: list[int] = []
        self._delivered = 0
        self._opened: list[Event] = []
        self._blanks: BlankFilter | None = None

    def _new_repair(self, opening: Header | None = None) -> Repair:
        tools = self._tools
        return Repair(self._encoding, tools.declared, opening, tools.builtins, answered=self._is_answered)

    def _new_parser(self) -> Any:
        """Return the library's inner parser, without the properties that copy their values."""
        return openai_harmony.StreamableParser(self._encoding.harmony, None)._inner

    def resume(self, header: Header | None = None, opening: Sequence[int] = ()) -> None:
        """Begin a new generation.

        `opening` are the tokens of the message that the prompt leaves open, from its `<|start|>`, and `header`
        is its header. Without them the prompt ends in `<|start|>assistant`.
        """
        self._is_answered = False
        self._repair = self._new_repair(header)
        self._repair.position = self._repair.origin = self._generated
        self._inner = self._new_parser()
        self.stopped = None
        if header is None:
            return
        self._open = OpenPart(header, tuple(opening))
        if (opened := self._open_message(header, self._open.tokens)) is not None:
            self._opened.append(opened)

    def reread(self, header: Sequence[int], begin: int, end: int) -> list[Event]:
        """Discard the open message, and continue with one that has the tokens `header`.

        The new message begins at the position `begin`; `header` follows its `<|start|>assistant` and ends at
        `end`. These tokens are not counted, since the model did not generate them.
        """
        # Generated tokens after the stop count, even if they arrived together with it.
        generated = self._generated
        self._repair = self._new_repair()
        self._repair.position = generated - len(header)
        self._repair.origin = generated - end
        self._repair.closed_to = begin
        self._inner = self._new_parser()
        self._item, self.stopped = None, None
        return self._route(self._repair.feed(header))

    def supply(self, tokens: Sequence[int]) -> list[Event]:
        """Return the events of inserted tokens, which are not counted as generated."""
        events = self._route(self._repair.feed(tokens))
        self._repair.position -= len(tokens)
        self._repair.origin -= len(tokens)
        return events

    def unread(self, tokens: int, instead: Sequence[int]) -> bool:
        """Replace the last `tokens` tokens of the open body by `instead`; all of them stay counted.

        Return False and change nothing if more of their text was already emitted.
        """
        body = [*self._body_tokens[:-tokens], *instead]
        if self._item is None or len(self._body_tokens) < tokens or len(self._encoding.decode(body)) < self._delivered:
            return False
        self._inner = self._new_parser()
        for token in (*self._any_header, *body):
            self._inner.process(token)
        less = tokens - len(instead)
        self._body_tokens = body
        self._reasoning_tokens -= less if isinstance(self._item, Reasoning) else 0
        self._repair.origin += less
        return True

    def trim(self, body: Sequence[int], end: int) -> None:
        """Continue the open message with `body` instead of its tokens so far; it ends at `end`."""
        self._repair = self._new_repair(self._open.header)
        self._repair.position = self._generated
        self._repair.origin = self._generated - end
        self._repair.closed_to = self._open.start
        self._inner = self._new_parser()
        for token in (*self._any_header, *body):
            self._inner.process(token)
        self._body_tokens = list(body)
        self.stopped = None
        if self._blanks is not None:
            self._blanks.restart()

    def count(self, tokens: int) -> None:
        """Count generated tokens that are not read."""
        self._tokens += tokens
        self._generated += tokens

    @property
    def closed_to(self) -> int:
        """Position after the last closed message."""
        return self._repair.closed_to

    @property
    def unsettled(self) -> int:
        """Number of tokens after the last settled message.

        The next marker, or the end of the output, may decide their meaning.
        """
        repair = self._repair
        begin = repair.closed_to if repair.thought is None else min(repair.thought[1], repair.closed_to)
        return repair.position - repair.origin - begin

    @property
    def is_emitted(self) -> bool:
        """True if a part of an unsettled message was emitted.

        That is the open message, or a message before it that only the next one settles.
        """
        return (self._item is not None and self._visible) or self._repair.thought is not None

    @property
    def thinking(self) -> bool | None:
        """True if the open message is reasoning; None if no message is open."""
        return None if self._item is None else isinstance(self._item, Reasoning)

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """Return the events of further generated tokens. Never raises because of tokens."""
        self._tokens += len(tokens)
        self._generated += len(tokens)
        return self._route(self._repair.feed(tokens))

    def end(self, reason: FinishReason, *, stop_hidden: bool = False) -> list[Event]:
        """Return the events at the end of a generation, without Finished.

        `stop_hidden` is described in `Repair.end`.
        """
        events = self._route(self._repair.end(reason, stop_hidden=stop_hidden))
        # The model generated the stop token, but the backend does not send it.
        self._tokens += self._repair.restored_stop
        return events

    def finished(self, reason: FinishReason, stop_sequence: str | None = None) -> Finished:
        """Return the last event of the answer."""
        return Finished(reason, self.usage, stop_sequence, cut_call=self.cut_call)

    @property
    def usage(self) -> Usage:
        """Output tokens so far, over all generations."""
        return Usage(completion_tokens=self._tokens, reasoning_tokens=self._reasoning_tokens)

    @property
    def cut_call(self) -> bool:
        """True if an allowed call was begun and never completed."""
        return self._repair.cut_call and self._calls_allowed

    # -- from legal messages to events

    def _route(self, legal: Sequence[Legal]) -> list[Event]:
        events, self._opened = self._opened, []
        for part in legal:
            match part:
                case BodyPart():
                    self._body(part.tokens, events)
                    if self.stopped is not None:
                        break
                case OpenPart():
                    if self._gate is not None and not self._gate.opens(part):
                        self.stopped = Stopped(part.header, part.tokens, part.start, part.end, part.end)
                        break
                    self._open = part
                    opened = self._open_message(part.header, self._own(part))
                    if opened is not None:
                        events.append(opened)
                case ClosedPart():
                    self._shut(part, events)
                    if self.stopped is not None:
                        break
                case Repaired():
                    events.append(part)
        return events

    def _own(self, part: OpenPart) -> tuple[int, ...]:
        """Return the tokens of a header, re-encoded as one if they came as text.

        The network may split text anywhere, so tokens of single chunks are not canonical.
        """
        if not (self.canonical and part.header.verbatim):
            return part.tokens
        tokens = tuple(self._encoding.encode_marked(self._encoding.decode(part.tokens)))
        self._tokens += len(tokens) - len(part.tokens)
        return tokens

    def _open_message(self, header: Header, tokens: tuple[int, ...]) -> Opened | None:
        process = self._inner.process
        for token in self._any_header:
            process(token)
        self._header_tokens = tokens
        self._body_tokens, self._delivered = [], 0
        self._item = self._item_of(header)
        held = isinstance(self._item, ToolCall) and self._hold_calls
        if isinstance(self._item, Text) and self._gate is not None:
            held = self._gate.is_buffered(header)
        self._visible = not held and self._is_visible(self._item)
        # A message that was read as a whole has no header after which the prompt could end.
        limits_blanks = self._gate is not None and not self._open.is_whole and self._gate.limits_blanks(header)
        self._blanks = BlankFilter() if limits_blanks else None
        return Opened(self._item) if self._visible else None

    def _item_of(self, header: Header) -> Item:
        index = self._items
        if header.is_call and self._calls_allowed:
            of_client = header.recipient.kind is RecipientKind.FUNCTION
            name = self._tools.client(header.recipient.name) if of_client else header.recipient.name
            return ToolCall(index, self._calls, self._new_call_id(), name)
        if header.recipient.kind is not RecipientKind.NONE or header.channel == ANALYSIS:
            return Reasoning(index)
        return Text(index, Phase.COMMENTARY if header.channel == COMMENTARY else Phase.FINAL)

    def _is_visible(self, item: Item) -> bool:
        return not isinstance(item, ToolCall) or self._parallel_calls or self._calls == 0

    def _body(self, tokens: Sequence[int], events: list[Event]) -> None:
        item, inner = self._item, self._inner
        assert item is not None
        process = inner.process
        if isinstance(item, Reasoning):
            self._reasoning_tokens += len(tokens)
        blanks = self._blanks
        for token in tokens:
            process(token)
            self._body_tokens.append(token)
            text = inner.last_content_delta
            if text and blanks is not None:
                text = blanks.feed(text, len(self._body_tokens) - 1)
                if blanks.is_too_long:
                    if text and self._visible:
                        events.append(Delta(item, text))
                    self._delivered += len(text)
                    self._stop_at_blanks(blanks)
                    return
            if text:
                self._delivered += len(text)
                if self._visible:
                    events.append(Delta(item, text))

    def _stop_at_blanks(self, blanks: BlankFilter) -> None:
        opened, item = self._open, self._item
        trimmed = blanks.trimmed(self._encoding, self._body_tokens)
        is_shown = self._visible and item is not None
        text, is_complete = self._encoding.decode(trimmed), blanks.is_complete
        self.stopped = Stopped(
            opened.header, opened.tokens, opened.start, opened.end, opened.end, text, trimmed, is_complete, is_shown
        )

    def _shut(self, shut: ClosedPart, events: list[Event]) -> None:
        item = self._item
        assert item is not None
        self._inner.process(shut.token)
        text = self._encoding.decode(self._body_tokens)
        passes = shut.complete and self._is_visible(item)
        if self._gate is not None and passes and not isinstance(item, Reasoning):
            says = self._gate.closes(self._open.header, text, held=not self._visible)
            if self._visible:
                says = text
            if says is None:
                opened = self._open
                self.stopped = Stopped(opened.header, opened.tokens, opened.start, opened.end, shut.end, text)
                self._item = None
                return
            if says != text:
                events.append(Repaired("code-fence", self._repair.position, dropped=len(text) - len(says)))
                text, self._body_tokens = says, self._encoding.encode_generated(says)
        self._is_answered = self._is_answered or self._open.header.is_answer
        # The parser's deltas are a prefix of the text: it withholds the bytes of an incomplete character and
        # all text after such bytes in the same token.
        if self._visible and (rest := text[self._delivered :]):
            events.append(Delta(item, rest))
        if self.canonical:
            self._recount(item, self._encoding.encode_generated(text))
        self._item = None
        if not self._visible:
            if isinstance(item, ToolCall) and not passes:
                return
            if isinstance(item, Text) and passes and self._gate is not None and self._gate.unfit:
                item = replace(item, unfit=True)
            events.append(Opened(item))
            if text:
                events.append(Delta(item, text))
        events.append(Closed(item, text, self._message_tokens(shut), shut.complete))
        self._items += 1
        if isinstance(item, ToolCall):
            self._calls += 1

    def _recount(self, item: Item, body: list[int]) -> None:
        """Count tokens as the model's own tokenizer makes them, not as the network split the text."""
        more = len(body) - len(self._body_tokens)
        self._tokens += more
        if isinstance(item, Reasoning):
            self._reasoning_tokens += more
        self._body_tokens = body

    def _message_tokens(self, shut: ClosedPart) -> tuple[int, ...]:
        return (*self._header_tokens, *self._body_tokens, shut.token) if shut.complete else ()
