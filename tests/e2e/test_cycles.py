"""Requests leave no reference cycles, so that their memory is free as soon as they end.

Otherwise dozens of requests stay in memory until the next garbage collection, and their successors use memory that is
not in the CPU cache.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.gateway import config_of
from tests.e2e.playing import staged
from tests.fakes import Sleep, Step, inject_at, reset_at
from tests.fakes.faults import Fault

SCRIPT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS = 3

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": MESSAGES}),
    "chat stream": ("chat/completions", {"messages": MESSAGES, "stream": True}),
    "two choices": ("chat/completions", {"messages": MESSAGES, "stream": True, "n": 2}),
    "responses": ("responses", {"input": "Hi"}),
    "responses stream": ("responses", {"input": "Hi", "stream": True}),
    "messages": ("messages", {"messages": MESSAGES, "max_tokens": 50}),
    "messages stream": ("messages", {"messages": MESSAGES, "max_tokens": 50, "stream": True}),
}


@contextmanager
def cyclic_garbage() -> Iterator[Counter[str]]:
    """Count the garbage of the block that only the collector frees, by its types of the gateway and its server."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        for each in gc.garbage:
            if type(each).__module__.startswith(("unisono", "uvicorn")):
                found[type(each).__name__] += 1
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(("path", "fields"), CASES.values(), ids=CASES)
async def test_a_request_leaves_no_cycles(path: str, fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "gpt-oss", **fields}).encode()
    async with staged(SCRIPT, ("vllm",), config_of) as (_, running):
        for _ in range(REQUESTS):
            assert (await running.post(f"/v1/{path}", body)).status == 200
        await asyncio.sleep(0.05)
        with cyclic_garbage() as found:
            for _ in range(REQUESTS):
                await running.post(f"/v1/{path}", body)
            # The task of a request ends after its response.
            await asyncio.sleep(0.05)
        assert not found


def paced(fault: Fault) -> Fault:
    """Return the fault, with a pause before every write, so that the gateway reads the events one by one."""

    def steps_of(steps: list[Step]) -> list[Step]:
        return [each for step in fault(steps) for each in (Sleep(0.002), step)]

    return steps_of


@pytest.mark.parametrize("case", ["chat", "chat stream", "responses stream", "messages stream"])
@pytest.mark.parametrize("fault", [reset_at(6), inject_at(6, b"data: {no JSON\n\n")], ids=["reset", "no JSON"])
async def test_an_answer_that_another_backend_continued_leaves_no_cycles(fault: Fault, case: str) -> None:
    path, fields = CASES[case]
    body = json.dumps({"model": "gpt-oss", **fields}).encode()
    async with staged(SCRIPT, ("vllm", "vllm"), config_of) as (play, running):
        with cyclic_garbage() as found:
            for _ in range(REQUESTS):
                play.failures.append(paced(fault))
                answer = await running.post(f"/v1/{path}", body)
                assert answer.status == 200
            assert len(play.asked) == 2 * REQUESTS
            await asyncio.sleep(0.05)
    # A connection that broke refers to its parser, which refers to it.
    del found["HttpClientConnection"]
    assert found == {}
