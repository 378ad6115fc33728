"""Reading of headers, and the caches of their text and meaning."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from unisono.core.generation import CHANNEL, START
from unisono.harmony import header_buffer
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import FINAL, Header
from unisono.harmony.header_buffer import MAX_CACHED_TOKENS, HeaderBuffer, HeldHeader
from unisono.harmony.header_text import header_text
from unisono.harmony.repaired_output import RepairedOutput


def buffer_of(encoding: Encoding, held: HeldHeader) -> HeaderBuffer:
    output = RepairedOutput(encoding, position=0, origin=0, closed_to=0, has_answer=False)
    buffer = HeaderBuffer(output, encoding, None, frozenset())
    buffer.held = held
    return buffer


def test_the_text_of_a_header_follows_its_tokens(encoding: Encoding) -> None:
    held = HeldHeader(tokens=encoding.encode_text("assistant"))
    buffer = buffer_of(encoding, held)
    assert buffer.text() == "assistant"
    held.tokens.append(CHANNEL)
    assert (buffer.text(), True) == header_text(encoding, held.tokens)
    held.tokens.extend(encoding.encode_text("final"))
    assert (buffer.text(), True) == header_text(encoding, held.tokens)


def test_a_complete_header_has_its_meaning_and_its_legal_tokens(encoding: Encoding) -> None:
    legal = HeldHeader(role_given=True, tokens=encoding.encode_marked("assistant<|channel|>final"))
    legal_tokens = tuple(encoding.encode_marked("<|start|>assistant<|channel|>final<|message|>"))
    assert buffer_of(encoding, legal).read() == (Header(FINAL, verbatim=True), legal_tokens, True)
    # The prompt ends in the role, so the output must not repeat it.
    repeated = HeldHeader(tokens=legal.tokens)
    assert buffer_of(encoding, repeated).read() == (Header(FINAL, rules=("glued-role",)), legal_tokens, True)


@pytest.mark.parametrize("read", [HeaderBuffer.text, HeaderBuffer.read])
def test_only_short_headers_are_cached(read: Callable[[HeaderBuffer], object], encoding: Encoding) -> None:
    caches = (header_buffer._cached_text, header_buffer._cached_complete)
    for cache in caches:
        assert cache.cache_parameters()["maxsize"] == 1024
        cache.cache_clear()
    assert read(buffer_of(encoding, HeldHeader(tokens=[START] * (MAX_CACHED_TOKENS + 1))))
    assert sum(cache.cache_info().currsize for cache in caches) == 0
    assert read(buffer_of(encoding, HeldHeader(tokens=[START] * MAX_CACHED_TOKENS)))
    assert sum(cache.cache_info().currsize for cache in caches) == 1
