"""Overload with ten times as many requests as slots, and unreliable or slow backends.

Admitted requests finish in time. Refused requests get a Retry-After header, and retries are limited.
"""

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
from unisono.bootstrap.deployments import build_pool
from unisono.bootstrap.engine import build_engine
from unisono.config import ModelRegistry, parse
from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.engine.request import GenerationRequest, RequestOrigin
from unisono.errors import BackendError, BackendOverloaded, ShareExceeded
from unisono.harmony.encoding import load_encoding
from unisono.routing.retries import RESERVE, RESERVE_S, SHARE

WORDS = "one two three four five six seven eight nine ten"
ANSWER = load_encoding().encode_marked(f"<|channel|>final<|message|>{WORDS}<|return|>")
STEP_S = 0.005
ANSWER_S = STEP_S * len(ANSWER)
# Extra time that a shared machine may add to any duration.
BUSY_S = 0.4
HEALTHY = VllmScript(tokens=ANSWER, delay_s=STEP_S)
UNAVAILABLE = Refusal(503, b'{"error":{"message":"no"}}', headers={"Retry-After": "1"})
TOO_MANY = Refusal(429, b'{"error":{"message":"no"}}', headers={"Retry-After": "1"})


def entry(fake: FakeVllm, *, patience_s: float = 5.0, **params: Any) -> dict[str, Any]:
    return {
        "model_name": "gpt-oss",
        "litellm_params": {"model": "vllm/tiny", "api_base": fake.url, "stream_timeout": patience_s, **params},
        "unisono": {"first_token_timeout_s": patience_s},
    }


@asynccontextmanager
async def probed_gateway(*entries: dict[str, Any], **sections: Any) -> AsyncIterator[Gateway]:
    """Run a gateway whose backends have been probed, so that only client requests are counted."""
    async with gateway({"model_list": list(entries), **sections}) as running:
        await pool_of(running).wait_for_probes(10)
        yield running


def pool_of(running: Gateway) -> Any:
    assert running.app is not None
    return running.app.state.gateway.pool


def answer_with(fake: FakeVllm, script: VllmScript | Refusal) -> None:
    fake.script = lambda asked: script


@dataclass
class Responses:
    """Responses, and the duration of each."""

    answers: list[Answer] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def of(self, *statuses: int) -> list[tuple[Answer, float]]:
        both = zip(self.answers, self.took_s, strict=True)
        return [(answer, took_s) for answer, took_s in both if answer.status in statuses]


async def send(running: Gateway, responses: Responses, **fields: Any) -> Answer:
    began = time.monotonic()
    answer = await running.chat(**fields)
    responses.took_s.append(time.monotonic() - began)
    responses.answers.append(answer)
    return answer


def continue_answer(asked: dict[str, Any]) -> VllmScript:
    """Return the rest of the answer after the part that the prompt contains."""
    prompt: list[int] = asked["prompt"]
    said = next(at for at in range(len(ANSWER), -1, -1) if prompt[len(prompt) - at :] == list(ANSWER[:at]))
    return replace(HEALTHY, tokens=ANSWER[said:])


def generations(fake: FakeVllm) -> int:
    return sum(seen.path == "/v1/completions" for seen in fake.requests)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_admitted_requests_finish_in_time_and_others_get_retry_after(stream: bool) -> None:
    places, line, waits_s = 4, 16, 0.5
    async with (
        FakeVllm(script=lambda asked: HEALTHY) as fake,
        probed_gateway(
            entry(fake, max_parallel_requests=places), unisono={"max_queue": line, "queue_timeout_s": waits_s}
        ) as running,
    ):
        responses = Responses()
        most = 0

        async def count() -> None:
            nonlocal most
            while True:
                most = max(most, sum(seen.done_at is None for seen in fake.requests))
                await asyncio.sleep(0.002)

        counting = asyncio.create_task(count())
        await asyncio.gather(*(send(running, responses, stream=stream) for _ in range(10 * places)))
        counting.cancel()
        well, refused = responses.of(200), responses.of(429, 503)
        assert len(well) + len(refused) == 10 * places
        # Requests that get a slot at once, and some of the queued requests; their number depends on timing.
        assert places <= len(well) < 10 * places
        assert most <= places
        assert all(took_s <= waits_s + 3 * ANSWER_S + BUSY_S for _, took_s in well + refused)
        assert all(message_of(answer).content == WORDS for answer, _ in well)
        for answer, _ in refused:
            assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert not busy_deployments(running)


