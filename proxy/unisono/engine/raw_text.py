"""Output of a raw completion: its tokens, and the text to emit; nothing is parsed.

A character may consist of several tokens. These tokens become part of the answer when the character is complete. The
tokens of an incomplete character are generated again if the answer continues on another deployment. No I/O.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Final

from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Finished, Opened, Text
from unisono.core.generation import ALL_STOP_TOKENS, FIRST_SPECIAL, FinishReason, Usage
from unisono.engine.interventions.stop_strings import StopStrings
from unisono.engine.request import RawPrompt
from unisono.harmony.encoding import Encoding, share_ids

ITEM: Final = Text(0, Phase.FINAL)


class RawText:
    """Text of one raw completion.

    `stop` are the client's stop strings.
    """

    def __init__(self, encoding: Encoding, raw: RawPrompt, stop: Sequence[str]) -> None:
        self._encoding = encoding
        self._raw = raw
        self._stops = raw.stop_tokens | ALL_STOP_TOKENS
        self._strings = StopStrings(stop) if stop else None
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._unfinished: list[int] = []
        self._begun = ""  # text of the unfinished tokens, without the incomplete character
        self._emitted: list[str] = []
        self._opened = False
        self.tokens: list[int] = []  # all tokens of complete characters, including the token that ended the output
        self.ended: FinishReason | None = None
        self._over = False

    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def has_begun(self) -> bool:
        """Return whether a token was generated, including tokens of an incomplete character."""
        return bool(self.tokens or self._unfinished)

    @property
    def broken_off(self) -> bool:
        """Return whether the output ended before the model generated one of its own stop tokens."""
        return self.ended is not None and not (self.tokens and self.tokens[-1] in ALL_STOP_TOKENS)

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """Read more generated tokens and return the events to emit.

        Tokens after the token that ends the output are ignored.
        """
        if self.is_over():
            return []
        texts: list[str] = []
        for token in share_ids(tokens):
            texts.append(self._cut(self._text_of(token)))
            if self.is_over():
                break
        return self._events("".join(texts))

    def end(self, reason: FinishReason) -> list[Event]:
        """End the output and return the events for the text that was held back until now.

        An incomplete character becomes U+FFFD. `reason` is ignored if the output has ended already.
        """
        rest = ""
        if self.ended is None:
            self.tokens += self._unfinished
            rest = self._cut(self._begun + self._decoder.decode(b"", final=True))
        self.ended = self.ended or reason
        self._unfinished, self._begun = [], ""
        if self._strings is not None and not self._over:
            # The held-back text could have been the beginning of a stop string, but is not.
            rest += "".join(e.text for e in self._strings.filter([Closed(ITEM, "")]) if isinstance(e, Delta))
        self._over = True
        return self._events(rest)

    def finished(self, usage: Usage) -> list[Event]:
        """Return the last events of the answer, with `usage`."""
        assert self.ended is not None
        stop = self._strings.matched if self._strings is not None else None
        opened: list[Event] = [] if self._opened else [Opened(ITEM)]
        return [*opened, Closed(ITEM, "".join(self._emitted)), Finished(self.ended, usage, stop)]

    def forget_unfinished(self) -> int:
        """Discard the tokens of an incomplete character and return their number.

        These tokens are generated again.
        """
        self._decoder.reset()
        forgotten = len(self._unfinished)
        self._unfinished, self._begun = [], ""
        return forgotten

    def _text_of(self, token: int) -> str:
        """Return the text that a token completes; empty if the token ends inside a character."""
        special = token >= FIRST_SPECIAL
        if special:
            # A special token ends an incomplete character, which becomes U+FFFD.
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
        # Hold the text back until the character is complete.
        if self._decoder.getstate()[0] and not special and self.ended is None:
            return ""
        text = self._begun
        self.tokens += self._unfinished
        self._unfinished, self._begun = [], ""
        return text

    def _cut(self, text: str) -> str:
        """Return the text that can be emitted now; hold back a possible beginning of a stop string."""
        if self._strings is None or not text:
            return text
        visible = "".join(event.text for event in self._strings.filter([Delta(ITEM, text)]) if isinstance(event, Delta))
        if self._strings.matched is None:
            return visible
        self.ended = FinishReason.STOP
        return visible + self._strings.matched if self._raw.shows_stop else visible

    def _events(self, text: str) -> list[Event]:
        if not text:
            return []
        opened: list[Event] = [] if self._opened else [Opened(ITEM)]
        self._opened = True
        self._emitted.append(text)
        return [*opened, Delta(ITEM, text)]
