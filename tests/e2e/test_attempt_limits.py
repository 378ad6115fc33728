"""Time limits of one attempt, over real sockets.

A backend that hangs leaves time for another one. A slow backend that works is not abandoned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of, gateway, message_of
from tests.e2e.messages import message_of as in_messages
from tests.e2e.playing import Play
from tests.fakes import FakeVllm, Refusal, VllmScript, stall_at
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript
from tests.fakes.wire import Stall, Step
from unisono.harmony.encoding import load_encoding
from unisono.routing.deployment import LiveDeployment
from unisono_adapters import _probe

SCRIPT = (
    "<|channel|>analysis<|message|>Hm, let me see.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"
)
ANSWER = load_encoding().encode_marked(SCRIPT)
# Prompt that may take five seconds to be processed.
LONG = [{"role": "user", "content": "word " * 2500}]
# Delay of a slow backend: more than a third of the total time, and less than all of it.
SLOW_S = 2.8
SHORT_TIMEOUT = {"timeout": 6, "num_retries": 2}
TOTAL_S = 6.0


class Silent(Refusal):
    """A response that never starts, not even with headers."""

    def steps(self) -> list[Step]:
        return [Stall()]


HANGS: dict[str, Any] = {
    "no response": Silent(200),
    "headers only": stall_at(0),
    "silent within the text": stall_at(6),
}


def text_of(surface: str, answer: Answer) -> str | None:
    assert answer.status == 200, answer.raw
    return (message_of(answer) if surface == "chat" else in_messages(answer)).content


@asynccontextmanager
async def served(config: dict[str, Any]) -> AsyncIterator[Gateway]:
    """Run a gateway and wait until its backends were probed."""
    async with gateway(config) as running:
        assert running.app is not None
        await running.app.state.gateway.pool.wait_for_probes(30)
        yield running


def members(running: Gateway, model: str = "gpt-oss") -> Sequence[LiveDeployment]:
    assert running.app is not None
    found: Sequence[LiveDeployment] = running.app.state.gateway.pool.members()[model]
    return found


def is_warm(live: LiveDeployment) -> bool:
    return live.times.learned(live.clock()).is_warm


@asynccontextmanager
async def pair(play: Play) -> AsyncIterator[Gateway]:
    """Run a gateway with two vLLM backends of the same model and a short total time."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        for fake in fakes:
            play.serve("vllm", fake)
        config = config_of(*(f"vllm@{fake.url}" for fake in fakes), router_settings=SHORT_TIMEOUT)
        yield await stack.enter_async_context(served(config))


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "stream"])
@pytest.mark.parametrize("surface", ["chat", pytest.param("messages", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "hang",
    [pytest.param(hang, id=name, marks=[pytest.mark.slow] * (name == "headers only")) for name, hang in HANGS.items()],
)
async def test_hanging_backend_leaves_time_for_an_idle_one(hang: Any, surface: str, stream: bool) -> None:
    play = Play(SCRIPT)
    async with pair(play) as running:
        play.failures = [hang]
        began = time.monotonic()
        ask: Callable[..., Any] = running.chat if surface == "chat" else running.messages
        answer = await ask(stream=stream)
        took_s = time.monotonic() - began
        assert text_of(surface, answer) == "Done."
        assert 1.0 < took_s < TOTAL_S - 1.0
        assert play.asked == ["vllm", "vllm"]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "stream"])
@pytest.mark.parametrize("warm", [pytest.param(False, marks=pytest.mark.slow), True], ids=["cold", "warm"])
async def test_long_prompt_extends_the_first_token_limit(warm: bool, stream: bool) -> None:
    def script(body: dict[str, Any]) -> VllmScript:
        return VllmScript(tokens=ANSWER, first_delay_s=SLOW_S if len(body["prompt"]) > 2000 else 0.0)

    async with (
        FakeVllm(script=script) as first,
        FakeVllm(script=script) as second,
        served(config_of(f"vllm@{first.url}", f"vllm@{second.url}", router_settings=SHORT_TIMEOUT)) as running,
    ):
        for _ in range(6 if warm else 0):
            assert text_of("chat", await running.chat()) == "Done."
        assert [is_warm(live) for live in members(running)] == [warm, warm]
        message = message_of(await running.chat(messages=LONG, stream=stream))
        assert (message.content, message.note["failovers"]) == ("Done.", 0)


async def test_new_requests_avoid_a_backend_on_which_a_request_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeVllm(tokens=ANSWER) as first, FakeVllm(tokens=ANSWER) as second:
        config = config_of(f"vllm@{first.url}", f"vllm@{second.url}")
        for order, entry in enumerate(config["model_list"]):
            entry["litellm_params"]["order"] = order
            entry["unisono"] = {"first_token_timeout_s": 4}
        async with served(config) as running:
            [frozen, _] = members(running)
            # Only from here on: a slow machine must not fail the first probe of a healthy backend.
            monkeypatch.setattr(_probe, "FIRST_TOKEN_S", 0.3)
            first.script = lambda _: Silent(200)
            first.patient.hangs = True
            waiting = asyncio.create_task(running.chat())
            await first.asked()
            async with asyncio.timeout(3.5):
                while frozen.failure is None:
                    await asyncio.sleep(0.01)
            # The attempt continues, but new requests avoid this backend.
            for _ in range(3):
                assert text_of("chat", await running.chat()) == "Done."
            assert not waiting.done()
            assert len(first.requests) == 1
            assert text_of("chat", await waiting) == "Done."