def busy_deployments(running: Gateway) -> list[Any]:
    return [one for one in pool_of(running).status() if one.running or one.waiting or one.tokens]


@pytest.mark.slow
@pytest.mark.alone
async def test_one_tenant_is_hardly_slowed_by_a_greedy_tenant() -> None:
    async with FakeVllm(script=lambda asked: HEALTHY) as one, FakeVllm(script=lambda asked: HEALTHY) as other:
        entries = [entry(fake, max_parallel_requests=4) for fake in (one, other)]
        config = parse({"model_list": entries, "unisono": {"max_queue": 40}}, {}).config
        pool = build_pool(config, ModelRegistry(config))
        engine = build_engine(pool)
        await pool.wait_for_probes(10)
        refusals: list[BackendError] = []

        async def asks(owner: str) -> float:
            turn = GenerationRequest(
                "gpt-oss", Conversation(Preamble(), (UserMessage("Hi"),)), origin=RequestOrigin(tenant=owner)
            )
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


@pytest.mark.parametrize("refusal", [UNAVAILABLE, TOO_MANY], ids=["503", "429"])
async def test_retries_are_limited_when_all_backends_refuse(refusal: Refusal) -> None:
    request_count = 100
    async with FakeVllm() as one, FakeVllm() as other, probed_gateway(entry(one), entry(other)) as running:
        for fake in (one, other):
            answer_with(fake, refusal)
        responses, began = Responses(), time.monotonic()
        for _ in range(request_count // 10):
            await asyncio.gather(*(send(running, responses) for _ in range(10)))
        assert len(responses.of(429, 503)) == request_count
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in responses.answers)
        # The retry budget allows a share of the requests and a reserve that is refilled.
        tries = generations(one) + generations(other)
        assert tries <= (1 + SHARE) * request_count + RESERVE * (1 + (time.monotonic() - began) / RESERVE_S) + 1


async def until(true: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.01)


def state_of(running: Gateway, index: int) -> str:
    return str(pool_of(running).status()[index].state)


async def steadily(running: Gateway, responses: Responses, done: asyncio.Event) -> None:
    """Send streaming requests in two lanes, one after the other in each, until `done` is set."""

    async def one_lane() -> None:
        while not done.is_set():
            await send(running, responses, stream=True)

    await asyncio.gather(one_lane(), one_lane())


def all_complete(answers: Sequence[Answer]) -> bool:
    return all(answer.status == 200 and message_of(answer).content == WORDS for answer in answers)


@pytest.mark.slow
async def test_a_dead_backend_cools_down_and_regains_its_traffic() -> None:
    settings = {"allowed_fails": 2, "cooldown_time": 0.3}
    async with FakeVllm(script=lambda asked: HEALTHY) as steady:
        mortal = FakeVllm(script=lambda asked: HEALTHY)
        await mortal.__aenter__()
        mortal.at_port = mortal.port
        async with probed_gateway(entry(mortal), entry(steady), router_settings=settings) as running:
            responses, done = Responses(), asyncio.Event()
            asking = asyncio.create_task(steadily(running, responses, done))
            try:
                await until(lambda: generations(mortal) >= 2 and generations(steady) >= 2)
                mortal.break_connections()
                await mortal.__aexit__(None, None, None)
                await until(lambda: state_of(running, 0) != "ready")
                answered = len(responses.answers)
                await until(lambda: len(responses.answers) >= answered + 10)
                again = FakeVllm(script=lambda asked: HEALTHY)
                again.at_port = mortal.at_port
                async with again:
                    await until(lambda: generations(again) >= 3, 20)
                    await until(lambda: state_of(running, 0) == "ready")
                    done.set()
                    await asking
            finally:
                done.set()
                await asyncio.gather(asking, return_exceptions=True)
            assert all_complete(responses.answers)
            assert not busy_deployments(running)


