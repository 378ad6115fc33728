"""Text of bodies in portions of any size: the gateway's table and openai-harmony's parser return the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from unisono.core.generation import FIRST_SPECIAL
from unisono.harmony.encoding import load_encoding
from unisono.harmony.item_reader import TableBodyText
from unisono.harmony.library_parser import LibraryBodyText

ENCODING = load_encoding()
# Most tokens below 256 are a single byte.
BYTES = st.integers(0, 255)
TOKENS = st.one_of(BYTES, BYTES, st.integers(0, FIRST_SPECIAL - 1), st.sampled_from([200_000, 200_013, 201_087]))
TEXTS = st.text(max_size=6).map(lambda text: ENCODING.encode_text(text.encode("utf-8", "replace").decode()))
BODIES = st.lists(st.one_of(TOKENS.map(lambda token: [token]), TEXTS), max_size=20).map(
    lambda parts: [token for part in parts for token in part]
)


@settings(max_examples=examples(300), deadline=None)
@given(bodies=st.lists(BODIES, max_size=3), cut=st.integers(0, 20), size=st.integers(1, 5))
def test_both_readers_return_the_same_text_of_each_portion(bodies: list[list[int]], cut: int, size: int) -> None:
    table, library = TableBodyText(ENCODING), LibraryBodyText(ENCODING)
    for body in bodies:
        for reader in (table, library):
            reader.start(body[:cut])
        for begin in range(cut, len(body), size):
            portion = body[begin : begin + size]
            assert table.text_of(portion) == library.text_of(portion)


@pytest.mark.parametrize("step", [89, pytest.param(7, marks=pytest.mark.slow)])
def test_the_table_reads_tokens_like_the_library(step: int) -> None:
    table, library = TableBodyText(ENCODING), LibraryBodyText(ENCODING)
    for first, token in pairwise(range(0, FIRST_SPECIAL, step)):
        for reader in (table, library):
            reader.start([first])
        assert table.text_of([token]) == library.text_of([token])
