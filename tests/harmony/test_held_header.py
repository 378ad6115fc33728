"""Reading of headers, and the caches of their text and meaning."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from unisono.core.generation import CHANNEL, START
from unisono.harmony import held_header
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import FINAL, Header
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


def test_a_complete_header_has_its_meaning_and_its_legal_tokens(encoding: Encoding) -> None:
    reader = HeaderReader(encoding, None, frozenset())
    legal = HeldHeader(role_given=True, tokens=encoding.encode_marked("assistant<|channel|>final"))
    legal_tokens = tuple(encoding.encode_marked("<|start|>assistant<|channel|>final<|message|>"))
    assert reader.read(legal) == (Header(FINAL, verbatim=True), legal_tokens, True)
    # The prompt ends in the role, so the output must not repeat it.
    repeated = HeldHeader(tokens=legal.tokens)
    assert reader.read(repeated) == (Header(FINAL, rules=("glued-role",)), legal_tokens, True)


@pytest.mark.parametrize("read", [HeaderReader.text, HeaderReader.read])
def test_only_short_headers_are_cached(read: Callable[[HeaderReader, HeldHeader], object], encoding: Encoding) -> None:
    reader = HeaderReader(encoding, None, frozenset())
    caches = (held_header._cached_text, held_header._cached_complete)
    for cache in caches:
        assert cache.cache_parameters()["maxsize"] == 1024
        cache.cache_clear()
    assert read(reader, HeldHeader(tokens=[START] * (MAX_CACHED_TOKENS + 1)))
    assert sum(cache.cache_info().currsize for cache in caches) == 0
    assert read(reader, HeldHeader(tokens=[START] * MAX_CACHED_TOKENS))
    assert sum(cache.cache_info().currsize for cache in caches) == 1
