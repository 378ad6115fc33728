"""Sentences of a reasoning text that form its summary."""

from __future__ import annotations

from itertools import pairwise
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from unisono.api.responses.outbound.reasoning_summary import SummarySentences, summarize

LIMIT = 40
CASES: dict[str, tuple[str, str]] = {
    # case: (text of 0 to 40 characters per sentence, summary of at most 40 characters)
    "no text": ("", ""),
    "blanks": (" \n\t ", ""),
    "one sentence": ("We add 2 and 2.", "We add 2 and 2."),
    "no punctuation at the end": ("We add. So 4", "We add. So 4"),
    "sentences that do not fit": ("First we add them. Then we check the sum. Done.", "First we add them."),
    "exactly the limit": ("a" * 19 + ". " + "b" * 18 + ". C.", "a" * 19 + ". " + "b" * 18 + "."),
    "a long first sentence": ("It is " + "very " * 9 + "long. Short.", "Short."),
    "a long sentence between others": ("One. It is " + "very " * 9 + "long. Two.", "One. Two."),
    "only a long sentence": ("It is " + "very " * 9 + "long.", "It is very very very very very very…"),
    "only a long word": ("a" * 50, "a" * 39 + "…"),
    "question and exclamation": ("Why?! Because! OK", "Why?! Because! OK"),
    "quoted end": ('He said "Go." Then left.', 'He said "Go." Then left.'),
    "decimal numbers and names": ("Use 3.14 in a.py now. OK.", "Use 3.14 in a.py now. OK."),
    "an abbreviation at the limit": (
        "Take e.g. the larger one of " + "them " * 4 + "now.",
        "Take e.g. the larger one of them them…",
    ),
    "a list": ("1. Read it\n2. Run it\n\n- Stop", "1. Read it\n2. Run it\n- Stop"),
    "blanks between sentences": ("One.   Two.\r\n  Three.", "One. Two.\nThree."),
    "no blanks between sentences": ("先读取。然后运行！好", "先读取。然后运行！好"),
    "a run of periods": ("Hm.... well. Yes.", "Hm.... well. Yes."),
}


@pytest.mark.parametrize(("text", "summary"), CASES.values(), ids=CASES)
def test_a_summary_is_the_first_sentences_that_fit(text: str, summary: str) -> None:
    assert summarize(text, LIMIT) == summary


CUT_CASES: dict[str, tuple[str, str]] = {
    "after a sentence": ("We add. So we g", "We add."),
    "within the only sentence": ("We add two num", "We add two…"),
    "within the only word": ("Compu", "Compu…"),
    "after punctuation, which may go on": ("We add. So 3.", "We add."),
}


@pytest.mark.parametrize(("text", "summary"), CUT_CASES.values(), ids=CUT_CASES)
def test_an_interrupted_sentence_is_left_out_unless_it_is_the_only_one(text: str, summary: str) -> None:
    assert summarize(text, LIMIT, is_complete=False) == summary


PIECES = st.sampled_from(["a", "Word", "e.g", "1", ".", "!", '"', ")", "。", "」", "…", " ", "  ", "\n", "-", "長い"])
TEXTS = st.lists(PIECES, max_size=60).map("".join) | st.text(max_size=80)


@settings(max_examples=examples(800))
@given(TEXTS, st.lists(st.integers(0, 120), max_size=12), st.integers(2, 30), st.booleans())
def test_any_cut_of_the_stream_gives_the_same_summary(text: str, cuts: list[int], limit: int, complete: bool) -> None:
    sentences = SummarySentences(limit)
    places = [0, *sorted(cuts), len(text)]
    added = [sentences.feed(text[start:stop]) for start, stop in pairwise(places)]
    added.append(sentences.end(is_complete=complete))
    assert "".join(added) == sentences.text == summarize(text, limit, is_complete=complete)
    assert len(sentences.text) <= limit
    assert bool(sentences.text) == bool(text.strip())


@pytest.mark.parametrize("piece", ["....", "aaaa", ".a.a", '."."', "。。", "e.g. "])
def test_a_long_text_without_a_sentence_costs_little_time(piece: str) -> None:
    sentences = SummarySentences(600)
    start = process_time()
    for _ in range(10_000):
        sentences.feed(piece)
    sentences.end(is_complete=True)
    assert process_time() - start < 2.0
