"""Token limit on a backend that ignores `max_tokens`: the answer ends at the limit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from tests.engine.scripted import CONVERSATION, IDS, TEXT, DeploymentDouble, Line
from tests.harmony.fold import check_lifecycle
from unisono.core.conversation import AnswerForm
from unisono.core.events import Closed, Finished
from unisono.core.generation import (
    MESSAGE,
    RETURN,
    Capabilities,
    Chunk,
    CompletionJob,
    FinishReason,
    OutputForm,
    Timeouts,
)
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.engine.request import AnswerOptions, GenerationRequest, GenerationStream
from unisono.harmony.encoding import Encoding
from unisono.harmony.max_tokens import TokenCap
from unisono.harmony.render import Renderer

HEADER = "<|channel|>final<|message|>"
WORDS = " one two three four five six seven"
REFUSED = "I cannot answer."


@dataclass
class Endless(DeploymentDouble):
    """Backend that generates the same words without end."""

    encoding: Encoding
    caps: Capabilities
    per_chunk: int
    name: str = "endless"
    timeouts: Timeouts = field(default_factory=Timeouts)
    sent: int = 0
    closed: bool = False

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        header, words = self.encoding.encode_as_server(HEADER), self.encoding.encode_text(WORDS)
        tokens = header + words * (-(-job.max_tokens // len(words)) * 3)
        output = tokens if self.caps.output is OutputForm.IDS else self.encoding.decode(tokens)
        try:
            for position in range(0, len(output), self.per_chunk):
                piece = output[position : position + self.per_chunk]
                self.sent += len(piece)
                yield Chunk(text=piece) if isinstance(piece, str) else Chunk(tokens=piece)
            raise AssertionError("the response was not closed")
        finally:
            self.closed = True

    async def aclose(self) -> None:
        pass


@dataclass
class Unwilling(DeploymentDouble):
    """Backend that generates an invalid answer in every attempt, within `max_tokens`. It hides the stop token."""

    encoding: Encoding
    caps: Capabilities
    name: str = "unwilling"
    timeouts: Timeouts = field(default_factory=Timeouts)
    generated: int = 0

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        is_open = list(job.prompt.tokens)[-1:] == [MESSAGE]
        answer = self.encoding.encode_as_server(("" if is_open else HEADER) + REFUSED)
        tokens = answer[: job.max_tokens]
        finish = FinishReason.STOP if len(answer) < job.max_tokens else FinishReason.LENGTH
        self.generated += len(tokens) + (finish is FinishReason.STOP)
        for token in tokens:
            text = self.encoding.decode([token])
            yield Chunk(text=text) if self.caps.output is OutputForm.TEXT else Chunk(tokens=[token])
        yield Chunk(finish=finish)

    async def aclose(self) -> None:
        pass


def start(encoding: Encoding, backend: DeploymentDouble, request: GenerationRequest) -> GenerationStream:
    engine = Engine(
        EngineDeps(
            encoding=encoding,
            renderer=Renderer(encoding),
            pool=Line([backend]),
            memory=ConversationCache(),
            new_call_id=lambda: "call_1",
        )
    )
    return engine.start(request)


@pytest.mark.parametrize(
    "capabilities", [IDS, replace(IDS, stop_visible=False), TEXT], ids=["ids", "ids, stop hidden", "text"]
)
@pytest.mark.parametrize("per_chunk", [1, 5, 64])
@pytest.mark.parametrize("max_tokens", [4, 40, 700])
async def test_an_endless_backend_stops_at_max_tokens(
    capabilities: Capabilities, per_chunk: int, max_tokens: int, encoding: Encoding
) -> None:
    backend = Endless(encoding, capabilities, per_chunk)
    stream = start(encoding, backend, GenerationRequest("m", CONVERSATION, answer=AnswerOptions(max_tokens=max_tokens)))
    events = [event async for batch in stream for event in batch]
    check_lifecycle(events)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.reason is FinishReason.LENGTH
    assert backend.closed
    # Text output is cut at chunk boundaries, so that up to one chunk more is counted.
    tolerance = 0 if capabilities.output is OutputForm.IDS else per_chunk
    assert max_tokens <= finished.usage.completion_tokens <= max_tokens + tolerance
    [closed] = [event for event in events if isinstance(event, Closed)]
    assert (WORDS * max_tokens).startswith(closed.text)


@pytest.mark.parametrize("capabilities", [replace(IDS, stop_visible=False), TEXT], ids=["ids", "text"])
@pytest.mark.parametrize("max_tokens", range(7, 24))
async def test_regenerations_stay_within_max_tokens(
    capabilities: Capabilities, max_tokens: int, encoding: Encoding
) -> None:
    backend = Unwilling(encoding, capabilities)
    options = AnswerOptions(max_tokens=max_tokens, form=AnswerForm(choices=("yes", "no")))
    stream = start(encoding, backend, GenerationRequest("m", CONVERSATION, answer=options))
    events = [event async for batch in stream for event in batch]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.usage.completion_tokens == backend.generated <= max_tokens
    # The third attempt is complete from 18 tokens on.
    assert finished.reason is (FinishReason.STOP if max_tokens >= 18 else FinishReason.LENGTH)


def test_token_ids_are_accepted_up_to_the_limit(encoding: Encoding) -> None:
    limit = TokenCap(encoding, 5, guessed=False)
    assert list(limit.within_limit([1, 2, 3])) == [1, 2, 3]
    assert list(limit.within_limit([4, 5])) == [4, 5]
    # The next token may still be the stop token.
    assert limit.room >= 0
    assert list(limit.within_limit([RETURN, 7])) == []
    assert limit.room < 0


def test_text_in_characters_is_counted_in_tokens_of_the_tokenizer(encoding: Encoding) -> None:
    text = WORDS * 100
    tokens = [token for letter in text for token in encoding.encode_text(letter)]
    size = len(encoding.encode_text(text))
    limit = TokenCap(encoding, size, guessed=True)
    for token in tokens:
        assert list(limit.within_limit([token])) == [token]
    assert limit.room >= 0
    for token in encoding.encode_text(" and more"):
        limit.within_limit([token])
    assert limit.room < 0
