"""Client disconnects, full queues, the order of choices and incremental streams."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.asking import scripted_request

# A tenth of the duration of the slow script, whose backend has one slot.
RELEASE_TIMEOUT_S = 3.0


def slow(**fields: Any) -> dict[str, Any]:
    return scripted_request("slow", model="one-at-a-time", **fields)


def check_slot_is_free(client: OpenAI) -> None:
    started = time.monotonic()
    completion = client.chat.completions.create(**scripted_request("an answer", model="one-at-a-time"))
    assert completion.choices[0].message.content == "Here is the answer."
    assert time.monotonic() - started < RELEASE_TIMEOUT_S


def test_closing_a_stream_frees_the_backend(scripted: OpenAI) -> None:
    stream = scripted.chat.completions.create(**slow(), stream=True)
    assert next(stream).choices[0].delta.role == "assistant"
    stream.close()
    check_slot_is_free(scripted)


def test_leaving_the_stream_helper_frees_the_backend(scripted: OpenAI) -> None:
    with scripted.chat.completions.stream(**slow()) as stream:
        for event in stream:
            if event.type == "content.delta":
                break
    check_slot_is_free(scripted)


def test_a_client_timeout_frees_the_backend(scripted: OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        scripted.with_options(timeout=0.5).chat.completions.create(**slow())
    check_slot_is_free(scripted)


async def test_cancelled_tasks_free_the_backend_and_the_queue(async_scripted: AsyncOpenAI) -> None:
    tasks = [asyncio.create_task(async_scripted.chat.completions.create(**slow())) for _ in range(3)]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The next request may arrive before the gateway notices the disconnects; then the SDK retries.
    retrying = async_scripted.with_options(max_retries=1)
    async with asyncio.timeout(RELEASE_TIMEOUT_S):
        completion = await retrying.chat.completions.create(**scripted_request("an answer", model="one-at-a-time"))
    assert completion.choices[0].message.content == "Here is the answer."


async def test_a_full_queue_rejects_requests_with_retry_after(async_scripted: AsyncOpenAI) -> None:
    tasks = [asyncio.create_task(async_scripted.chat.completions.create(**slow())) for _ in range(3)]
    await asyncio.sleep(0.5)
    with pytest.raises(openai.InternalServerError) as raised:
        await async_scripted.chat.completions.create(**slow())
    assert (raised.value.status_code, raised.value.code) == (503, "backend_overloaded")
    assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_choices_are_ordered_by_index(scripted: OpenAI) -> None:
    with scripted.chat.completions.stream(**scripted_request("n in reverse", n=2, seed=7)) as stream:
        for _ in stream:
            continue
        final = stream.get_final_completion()
    assert [choice.index for choice in final.choices] == [0, 1]
    assert [choice.message.content for choice in final.choices] == ["Here is the answer."] * 2
    assert [choice.finish_reason for choice in final.choices] == ["stop"] * 2


def test_a_slow_answer_is_streamed_incrementally(scripted: OpenAI) -> None:
    started = time.monotonic()
    times: list[float] = []
    for chunk in scripted.chat.completions.create(**scripted_request("slow", max_tokens=40), stream=True):
        times.append(time.monotonic() - started)
        last = chunk.choices[0].finish_reason
    assert last == "length"
    assert times[-1] > 0.6
    assert sum(times[i + 1] - times[i] > 0.005 for i in range(len(times) - 1)) > 15
