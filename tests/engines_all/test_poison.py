"""Requests that engines have failed on, sent to every engine that can be constrained, behind the whole gateway."""

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
    "a pattern that is not compiled": named(UNCOMPILED),
    "a pattern with a long bound": named("^(a{1,5000}){1,500}$"),
    "a bias": {"logit_bias": {"200002": 100, "0": 100}},
    "stop strings": {"stop": ["\u0000", "a" * 500, "\ufffd", "<|end|>"]},
    "extreme sampling": {"temperature": 2, "top_p": 1e-9, "presence_penalty": -2, "frequency_penalty": 2},
    "long names of tools": {"tools": [TOOL], "tool_choice": "required"},
    "too many tokens": {"max_tokens": 100_000_000},
}
TIMES = 5


@pytest.mark.parametrize("fields", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_no_request_takes_the_engine_from_others(
    engine: Running, site: Gateway, fields: dict[str, Any], stream: bool
) -> None:
    for _ in range(TIMES):
        async with asyncio.timeout(120):
            answer = await site.chat(stream=stream, seed=1, **{"max_tokens": 60, **fields})
        assert answer.status in (200, 400), answer.raw
        assert not stream or answer.status == 400 or answer.done
    said = await site.chat(messages=[{"role": "user", "content": "Hello!"}], temperature=0)
    assert message_of(said).content == CHATS["Hello!"].content
    assert (await site.get("/health/readiness")).body["reasons"] == []


async def test_an_answer_without_its_constraint_is_validated(engine: Running, site: Gateway) -> None:
    """vLLM 0.32 answers 500 to this pattern; where it is kept to, the answer has to match as well."""
    asked = named(UNCOMPILED)
    answer = await site.chat(temperature=0, max_tokens=300, **asked)
    assert answer.status == 200, answer.raw
    said = message_of(answer)
    if said.content is None:
        assert said.note["unmet"]
    else:
        assert violation(asked["response_format"]["json_schema"]["schema"], said.content) is None
    noted = any("constraint (json_schema)" in note for note in said.note.get("notes", ()))
    assert noted or engine.engine.kind != "vllm"