async def test_a_stalled_backend_holds_no_slot_past_its_timeout() -> None:
    patience_s = 0.3
    async with (
        FakeVllm(tokens=ANSWER, faults=(stall_at(2),)) as fake,
        probed_gateway(
            entry(fake, patience_s=patience_s, max_parallel_requests=2),
            router_settings={"num_retries": 0, "allowed_fails": 1000},
        ) as running,
    ):
        responses = Responses()
        await asyncio.gather(*(send(running, responses) for _ in range(6)))
        assert [answer.status for answer in responses.answers] == [504] * 6
        # Two run at a time, each until its token timeout.
        assert max(responses.took_s) <= 3 * (patience_s + BUSY_S) + BUSY_S
        assert not busy_deployments(running)
        answer_with(fake, HEALTHY)
        assert message_of(await send(running, responses)).content == WORDS
        assert responses.took_s[-1] <= ANSWER_S + BUSY_S


@pytest.mark.slow
async def test_a_flapping_backend_does_not_affect_clients() -> None:
    def flaps(asked: dict[str, Any]) -> VllmScript:
        script = continue_answer(asked)
        broken = time.monotonic() % 0.2 < 0.1 and len(script.tokens) > 6
        return replace(script, faults=(reset_at(4),)) if broken else script

    async with (
        FakeVllm(script=flaps) as flapping,
        FakeVllm(script=continue_answer) as steady,
        probed_gateway(entry(flapping), entry(steady), router_settings={"cooldown_time": 0.2}) as running,
    ):
        responses, done = Responses(), asyncio.Event()
        asking = asyncio.create_task(steadily(running, responses, done))
        await until(lambda: len(responses.answers) >= 40, 30)
        done.set()
        await asking
        assert all_complete(responses.answers)
        assert sum(message_of(answer).note["failovers"] for answer in responses.answers) > 0
        assert not busy_deployments(running)


async def test_a_busy_backend_is_not_retried_before_its_retry_after() -> None:
    async with (
        FakeVllm(script=lambda asked: TOO_MANY) as busy,
        FakeVllm(script=lambda asked: HEALTHY) as steady,
        probed_gateway(entry(busy), entry(steady)) as running,
    ):
        responses, done = Responses(), asyncio.Event()
        began = time.monotonic()
        asking = asyncio.create_task(steadily(running, responses, done))
        await until(lambda: len(responses.answers) >= 30, 30)
        done.set()
        await asking
        assert all_complete(responses.answers)
        # Both lanes may try it at once, and again whenever its Retry-After of one second has passed.
        assert generations(busy) <= 2 * (1 + (time.monotonic() - began))


@pytest.mark.slow
async def test_a_slow_backend_gets_fewer_requests() -> None:
    slow = VllmScript(tokens=ANSWER, delay_s=STEP_S, first_delay_s=0.5)
    async with (
        FakeVllm(script=lambda asked: slow) as tortoise,
        FakeVllm(script=lambda asked: HEALTHY) as hare,
        probed_gateway(entry(tortoise), entry(hare)) as running,
    ):
        responses, done = Responses(), asyncio.Event()
        asking = asyncio.create_task(steadily(running, responses, done))
        await until(lambda: len(responses.answers) >= 16, 30)
        done.set()
        await asking
        assert all_complete(responses.answers)
        assert generations(tortoise) <= generations(hare)
