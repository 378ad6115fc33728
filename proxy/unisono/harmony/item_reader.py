"""Items of an answer, and the reader that turns tokens of a message into text and events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Item, Opened, Reasoning, Text, ToolCall
from unisono.harmony.blanks import BlankFilter, is_closed
from unisono.harmony.encoding import Encoding
from unisono.harmony.gate_protocol import Gate, OpenPart, Stopped
from unisono.harmony.header import ANALYSIS, COMMENTARY, Header
from unisono.harmony.recipients import RecipientKind
from unisono.harmony.tool_declarations import ToolSet

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
TRUNCATED: Final = "unexpected end of data"  # reason of a UnicodeDecodeError for an incomplete character


class BodyText(Protocol):
    """Decoder that turns the body tokens of a message into text, one message after another.

    The bytes of an incomplete character are withheld until the character is complete.
    """

    def start(self, body: Sequence[int] = ()) -> None:
        """Discard what is withheld of the previous message, and begin the next message.

        `body` are the tokens of the new message that were read before; their text is not returned again.
        """

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text that the next `tokens` of the message complete."""


class TableBodyText:
    """Decoder that looks up the text of each token in the vocabulary.

    It returns the same texts as openai-harmony's parser, also for bytes that are not UTF-8.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._texts = encoding.texts
        self._withheld = b""

    def start(self, body: Sequence[int] = ()) -> None:
        self._withheld = b""
        if body:
            self.text_of(body)

    def text_of(self, tokens: Sequence[int]) -> str:
        if self._withheld:
            return "".join(map(self._decoded, tokens))
        # A slow stream delivers one token at a time.
        if len(tokens) == 1 and (known := self._texts.get(tokens[0])) is not None:
            return known
        try:
            return "".join(map(self._texts.__getitem__, tokens))
        except KeyError:  # the text of a token is not known yet, or the token is not a whole character
            return "".join(map(self._decoded, tokens))

    def _decoded(self, token: int) -> str:
        if not self._withheld and (known := self._texts.get(token)) is not None:
            return known
        before = self._withheld
        data = before + self._encoding.decode_bytes((token,))
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            text = data[: error.start].decode()
            if error.reason == TRUNCATED:
                self._withheld = data[error.start :]
                return text
            # Like openai-harmony's parser: replace only the first invalid bytes, and decode the rest with the next
            # token.
            self._withheld = data[error.end :]
            return text + REPLACEMENT
        self._withheld = b""
        if not before:
            self._texts[token] = text
        return text


def body_text(encoding: Encoding) -> BodyText:
    """Return the decoder of message bodies that the encoding selects."""
    if encoding.uses_library_parser:
        # Imported only here, because the library needs 50 MB.
        from unisono.harmony.library_parser import LibraryBodyText

        return LibraryBodyText(encoding)
    return TableBodyText(encoding)


class ItemFactory:
    """Factory of the items of one answer, numbered in the order of their messages.

    `new_call_id` returns a new id for each tool call. With `hold_calls`, a call is emitted only when it is complete.
    Without `hold_calls`, the arguments are emitted as they arrive, and a truncated call closes as incomplete. If
    `calls_allowed` is False, calls become reasoning, since nothing may run them. Without `parallel_calls`, only the
    first call is emitted. `gate` decides which other messages are emitted only when they are complete.
    """

    # Rules.
    # - A message to a recipient is reasoning if it is not a call or if calls are not allowed, since nothing will run
    #   it.
    # - An item is counted when it is closed. A message that is generated again therefore gets the same index.

    def __init__(
        self,
        encoding: Encoding,
        tools: ToolSet,
        new_call_id: Callable[[], str],
        gate: Gate | None,
        *,
        hold_calls: bool,
        calls_allowed: bool,
        parallel_calls: bool,
    ) -> None:
        self._tools = tools
        self._new_call_id = new_call_id
        self._gate = gate
        self._hold_calls = hold_calls
        self.calls_allowed = calls_allowed
        self._parallel_calls = parallel_calls
        self._parser = body_text(encoding)
        self._items = 0  # closed items, and so the next item's index
        self._calls = 0  # closed calls

    def open(self, part: OpenPart, tokens: tuple[int, ...], events: list[Event]) -> ItemReader:
        """Return the reader of an opened message, and add the first event of its item to `events`.

        `tokens` are the header's tokens that the event `Closed` will report.
        """
        gate, header = self._gate, part.header
        item, is_checked = self._item(header)
        is_call = isinstance(item, ToolCall)
        is_held, limits_blanks = is_call and self._hold_calls, False
        if gate is not None and not isinstance(item, Reasoning):
            is_held = is_held or gate.is_buffered(header)
            # If the whole message was read before its header was known, generation cannot be resumed after the header.
            limits_blanks = not part.is_whole and gate.limits_blanks(header)
        is_allowed = not is_call or self._parallel_calls or self._calls == 0
        is_visible = is_allowed and not is_held
        blanks = BlankFilter() if limits_blanks else None
        if is_visible:
            events.append(Opened(item))
        return ItemReader(
            item,
            part,
            tokens,
            self._parser,
            is_allowed=is_allowed,
            is_visible=is_visible,
            is_checked=is_checked,
            blanks=blanks,
        )

    def _item(self, header: Header) -> tuple[Item, bool]:
        """Return the item of a message, and whether the gate checks the complete message."""
        if header.is_call and self.calls_allowed:
            of_client = header.recipient.kind is RecipientKind.FUNCTION
            name = self._tools.client(header.recipient.name) if of_client else header.recipient.name
            return ToolCall(self._items, self._calls, self._new_call_id(), name), True
        if header.recipient.kind is not RecipientKind.NONE or header.channel == ANALYSIS:
            return Reasoning(self._items), False
        if self._gate is not None and self._gate.is_aside(header):
            return Reasoning(self._items), True
        return Text(self._items, Phase.COMMENTARY if header.channel == COMMENTARY else Phase.FINAL), True

    def count(self, item: Item) -> None:
        """Count an item that was closed."""
        self._items += 1
        self._calls += isinstance(item, ToolCall)


class ItemReader:
    """Reader of the body of one message, which emits the events of its item.

    `opened` is the part that opened the message, and `header_tokens` are the header's tokens to report. `is_allowed` is
    False for a second call if parallel calls are off. Unless `is_visible` is True, nothing is emitted before the
    message is complete. `is_checked`: a gate checks the complete message. `blanks` withholds blanks in a JSON body;
    None if the body is not filtered.
    """

    def __init__(
        self,
        item: Item,
        opened: OpenPart,
        header_tokens: tuple[int, ...],
        parser: BodyText,
        *,
        is_allowed: bool,
        is_visible: bool,
        is_checked: bool,
        blanks: BlankFilter | None,
    ) -> None:
        self.item = item
        self.is_reasoning = isinstance(item, Reasoning)
        self.opened = opened
        self.header_tokens = header_tokens
        self.is_allowed = is_allowed
        self.is_visible = is_visible
        self.is_checked = is_checked
        self.body: list[int] = []  # tokens of the body so far
        self.delivered = 0  # number of characters that the parser returned
        self.unread = 0  # number of tokens after the token at which the last `read` ended early
        self._parser = parser
        self._blanks = blanks
        parser.start()

    def read(self, tokens: Sequence[int], events: list[Event]) -> bool:
        """Add the text of body tokens to `events`.

        If there are too many blanks in a row, return False without reading the rest of `tokens`.
        """
        body, blanks = self.body, self._blanks
        # Without a filter for blanks, nothing ends the read early.
        if blanks is None:
            body += tokens
            if text := self._parser.text_of(tokens):
                self.delivered += len(text)
                if self.is_visible:
                    events.append(Delta(self.item, text))
            return True
        for read, token in enumerate(tokens, 1):
            text = self._parser.text_of((token,))
            body.append(token)
            if not text:
                continue
            text = blanks.feed(text, len(body) - 1)
            self.delivered += len(text)
            if text and self.is_visible:
                events.append(Delta(self.item, text))
            if blanks.is_too_long:
                self.unread = len(tokens) - read
                return False
        return True

    def replace_body(self, body: Sequence[int]) -> None:
        """Replace the body tokens read so far with `body`, and continue after `body`."""
        self._parser.start(body)
        self.body[:] = body

    def replace_end(self, encoding: Encoding, tokens: int, instead: Sequence[int]) -> bool:
        """Replace the last `tokens` tokens of the body with the tokens `instead`.

        Return False and change nothing if the body has fewer than `tokens` tokens, or if more text was already emitted
        than the new body has.
        """
        if len(self.body) < tokens:
            return False
        body = [*self.body[:-tokens], *instead]
        if len(encoding.decode(body)) < self.delivered:
            return False
        self.replace_body(body)
        return True

    def restart_blanks(self) -> None:
        """Forget the withheld blanks, after the caller removed them from the body."""
        if self._blanks is not None:
            self._blanks.restart()

    def emit_end(self, closed: Closed, events: list[Event]) -> None:
        """Add the last events of the item to `events`, ending with `closed`.

        The events report `closed.item`, which may differ from `self.item` if nothing was emitted before.
        """
        # The parser's deltas are a prefix of the text: it withholds the bytes of an incomplete character and all text
        # after such bytes in the same token.
        rest = closed.text[self.delivered :] if self.is_visible else closed.text
        if not self.is_visible:
            events.append(Opened(closed.item))
        if rest:
            events.append(Delta(closed.item, rest))
        events.append(closed)

    def stopped_at(self, end: int, text: str) -> Stopped:
        """Describe a message that the gate rejected when it closed, at the position `end`."""
        opened = self.opened
        return Stopped(opened.header, opened.tokens, opened.start, opened.end, end, text)

    def stopped_at_blanks(self, encoding: Encoding) -> Stopped:
        """Describe a message in which reading stopped, because it has too many blanks in a row."""
        assert self._blanks is not None
        opened = self.opened
        trimmed = self._blanks.trimmed(encoding, self.body)
        text = encoding.decode(trimmed)
        return Stopped(
            opened.header,
            opened.tokens,
            opened.start,
            opened.end,
            opened.end,
            text,
            trimmed,
            is_complete=is_closed(text),
            is_emitted=self.is_visible,
        )
