"""Answers of the fake backend are legal Harmony of the requested length; prompts are reproducible."""

from pathlib import Path

import openai_harmony
import pytest

from bench import prose
from bench.prose import Corpus
from unisono.core.generation import FIRST_SPECIAL, RETURN
from unisono.harmony.encoding import Encoding
from unisono.harmony.library_parser import load_library

LENGTHS = [1, 5, 11, 12, 13, 64, 255, 256, 700, 4096]


@pytest.mark.parametrize("length", LENGTHS)
def test_an_answer_has_the_requested_length_and_matching_texts(
    corpus: Corpus, bench_encoding: Encoding, length: int
) -> None:
    answer = corpus.answer(length)
    assert len(answer.tokens) == len(answer.texts) == length
    visible = answer.tokens[:-1] if answer.finish == "stop" else answer.tokens
    assert "".join(answer.texts) == bench_encoding.decode(visible)
    assert "�" not in "".join(answer.texts)


@pytest.mark.parametrize("length", [length for length in LENGTHS if length >= prose.MIN_ANSWER_TOKENS])
def test_a_complete_answer_parses_into_reasoning_and_content(
    corpus: Corpus, bench_encoding: Encoding, length: int
) -> None:
    answer = corpus.answer(length)
    messages = load_library().parse_messages_from_completion_tokens(list(answer.tokens), openai_harmony.Role.ASSISTANT)
    texts = [(message.channel, message.content[0].to_dict()["text"]) for message in messages]
    assert texts == [("analysis", answer.reasoning), ("final", answer.content)]
    assert (answer.tokens[-1], answer.finish) == (RETURN, "stop")


def test_answers_contain_characters_that_span_tokens(corpus: Corpus) -> None:
    answer = corpus.answer(1000)
    without_text = [i for i, (token, text) in enumerate(zip(answer.tokens, answer.texts, strict=True)) if not text]
    assert [i for i in without_text if answer.tokens[i] < FIRST_SPECIAL]


def test_a_prompt_has_one_token_per_word_and_depends_on_its_seed(corpus: Corpus, bench_encoding: Encoding) -> None:
    tokens, text = corpus.prompt(500, seed=7)
    assert bench_encoding.encode_text(text) == tokens
    assert corpus.prompt(500, seed=7) == (tokens, text)
    assert corpus.prompt(500, seed=8)[1] != text


def test_material_round_trips_through_its_file(corpus: Corpus, tmp_path: Path) -> None:
    prose.save(corpus, tmp_path / "material.json")
    assert prose.load(tmp_path / "material.json") == corpus
