"""Benchmark of prompt rendering: reproducible conversations, and the token ids of the library."""

import pytest

from bench import render_timing
from bench.prose import Corpus
from unisono.core.conversation import AssistantMessage, UserMessage
from unisono.harmony.encoding import load_encoding


def test_a_conversation_depends_on_its_seed(corpus: Corpus) -> None:
    items = render_timing.conversation(corpus, 1000, seed=1).items
    assert [type(item) for item in items] == [UserMessage, AssistantMessage] * 2 + [UserMessage]
    assert items == render_timing.conversation(corpus, 1000, seed=1).items
    assert not {*items[:-1]} & {*render_timing.conversation(corpus, 1000, seed=2).items}


@pytest.mark.parametrize("variant", render_timing.RENDERS)
def test_every_render_method_is_timed(corpus: Corpus, variant: str) -> None:
    assert 0 < render_timing.milliseconds(corpus, render_timing.RenderJob(variant, words=1000, times=2, seed=3)) < 1000


def test_the_render_equals_that_of_the_harmony_library(corpus: Corpus) -> None:
    rendered = render_timing.RENDERS["cold"](corpus, 1000, 5)()
    reference = render_timing.RENDERS["library"](corpus, 1000, 5)()
    assert isinstance(rendered, list)
    assert isinstance(reference, list)
    # The conversation of the library has no system message.
    assert rendered[-len(reference) :] == reference
    assert len(reference) > 1000
    assert load_encoding().decode(reference[-2:]) == "<|start|>assistant"
