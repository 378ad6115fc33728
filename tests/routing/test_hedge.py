"""Hedged answers: the order of their chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.routing.doubles import Clock, ScriptedBackend
from unisono.core.generation import Chunk, CompletionJob, FinishReason, Prompt
from unisono.routing.deployment import LiveDeployment
from unisono.routing.hedge import HedgeActions, hedged

CHUNKS = [Chunk(tokens=[token]) for token in range(50)] + [Chunk(finish=FinishReason.STOP)]


class OfferingBackend(ScriptedBackend):
    """Backend that offers each chunk to the job before it yields it."""

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        for chunk in CHUNKS:
            if job.on_chunk is None or not job.on_chunk(chunk):
                yield chunk


def switch(*_: object) -> None:
    pytest.fail("there is no second deployment")


async def test_chunks_that_are_read_ahead_stay_in_order() -> None:
    received: list[Chunk] = []

    def on_chunk(chunk: Chunk) -> bool:
        # The engine takes no chunk before the first one, which it reads itself.
        if received:
            received.append(chunk)
        return bool(received)

    live = LiveDeployment("a", OfferingBackend(), clock=Clock())
    actions = HedgeActions(lambda: None, switch, switch)
    job = CompletionJob(Prompt(tokens=(1,)), 100, on_chunk=on_chunk)
    async for chunk in hedged(live, job, 1.0, actions):
        received.append(chunk)
    assert received == CHUNKS
