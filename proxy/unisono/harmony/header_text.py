"""Conversion between header tokens and text, with Unicode surrogates instead of the markers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from unisono.core.generation import CHANNEL, CONSTRAIN, START
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import C, Header, S, T

# Maximum length in characters of a header that is cached. It bounds the memory of the cache.
MAX_CACHED_LENGTH: Final = 128

_SENTINELS = {START: S, CHANNEL: C, CONSTRAIN: T}


def header_text(encoding: Encoding, tokens: Sequence[int]) -> tuple[str, bool]:
    """Return the text, and whether all bytes were valid UTF-8; invalid bytes become U+FFFD."""
    parts: list[str] = []
    run: list[int] = []
    whole = True
    for token in [*tokens, START]:
        if token not in _SENTINELS:
            run.append(token)
            continue
        if run:
            raw = encoding.decode_bytes(run)
            parts.append(raw.decode("utf-8", errors="replace"))
            whole = whole and _is_text(raw)
            run = []
        parts.append(_SENTINELS[token])
    return "".join(parts[:-1]), whole


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def spelled_header(encoding: Encoding, header: Header) -> tuple[int, ...]:
    """Return the canonical tokens of a header, from `<|start|>` to `<|message|>`."""
    text = header.spelled()
    tokens = encoding.encode_marked(text) if len(text) > MAX_CACHED_LENGTH else _tokens(encoding, text)
    return (*encoding.assistant_start, *tokens)


@lru_cache(maxsize=1024)
def _tokens(encoding: Encoding, text: str) -> tuple[int, ...]:
    return tuple(encoding.encode_marked(text))
