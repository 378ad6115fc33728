"""Time limits of one attempt, over real sockets: a backend that hangs leaves time for another one, and a backend that
is honestly slow is not given up."""

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
LONG = [{"role": "user", "content": "word " * 2500}]
"""It may take five seconds to be read."""
HONEST_S = 2.8
"""More than a third of the time, and less than that."""
TIGHT = {"timeout": 6, "num_retries": 2}
TOTAL_S = 6.0


class Silent(Refusal):
    """Not even headers."""

    def steps(self) -> list[Step]:
        return [Stall()]


HANGS: dict[str, Any] = {
    "accepts and stays silent": Silent(200),
    "headers only": stall_at(0),
    "falls silent in the middle": stall_at(6),
}


def text_of(surface: str, answer: Answer) -> str | None:
    assert answer.status == 200, answer.raw
    return (message_of(answer) if surface == "chat" else in_messages(answer)).content


@asynccontextmanager
async def served(config: dict[str, Any]) -> AsyncIterator[Gateway]:
    """A gateway whose backends were examined."""
    async with gateway(config) as running:
        assert running.app is not None
        await running.app.state.gateway.pool.settled(30)
        yield running


def members(running: Gateway, model: str = "gpt-oss") -> Sequence[LiveDeployment]:
    assert running.app is not None
    found: Sequence[LiveDeployment] = running.app.state.gateway.pool.members()[model]
    return found


def is_warm(live: LiveDeployment) -> bool:
    return live.times.learned(live.clock()).is_warm


