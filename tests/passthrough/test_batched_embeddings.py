"""Embeddings of large input lists, in parts over several deployments."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Gateway
from tests.e2e.keyed import keyed
from tests.fakes import Refusal
from tests.fakes.openai_modes import FakeModes, vector_of
from tests.passthrough.test_embeddings import embed, embedder
from tests.passthrough.test_passing_chat import served
from tests.passthrough.test_passing_counted import used_by
from unisono.core.observer import GenerationFacts, StepDone
from unisono.core.quotas import TokenUsage

SIZE = 4
INPUTS = [f"text {number}" for number in range(30)]
Script = Refusal | Callable[[Any], Refusal | None] | None


def sized(base: str, size: int | None = SIZE, **params: Any) -> dict[str, Any]:
    return {**embedder(base, **params), "unisono": {"max_embedding_batch_size": size}}


@asynccontextmanager
async def split(
    *scripts: Script, size: int = SIZE, retries: int = 2, **settings: Any
) -> AsyncIterator[tuple[Gateway, list[FakeModes]]]:
    """Run a gateway with one deployment for each script. Only the first one states the size of a part."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeModes(script, **settings)) for script in scripts]
        entries = [sized(fake.url, None if number else size) for number, fake in enumerate(fakes)]
        routing = {"num_retries": retries, "allowed_fails": 1_000}
        yield await stack.enter_async_context(served(*entries, router_settings=routing)), fakes


def parts_of(fakes: Sequence[FakeModes]) -> list[list[Any]]:
    return [request.json["input"] for fake in fakes for request in fake.requests]


def check(body: Any, inputs: Sequence[Any]) -> None:
    assert [one["index"] for one in body["data"]] == [*range(len(inputs))]
    assert [one["embedding"] for one in body["data"]] == [vector_of(one) for one in inputs]


async def test_a_large_list_is_split_over_all_deployments_and_joined_in_order() -> None:
    async with split(None, None, None) as (running, fakes):
        answer = await embed(running, input=INPUTS, dimensions=3)
    check(answer.body, INPUTS)
    assert answer.body["usage"] == {"prompt_tokens": 30, "total_tokens": 30}
    assert answer.body["model"] == "other"
    assert sorted(map(len, parts_of(fakes))) == [2, *[4] * 7]
    assert sorted(itertools.chain(*parts_of(fakes))) == sorted(INPUTS)
    assert {request.json["dimensions"] for fake in fakes for request in fake.requests} == {3}
    assert all(fake.requests for fake in fakes)
    assert answer.headers["x-unisono-backend"] == "vllm-1, vllm-2, vllm-3"


async def test_the_timeout_limits_the_whole_request() -> None:
    async with FakeModes(delay_s=0.4) as fake, served(sized(fake.url, 1, timeout=1)) as running:
        answer = await embed(running, input=INPUTS)
    assert (answer.status, answer.body["error"]["code"]) == (504, "backend_timeout")
    assert len(fake.requests) < len(INPUTS)


WHOLE: dict[str, Any] = {"a text": "text", "token ids": [1, 2, 3, 4, 5, 6], "as many as allowed": INPUTS[:SIZE]}


@pytest.mark.parametrize("value", WHOLE.values(), ids=WHOLE)
async def test_a_small_list_and_one_list_of_token_ids_are_not_split(value: Any) -> None:
    async with split(None) as (running, fakes):
        assert (await embed(running, input=value)).status == 200
    assert parts_of(fakes) == [value]


async def test_lists_of_token_ids_are_split() -> None:
    inputs = [[number, 7] for number in range(10)]
    async with split(None) as (running, fakes):
        answer = await embed(running, input=inputs)
    check(answer.body, inputs)
    assert sorted(parts_of(fakes)) == [inputs[0:4], inputs[4:8], inputs[8:]]


def fails_once(asked: Any, failed: set[str]) -> Refusal | None:
    """Refuse the first request for the part with `text 5`."""
    if "text 5" in asked["input"] and not failed:
        failed.add("text 5")
        return Refusal(500, b"{}")
    return None


async def test_a_failing_part_is_retried_alone() -> None:
    failed: set[str] = set()
    async with split(*[lambda asked: fails_once(asked, failed)] * 2) as (running, fakes):
        answer = await embed(running, input=INPUTS)
    check(answer.body, INPUTS)
    sent = [one[0] for one in parts_of(fakes)]
    assert sorted(sent) == sorted([*INPUTS[::SIZE], "text 4"])
    assert answer.headers["x-unisono-failovers"] == "1"