@asynccontextmanager
async def passthrough_gateway(first: FakeOpenAi, second: FakeOpenAi) -> AsyncIterator[Gateway]:
    """Run a gateway that passes requests through to the first server while it is healthy."""
    entries = [
        {"model_name": "other", "litellm_params": {"model": "vllm/qwen", "api_base": fake.url, "order": order}}
        for order, fake in enumerate((first, second))
    ]
    async with served({"model_list": entries, "router_settings": SHORT_TIMEOUT}) as running:
        yield running


@pytest.mark.slow
async def test_passthrough_answer_without_streaming_may_use_the_total_time() -> None:
    script = OpenAiScript(delay_s=SLOW_S)
    async with FakeOpenAi(script) as first, FakeOpenAi() as second, passthrough_gateway(first, second) as running:
        answer = await running.chat(model="other")
        assert (answer.status, len(first.requests), len(second.requests)) == (200, 1, 0)


async def test_passthrough_answer_without_streaming_fails_over_after_a_failed_probe() -> None:
    script = OpenAiScript(delay_s=60.0)
    async with FakeOpenAi(script) as first, FakeOpenAi() as second, passthrough_gateway(first, second) as running:
        first.listing = Refusal(500, b"{}")
        began = time.monotonic()
        answer = await running.chat(model="other")
        assert (answer.status, len(first.requests), len(second.requests)) == (200, 1, 1)
        assert time.monotonic() - began < TOTAL_S - 1.0


async def test_only_passthrough_streams_teach_first_token_times() -> None:
    async with FakeOpenAi() as first, FakeOpenAi() as second, passthrough_gateway(first, second) as running:
        for stream in (False, True):
            assert (await running.chat(model="other", stream=stream)).status == 200
            assert [is_warm(live) for live in members(running, "other")] == [stream, False]


async def test_time_in_the_queue_does_not_count_as_a_backend_failure() -> None:
    async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER, first_delay_s=0.7)) as fake:
        config = config_of(f"vllm@{fake.url}")
        config["model_list"][0]["litellm_params"] |= {"timeout": 1, "max_parallel_requests": 1}
        async with served(config) as running:
            clients = (running.chat(messages=[{"role": "user", "content": f"I am {n}"}]) for n in range(8))
            answers = await asyncio.gather(*clients)
            assert {answer.status for answer in answers[1:]} <= {503, 504}
            assert members(running)[0].circuits == {}
            assert text_of("chat", await running.chat()) == "Done."


async def test_queue_wait_is_limited_by_the_timeout() -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        config = config_of(f"vllm@{fake.url}")
        config["model_list"][0]["litellm_params"] |= {"timeout": 1, "rpm": 1}
        async with served(config) as running:
            assert text_of("chat", await running.chat()) == "Done."
            async with asyncio.timeout(5):
                answer = await running.chat()
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 30


SHORT_LIMITS = {"min_first_token_timeout_s": 0.8, "min_silence_timeout_s": 1}


@asynccontextmanager
async def hurried(*fakes: FakeVllm | FakeOpenAi) -> AsyncIterator[Gateway]:
    """Run a gateway with short limits and backends whose times are learned."""
    config = config_of(*(f"vllm@{fake.url}" for fake in fakes))
    for entry, fake in zip(config["model_list"], fakes, strict=True):
        entry["unisono"] = SHORT_LIMITS
        if isinstance(fake, FakeOpenAi):
            entry["litellm_params"]["model"] = entry["model_name"] = "vllm/qwen"
    async with served(config) as running:
        model = config["model_list"][0]["model_name"]
        assert {answer.status for answer in await burst(running, 6, model=model)} == {200}
        assert all(map(is_warm, members(running, model)))
        for fake in fakes:
            fake.requests.clear()
        yield running


async def burst(running: Gateway, clients: int, **fields: Any) -> list[Answer]:
    messages = ({"role": "user", "content": f"I am {n}"} for n in range(clients))
    return await asyncio.gather(*(running.chat(stream=True, messages=[message], **fields) for message in messages))


@pytest.mark.slow
@pytest.mark.parametrize("fake", [FakeVllm, FakeOpenAi], ids=["harmony", "pass-through"])
async def test_request_waiting_for_a_busy_backend_is_not_abandoned(fake: Any) -> None:
    fake_fields = {} if fake is FakeOpenAi else {"tokens": ANSWER}
    async with fake(**fake_fields) as first, fake(**fake_fields) as second, hurried(first, second) as running:
        slow = OpenAiScript(delay_s=0.15) if fake is FakeOpenAi else VllmScript(tokens=ANSWER, delay_s=0.03)
        for server in (first, second):
            server.slots, server.script = asyncio.Semaphore(1), lambda _: slow
        fields = {"model": "vllm/qwen"} if fake is FakeOpenAi else {}
        answers = await burst(running, 10, **fields)
        assert {answer.status for answer in answers} == {200}
        assert not any("error" in event for answer in answers for event in answer.events)
        assert len(first.requests) + len(second.requests) == 10


@pytest.mark.slow
@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
async def test_many_requests_on_a_hanging_backend_are_answered_by_another_one(hang: Any) -> None:
    async with FakeVllm(tokens=ANSWER) as first, FakeVllm(tokens=ANSWER) as second, hurried(first, second) as running:
        broken = hang if isinstance(hang, Refusal) else VllmScript(tokens=ANSWER, faults=(hang,))
        first.script = lambda _: broken
        first.slots = asyncio.Semaphore(2)
        async with asyncio.timeout(10):
            answers = await burst(running, 12)
        assert [text_of("chat", answer) for answer in answers] == ["Done."] * 12
        [hanging, _] = members(running)
        assert (len(hanging.waits), hanging.candidate.running) == (0, 0)
        assert hanging.generation.last_at(hanging.clock()) < hanging.clock()
