"""Ten times as many requests as there are places, and backends that refuse, stall, flap or are slow: whoever is
admitted is answered in time, whoever is not is told when to come back, and nothing is tried over and over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, gateway, message_of
from tests.fakes import FakeVllm, Refusal, VllmScript, reset_at, stall_at
from unisono.app import build_engine
from unisono.bootstrap.backends import build_pool
from unisono.config import ModelRegistry, parse
from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.engine.request import GenerationRequest
from unisono.errors import BackendError, BackendOverloaded, ShareExceeded
from unisono.harmony.encoding import load_encoding
from unisono.routing.retry_budget import RESERVE, RESERVE_S, SHARE

WORDS = "one two three four five six seven eight nine ten"
ANSWER = load_encoding().encode_marked(f"<|channel|>final<|message|>{WORDS}<|return|>")
STEP_S = 0.005
ANSWER_S = STEP_S * len(ANSWER)
BUSY_S = 0.4
"""What a machine that is shared may add to anything."""
WELL = VllmScript(tokens=ANSWER, delay_s=STEP_S)
NO_PLACE = Refusal(503, b'{"error":{"message":"no"}}', headers={"Retry-After": "1"})
TOO_MANY = Refusal(429, b'{"error":{"message":"no"}}', headers={"Retry-After": "1"})


def entry(fake: FakeVllm, *, patience_s: float = 5.0, **params: Any) -> dict[str, Any]:
    return {
        "model_name": "gpt-oss",
        "litellm_params": {"model": "vllm/tiny", "api_base": fake.url, "stream_timeout": patience_s, **params},
        "unisono": {"first_token_timeout_s": patience_s},
    }


@asynccontextmanager
async def behind(*entries: dict[str, Any], **sections: Any) -> AsyncIterator[Gateway]:
    """A gateway whose backends were examined, so that what is counted is what clients cause."""
    async with gateway({"model_list": list(entries), **sections}) as running:
        await pool_of(running).settled(10)
        yield running


def pool_of(running: Gateway) -> Any:
    assert running.app is not None
    return running.app.state.gateway.pool


def speaks(fake: FakeVllm, script: VllmScript | Refusal) -> None:
    fake.script = lambda asked: script


@dataclass
class Told:
    """Answers, and how long each took."""

    answers: list[Answer] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def of(self, *statuses: int) -> list[tuple[Answer, float]]:
        both = zip(self.answers, self.took_s, strict=True)
        return [(answer, took_s) for answer, took_s in both if answer.status in statuses]


async def ask(running: Gateway, told: Told, **fields: Any) -> Answer:
    began = time.monotonic()
    answer = await running.chat(**fields)
    told.took_s.append(time.monotonic() - began)
    told.answers.append(answer)
    return answer


def goes_on(asked: dict[str, Any]) -> VllmScript:
    """The answer behind what of it the prompt holds already."""
    prompt: list[int] = asked["prompt"]
    said = next(at for at in range(len(ANSWER), -1, -1) if prompt[len(prompt) - at :] == list(ANSWER[:at]))
    return replace(WELL, tokens=ANSWER[said:])


def generations(fake: FakeVllm) -> int:
    return sum(seen.path == "/v1/completions" for seen in fake.requests)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_who_is_admitted_is_answered_in_time_and_who_is_not_is_told_when_to_come_back(stream: bool) -> None:
    places, line, waits_s = 4, 16, 0.5
    async with (
        FakeVllm(script=lambda asked: WELL) as fake,
        behind(
            entry(fake, max_parallel_requests=places), unisono={"max_queue": line, "queue_timeout_s": waits_s}
        ) as running,
    ):
        told = Told()
        most = 0

        async def count() -> None:
            nonlocal most
            while True:
                most = max(most, sum(seen.done_at is None for seen in fake.requests))
                await asyncio.sleep(0.002)

        counting = asyncio.create_task(count())
        await asyncio.gather(*(ask(running, told, stream=stream) for _ in range(10 * places)))
        counting.cancel()
        well, refused = told.of(200), told.of(429, 503)
        assert len(well) + len(refused) == 10 * places
        # Those who find a place, and some of those who wait for one; how many, time tells.
        assert places <= len(well) < 10 * places
        assert most <= places
        assert all(took_s <= waits_s + 3 * ANSWER_S + BUSY_S for _, took_s in well + refused)
        assert all(message_of(answer).content == WORDS for answer, _ in well)
        for answer, _ in refused:
            assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert not left_in(running)


def left_in(running: Gateway) -> list[Any]:
    return [one for one in pool_of(running).status() if one.running or one.waiting or one.tokens]


@pytest.mark.slow
@pytest.mark.alone
async def test_a_modest_owner_hardly_feels_a_greedy_one() -> None:
    async with FakeVllm(script=lambda asked: WELL) as one, FakeVllm(script=lambda asked: WELL) as other:
        entries = [entry(fake, max_parallel_requests=4) for fake in (one, other)]
        config = parse({"model_list": entries, "unisono": {"max_queue": 40}}, {}).config
        pool = build_pool(config, ModelRegistry(config))
        engine = build_engine(pool)
        await pool.settled(10)
        refusals: list[BackendError] = []

        async def asks(owner: str) -> float:
            turn = GenerationRequest("gpt-oss", Conversation(Preamble(), (UserMessage("Hi"),)), tenant=owner)
            began = time.monotonic()
            run = engine.start(turn)
            async for _ in run:
                pass
            return time.monotonic() - began

        async def greedy() -> None:
            while True:
                try:
                    await asks("greedy")
                except (BackendOverloaded, ShareExceeded) as error:
                    refusals.append(error)
                    await asyncio.sleep(0.5)

        async def modest() -> list[float]:
            return sorted([await asks("modest") for _ in range(15)])

        try:
            alone_s = await modest()
            crowd = [asyncio.create_task(greedy()) for _ in range(80)]
            await asyncio.sleep(3 * ANSWER_S)
            crowded_s = await modest()
            for task in crowd:
                task.cancel()
            await asyncio.gather(*crowd, return_exceptions=True)
        finally:
            await pool.aclose()
        assert crowded_s[-1] <= 2 * alone_s[-1] + BUSY_S
        assert crowded_s[len(crowded_s) // 2] <= 2 * alone_s[len(alone_s) // 2] + BUSY_S / 3
        assert refusals
        assert all(error.retry_after_s is not None and 1 <= error.retry_after_s <= 30 for error in refusals)
        assert not [each for each in pool.status() if each.running or each.waiting or each.tokens]


@pytest.mark.parametrize("refusal", [NO_PLACE, TOO_MANY], ids=["503", "429"])
async def test_backends_that_all_refuse_are_not_asked_over_and_over(refusal: Refusal) -> None:
    asked_for = 100
    async with FakeVllm() as one, FakeVllm() as other, behind(entry(one), entry(other)) as running:
        for fake in (one, other):
            speaks(fake, refusal)
        told, began = Told(), time.monotonic()
        for _ in range(asked_for // 10):
            await asyncio.gather(*(ask(running, told) for _ in range(10)))
        assert len(told.of(429, 503)) == asked_for
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in told.answers)
        # A tenth more, and what lies in reserve for quiet hours and comes back.
        tries = generations(one) + generations(other)
        assert tries <= (1 + SHARE) * asked_for + RESERVE * (1 + (time.monotonic() - began) / RESERVE_S) + 1


async def until(true: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.01)


def state_of(running: Gateway, index: int) -> str:
    return str(pool_of(running).status()[index].state)


async def steadily(running: Gateway, told: Told, done: asyncio.Event) -> None:
    """One stream after the other, two at a time."""

    async def one_lane() -> None:
        while not done.is_set():
            await ask(running, told, stream=True)

    await asyncio.gather(one_lane(), one_lane())


def all_whole(answers: Sequence[Answer]) -> bool:
    return all(answer.status == 200 and message_of(answer).content == WORDS for answer in answers)


@pytest.mark.slow
async def test_a_backend_that_dies_rests_and_gets_its_traffic_back() -> None:
    settings = {"allowed_fails": 2, "cooldown_time": 0.3}
    async with FakeVllm(script=lambda asked: WELL) as steady:
        mortal = FakeVllm(script=lambda asked: WELL)
        await mortal.__aenter__()
        mortal.at_port = mortal.port
        async with behind(entry(mortal), entry(steady), router_settings=settings) as running:
            told, done = Told(), asyncio.Event()
            asking = asyncio.create_task(steadily(running, told, done))
            try:
                await until(lambda: generations(mortal) >= 2 and generations(steady) >= 2)
                mortal.break_connections()
                await mortal.__aexit__(None, None, None)
                await until(lambda: state_of(running, 0) != "ready")
                answered = len(told.answers)
                await until(lambda: len(told.answers) >= answered + 10)
                again = FakeVllm(script=lambda asked: WELL)
                again.at_port = mortal.at_port
                async with again:
                    await until(lambda: generations(again) >= 3, 20)
                    await until(lambda: state_of(running, 0) == "ready")
                    done.set()
                    await asking
            finally:
                done.set()
                await asyncio.gather(asking, return_exceptions=True)
            assert all_whole(told.answers)
            assert not left_in(running)


async def test_a_backend_that_stalls_holds_no_place_past_its_deadline() -> None:
    patience_s = 0.3
    async with (
        FakeVllm(tokens=ANSWER, faults=(stall_at(2),)) as fake,
        behind(
            entry(fake, patience_s=patience_s, max_parallel_requests=2),
            router_settings={"num_retries": 0, "allowed_fails": 1000},
        ) as running,
    ):
        told = Told()
        await asyncio.gather(*(ask(running, told) for _ in range(6)))
        assert [answer.status for answer in told.answers] == [504] * 6
        # Two at a time, each for as long as it may be silent.
        assert max(told.took_s) <= 3 * (patience_s + BUSY_S) + BUSY_S
        assert not left_in(running)
        speaks(fake, WELL)
        assert message_of(await ask(running, told)).content == WORDS
        assert told.took_s[-1] <= ANSWER_S + BUSY_S


@pytest.mark.slow
async def test_a_backend_that_flaps_is_noticed_by_no_client() -> None:
    def flaps(asked: dict[str, Any]) -> VllmScript:
        script = goes_on(asked)
        broken = time.monotonic() % 0.2 < 0.1 and len(script.tokens) > 6
        return replace(script, faults=(reset_at(4),)) if broken else script

    async with (
        FakeVllm(script=flaps) as flapping,
        FakeVllm(script=goes_on) as steady,
        behind(entry(flapping), entry(steady), router_settings={"cooldown_time": 0.2}) as running,
    ):
        told, done = Told(), asyncio.Event()
        asking = asyncio.create_task(steadily(running, told, done))
        await until(lambda: len(told.answers) >= 40, 30)
        done.set()
        await asking
        assert all_whole(told.answers)
        assert sum(message_of(answer).note["failovers"] for answer in told.answers) > 0
        assert not left_in(running)


async def test_a_backend_that_is_always_busy_is_left_alone_as_long_as_it_asks() -> None:
    async with (
        FakeVllm(script=lambda asked: TOO_MANY) as busy,
        FakeVllm(script=lambda asked: WELL) as steady,
        behind(entry(busy), entry(steady)) as running,
    ):
        told, done = Told(), asyncio.Event()
        began = time.monotonic()
        asking = asyncio.create_task(steadily(running, told, done))
        await until(lambda: len(told.answers) >= 30, 30)
        done.set()
        await asking
        assert all_whole(told.answers)
        # Both lanes may meet it at once, and again each time the second it asked for is over.
        assert generations(busy) <= 2 * (1 + (time.monotonic() - began))


@pytest.mark.slow
async def test_a_slow_backend_gets_less_to_do() -> None:
    slow = VllmScript(tokens=ANSWER, delay_s=STEP_S, first_delay_s=0.5)
    async with (
        FakeVllm(script=lambda asked: slow) as tortoise,
        FakeVllm(script=lambda asked: WELL) as hare,
        behind(entry(tortoise), entry(hare)) as running,
    ):
        told, done = Told(), asyncio.Event()
        asking = asyncio.create_task(steadily(running, told, done))
        await until(lambda: len(told.answers) >= 16, 30)
        done.set()
        await asking
        assert all_whole(told.answers)
        assert generations(tortoise) <= generations(hare)
