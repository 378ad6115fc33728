"""Decoders that turn the chunks of a backend's output into tokens.

Token ids are passed on unchanged. In text, the decoder finds the Harmony markers, such as `<|end|>`. If the backend
removes the markers from its text, the decoder restores them.

In text, a marker that the model only quotes looks the same as a real marker. These rules distinguish them:

- A stop marker is quoted if prose without a header follows it, unless this prose is the answer after reasoning.
- A start marker is quoted if no header follows it.
- A marker inside an open JSON string of a call's arguments is quoted, unless it is a stop marker that ends the output.

If the text after a marker is too short to decide, the decoder holds the marker and this text until more characters
arrive or the output ends. The length of the held text is limited.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, Protocol

from unisono.core.generation import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    ENDOFTEXT,
    FIRST_SPECIAL,
    MESSAGE,
    RETURN,
    START,
    Chunk,
    OutputForm,
)
from unisono.harmony.encoding import STRUCTURAL, Encoding
from unisono.harmony.header import ANALYSIS, CHANNELS, COMMENTARY, FINAL, Header
from unisono.harmony.recipients import RecipientKind

_MARKER = re.compile(r"<\|(?:start|channel|constrain|message|end|return|call|endoftext|reserved_20[01]\d{3})\|>")
_PARTIAL = re.compile(r"<(?:\|[a-z_0-9]{0,16}(?:\|)?)?\Z")
_STOPS = frozenset({END, RETURN, CALL, ENDOFTEXT})
# Inside a body, the rules above apply to these markers only. `repair` drops any other marker in a body.
_UNCERTAIN = _STOPS | {START, CHANNEL}
# Maximum number of characters after a marker that are held until it is clear whether the marker is real.
_LOOKAHEAD = 512

# The same for an end marker in reasoning or a preamble, because the text after it may be the answer.
_ANSWER_LOOKAHEAD = 16_384

_CHANNEL = "|".join(CHANNELS)
_TO = re.compile(r"to ?[=:]", re.IGNORECASE)
_HEADER_START = re.compile(rf"\s*(?:assistant|{_CHANNEL}|(?i:to ?[=:]))")
_BEFORE_ANSWER = re.compile(rf"(?:assistant)?\s*(?:{ANALYSIS}|{COMMENTARY})\s*\Z")
_TO_PYTHON = re.compile(r"to=python(?![\w-])")
# Maximum length of a stored header in characters. Of a longer header, only the end is stored.
_MAX_HEADER_LENGTH = 256
_STRING_EDGE = re.compile(r'["\\]')


class Decoder(Protocol):
    def feed(self, chunk: Chunk) -> Sequence[int]: ...

    def end(self) -> Sequence[int]: ...


def decoder_for(
    form: OutputForm, encoding: Encoding, opening: Header | None = None, generated: Sequence[int] = ()
) -> Decoder:
    """Return the decoder for a backend's output.

    `form` says whether the backend sends token ids, text, or text without markers. `opening` is the header of the
    message that the prompt leaves open; None if the prompt leaves no message open. `generated` are the tokens at the
    end of the prompt that the model generated earlier.
    """
    match form:
        case OutputForm.IDS:
            return AsIds()
        case OutputForm.TEXT:
            return _Text(encoding, opening, generated)
        case OutputForm.MARKERLESS:
            return _Markerless(encoding, opening, generated)


class AsIds:
    """Decoder for backends that send token ids."""

    def feed(self, chunk: Chunk) -> Sequence[int]:
        return chunk.tokens

    def end(self) -> Sequence[int]:
        return ()


class _Place(Enum):
    """Part of the output that the next character belongs to."""

    HEADER = auto()
    BEFORE_ANSWER = auto()  # in reasoning or a preamble
    TEXT = auto()  # in any other body that is not JSON
    BEFORE_JSON = auto()  # in a body that may be JSON, before its first character
    JSON = auto()  # in JSON, outside strings
    STRING = auto()
    ESCAPE = auto()  # in a string, after a backslash


# Constants, because they are read for every chunk; the comment in `repair` gives the cost of an enumeration member.
_HEADER: Final = _Place.HEADER
_BEFORE_JSON: Final = _Place.BEFORE_JSON
_ESCAPE: Final = _Place.ESCAPE
_IN_TEXT: Final = (_Place.BEFORE_ANSWER, _Place.TEXT)
_IN_STRING: Final = (_Place.STRING, _Place.ESCAPE)


class _Text:
    def __init__(self, encoding: Encoding, opening: Header | None, generated: Sequence[int]) -> None:
        self._encoding = encoding
        self._buffer = ""
        self._recipient = False
        self._header = ""
        if opening is None:
            self._place = _Place.HEADER
        elif opening.recipient.kind is RecipientKind.FUNCTION:
            self._place = _Place.BEFORE_JSON
        else:
            self._place = _Place.TEXT if opening.channel == FINAL else _Place.BEFORE_ANSWER
        self._go_through(generated)

    def feed(self, chunk: Chunk) -> Sequence[int]:
        self._buffer += chunk.text
        return self._read(over=False)

    def end(self) -> Sequence[int]:
        return self._read(over=True)

    def _read(self, *, over: bool) -> list[int]:
        out: list[int] = []
        at = 0
        text = self._buffer
        while marker := _MARKER.search(text, at):
            self._text(text[at : marker.start()], out)
            at = marker.start()
            token = _id_of(marker[0])
            meant = self._is_structure(token, text, marker.end(), over=over)
            if meant is None:
                break
            at = marker.end()
            if meant:
                self._structure(token)
                out.append(token)
            else:
                self._text(marker[0], out)
        if marker is None:
            partial = None if over else _PARTIAL.search(text, at)
            end = partial.start() if partial else len(text)
            self._text(text[at:end], out)
            at = end
        self._buffer = text[at:]
        return out

    def _go_through(self, generated: Sequence[int]) -> None:
        """Set the state that the decoder has after the tokens `generated`, but with no held text."""
        begin = 0
        for at, token in enumerate(generated):
            if token >= FIRST_SPECIAL:
                self._track(self._encoding.decode(generated[begin:at]))
                self._structure(token)
                begin = at + 1
        self._track(self._encoding.decode(generated[begin:]))

    def _text(self, text: str, out: list[int]) -> None:
        if text:
            self._track(text)
            out += self._encoding.encode_generated(text)

    def _track(self, text: str) -> None:
        if self._place is _HEADER:
            header = self._header + text
            self._recipient = self._recipient or _TO.search(header) is not None
            self._header = header[-_MAX_HEADER_LENGTH:]
        elif self._place not in _IN_TEXT:
            self._track_json(text)

    def _structure(self, token: int) -> None:
        is_header = self._place is _Place.HEADER
        if token == MESSAGE and is_header:
            # Code for `python` is not JSON, even if it begins like JSON.
            if self._recipient:
                self._place = _Place.TEXT if _TO_PYTHON.search(self._header) else _Place.BEFORE_JSON
            else:
                self._place = _Place.BEFORE_ANSWER if _BEFORE_ANSWER.match(self._header) else _Place.TEXT
        elif token in _STOPS or token in (START, CHANNEL):
            # A channel marker in a header belongs to that header.
            if not is_header or token != CHANNEL:
                self._recipient, self._header = False, ""
            self._place = _Place.HEADER

    def _track_json(self, text: str) -> None:
        if self._place is _BEFORE_JSON and (head := text.lstrip()):
            # Arguments need not be JSON; in code, quotes have no meaning here.
            self._place = _Place.JSON if head[0] in '{["' else _Place.TEXT
        if self._place not in _IN_TEXT:
            self._track_string(text)

    def _track_string(self, text: str) -> None:
        at = 0
        if self._place is _ESCAPE:
            at, self._place = 1, _Place.STRING
        while edge := _STRING_EDGE.search(text, at):
            at = edge.end()
            if edge[0] == '"':
                self._place = _Place.JSON if self._place is _Place.STRING else _Place.STRING
            elif self._place is _Place.STRING:
                if at == len(text):
                    self._place = _Place.ESCAPE
                at += 1

    def _is_structure(self, token: int, text: str, at: int, *, over: bool) -> bool | None:
        """Return True if the marker `token` is real, False if it is quoted.

        The marker ends before the index `at` of `text`. Return None if the decision depends on text that has not
        arrived. `over` means that the output has ended.
        """
        is_in_string = self._place in _IN_STRING
        if self._place is _Place.HEADER or token not in _UNCERTAIN:
            return not is_in_string
        if is_in_string:
            if token not in _STOPS:
                return False
            # A stop inside a string is meant only at the very end of the output, where the arguments were cut.
            return True if over and at == len(text) else (None if at == len(text) else False)
        if self._place not in _IN_TEXT:
            return True
        if token == END and self._place is _Place.BEFORE_ANSWER:
            ahead = text[at : at + _ANSWER_LOOKAHEAD]
            should_decide = over or len(ahead) == _ANSWER_LOOKAHEAD
            return _ends_before_answer(ahead, should_decide, over)
        ahead = text[at : at + _LOOKAHEAD]
        should_decide = over or len(ahead) == _LOOKAHEAD
        return _stop_is_meant(ahead, should_decide) if token in _STOPS else _start_is_meant(ahead, should_decide)


def _id_of(marker: str) -> int:
    token = STRUCTURAL.get(marker)
    return int(marker[len("<|reserved_") : -2]) if token is None else token


def _stop_is_meant(rest: str, should_decide: bool) -> bool | None:
    """Return True if a stop marker is real, False if it is quoted, None if undecided.

    `rest` is the text after the marker. A real marker is followed by nothing, by another marker, or by a header. If
    prose follows, the marker is quoted, unless a real start or channel marker follows the prose. With `should_decide`,
    the decision is made with `rest` alone, and the result is never None.
    """
    following = _MARKER.search(rest)
    if following is None:
        if not rest.strip():
            return True if should_decide else None
        return False if should_decide else None
    token = _id_of(following[0])
    between = rest[: following.start()]
    if not between.strip():
        return True
    if token in (START, CHANNEL):
        return _start_is_meant(rest[following.end() :], should_decide)
    if token in (MESSAGE, CONSTRAIN):
        return _HEADER_START.match(between) is not None
    return False


def _ends_before_answer(rest: str, should_decide: bool, over: bool) -> bool | None:
    """Return whether an end marker in reasoning or a preamble is real; see `_stop_is_meant`.

    The end marker is also real if only text without a header follows it until the output ends. That text is the answer.
    `over` means that the output has ended.
    """
    following = _MARKER.search(rest)
    if following is None and rest.strip():
        return over if should_decide else None
    if following is not None and _id_of(following[0]) == RETURN:
        return True
    return _stop_is_meant(rest, should_decide)


def _start_is_meant(rest: str, should_decide: bool) -> bool | None:
    """Return True if a start or channel marker in a body is real, False if it is quoted.

    `rest` is the text after the marker. The marker is real if a header follows: a few words, and then another marker.
    Return None if more text is needed to decide. With `should_decide`, the result is never None.
    """
    following = _MARKER.search(rest)
    if following is None:
        # `rest` may end with the first characters of a marker. They are not words of a header.
        partial = None if should_decide else _PARTIAL.search(rest)
        rest = rest[: partial.start()] if partial else rest
        words = rest.strip()
        if not words:
            return True if should_decide else None
        if not should_decide and "\n" not in words:
            return None
        return should_decide and (_HEADER_START.match(rest) is not None or "assistant".startswith(words))
    between = rest[: following.start()]
    # Headers are short and on one line; longer text before a marker is prose.
    headed = "\n" not in between.strip() and len(between.split()) <= 6
    after = _id_of(following[0])
    if after in _STOPS:
        return headed and _HEADER_START.match(between) is not None
    return headed


# Header from which the backend removed the markers, such as `assistantfinal` or `commentary to=functions.name json`.
_SPLIT = re.compile(
    rf"(?:\A|assistant)\s?(?P<channel>{_CHANNEL})(?P<to>\s{{1,2}}to=(?P<name>[\w.-]{{1,80}})\s{{0,2}}(?:json|code)?)?"
)
# Maximum length of such a header in characters.
_TAIL = len("assistant commentary  to=  json") + 80


class _Markerless:
    """Decoder for text from which the backend removed the markers.

    A channel name begins a message if it is at the beginning of the output, or directly after the word `assistant`.
    """

    def __init__(self, encoding: Encoding, opening: Header | None, generated: Sequence[int]) -> None:
        self._encoding = encoding
        self._buffer = ""
        start = encoding.encode_marked("<|start|>assistant")
        self._at_start = list(generated[-len(start) :]) == start if generated else opening is None
        self._has_started = not self._at_start and (opening is not None or MESSAGE in generated)

    def feed(self, chunk: Chunk) -> Sequence[int]:
        self._buffer += chunk.text
        return self._read(over=False)

    def end(self) -> Sequence[int]:
        return self._read(over=True)

    def _read(self, *, over: bool) -> list[int]:
        out: list[int] = []
        while (split := self._next_split()) is not None:
            if not over and len(self._buffer) - split.start() < _TAIL:
                break
            self._emit(self._buffer[: split.start()], out)
            if self._has_started:
                out += [END, START, *self._encoding.encode_text("assistant")]
            self._has_started, self._at_start = True, False
            to = f" to={split['name']}" if split["to"] else ""
            out += [CHANNEL, *self._encoding.encode_text(split["channel"] + to), MESSAGE]
            self._buffer = self._buffer[split.end() :]
        if over:
            self._emit(self._buffer, out)
            self._buffer = ""
        elif split is None:
            # Hold back the end of the text, because it may be the beginning of a header.
            keep = min(len(self._buffer), _TAIL)
            self._emit(self._buffer[: len(self._buffer) - keep], out)
            self._buffer = self._buffer[len(self._buffer) - keep :]
        return out

    def _next_split(self) -> re.Match[str] | None:
        for split in _SPLIT.finditer(self._buffer):
            if split[0].startswith("assistant") or (split.start() == 0 and self._at_start):
                return split
        return None

    def _emit(self, text: str, out: list[int]) -> None:
        self._at_start = self._at_start and not text
        out += self._encoding.encode_generated(text)
