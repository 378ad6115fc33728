"""Regenerated tool calls on every engine: at temperature 0 they are always equal."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.e2e.gateway import Gateway, message_of
from tests.example_tool import EXAMPLE_TOOL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

REQUESTS = 50


async def test_a_malformed_call_is_always_regenerated_equally(site: Gateway) -> None:
    answers: Counter[str] = Counter()
    for number in range(REQUESTS):
        async with asyncio.timeout(120):
            answer = await site.chat(
                messages=[{"role": "user", "content": "glitch bad json"}],
                tools=[EXAMPLE_TOOL],
                temperature=0,
                max_tokens=400,
                stream=bool(number % 2),
            )
        message = message_of(answer)
        assert "regenerated-call" in message.note["recoveries"]
        answers[repr((message.content, message.reasoning, message.calls, message.finish_reason))] += 1

    assert len(answers) == 1, answers.most_common()
