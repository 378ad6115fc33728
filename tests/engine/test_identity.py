"""Identity of a client without a key: shared by repetitions and continuations of a request."""

from __future__ import annotations

import pytest

from tests.engine.planning import WITHOUT_TOOLS, turn
from unisono.core.conversation import AssistantMessage, Conversation, Preamble, UserMessage
from unisono.core.generation import Sampling
from unisono.engine.failover_policy import IDENTITY_CHARS, USUAL, identity_of
from unisono.engine.request import RawPrompt

LONG = "word " * IDENTITY_CHARS


def identity(
    text: str, *more: AssistantMessage | UserMessage, instructions: str = "", sampling: Sampling = USUAL
) -> str:
    conversation = Conversation(items=(UserMessage(text), *more), preamble=Preamble(instructions=instructions))
    return identity_of(turn(conversation=conversation, sampling=sampling))


def test_a_repeated_or_continued_request_has_the_same_identity() -> None:
    assert identity("Hello") == identity("Hello") == identity("Hello", AssistantMessage("Hi."), UserMessage("And now?"))


@pytest.mark.parametrize("other", [identity("Hallo"), identity("Hello", instructions="Be brief."), identity("")])
def test_another_conversation_has_another_identity(other: str) -> None:
    assert identity("Hello") != other


def test_unusual_options_decide_before_the_conversation() -> None:
    hot = Sampling(temperature=1.9)
    assert identity("Hello", sampling=hot) == identity("Goodbye", sampling=hot) != identity("Hello")


def test_only_the_beginning_of_a_long_text_is_read() -> None:
    assert identity(LONG) == identity(LONG + "more") != identity("x" + LONG)
    assert identity("a", instructions=LONG) == identity("a", instructions=LONG + "more")
    texts = [RawPrompt(text=text) for text in (LONG, LONG + "more", "x" + LONG)]
    tokens = [RawPrompt(tokens=(token,) * length) for token, length in ((1, 2000), (1, 3000), (2, 2000))]
    for prompts in (texts, tokens):
        first, longer, other = (identity_of(turn(conversation=WITHOUT_TOOLS, raw=prompt)) for prompt in prompts)
        assert first == longer != other
