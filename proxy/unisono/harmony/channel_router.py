"""Router: turns generated tokens into the events of reasoning, text and tool calls.

The router is synchronous and does no I/O. `Repair` turns any tokens into well-formed messages, a table maps the tokens
of their bodies to text, and the router assigns the text to items. Each body token produces at most one delta, so the
items and their texts do not depend on the chunks in which the tokens arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import ref

from unisono.core.events import Closed, Event, Finished, Opened, Repaired, Text, ToolCall
from unisono.core.generation import FinishReason, Usage
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate_protocol import BodyPart, ClosedPart, Gate, Legal, OpenPart, Stopped
from unisono.harmony.header import Header
from unisono.harmony.item_reader import ItemFactory, ItemReader
from unisono.harmony.max_tokens import TokenCounter
from unisono.harmony.repair import Repair
from unisono.harmony.tool_declarations import ToolSet


class HarmonyRouter:
    """Router of one answer, which may consist of several generations.

    `ItemFactory` explains the options `hold_calls`, `calls_allowed` and `parallel_calls`; `TokenCounter` explains
    `canonical`. If `gate` stops reading, `stopped` describes the message, and `unread_tokens` is the number of tokens
    in the last `feed` that follow the stop; these tokens are not counted. No tokens may then be fed before `reread`,
    `trim` or `resume`.
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
        self._factory = ItemFactory(
            encoding,
            tools,
            new_call_id,
            gate,
            hold_calls=hold_calls,
            calls_allowed=calls_allowed,
            parallel_calls=parallel_calls,
        )
        self.counter = TokenCounter(encoding, canonical=canonical)
        self._gate = gate
        self.stopped: Stopped | None = None
        self.unread_tokens = 0
        self._read_to = 0  # position at which the gate stopped reading
        self._is_answered = False  # this step has an answer or a call
        self._repair = self._new_repair()
        self._open: ItemReader | None = None
        self._pending: list[Event] = []  # events to emit before those of the next tokens

    def _new_repair(
        self, opening: Header | None = None, *, position: int = 0, generated: int = 0, closed_to: int = 0
    ) -> Repair:
        """Return a state machine that continues at `position`.

        `generated` counts the tokens of all generations so far.
        """
        tools = self._tools
        # A strong reference would be a cycle, which only the garbage collector frees.
        router = ref(self)

        def open_body() -> Sequence[int]:
            found = router()
            return () if found is None or found._open is None else found._open.body

        return Repair(
            self._encoding,
            tools.declared,
            opening,
            tools.builtins,
            answered=self._is_answered,
            position=position,
            origin=generated - position,
            closed_to=closed_to,
            open_body=open_body,
        )

    @property
    def generated(self) -> int:
        """Number of tokens that were read or counted in all generations, without corrections."""
        return self._repair.output.origin + self._repair.output.position

    def resume(self, header: Header | None = None, opening: Sequence[int] = ()) -> None:
        """Begin a new generation.

        `opening` are the tokens of the message that the prompt leaves open, from its `<|start|>`, and `header`
        is its header. Without `header` and `opening`, the prompt ends in `<|start|>assistant`.
        """
        self._is_answered = False
        self._repair = self._new_repair(header, generated=self.generated)
        self._open = self.stopped = None
        self.unread_tokens = 0
        if header is not None:
            tokens = tuple(opening)
            self._open = self._factory.open(OpenPart(header, tokens), tokens, self._pending)

    def reread(self, header: Sequence[int], begin: int, end: int) -> list[Event]:
        """Discard the open message, and continue in a new message with another header.

        `header` are the tokens after the `<|start|>assistant` of the new message. The message begins at the position
        `begin`, and its header ends at the position `end`. The tokens of `header` do not count as generated.
        """
        position = end - len(header)
        self._repair = self._new_repair(position=position, generated=self.generated - len(header), closed_to=begin)
        self._open = self.stopped = None
        self.unread_tokens = 0
        return self._route(self._repair.feed(header))

    def supply(self, tokens: Sequence[int]) -> list[Event]:
        """Return the events of inserted tokens, which are not counted as generated."""
        events = self._route(self._repair.feed(tokens))
        self._repair.output.origin -= len(tokens)
        return events

    def unread(self, tokens: int, instead: Sequence[int]) -> bool:
        """Replace the last tokens of the open message with the tokens `instead`.

        `tokens` is the number of tokens to replace. `generated` still includes the replaced tokens. Return False and
        change nothing if no message is open, if its body has fewer than `tokens` tokens, or if the client already
        received more text than the new body has.
        """
        opened = self._open
        if opened is None or not opened.replace_end(self._encoding, tokens, instead):
            return False
        # `generated` includes the replaced tokens, but positions count only the tokens of the new body.
        less = tokens - len(instead)
        self.counter.reasoning -= less if opened.is_reasoning else 0
        self._repair.output.position -= less
        self._repair.output.origin += less
        return True

    def trim(self, body: Sequence[int], end: int) -> None:
        """Replace the body of the open message with `body`, which ends at the position `end`."""
        opened = self._open
        assert opened is not None
        self._repair = self._new_repair(
            opened.opened.header, position=end, generated=self.generated, closed_to=opened.opened.start
        )
        opened.replace_body(body)
        opened.restart_blanks()
        self.stopped, self.unread_tokens = None, 0

    def count(self, tokens: int) -> None:
        """Add the number `tokens` of generated tokens that are not read to the count."""
        self._repair.output.origin += tokens

    @property
    def closed_to(self) -> int:
        """Position after the last closed message."""
        return self._repair.output.closed_to

    @property
    def undecided_tokens(self) -> int:
        """Number of tokens after the last message whose meaning is final.

        The next marker, or the end of the output, may still change the meaning of these tokens.
        """
        output = self._repair.output
        begin = output.closed_to if output.undecided is None else min(output.undecided.start, output.closed_to)
        return output.position - begin

    @property
    def is_emitted(self) -> bool:
        """True if the `undecided_tokens` must not be discarded.

        In that case a part of the open message was emitted, or repair holds text whose meaning the next message
        decides.
        """
        return (self._open is not None and self._open.is_visible) or self._repair.output.undecided is not None

    @property
    def can_close_answer(self) -> bool:
        """True if the next token may complete a message that the gate checks.

        This is the case if such a message is open, or if repair has not decided the meaning of a header yet.
        """
        is_open = self._open is not None and self._open.is_checked
        return is_open or self._repair.output.undecided is not None

    @property
    def is_reasoning(self) -> bool | None:
        """True if the open message is reasoning; None if no message is open."""
        return None if self._open is None else self._open.is_reasoning

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """Return the events of further generated tokens. Never raises because of tokens."""
        # Fast path: nearly all tokens extend an open body.
        opened = self._open
        if opened is not None and not self._pending and self._repair.try_forward(tokens):
            events: list[Event] = []
            if opened.is_reasoning:
                self.counter.reasoning += len(tokens)
            if not opened.read(tokens, events):
                self.stopped = opened.stopped_at_blanks(self._encoding)
                self._forget_unread(opened.unread)
            return events
        events = self._route(self._repair.feed(tokens))
        if self.stopped is not None:
            self._forget_unread(self._repair.output.position - self._read_to)
        return events

    def _forget_unread(self, tokens: int) -> None:
        """Do not count the last `tokens` tokens, which repair has read after the stop."""
        self.unread_tokens = tokens
        self._repair.output.position -= tokens

    def end(self, reason: FinishReason, *, stop_hidden: bool = False) -> list[Event]:
        """Return the last events of a generation, except `Finished`.

        `stop_hidden` means that the backend never sends the stop token; if the model stopped, the token is restored.
        """
        if stop_hidden and reason is FinishReason.STOP:
            # The model generated the stop token, but the backend does not send it.
            restored = self._repair.restore_stop()
            self.counter.corrections += restored
            self.counter.hidden_stops += restored
        return self._route(self._repair.end(reason))

    def finished(self, reason: FinishReason, stop_sequence: str | None = None) -> Finished:
        """Return the last event of the answer."""
        return Finished(reason, self.usage, stop_sequence, cut_call=self.cut_call)

    @property
    def usage(self) -> Usage:
        """Usage so far, over all generations: output tokens and reasoning tokens."""
        return Usage(completion_tokens=self.output_tokens, reasoning_tokens=self.counter.reasoning)

    @property
    def output_tokens(self) -> int:
        """Number of output tokens so far, over all generations."""
        return self.generated + self.counter.corrections

    @property
    def cut_call(self) -> bool:
        """True if the output ends inside a call, and calls are allowed."""
        return self._repair.output.has_cut_call and self._factory.calls_allowed

    # -- from legal messages to events

    def _route(self, legal: Sequence[Legal]) -> list[Event]:
        events, self._pending = self._pending, []
        for part in legal:
            match part:
                case BodyPart(tokens):
                    opened = self._open
                    assert opened is not None
                    if opened.is_reasoning:
                        self.counter.reasoning += len(tokens)
                    if not opened.read(tokens, events):
                        self.stopped = opened.stopped_at_blanks(self._encoding)
                case OpenPart():
                    if self._gate is not None and not self._gate.opens(part):
                        at, whole = (part.start, part.end, part.end), part.is_whole
                        self.stopped = Stopped(part.header, part.tokens, *at, is_whole=whole)
                    else:
                        header = self.counter.header(part) if self.counter.canonical else part.tokens
                        self._open = self._factory.open(part, header, events)
                case ClosedPart():
                    self._close_message(part, events)
                case Repaired():
                    events.append(part)
                    continue
            if self.stopped is not None:
                rest = legal[next(at for at, each in enumerate(legal) if each is part) :]
                later = sum(not isinstance(each, Repaired) for each in rest)
                self._read_to = self._repair.output.marks[-later]
                if isinstance(part, BodyPart) and self._open is not None:
                    self._read_to -= self._open.unread
                break
        return events

    def _close_message(self, closed: ClosedPart, events: list[Event]) -> None:
        opened, self._open = self._open, None
        assert opened is not None
        item, header, body = opened.item, opened.opened.header, opened.body
        text = written = self._encoding.decode(body)
        is_passed = closed.complete and opened.is_allowed
        if is_passed and opened.is_checked and self._gate is not None:
            content = self._gate.closes(header, text, held=not opened.is_visible)
            if opened.is_visible and not (content or "").startswith(text):
                content = text
            if content is None:
                self.stopped = opened.stopped_at(closed.end, text)
                return
            if content != text:
                is_call = isinstance(item, ToolCall)
                # An empty object instead of blanks is not reported as a recovery: models often write no arguments.
                if text.strip():
                    rule = "wrapped-input" if is_call else "code-fence"
                    events.append(Repaired(rule, self.generated, dropped=len(text) - len(content)))
                # The tokens of a call stay as they were generated, because the backend has them in its cache.
                text = content
                if not is_call:
                    written, body = content, self._encoding.encode_generated(content)
        self._is_answered = self._is_answered or header.is_answer
        if self.counter.canonical:
            body = self.counter.body(item, written, len(body))
        if not is_passed and isinstance(item, ToolCall):
            is_unwritten = opened.is_visible and not body and _take_back(item, events)
            if is_unwritten or not opened.is_visible:
                return
        is_unseen = is_passed and not opened.is_visible
        if is_unseen and isinstance(item, Text) and self._gate is not None and self._gate.unfit:
            item = replace(item, unfit=True)
        tokens = (*opened.header_tokens, *body, closed.token) if closed.complete else ()
        opened.emit_end(Closed(item, text, tokens, closed.complete), events)
        self._factory.count(item)


def _take_back(item: ToolCall, events: list[Event]) -> bool:
    """Remove the event that opens a call, if it is among `events`; return whether it was."""
    # A call is opened with the first token of its arguments, or at its end. If the model abandons a call before the
    # arguments, the call is opened and closed at once, so the client need not see it.
    if (opening := Opened(item)) not in events:
        return False
    events.remove(opening)
    return True
