"""What was generated behind a raw prompt: its tokens, and as much of their text as may be told. Nothing is read into
them.

Tokens count from the moment that their characters are whole: those of half a character are told to nobody, and where
the answer goes on elsewhere they are generated again. No I/O.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Final

from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Finished, Opened, Text
from unisono.core.generation import ENDOFTEXT, FIRST_SPECIAL, STOP_TOKENS, FinishReason, Usage
from unisono.core.token_ids import share_ids
from unisono.engine.stops import StopStrings
from unisono.engine.turn import RawPrompt
from unisono.harmony.encoding import Encoding

STOPS: Final = frozenset({*STOP_TOKENS, ENDOFTEXT})
"""What ends every generation."""

ITEM: Final = Text(0, Phase.FINAL)


class RawText:
    """`stop` are the client's stop strings."""

    def __init__(self, encoding: Encoding, raw: RawPrompt, stop: Sequence[str]) -> None:
        self._encoding = encoding
        self._raw = raw
        self._stops = raw.stop_tokens | STOPS
        self._strings = StopStrings(stop) if stop else None
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._unfinished: list[int] = []
        self._begun = ""
        """The text of those, but for the character that is not whole."""
        self._told: list[str] = []
        self._opened = False
        self.tokens: list[int] = []
        """All that counts of what was generated, what ended it too."""
        self.ended: FinishReason | None = None
        self._over = False

    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def broken_off(self) -> bool:
        """Whether it ended where the model would have gone on."""
        return self.ended is not None and not (self.tokens and self.tokens[-1] in STOPS)

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """What may be told of some more tokens. Nothing counts behind the one that ends it, however the network cuts
        the stream."""
        if self.is_over():
            return []
        told: list[str] = []
        for token in share_ids(tokens):
            told.append(self._cut(self._text_of(token)))
            if self.is_over():
                break
        return self._events("".join(told))

    def end(self, reason: FinishReason) -> list[Event]:
        """The rest of the text, behind the last token. Half a character is told as one that is broken."""
        told = ""
        if self.ended is None:
            self.tokens += self._unfinished
            told = self._cut(self._begun + self._decoder.decode(b"", final=True))
        self.ended = self.ended or reason
        self._unfinished, self._begun = [], ""
        if self._strings is not None and not self._over:
            # What could have been the beginning of a stop string is none.
            told += "".join(e.text for e in self._strings.filter([Closed(ITEM, "")]) if isinstance(e, Delta))
        self._over = True
        return self._events(told)

    def finished(self, usage: Usage) -> list[Event]:
        """The last events."""
        assert self.ended is not None
        stop = self._strings.matched if self._strings is not None else None
        opened: list[Event] = [] if self._opened else [Opened(ITEM)]
        return [*opened, Closed(ITEM, "".join(self._told)), Finished(self.ended, usage, stop)]

    def forget_unfinished(self) -> int:
        """What was generated of a character that is not whole is generated again; how many tokens that is."""
        self._decoder.reset()
        forgotten = len(self._unfinished)
        self._unfinished, self._begun = [], ""
        return forgotten

    def _text_of(self, token: int) -> str:
        """What a token adds to the text, with those before it that were not whole."""
        special = token >= FIRST_SPECIAL
        if special:
            # It ends a character that is not whole.
            text = self._decoder.decode(b"", final=True)
            self._decoder.reset()
            spelled = "" if self._raw.hides_special else self._encoding.decode([token])
        else:
            text, spelled = "", self._decoder.decode(self._encoding.decode_bytes([token]))
        self._unfinished.append(token)
        if token in self._stops:
            self.ended = FinishReason.STOP
            spelled = spelled if self._raw.shows_stop else ""
        self._begun += text + spelled
        if self._decoder.getstate()[0] and not special and self.ended is None:
            return ""
        text = self._begun
        self.tokens += self._unfinished
        self._unfinished, self._begun = [], ""
        return text

    def _cut(self, text: str) -> str:
        """As much of more text as may be told: not what may yet be a stop string."""
        if self._strings is None or not text:
            return text
        told = "".join(event.text for event in self._strings.filter([Delta(ITEM, text)]) if isinstance(event, Delta))
        if self._strings.matched is None:
            return told
        self.ended = FinishReason.STOP
        return told + self._strings.matched if self._raw.shows_stop else told

    def _events(self, text: str) -> list[Event]:
        if not text:
            return []
        opened: list[Event] = [] if self._opened else [Opened(ITEM)]
        self._opened = True
        self._told.append(text)
        return [*opened, Delta(ITEM, text)]
