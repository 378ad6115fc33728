"""Benchmark of prompt rendering: reproducible conversations, and the token ids of the library."""

import pytest

from bench import renders
from bench.material import Material
from unisono.core.conversation import AssistantMessage, UserMessage
from unisono.harmony.encoding import load_encoding


def test_a_conversation_depends_on_its_seed(stuff: Material) -> None:
    items = renders.conversation(stuff, 1000, seed=1).items
    assert [type(item) for item in items] == [UserMessage, AssistantMessage] * 2 + [UserMessage]
    assert items == renders.conversation(stuff, 1000, seed=1).items
    assert not {*items[:-1]} & {*renders.conversation(stuff, 1000, seed=2).items}


@pytest.mark.parametrize("how", renders.RENDERS)
def test_every_render_method_is_timed(stuff: Material, how: str) -> None:
    assert 0 < renders.milliseconds(stuff, renders.Ask(how, words=1000, times=2, seed=3)) < 1000


def test_the_render_equals_that_of_the_harmony_library(stuff: Material) -> None:
    rendered = renders.RENDERS["cold"](stuff, 1000, 5)()
    reference = renders.RENDERS["library"](stuff, 1000, 5)()
    assert isinstance(rendered, list)
    assert isinstance(reference, list)
    # The conversation of the library has no system message.
    assert rendered[-len(reference) :] == reference
    assert len(reference) > 1000
    assert load_encoding().decode(reference[-2:]) == "<|start|>assistant"
