"""Second requests of a running gateway while a backend sends nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.test_metrics import OUTPUT, read
from tests.fakes import FakeVllm, Refusal, VllmScript
from tests.fakes.faults import reset_at
from unisono.errors import ConfigError
from unisono.routing.attempt_timeouts import AttemptSample, AttemptTimes
from unisono.routing.deployment import LiveDeployment
from unisono.routing.hedge import HEDGED_SHARE, MAX_SAVED, HedgeBudget, HedgeRules

STALLED = VllmScript(tokens=OUTPUT, first_delay_s=30.0)
FAST = VllmScript(tokens=OUTPUT)


def is_request(asked: Mapping[str, Any]) -> bool:
    """Return whether a request comes from a client of the tests, not from a probe."""
    return bool(asked.get("seed") == 4711)


@asynccontextmanager
async def two(first: Any, second: Any, **hedge: Any) -> AsyncIterator[tuple[Gateway, FakeVllm, FakeVllm]]:
    """Run a gateway whose first backend is preferred; requests of clients get these scripts."""

    def script(own: Any) -> Any:
        return lambda asked: own if is_request(asked) else FAST

    async with FakeVllm(script=script(first)) as one, FakeVllm(script=script(second)) as two:
        config = config_of(f"vllm@{one.url}", f"vllm@{two.url}", unisono={"hedge": {"after": 0.2, **hedge}})
        config["model_list"][1]["litellm_params"]["order"] = 1
        async with gateway(config) as running:
            await running.chat()
            yield running, one, two


def asked(fake: FakeVllm) -> int:
    return sum(is_request(each.json or {}) for each in fake.requests)


async def test_the_faster_backend_answers_and_the_other_request_ends() -> None:
    async with two(STALLED, FAST) as (running, one, other):
        answer = await running.chat(seed=4711)
        assert answer.status == 200, answer.body
        assert answer.body["unisono"]["backend"] == "vllm-2"
        assert answer.body["choices"][0]["message"]["content"] == "Hello."
        assert (asked(one), asked(other)) == (1, 1)
        async with asyncio.timeout(10):
            await one.gone()
            # Both slots are free again.
            while any(each["running"] for each in (await running.get("/v1/status")).body["models"][0]["deployments"]):
                await asyncio.sleep(0.01)
        metrics = await read(running.url)
        assert metrics("backend_requests_total", model="gpt-oss", backend="vllm-2", outcome="ok") == 1
        assert metrics("hedges_total", model="gpt-oss", backend="vllm-2", result="won") == 1
        assert metrics("hedges_total", result="sent") == 1


async def test_a_backend_that_answers_in_time_causes_no_second_request() -> None:
    async with two(FAST, FAST, after=20) as (running, one, other):
        for _ in range(5):
            assert (await running.chat(seed=4711)).body["unisono"]["backend"] == "vllm-1"
        assert (asked(one), asked(other)) == (5, 0)


async def test_the_first_backend_may_still_win() -> None:
    slow = VllmScript(tokens=OUTPUT, first_delay_s=0.6)
    async with two(slow, STALLED) as (running, one, other):
        assert (await running.chat(seed=4711)).body["unisono"]["backend"] == "vllm-1"
        assert (asked(one), asked(other)) == (1, 1)
        async with asyncio.timeout(10):
            await other.gone()


@pytest.mark.parametrize("broken", [Refusal(500, b"{}"), VllmScript(tokens=OUTPUT, faults=(reset_at(0),))])
async def test_a_second_backend_that_fails_changes_nothing(broken: Any) -> None:
    async with two(VllmScript(tokens=OUTPUT, first_delay_s=0.8), broken) as (running, _, other):
        answer = await running.chat(seed=4711)
        assert (answer.status, answer.body["unisono"]["backend"]) == (200, "vllm-1")
        assert asked(other) == 1


async def test_a_first_backend_that_fails_later_is_replaced() -> None:
    late = VllmScript(tokens=OUTPUT, first_delay_s=0.4, faults=(reset_at(0),))
    async with two(late, VllmScript(tokens=OUTPUT, first_delay_s=1.0)) as (running, _, other):
        answer = await running.chat(seed=4711)
        assert (answer.status, answer.body["unisono"]["backend"]) == (200, "vllm-2")
        assert asked(other) == 1


async def test_a_client_that_leaves_ends_both_requests() -> None:
    async with two(STALLED, STALLED) as (running, one, other):
        request = asyncio.create_task(running.chat(seed=4711))
        async with asyncio.timeout(10):
            while not asked(other):
                await asyncio.sleep(0.01)
            request.cancel()
            await one.gone()
            await other.gone()
            while any(each["running"] for each in (await running.get("/v1/status")).body["models"][0]["deployments"]):
                await asyncio.sleep(0.01)


async def first_tokens(running: Gateway, count: int) -> Sequence[float]:
    times = []
    for _ in range(count):
        begin = monotonic()
        assert (await running.chat(seed=4711)).status == 200
        times.append(monotonic() - begin)
    return sorted(times)


@pytest.mark.slow
async def test_the_slowest_answers_get_fast_for_few_requests() -> None:
    """With stalls of 5 %, p99 is at least five times lower for less than 5 % more requests."""
    stall = VllmScript(tokens=OUTPUT, first_delay_s=2.0)
    results = {}
    for hedge in (None, {"after": "p95"}):
        # One request of each 20 stalls, at a random place. Stalls happen before the limit is learned, too.
        draw = random.Random(1)
        stalled = {20 * block + draw.randrange(20) for block in range(31)}
        numbers = iter(range(10_000))

        def script(own: Mapping[str, Any], stalled: Collection[int] = stalled, numbers: Iterator[int] = numbers) -> Any:
            return stall if is_request(own) and next(numbers) in stalled else FAST

        async with FakeVllm(script=script) as one, FakeVllm(tokens=OUTPUT) as other:
            config = config_of(f"vllm@{one.url}", f"vllm@{other.url}", unisono={"hedge": hedge})
            config["model_list"][1]["litellm_params"]["order"] = 1
            async with gateway(config) as running:
                await first_tokens(running, 20)
                times = await first_tokens(running, 600)
                results[str(hedge)] = times[int(0.99 * len(times))], asked(one) + asked(other)
    (without_s, _), (with_s, sent) = results.values()
    assert without_s / with_s >= 5, results
    assert sent < 620 * 1.05, results


def test_the_budget_limits_second_requests() -> None:
    budget = HedgeBudget()
    paid = 0
    for _ in range(10_000):
        budget.add_request()
        paid += budget.pay()
    assert paid <= 10_000 * HEDGED_SHARE + 1
    for _ in range(1_000):
        budget.add_request()
    assert sum(budget.pay() for _ in range(100)) == MAX_SAVED


def test_stalls_among_the_answers_do_not_raise_the_limit() -> None:
    """With one stall in sixteen answers, the 95th percentile is a stall."""
    live = SimpleNamespace(times=AttemptTimes(), clock=lambda: 40.0)
    for number in range(40):
        first_s, long_s = (6.0, 80.0) if number % 16 == 15 else (0.1, 4.0)
        live.times.record(AttemptSample(number, first_s))
        live.times.record(AttemptSample(number, long_s, read_tokens=4000))
    rules = HedgeRules()
    assert rules.delay_s(cast("LiveDeployment", live), 0) == pytest.approx(0.3)
    assert rules.delay_s(cast("LiveDeployment", live), 2000) == pytest.approx(6.0)


def test_slow_answers_of_two_kinds_are_no_stalls() -> None:
    """With cached prompts of 30 ms and others of 0.5 s, the limit is not below the slower kind."""
    live = SimpleNamespace(times=AttemptTimes(), clock=lambda: 64.0)
    for number in range(64):
        live.times.record(AttemptSample(number, 0.5 if number % 5 == 0 else 0.03))
    assert HedgeRules().delay_s(cast("LiveDeployment", live), 0) == pytest.approx(0.5)


async def test_a_wrong_time_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unisono\.hedge\.after"):
        async with gateway(config_of("vllm@http://127.0.0.1:1", unisono={"hedge": {"after": "p50"}})):
            pass
