"""Log probabilities of the tokens that a backend generated, and of the visible text.

The gateway may repair, buffer or truncate text before it is emitted. Therefore, the bytes of the emitted text are
compared with the bytes of the generated tokens to find the tokens of each text. Tokens of another message may have the
same bytes, so the log also records when each text was opened and closed. Text that the gateway inserts has no log
probabilities. The text of a raw completion is not changed, so its tokens are found by position.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from unisono.core.events import Closed, Event, Opened, Text
from unisono.core.generation import CHANNEL, CONSTRAIN, FIRST_SPECIAL, MESSAGE, TokenLogprob

# Maximum number of bytes of emitted text that match no token and are buffered. If a text has more, no log probabilities
# are reported for the rest of the text.
MAX_INSERTED_BYTES: Final = 4_096
# Maximum number of tokens with invalid UTF-8 that are matched together.
MAX_REPLACED_TOKENS: Final = 16
FENCE: Final = b"```"
# Maximum number of bytes of a line that opens a code fence; longer lines are read as text.
MAX_FENCE_BYTES: Final = 64
REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_UTF8: Final = codecs.getincrementaldecoder("utf-8")


# Token id with its log probability, which is None if unknown.
ScoredToken: TypeAlias = tuple[int, TokenLogprob | None]


@dataclass(slots=True)
class _Text:
    """Progress in matching one emitted text with generated tokens.

    `position` is the index of the next generated token; None if no further tokens can be matched.
    """

    position: int | None = None
    # Emitted bytes after the last matched token. They are a part of the next token, or text that the gateway inserted.
    rest: bytes = b""


class LogprobLog:
    """Generated tokens of one answer, with their log probabilities.

    `token_bytes` returns the bytes of a token id. `prompt` contains the tokens of the prompt with their log
    probabilities, if the request asks for these; it is empty until they have arrived.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self.token_bytes = token_bytes
        self.prompt: Sequence[ScoredToken] = ()
        self._tokens: list[int] = []
        self._values: list[TokenLogprob | None] = []
        # Indices in `_tokens` at which the body of a message may begin.
        self._body_starts: list[int] = []
        # Indices in `_tokens` of the text tokens of headers without a body. Such a header contains the message's text.
        self._header_starts: list[int] = []
        # Length of `_header_starts` before the current header; None while a body is added.
        self._header_begin: int | None = None
        self._texts: dict[int, _Text] = {}
        # Number of tokens that the reader of the answer has read. It may exceed the number of recorded tokens.
        self._read = 0
        # Numbers of tokens that were read when a text item was opened and when it was closed, by its index.
        self._opened: dict[int, int] = {}
        self._closed: dict[int, int] = {}

    def start_generation(self) -> None:
        """Begin a generation; its first token may continue a message body at the prompt's end."""
        self._body_starts.append(len(self._tokens))
        self._header_begin = None
        self._read = len(self._tokens)

    def count_read(self, tokens: int) -> None:
        """Record that the reader of the answer reads the next `tokens` tokens."""
        self._read += tokens

    def open_text(self, item: int) -> None:
        """Record that the text item `item` was opened: it begins in the tokens read so far.

        `item` is the index of the item. A message that is generated again has the same index as before.
        """
        self._opened[item] = self._read
        self._closed.pop(item, None)

    def close_text(self, item: int) -> None:
        """Record that the text item `item` was closed: it ends in the tokens read so far."""
        self._closed[item] = self._read

    def add(self, tokens: Sequence[int], values: Sequence[TokenLogprob | None]) -> None:
        """Add tokens that a backend generated.

        `values` are the log probabilities of the tokens. Missing values are treated as unknown.
        """
        for position, token in enumerate(tokens):
            self._tokens.append(token)
            self._values.append(values[position] if position < len(values) else None)
            if token == MESSAGE:
                self._body_starts.append(len(self._tokens))
                if self._header_begin is not None:
                    del self._header_starts[self._header_begin :]
                    self._header_begin = None
            elif token >= FIRST_SPECIAL:
                if self._header_begin is None or token not in (CHANNEL, CONSTRAIN):
                    self._header_begin = len(self._header_starts)
            elif self._header_begin is not None:
                self._header_starts.append(len(self._tokens) - 1)

    @property
    def has_only_unknown(self) -> bool:
        """True if tokens were generated, and none of them has a log probability."""
        return bool(self._values) and all(value is None for value in self._values)

    def scored(self, begin: int, end: int) -> list[ScoredToken]:
        """Return the generated tokens from index `begin` up to, but not including, index `end`."""
        return list(zip(self._tokens[begin:end], self._values[begin:end], strict=True))

    def truncate(self, size: int) -> None:
        """Forget all generated tokens after the first `size`, because they are generated again."""
        del self._tokens[size:], self._values[size:]
        self._body_starts = [start for start in self._body_starts if start <= size]
        self._header_starts = [start for start in self._header_starts if start < size]
        self._header_begin = None

    def emitted(self, item: int, text: str) -> list[tuple[bytes, TokenLogprob]]:
        """Return the bytes and the log probability of each token that `text` completes, in order.

        `text` is the next part of the item with the index `item`. Tokens without a log probability are left out.
        """
        content = text.encode("utf-8", "surrogatepass")
        state = self._texts.get(item)
        if state is None:
            state = self._texts[item] = self._start_of(content, self._opened.get(item, len(self._tokens)))
        if state.position is None:
            return []
        content = state.rest + content
        found: list[tuple[bytes, TokenLogprob]] = []
        # `text` may be a whole long answer. Cutting off matched bytes would copy the rest for each token, so `start`
        # is moved instead.
        at, start = state.position, 0
        limit = min(self._closed.get(item, len(self._tokens)), len(self._tokens))
        while start < len(content) and at < limit:
            token = self._tokens[at]
            spelled = self.token_bytes(token)
            if token >= FIRST_SPECIAL:
                # The text continues in another message, or after an edit by the gateway.
                if at + 1 >= limit:
                    break
                at += 1
                continue
            if content.startswith(spelled, start):
                found += self._scored_bytes(at, at + 1)
                start += len(spelled)
                at += 1
            elif len(content) - start < len(spelled) and spelled.startswith(content[start:]):
                break
            elif (replaced := self._replaced(at)) is not None:
                end, shown = replaced
                # As below, the gateway may have inserted text before these tokens.
                if (begin := content.find(shown, start)) < 0:
                    break
                found += self._scored_bytes(at, end)
                start, at = begin + len(shown), end
            elif (inserted := content.find(spelled, start)) >= 0:
                # The gateway inserted text before this token.
                start = inserted
            else:
                break
        # Unmatched text was inserted by the gateway, and generated text may follow it.
        state.rest = content[start:]
        state.position = at if len(state.rest) <= MAX_INSERTED_BYTES else None
        return found

    def _scored_bytes(self, begin: int, end: int) -> list[tuple[bytes, TokenLogprob]]:
        """Return the bytes and the log probability of each token that has one, as in `scored`."""
        return [(self.token_bytes(token), value) for token, value in self.scored(begin, end) if value is not None]

    def _start_of(self, content: bytes, limit: int) -> _Text:
        """Return the initial progress for a new text: the position with the longest common prefix.

        The text begins within the first `limit` tokens. If several positions have equally long prefixes, the first one
        from `_starts` is taken. The position is None if the text has no common prefix with the tokens at any position.
        """
        best, longest = _Text(), 0
        for start, removed in self._starts(limit):
            if (common := self._common_prefix(start, removed + content) - len(removed)) > longest:
                best, longest = _Text(start, removed), common
        return best

    def _starts(self, limit: int) -> Iterator[tuple[int, bytes]]:
        """Yield each token index at which a text may begin, with the bytes of the token to skip.

        A text may begin at the start of a body, after a line that opens a code fence at the start of a body, or at a
        text token of a header without a body. Positions after `limit` are left out. Later positions of each kind come
        first.
        """
        bodies = [start for start in reversed(self._body_starts) if start <= limit]
        yield from ((start, b"") for start in bodies)
        for start in bodies:
            yield from self._after_fence(start)
        for start in (start for start in reversed(self._header_starts) if start < limit):
            # Text from a header may be emitted without the white space at the beginning of its first token.
            spelled = self.token_bytes(self._tokens[start])
            yield start, spelled[: len(spelled) - len(spelled.lstrip())]
            yield start, b""

    def _after_fence(self, begin: int) -> Iterator[tuple[int, bytes]]:
        """Yield the position after the body's first line, if this line opens a code fence."""
        read = b""
        for at in range(begin, len(self._tokens)):
            spelled = self.token_bytes(self._tokens[at])
            line = (read + spelled).lstrip()
            if self._tokens[at] >= FIRST_SPECIAL or len(line) > MAX_FENCE_BYTES or line[:3] != FENCE[: len(line)]:
                return
            if b"\n" in line:
                removed = spelled[: spelled.index(b"\n", max(0, spelled.find(b"`"))) + 1]
                yield (at, removed) if removed != spelled else (at + 1, b"")
                return
            read += spelled

    def _common_prefix(self, start: int, content: bytes) -> int:
        """Return the length in bytes of the common prefix of a text and the body at index `start`."""
        length, at = 0, start
        while at < len(self._tokens):
            token = self._tokens[at]
            if length == len(content) or token >= FIRST_SPECIAL:
                break
            end, spelled = at + 1, self.token_bytes(token)
            if not content.startswith(spelled, length):
                end, spelled = self._replaced(at) or (end, spelled)
            if not content.startswith(spelled, length):
                return length + _common_length(spelled, content[length : length + len(spelled)])
            length += len(spelled)
            at = end
        return length

    def _replaced(self, start: int) -> tuple[int, bytes] | None:
        """Return the emitted bytes of the tokens from `start`, if these contain invalid UTF-8.

        Reads tokens until one ends with a whole character. In the emitted text, U+FFFD replaces invalid bytes. The
        result is the index after the last token, and the UTF-8 bytes of the text; None if all bytes are valid.
        """
        decoder = _UTF8(errors="replace")
        text, end = "", start
        while end < len(self._tokens) and self._tokens[end] < FIRST_SPECIAL and end - start < MAX_REPLACED_TOKENS:
            text += decoder.decode(self.token_bytes(self._tokens[end]))
            end += 1
            if not decoder.getstate()[0]:
                break
        text += decoder.decode(b"", final=True)
        return (end, text.encode()) if REPLACEMENT in text else None


def counted(tokens: Iterable[int], log: LogprobLog | None) -> Iterator[int]:
    """Yield the tokens one by one, and count each of them in `log` before it is read."""
    for token in tokens:
        if log is not None:
            log.count_read(1)
        yield token


def record_texts(events: Sequence[Event], log: LogprobLog | None) -> None:
    """Record in `log`, if there is one, where the texts of an answer begin and end.

    The tokens of a journal have no log probabilities, so the events of a replay must not be recorded.
    """
    if log is None:
        return
    for event in events:
        match event:
            case Opened(item=Text(index=index)):
                log.open_text(index)
            case Closed(item=Text(index=index)):
                log.close_text(index)


def _common_length(one: bytes, other: bytes) -> int:
    """Return the length of the longest common prefix of two byte strings."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
