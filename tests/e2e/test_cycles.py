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
