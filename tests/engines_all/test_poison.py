"""Requests that made engines fail, sent to every engine with constrained generation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, message_of
from tests.e2e.test_engines import CHATS
from tests.e2e.test_poison import TOOL, UNCOMPILED, named
from tests.engines_all.engines import Running
from unisono.schemas import violation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("engine", ["vllm", "llamacpp", "mlx"], indirect=True),
]

POISONS: dict[str, dict[str, Any]] = {
    "pattern that cannot be compiled": named(UNCOMPILED),
    "pattern with a large bound": named("^(a{1,5000}){1,500}$"),
    "bias": {"logit_bias": {"200002": 100, "0": 100}},
    "stop strings": {"stop": ["\u0000", "a" * 500, "\ufffd", "<|end|>"]},
    "extreme sampling": {"temperature": 2, "top_p": 1e-9, "presence_penalty": -2, "frequency_penalty": 2},
    "long tool names": {"tools": [TOOL], "tool_choice": "required"},
    "too many tokens": {"max_tokens": 100_000_000},
}
REPETITIONS = 5


@pytest.mark.parametrize("fields", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_engine_serves_other_requests_after_a_harmful_one(
    engine: Running, site: Gateway, fields: dict[str, Any], stream: bool
) -> None:
    for _ in range(REPETITIONS):
        async with asyncio.timeout(120):
            answer = await site.chat(stream=stream, seed=1, **{"max_tokens": 60, **fields})
        assert answer.status in (200, 400), answer.raw
        assert not stream or answer.status == 400 or answer.done
    response = await site.chat(messages=[{"role": "user", "content": "Hello!"}], temperature=0)
    assert message_of(response).content == CHATS["Hello!"].content
    assert (await site.get("/health/readiness")).body["reasons"] == []


async def test_an_answer_without_its_constraint_is_validated(engine: Running, site: Gateway) -> None:
    """Answers with and without the constraint must match.

    vLLM 0.32 answers this pattern with status 500; other engines support it.
    """
    fields = named(UNCOMPILED)
    answer = await site.chat(temperature=0, max_tokens=300, **fields)
    assert answer.status == 200, answer.raw
    message = message_of(answer)
    if message.content is None:
        assert message.note["unmet"]
    else:
        assert violation(fields["response_format"]["json_schema"]["schema"], message.content) is None
    noted = any("constraint (json_schema)" in note for note in message.note.get("notes", ()))
    assert noted or engine.engine.kind != "vllm"
