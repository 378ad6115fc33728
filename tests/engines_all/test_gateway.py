"""Every engine behind a whole gateway: clients receive the same answers from all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, Message, message_of
from tests.e2e.test_engines import CHATS, ON_TEXT, TOOL_CHATS, without_cache
from tests.engines_all.conversations import FILLER
from tests.engines_all.engines import CONCURRENCY, CONTEXT, Running, wait_until_idle
from tests.example_tool import EXAMPLE_TOOL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

ENDLESS = "Repeat la forever."


async def ask(site: Gateway, content: str | list[Any], **fields: Any) -> Answer:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    async with asyncio.timeout(120):
        return await site.chat(messages=messages, temperature=0, **fields)


async def ask_both_ways(site: Gateway, content: str | list[Any], **fields: Any) -> Message:
    """Return the answer after checking that it is the same with and without streaming.

    With a stop string, the usage may differ: an engine generates some tokens before it is stopped.
    """
    whole = await ask(site, content, **fields)
    stream = await ask(site, content, stream=True, stream_options={"include_usage": True}, **fields)
    assert (whole.status, stream.status, stream.done) == (200, 200, True)
    first, second = without_cache(message_of(whole)), without_cache(message_of(stream))
    assert first[:-1] == second[:-1]
    assert first[-1] == second[-1] or "stop" in fields
    return message_of(whole)


@pytest.mark.parametrize("user", [*CHATS, *TOOL_CHATS])
async def test_answers_and_recoveries_are_the_same_with_and_without_streaming(
    engine: Running, site: Gateway, user: str
) -> None:
    expected = CHATS.get(user) or TOOL_CHATS[user]
    content, rules = expected.content, list(expected.rules)
    if not engine.engine.shows_stop:
        # A hidden stop token is restored, which is a recovery of its own.
        content, rules = ON_TEXT.get(user, (content, [*rules, "restored-stop"]))

    message = await ask_both_ways(site, user, **({"tools": [EXAMPLE_TOOL]} if user in TOOL_CHATS else {}))

    assert (message.content, message.reasoning, message.calls) == (content, expected.reasoning, list(expected.calls))
    assert message.finish_reason == ("tool_calls" if expected.calls else "stop")
    assert message.note["recoveries"] == rules


ROUND_TRIPS: dict[str, tuple[str, list[str], list[str], str]] = {
    "one call": (
        "What is the weather in Paris?",
        ["18 degrees, sunny"],
        ['{"location":"Paris"}'],
        "It is sunny in Paris with 18 degrees.",
    ),
    "two successive calls": (
        "Compare the weather in London and Tokyo.",
        ["18 degrees, sunny", "11 degrees, rainy"],
        ['{"location":"London"}', '{"location":"Tokyo"}'],
        "I compared London and Tokyo.",
    ),
    "a preamble and a call": (
        "Make a plan first, then check the weather in Oslo.",
        ["3 degrees, cloudy"],
        ['{"location":"Oslo"}'],
        "It is cloudy in Oslo with 3 degrees.",
    ),
}


@pytest.mark.parametrize(("user", "results", "arguments", "answer"), ROUND_TRIPS.values(), ids=ROUND_TRIPS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_tool_round_trip_ends_in_an_answer(
    site: Gateway, user: str, results: list[str], arguments: list[str], answer: str, stream: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": user}]
    for number, result in enumerate(results):
        message = message_of(await ask(site, messages, tools=[EXAMPLE_TOOL], stream=stream))
        assert (message.calls, message.finish_reason) == ([("get_weather", arguments[number])], "tool_calls")
        function = {"name": "get_weather", "arguments": arguments[number]}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": message.content, "reasoning": message.reasoning, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": result},
        ]
    message = message_of(await ask(site, messages, tools=[EXAMPLE_TOOL], stream=stream))

    assert (message.content, message.calls, message.finish_reason) == (answer, [], "stop")


async def test_the_token_limit_ends_an_answer(site: Gateway) -> None:
    message = await ask_both_ways(site, ENDLESS, max_tokens=20)

    assert (message.reasoning, message.finish_reason, message.usage["completion_tokens"]) == ("Sing.", "length", 20)
    assert set((message.content or "").split()) == {"la"}


async def test_a_stop_string_ends_the_answer_and_the_generation(engine: Running, site: Gateway) -> None:
    message = await ask_both_ways(site, "Count to 30.", stop=["7,"])

    assert (message.reasoning, message.content, message.finish_reason) == ("Count.", "1, 2, 3, 4, 5, 6, ", "stop")
    await wait_until_idle(engine)


async def test_eight_concurrent_requests_are_answered(site: Gateway) -> None:
    users = [*CHATS, *TOOL_CHATS][:CONCURRENCY]
    answers = await asyncio.gather(
        *(
            ask(site, user, stream=bool(number % 2), **({"tools": [EXAMPLE_TOOL]} if user in TOOL_CHATS else {}))
            for number, user in enumerate(users)
        )
    )
    for user, answer in zip(users, answers, strict=True):
        expected = CHATS.get(user) or TOOL_CHATS[user]
        message = message_of(answer)
        assert ((message.content or "").strip(), message.calls) == (
            (expected.content or "").strip(),
            list(expected.calls),
        )


async def test_a_request_for_three_choices_gets_three(site: Gateway) -> None:
    answer = await ask(site, "Hello!", n=3)

    contents = [choice["message"]["content"] for choice in answer.body["choices"]]
    assert contents == [CHATS["Hello!"].content] * 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_engine_is_idle_after_clients_disconnect(engine: Running, site: Gateway, stream: bool) -> None:
    requests = [asyncio.create_task(ask(site, ENDLESS, stream=stream, max_tokens=3000)) for _ in range(3)]
    async with asyncio.timeout(20):
        while not await engine.busy():
            await asyncio.sleep(0.02)
    for task in requests:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*requests, return_exceptions=True)

    await wait_until_idle(engine)
    assert message_of(await ask(site, "Hello!")).content == CHATS["Hello!"].content


async def test_a_long_conversation_within_the_context_is_answered(site: Gateway) -> None:
    message = message_of(await ask(site, "Hello!" + FILLER * 350, max_tokens=40))

    assert 3500 < message.usage["prompt_tokens"] < CONTEXT
    assert 0 < message.usage["completion_tokens"] <= 40


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 5}, {"stream": True}], ids=str)
async def test_a_conversation_over_the_context_is_too_long(site: Gateway, fields: dict[str, Any]) -> None:
    answer = await ask(site, "Hello!" + FILLER * 450, **fields)

    assert answer.status == 400
    assert answer.body["error"]["code"] == "context_length_exceeded"


async def test_a_token_limit_beyond_the_context_is_reduced(site: Gateway) -> None:
    answer = await ask(site, "Hello!", max_tokens=100_000)

    assert (answer.status, message_of(answer).finish_reason) == (200, "stop")


async def test_the_model_list_does_not_name_the_engine(engine: Running, site: Gateway) -> None:
    listed = await site.get("/v1/models")

    assert [model["id"] for model in listed.body["data"]] == ["gpt-oss"]
    assert engine.engine.model not in listed.raw.decode()