@asynccontextmanager
async def pair(play: Play) -> AsyncIterator[Gateway]:
    """A gateway before two vLLM with the same model, with little time for an answer."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeVllm()) for _ in range(2)]
        for fake in fakes:
            play.serve("vllm", fake)
        config = config_of(*(f"vllm@{fake.url}" for fake in fakes), router_settings=TIGHT)
        yield await stack.enter_async_context(served(config))


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "stream"])
@pytest.mark.parametrize("surface", ["chat", pytest.param("messages", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
async def test_a_backend_that_hangs_leaves_time_for_an_idle_one(hang: Any, surface: str, stream: bool) -> None:
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
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
async def test_a_long_prompt_may_take_its_time(warm: bool, stream: bool) -> None:
    def script(asked: dict[str, Any]) -> VllmScript:
        return VllmScript(tokens=ANSWER, first_delay_s=HONEST_S if len(asked["prompt"]) > 2000 else 0.0)

    async with (
        FakeVllm(script=script) as one,
        FakeVllm(script=script) as other,
        served(config_of(f"vllm@{one.url}", f"vllm@{other.url}", router_settings=TIGHT)) as running,
    ):
        for _ in range(6 if warm else 0):
            assert text_of("chat", await running.chat()) == "Done."
        assert [is_warm(live) for live in members(running)] == [warm, warm]
        said = message_of(await running.chat(messages=LONG, stream=stream))
        assert (said.content, said.note["failovers"]) == ("Done.", 0)


async def test_new_requests_go_elsewhere_while_one_waits_for_a_backend_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_probe, "FIRST_TOKEN_S", 0.3)
    async with FakeVllm(tokens=ANSWER) as one, FakeVllm(tokens=ANSWER) as other:
        config = config_of(f"vllm@{one.url}", f"vllm@{other.url}")
        for order, entry in enumerate(config["model_list"]):
            entry["litellm_params"]["order"] = order
            entry["unisono"] = {"first_token_timeout_s": 4}
        async with served(config) as running:
            [frozen, _] = members(running)
            one.script = lambda asked: Silent(200)
            one.patient.hangs = True
            waiting = asyncio.create_task(running.chat())
            await one.asked()
            async with asyncio.timeout(3.5):
                while frozen.failure is None:
                    await asyncio.sleep(0.01)
            # The attempt goes on while others are not put on it any more.
            for _ in range(3):
                assert text_of("chat", await running.chat()) == "Done."
            assert not waiting.done()
            assert len(one.requests) == 1
            assert text_of("chat", await waiting) == "Done."


@asynccontextmanager
async def passing(first: FakeOpenAi, second: FakeOpenAi) -> AsyncIterator[Gateway]:
    """A gateway that hands requests on to the first server, as long as it is well."""
    entries = [
        {"model_name": "other", "litellm_params": {"model": "vllm/qwen", "api_base": fake.url, "order": order}}
        for order, fake in enumerate((first, second))
    ]
    async with served({"model_list": entries, "router_settings": TIGHT}) as running:
        yield running


@pytest.mark.slow
async def test_an_answer_that_is_not_streamed_may_take_all_the_time() -> None:
    script = OpenAiScript(delay_s=HONEST_S)
    async with FakeOpenAi(script) as first, FakeOpenAi() as second, passing(first, second) as running:
        answer = await running.chat(model="other")
        assert (answer.status, len(first.requests), len(second.requests)) == (200, 1, 0)


async def test_an_answer_that_is_not_streamed_leaves_time_once_a_probe_fails() -> None:
    script = OpenAiScript(delay_s=60.0)
    async with FakeOpenAi(script) as first, FakeOpenAi() as second, passing(first, second) as running:
        first.listing = Refusal(500, b"{}")
        began = time.monotonic()
        answer = await running.chat(model="other")
        assert (answer.status, len(first.requests), len(second.requests)) == (200, 1, 1)
        assert time.monotonic() - began < TOTAL_S - 1.0


async def test_only_streams_that_pass_through_show_when_the_first_token_comes() -> None:
    async with FakeOpenAi() as first, FakeOpenAi() as second, passing(first, second) as running:
        for stream in (False, True):
            assert (await running.chat(model="other", stream=stream)).status == 200
            assert [is_warm(live) for live in members(running, "other")] == [stream, False]


async def test_time_that_is_spent_in_line_speaks_against_no_backend() -> None:
    async with FakeVllm(script=lambda asked: VllmScript(tokens=ANSWER, first_delay_s=0.7)) as fake:
        config = config_of(f"vllm@{fake.url}")
        config["model_list"][0]["litellm_params"] |= {"timeout": 1, "max_parallel_requests": 1}
        async with served(config) as running:
            clients = (running.chat(messages=[{"role": "user", "content": f"I am {n}"}]) for n in range(8))
            answers = await asyncio.gather(*clients)
            assert {answer.status for answer in answers[1:]} <= {503, 504}
            assert members(running)[0].circuits == {}
            assert text_of("chat", await running.chat()) == "Done."


async def test_nobody_waits_in_line_for_longer_than_an_answer_may_take() -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        config = config_of(f"vllm@{fake.url}")
        config["model_list"][0]["litellm_params"] |= {"timeout": 1, "rpm": 1}
        async with served(config) as running:
            assert text_of("chat", await running.chat()) == "Done."
            async with asyncio.timeout(5):
                answer = await running.chat()
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) > 30


IMPATIENT = {"min_first_token_timeout_s": 0.8, "min_silence_timeout_s": 1}


@asynccontextmanager
async def hurried(*fakes: FakeVllm | FakeOpenAi) -> AsyncIterator[Gateway]:
    """A gateway with short limits, whose backends are warm."""
    config = config_of(*(f"vllm@{fake.url}" for fake in fakes))
    for entry, fake in zip(config["model_list"], fakes, strict=True):
        entry["unisono"] = IMPATIENT
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
    each = ({"role": "user", "content": f"I am {n}"} for n in range(clients))
    return await asyncio.gather(*(running.chat(stream=True, messages=[one], **fields) for one in each))


@pytest.mark.slow
@pytest.mark.parametrize("fake", [FakeVllm, FakeOpenAi], ids=["harmony", "passing"])
async def test_who_waits_for_the_end_of_other_answers_is_not_given_up(fake: Any) -> None:
    kept = {} if fake is FakeOpenAi else {"tokens": ANSWER}
    async with fake(**kept) as one, fake(**kept) as other, hurried(one, other) as running:
        slow = OpenAiScript(delay_s=0.15) if fake is FakeOpenAi else VllmScript(tokens=ANSWER, delay_s=0.03)
        for server in (one, other):
            server.slots, server.script = asyncio.Semaphore(1), lambda asked: slow
        fields = {"model": "vllm/qwen"} if fake is FakeOpenAi else {}
        answers = await burst(running, 10, **fields)
        assert {answer.status for answer in answers} == {200}
        assert not any("error" in event for answer in answers for event in answer.events)
        assert len(one.requests) + len(other.requests) == 10


@pytest.mark.slow
@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
async def test_many_who_wait_for_a_backend_that_hangs_are_answered_by_another_one(hang: Any) -> None:
    async with FakeVllm(tokens=ANSWER) as one, FakeVllm(tokens=ANSWER) as other, hurried(one, other) as running:
        broken = hang if isinstance(hang, Refusal) else VllmScript(tokens=ANSWER, faults=(hang,))
        one.script = lambda asked: broken
        one.slots = asyncio.Semaphore(2)
        async with asyncio.timeout(10):
            answers = await burst(running, 12)
        assert [text_of("chat", answer) for answer in answers] == ["Done."] * 12
        [hangs, _] = members(running)
        assert (len(hangs.waits), hangs.candidate.running) == (0, 0)
        assert hangs.generation.last_at(hangs.clock()) < hangs.clock()
