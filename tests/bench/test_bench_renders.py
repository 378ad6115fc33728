"""What is timed as a render is one: the ids are those of a whole request, however they came about."""

import pytest

from bench import renders
from bench.material import Material
from unisono.core.conversation import AssistantMessage, UserMessage
from unisono.harmony.encoding import load_encoding


def test_a_conversation_is_its_seeds(stuff: Material) -> None:
    items = renders.conversation(stuff, 1000, seed=1).items
    assert [type(item) for item in items] == [UserMessage, AssistantMessage] * 2 + [UserMessage]
    assert items == renders.conversation(stuff, 1000, seed=1).items
    assert not {*items[:-1]} & {*renders.conversation(stuff, 1000, seed=2).items}


@pytest.mark.parametrize("how", renders.RENDERS)
def test_every_way_of_rendering_is_timed(stuff: Material, how: str) -> None:
    assert 0 < renders.milliseconds(stuff, renders.Ask(how, words=1000, times=2, seed=3)) < 1000


def test_the_gateways_render_is_that_of_the_library(stuff: Material) -> None:
    ours = renders.RENDERS["cold"](stuff, 1000, 5)()
    theirs = renders.RENDERS["library"](stuff, 1000, 5)()
    assert isinstance(ours, list)
    assert isinstance(theirs, list)
    # The library's conversation here has no system message.
    assert ours[-len(theirs) :] == theirs
    assert len(theirs) > 1000
    assert load_encoding().decode(theirs[-2:]) == "<|start|>assistant"
