"""Requests and tokens a minute of entries, as clients see them: of models that pass through and of gpt-oss."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.gateway import Gateway
from tests.fakes import FakeVllm, Refusal
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript
from tests.passthrough.test_passing_chat import HARMONY, entry, oss_entry, served

NO_LINE = {"unisono": {"max_queue": 0}}
MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def answered(running: Gateway, model: str, times: int, **fields: Any) -> list[str]:
    """Who answers each of so many requests, or the code of the error."""
    told = []
    for _ in range(times):
        answer = await running.chat(model=model, **fields)
        told.append(answer.headers.get("x-unisono-backend") or answer.body["error"]["code"])
    return told


@MODES
async def test_an_entry_at_its_requests_leaves_them_to_others_and_then_to_nobody(stream: bool) -> None:
    async with FakeOpenAi() as fake:
        rated = [entry(fake.url, rpm=2), entry(fake.url, rpm=1, order=1)]
        async with served(*rated, **NO_LINE) as running:
            assert await answered(running, "other", 4, stream=stream) == ["vllm-1"] * 2 + ["vllm-2"] + [
                "backend_overloaded"
            ]
            refused = await running.chat(model="other", stream=stream)
    assert refused.status == 503
    assert 50 < int(refused.headers["retry-after"]) <= 61


@MODES
async def test_an_entrys_tokens_are_those_that_the_server_tells(stream: bool) -> None:
    # Seven and two of each answer, where more than a thousand are taken for it while it runs.
    async with FakeOpenAi() as fake, served(entry(fake.url, tpm=1100), **NO_LINE) as running:
        assert await answered(running, "other", 4, stream=stream) == ["vllm-1"] * 4
        fake.script = OpenAiScript(prompt_tokens=5000)
        assert await answered(running, "other", 2, stream=stream) == ["vllm-1", "backend_overloaded"]


async def test_what_fails_counts_too() -> None:
    async with FakeOpenAi(Refusal(400)) as fake, served(entry(fake.url, rpm=1), **NO_LINE) as running:
        assert [(await running.chat(model="other")).status for _ in range(2)] == [400, 503]


async def test_a_model_stands_in_for_one_at_its_requests_at_once() -> None:
    fallbacks = {"router_settings": {"fallbacks": [{"other": ["spare"]}]}}
    async with FakeOpenAi() as fake:
        entries = [entry(fake.url, rpm=1), entry(fake.url, name="spare")]
        async with served(*entries, **fallbacks) as running:
            assert await answered(running, "other", 3) == ["vllm-1", "vllm-2", "vllm-2"]


async def test_a_provider_answers_what_a_gpt_oss_may_not_begin() -> None:
    async with FakeVllm(tokens=HARMONY) as engine, FakeOpenAi() as fake:
        ours = oss_entry(engine.url, "both")
        ours["litellm_params"]["rpm"] = 1
        async with served(ours, entry(fake.url, name="both"), **NO_LINE) as running:
            assert await answered(running, "both", 2) == ["vllm-1", "vllm-2"]
