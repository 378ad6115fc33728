"""A backend that keeps to no limit: an answer ends where it was to end, and nobody goes on listening."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from tests.engine.scripted import ASKED, IDS, TEXT, Line, Standing
from tests.harmony.fold import check_lifecycle
from unisono.core.events import Closed, Finished
from unisono.core.generation import RETURN, Capabilities, Chunk, CompletionJob, FinishReason, OutputForm, Timeouts
from unisono.engine.attempt import TokenCap
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.request import GenerationRequest, GenerationStream
from unisono.engine.service import Engine
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer

BEGUN = "<|channel|>final<|message|>"
WORDS = " one two three four five six seven"


@dataclass
class Endless(Standing):
    """Says the same words over and over."""

    encoding: Encoding
    told: Capabilities
    per_chunk: int
    name: str = "endless"
    timeouts: Timeouts = field(default_factory=Timeouts)
    said: int = 0
    closed: bool = False

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        begun, words = self.encoding.encode_as_server(BEGUN), self.encoding.encode_text(WORDS)
        whole = begun + words * (-(-job.max_tokens // len(words)) * 3)
        said = whole if self.told.output is OutputForm.IDS else self.encoding.decode(whole)
        try:
            for at in range(0, len(said), self.per_chunk):
                part = said[at : at + self.per_chunk]
                self.said += len(part)
                yield Chunk(text=part) if isinstance(part, str) else Chunk(tokens=part)
            raise AssertionError("nobody stopped listening")
        finally:
            self.closed = True

    async def aclose(self) -> None:
        pass


def start(encoding: Encoding, backend: Standing, turn: GenerationRequest) -> GenerationStream:
    engine = Engine(
        EngineDeps(
            encoding=encoding,
            renderer=Renderer(encoding),
            pool=Line([backend]),
            memory=ConversationCache(),
            new_call_id=lambda: "call_1",
        )
    )
    return engine.start(turn)


@pytest.mark.parametrize("told", [IDS, replace(IDS, stop_visible=False), TEXT], ids=["ids", "ids, stop hidden", "text"])
@pytest.mark.parametrize("per_chunk", [1, 5, 64])
@pytest.mark.parametrize("most", [4, 40, 700])
async def test_a_backend_that_goes_on_for_ever_is_not_listened_to_for_longer_than_was_asked_for(
    told: Capabilities, per_chunk: int, most: int, encoding: Encoding
) -> None:
    backend = Endless(encoding, told, per_chunk)
    run = start(encoding, backend, GenerationRequest("m", ASKED, max_tokens=most))
    events = [event async for batch in run for event in batch]
    check_lifecycle(events)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.LENGTH
    assert backend.closed
    # What came as text is cut where the network cut it, and within a piece nobody knows where.
    over = 0 if told.output is OutputForm.IDS else per_chunk
    assert most <= finished.usage.completion_tokens <= most + over
    [closed] = [event for event in events if isinstance(event, Closed)]
    assert (WORDS * most).startswith(closed.text)


def test_ids_are_taken_up_to_the_limit(encoding: Encoding) -> None:
    limit = TokenCap(encoding, 5, guessed=False)
    assert list(limit.counted([1, 2, 3])) == [1, 2, 3]
    assert list(limit.counted([4, 5])) == [4, 5]
    # Where the last one is a stop, the backend has yet to say so.
    assert not limit.is_exceeded
    assert list(limit.counted([RETURN, 7])) == []
    assert limit.is_exceeded


def test_text_that_came_in_letters_is_counted_as_the_tokenizer_makes_it(encoding: Encoding) -> None:
    text = WORDS * 100
    tokens = [token for letter in text for token in encoding.encode_text(letter)]
    most = len(encoding.encode_text(text))
    limit = TokenCap(encoding, most, guessed=True)
    for token in tokens:
        assert list(limit.counted([token])) == [token]
    assert not limit.is_exceeded
    for token in encoding.encode_text(" and more"):
        limit.counted([token])
    assert limit.is_exceeded