async def test_a_failing_part_is_retried_on_the_only_deployment() -> None:
    failed: set[str] = set()
    async with split(lambda asked: fails_once(asked, failed)) as (running, fakes):
        answer = await embed(running, input=INPUTS)
    check(answer.body, INPUTS)
    assert len(parts_of(fakes)) == 9


BROKEN: dict[str, Refusal] = {
    "server error": Refusal(500, b"{}"),
    "garbage": Refusal(200, b"<html>"),
    "no embeddings": Refusal(200, b'{"object": "list"}'),
    "too few": Refusal(200, b'{"data": [{"index": 0, "embedding": [1]}]}'),
    "no object": Refusal(200, b'{"data": 7}'),
}


@pytest.mark.slow
@pytest.mark.parametrize("refusal", BROKEN.values(), ids=BROKEN)
async def test_ten_thousand_inputs_are_complete_although_one_of_three_deployments_fails(refusal: Refusal) -> None:
    inputs = [f"text {number}" for number in range(10_000)]
    async with split(refusal, None, None, size=100) as (running, fakes):
        answer = await embed(running, input=inputs)
    assert answer.status == 200, answer.raw[:500]
    check(answer.body, inputs)
    assert fakes[0].requests
    assert answer.headers["x-unisono-backend"] == "vllm-2, vllm-3"


def mixed_up(asked: Any) -> Refusal:
    import json

    data = [{"index": at, "embedding": vector_of(one)} for at, one in enumerate(asked["input"])]
    return Refusal(200, json.dumps({"data": data[::-1], "model": "x"}).encode())


async def test_a_server_may_answer_in_another_order() -> None:
    async with split(mixed_up) as (running, _):
        answer = await embed(running, input=INPUTS)
    check(answer.body, INPUTS)
    assert "usage" not in answer.body


async def test_the_request_fails_if_all_attempts_of_a_part_fail() -> None:
    refusal = Refusal(400, b'{"error": {"message": "text 5 is odd"}}')

    def script(asked: Any) -> Refusal | None:
        return refusal if "text 5" in asked["input"] else None

    async with split(script, script) as (running, _):
        answer = await embed(running, input=INPUTS)
        assert (answer.status, answer.body["error"]["code"]) == (400, "backend_rejected_request")
        assert "text 5 is odd" in answer.body["error"]["message"]
        assert (await embed(running, input=INPUTS[8:])).status == 200


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("input.1", "input.5"),
        ("input[1]", "input[5]"),
        ("input.1.0", "input.5.0"),
        ("input", "input"),
        ("part.1", None),
    ],
)
async def test_a_rejected_part_names_the_input_of_the_request(param: str, expected: str | None) -> None:
    error = {"message": "too long", "param": param, "type": "invalid_request_error"}
    refusal = Refusal(400, json.dumps({"error": error}).encode())
    async with split(lambda asked: refusal if "text 5" in asked["input"] else None) as (running, _):
        answer = await embed(running, input=INPUTS)
    assert (answer.status, answer.body["error"]["param"]) == (400, expected)


async def test_a_client_disconnect_ends_all_parts() -> None:
    async with split(None, None, delay_s=60.0) as (running, fakes):
        task = asyncio.ensure_future(embed(running, input=INPUTS))
        for fake in fakes:
            await fake.asked()
        task.cancel()
        async with asyncio.timeout(5):
            while any(request.gone_at is None for fake in fakes for request in fake.requests):
                await asyncio.sleep(0.02)
        assert running.app is not None
        # No part starts afterwards.
        assert len(parts_of(fakes)) == 8


async def test_the_request_counts_once_with_the_usage_of_all_parts(tmp_path: Path) -> None:
    async with FakeModes() as fake, keyed({"model_list": [sized(fake.url)]}, tmp_path) as (running, keys):
        record, key = await keys.issue()
        await embed(running, key=key, input=INPUTS)
        used = await used_by(running, record.tenant, record.id)
    assert used == TokenUsage(requests=1, input=30)
    assert len(fake.requests) == 8


def test_the_usage_of_an_incomplete_request_has_all_answered_parts() -> None:
    steps = [StepDone(number, "vllm-1", 0.0, None, 1.0, 2, None, 0) for number in range(8)]
    assert GenerationFacts(steps=steps, prompt_tokens=16).usage.prompt_tokens == 16
    assert GenerationFacts(steps=steps[:1]).usage.prompt_tokens == 2


async def test_missing_usage_of_the_parts_is_estimated_once(tmp_path: Path) -> None:
    async with FakeModes(usage=None) as fake, keyed({"model_list": [sized(fake.url)]}, tmp_path) as (running, keys):
        record, key = await keys.issue()
        await embed(running, key=key, input=["x" * 30] * 20)
        used = await used_by(running, record.tenant, record.id)
    assert 200 <= used.input <= 215
