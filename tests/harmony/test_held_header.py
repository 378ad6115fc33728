"""Text of headers that are read, and its cache."""

from __future__ import annotations

from unisono.core.generation import CHANNEL, START
from unisono.harmony import held_header
from unisono.harmony.encoding import Encoding
from unisono.harmony.header_text import header_text
from unisono.harmony.held_header import MAX_CACHED_TOKENS, HeaderReader, HeldHeader


def test_the_text_of_a_header_follows_its_tokens(encoding: Encoding) -> None:
    reader = HeaderReader(encoding, None, frozenset())
    held = HeldHeader(tokens=encoding.encode_text("assistant"))
    assert reader.text(held) == ("assistant", True)
    held.tokens.append(CHANNEL)
    assert reader.text(held) == header_text(encoding, held.tokens)
    held.tokens.extend(encoding.encode_text("final"))
    assert reader.text(held) == header_text(encoding, held.tokens)


def test_only_texts_of_short_headers_are_cached(encoding: Encoding) -> None:
    reader, cache = HeaderReader(encoding, None, frozenset()), held_header._cached_text
    assert cache.cache_parameters()["maxsize"] == 1024
    cache.cache_clear()
    assert reader.text(HeldHeader(tokens=[START] * (MAX_CACHED_TOKENS + 1)))[0]
    assert cache.cache_info().currsize == 0
    assert reader.text(HeldHeader(tokens=[START] * MAX_CACHED_TOKENS))[0]
    assert cache.cache_info().currsize == 1
    cache.cache_clear()
