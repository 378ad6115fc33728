"""Conversion between text and tokens for raw prompts and for their continuation.

A raw prompt was not rendered by the gateway. A special token that is spelled in the text becomes that token, but the
structure of Harmony messages is neither checked nor repaired.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Final

from unisono.core.generation import FIRST_SPECIAL, Chunk, OutputForm
from unisono.harmony.decode import AsIds, Decoder
from unisono.harmony.encoding import Encoding

# Incomplete characters at the end of a token sequence.

MAX_CHARACTER_TOKENS: Final = 4  # maximum number of tokens that encode one character

TAIL_TOKENS: Final = 16  # number of tokens at the end that are decoded to see whether the last character is complete


def unfinished(encoding: Encoding, tokens: Sequence[int]) -> int:
    """Return the number of tokens at the end that begin an incomplete character.

    The number is 0 if the last character is complete. It is also 0 if no complete character ends within the last few
    tokens, or if a special token interrupts the character.
    """
    last = tokens[-TAIL_TOKENS:]
    if not _ends_inside(encoding, last):
        return 0
    for begun in range(1, min(MAX_CHARACTER_TOKENS, len(last)) + 1):
        if last[-begun] >= FIRST_SPECIAL:
            return 0
        if not _ends_inside(encoding, last[:-begun]):
            return begun
    return 0


def _ends_inside(encoding: Encoding, tokens: Sequence[int]) -> bool:
    decoder = getincrementaldecoder("utf-8")("replace")
    decoder.decode(encoding.decode_bytes(tokens))
    return bool(decoder.getstate()[0])


_SPELLED: Final = re.compile(r"(<\|[a-z_0-9]{1,20}\|>)")
_PARTIAL: Final = re.compile(r"<(?:\|[a-z_0-9]{0,20}\|?)?\Z")


def to_tokens(encoding: Encoding, text: str) -> list[int]:
    """Tokenize text of any length.

    The spelling of a special token becomes that token, as in inference servers.
    """
    tokens: list[int] = []
    pending = ""
    for at, part in enumerate(_SPELLED.split(text)):
        if at % 2 and part in encoding.special_names:
            tokens += encoding.encode_generated(pending)
            tokens += encoding.encode_as_server(part)
            pending = ""
        else:
            pending += part
    return tokens + encoding.encode_generated(pending)


def plain_decoder(form: OutputForm, encoding: Encoding) -> Decoder:
    """Return the decoder for a backend's output after a raw prompt."""
    return AsIds() if form is OutputForm.IDS else _Text(encoding, marked=form is OutputForm.TEXT)


class _Text:
    """Decoder of text that holds back the end of a chunk if a special token may begin there."""

    def __init__(self, encoding: Encoding, *, marked: bool) -> None:
        self._encoding = encoding
        self._marked = marked
        self._pending = ""

    def feed(self, chunk: Chunk) -> Sequence[int]:
        text = self._pending + chunk.text
        partial = _PARTIAL.search(text) if self._marked else None
        end = partial.start() if partial else len(text)
        self._pending = text[end:]
        return self._read(text[:end])

    def end(self) -> Sequence[int]:
        held, self._pending = self._pending, ""
        return self._read(held)

    def _read(self, text: str) -> Sequence[int]:
        return to_tokens(self._encoding, text) if self._marked else self._encoding.encode_generated(text)


def retokenized(encoding: Encoding, tokens: Sequence[int]) -> list[int]:
    """Encode the text between the control tokens again, as the model's own tokenizer would.

    The control tokens stay unchanged, and so do the tokens of an incomplete character at the end.
    """
    # An incomplete character cannot be decoded to text and encoded again.
    end = len(tokens) - unfinished(encoding, tokens)
    whole, rest = tokens[:end], tokens[end:]
    exact: list[int] = []
    begin = 0
    for at in [at for at, token in enumerate(whole) if token >= FIRST_SPECIAL]:
        exact += (*encoding.encode_generated(encoding.decode(whole[begin:at])), whole[at])
        begin = at + 1
    return [*exact, *encoding.encode_generated(encoding.decode(whole[begin:])), *rest]
