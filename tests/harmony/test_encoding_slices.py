"""Encoding of long texts in slices, which must give the same tokens as encoding the whole text."""

from __future__ import annotations

import random

import pytest

from unisono.harmony import encoding
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
WORDS = (
    *("don't", "we'LL", "A1", "end|>", "<|end|>", "a/b", "foo\n", "\n\nBar", "HeLLo", "é1", "中文", "x\u0301y", "a  b"),
    *("K's", "\t", "//\n", "_a_", "ǅa", "’s", "1234", "\r\n"),
)


@pytest.mark.parametrize("seed", range(20))
def test_slices_have_the_tokens_of_the_whole_text(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chosen = random.Random(seed)
    texts = [between.join(chosen.choices(WORDS, k=200)) for between in ("", " ", "a")]
    whole = [ENCODING.encode_text(text) for text in texts]
    monkeypatch.setattr(encoding, "SLICE", 30)
    assert [ENCODING.encode_text(text) for text in texts] == whole


def test_a_text_without_a_border_is_encoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "中文" * 100
    whole = ENCODING.encode_text(text)
    monkeypatch.setattr(encoding, "SLICE", 30)
    assert ENCODING.encode_text(text) == whole
