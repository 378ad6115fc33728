"""Request and token rate limits of model entries, for pass-through models and for gpt-oss."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.gateway import Gateway
from tests.fakes import FakeVllm, Refusal
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript
from tests.passthrough.test_passing_chat import HARMONY, entry, oss_entry, served

NO_QUEUE = {"unisono": {"max_queue": 0}}
MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def outcomes(running: Gateway, model: str, times: int, **fields: Any) -> list[str]:
    """Send requests one after the other; return the backend or the error code of each."""
    results = []
    for _ in range(times):
        answer = await running.chat(model=model, **fields)
        results.append(answer.headers.get("x-unisono-backend") or answer.body["error"]["code"])
    return results


@MODES
async def test_requests_over_an_entrys_rpm_use_other_entries_or_fail(stream: bool) -> None:
    async with FakeOpenAi() as fake:
        rated = [entry(fake.url, rpm=2), entry(fake.url, rpm=1, order=1)]
        async with served(*rated, **NO_QUEUE) as running:
            assert await outcomes(running, "other", 4, stream=stream) == ["vllm-1"] * 2 + ["vllm-2"] + [
                "backend_overloaded"
            ]
            refused = await running.chat(model="other", stream=stream)
    assert refused.status == 503
    assert 50 < int(refused.headers["retry-after"]) <= 61


@MODES
async def test_the_tpm_of_an_entry_counts_the_reported_tokens(stream: bool) -> None:
    # Each answer uses 7 + 2 tokens; while it runs, more than a thousand are reserved.
    async with FakeOpenAi() as fake, served(entry(fake.url, tpm=1100), **NO_QUEUE) as running:
        assert await outcomes(running, "other", 4, stream=stream) == ["vllm-1"] * 4
        fake.script = OpenAiScript(prompt_tokens=5000)
        assert await outcomes(running, "other", 2, stream=stream) == ["vllm-1", "backend_overloaded"]


async def test_failed_requests_count_toward_rpm() -> None:
    async with FakeOpenAi(Refusal(400)) as fake, served(entry(fake.url, rpm=1), **NO_QUEUE) as running:
        assert [(await running.chat(model="other")).status for _ in range(2)] == [400, 503]


async def test_a_fallback_model_is_used_at_once_when_rpm_is_reached() -> None:
    fallbacks = {"router_settings": {"fallbacks": [{"other": ["spare"]}]}}
    async with FakeOpenAi() as fake:
        entries = [entry(fake.url, rpm=1), entry(fake.url, name="spare")]
        async with served(*entries, **fallbacks) as running:
            assert await outcomes(running, "other", 3) == ["vllm-1", "vllm-2", "vllm-2"]


async def test_a_provider_is_used_when_gpt_oss_has_reached_its_rpm() -> None:
    async with FakeVllm(tokens=HARMONY) as engine, FakeOpenAi() as fake:
        oss = oss_entry(engine.url, "both")
        oss["litellm_params"]["rpm"] = 1
        async with served(oss, entry(fake.url, name="both"), **NO_QUEUE) as running:
            assert await outcomes(running, "both", 2) == ["vllm-1", "vllm-2"]
