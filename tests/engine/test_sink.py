"""A consumer with a sink for deltas: it receives the events that the iteration alone would yield, in order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from tests.engine.scripted import ANSWER, CONVERSATION, IDS, TEXT, THOUGHT, Runner, Scripted, Step
from tests.harmony.recoveries import CASES
from unisono.core.events import Delta, Event
from unisono.core.generation import Capabilities
from unisono.engine.request import AnswerOptions, GenerationRequest
from unisono.errors import BackendUnavailable
from unisono.harmony.encoding import Encoding

# Share of the batches that the sink refuses, as if the client read slowly.
REFUSED = 0.3
REQUEST = GenerationRequest("m", CONVERSATION)
BROKEN = BackendUnavailable("the connection broke")
FINAL = "<|channel|>final<|message|>ok<|return|>"
SEEN = THOUGHT + "<|start|>assistant<|channel|>final<|message|>one two"


@dataclass
class Consumer:
    """Consumer of one stream, by iteration and through a sink that refuses at random."""

    refuses: random.Random
    events: list[Event] = field(default_factory=list)
    taken: list[list[Event]] = field(default_factory=list)
    is_waiting: bool = False

    def take(self, batch: list[Event]) -> bool:
        assert self.is_waiting
        if self.refuses.random() < REFUSED:
            return False
        self.taken.append(batch)
        self.events += batch
        return True


async def events_of(runner: Runner, request: GenerationRequest, consumer: Consumer | None) -> list[Event]:
    stream = runner.engine.start(request)
    if consumer is None:
        return [event async for batch in stream for event in batch]
    stream.sink = consumer.take
    batches = aiter(stream)
    while True:
        consumer.is_waiting = True
        batch = await anext(batches, None)
        consumer.is_waiting = False
        if batch is None:
            return consumer.events
        consumer.events += batch


async def check(
    encoding: Encoding, request: GenerationRequest, caps: Capabilities, *steps: list[Step], seed: int = 0
) -> Consumer:
    """Check that both ways give the same events, with the steps of each backend; return the consumer with the sink."""

    def runner(*, offers: bool) -> Runner:
        return Runner(encoding, *(Scripted(encoding, each, caps, per_chunk=1, offers=offers) for each in steps))

    expected = await events_of(runner(offers=False), request, None)
    # A backend may also let the engine take a chunk before it is yielded.
    for offers in (True, False):
        consumer = Consumer(random.Random(seed))
        assert await events_of(runner(offers=offers), request, consumer) == expected
        assert all(len(batch) == 1 and type(batch[0]) is Delta for batch in consumer.taken)
    return consumer


@pytest.mark.parametrize("caps", [IDS, TEXT], ids=["ids", "text"])
async def test_every_recovery_gives_the_same_events(encoding: Encoding, caps: Capabilities) -> None:
    taken = 0
    for number, case in enumerate(CASES.values()):
        # Some of the outputs are continued by another generation.
        consumer = await check(encoding, REQUEST, caps, [Step(case.output), *[Step(FINAL)] * 3], seed=number)
        taken += len(consumer.taken)
    assert taken > 20


async def test_failovers_keep_the_order(encoding: Encoding) -> None:
    for seed in range(20):
        consumer = await check(
            encoding, REQUEST, IDS, [Step(SEEN, failure=BROKEN)], [Step(" three<|return|>")], seed=seed
        )
        assert "".join(event.text for event in consumer.events if isinstance(event, Delta)) == "Hm.one two three"


async def test_a_stop_string_ends_the_answer_although_the_sink_would_take_more(encoding: Encoding) -> None:
    request = replace(REQUEST, answer=AnswerOptions(stop=("two",)))
    for seed in range(20):
        consumer = await check(encoding, request, IDS, [Step(THOUGHT + ANSWER)], seed=seed)
        assert "".join(event.text for event in consumer.events if isinstance(event, Delta)) == "Hm.one "


async def test_a_reasoning_budget_gives_the_same_events(encoding: Encoding) -> None:
    request = replace(REQUEST, answer=AnswerOptions(reasoning_budget=3))
    long_thought = THOUGHT.replace("Hm.", "one two three four five six")
    await check(encoding, request, IDS, [Step(long_thought), Step(FINAL)])


async def test_nothing_is_taken_of_a_whole_answer(encoding: Encoding) -> None:
    request = replace(REQUEST, answer=AnswerOptions(whole=True))
    consumer = await check(encoding, request, IDS, [Step(THOUGHT + ANSWER)])
    assert consumer.taken == []
