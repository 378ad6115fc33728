"""Conversion between text and tokens that interprets spelled special tokens only.

For prompts that are not rendered here, and their output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from unisono.core.generation import Chunk, OutputForm
from unisono.harmony.decode import AsIds, Decoder
from unisono.harmony.encoding import Encoding

_SPELLED: Final = re.compile(r"(<\|[a-z_0-9]{1,20}\|>)")
_PARTIAL: Final = re.compile(r"<(?:\|[a-z_0-9]{0,20}\|?)?\Z")


def to_tokens(encoding: Encoding, text: str) -> list[int]:
    """Tokenise text of any length, as an inference server does.

    A special token that is spelled in the text, such as `<|start|>`, becomes the real token.
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
    """Return the decoder for a backend's output."""
    return AsIds() if form is OutputForm.IDS else _Text(encoding, marked=form is OutputForm.TEXT)


class _Text:
    """Decoder that holds text that may become the spelling of a special token."""

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
