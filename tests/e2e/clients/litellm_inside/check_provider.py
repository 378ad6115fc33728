"""LiteLLM as a library: what it asks reaches the engine, and what that says reaches its caller, sync and async,
streamed and whole alike."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import litellm
import openai
import pytest
from pydantic import BaseModel

from tests.fakes import Refusal, reset_at, stall_at, vllm_context_error
from unisono.harmony.encoding import load_encoding

Asked = Callable[..., dict[str, Any]]

ENCODING = load_encoding()
SAID = "Here is the answer: naïve 日本."
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string"}},
            "required": ["location"],
            "additionalProperties": False,
        },
    },
}


def whole(**fields: Any) -> Any:
    return litellm.completion(**fields)


def streamed(**fields: Any) -> Any:
    return folded(list(litellm.completion(stream=True, stream_options={"include_usage": True}, **fields)), fields)


def awaited(**fields: Any) -> Any:
    return asyncio.run(litellm.acompletion(**fields))


def streamed_and_awaited(**fields: Any) -> Any:
    async def all_of_it() -> list[Any]:
        options = {"include_usage": True}
        return [chunk async for chunk in await litellm.acompletion(stream=True, stream_options=options, **fields)]

    return folded(asyncio.run(all_of_it()), fields)


def folded(chunks: list[Any], fields: dict[str, Any]) -> Any:
    return litellm.stream_chunk_builder(chunks, messages=fields["messages"])


WAYS = {
    "whole": whole,
    "streamed": streamed,
    "awaited": awaited,
    "streamed and awaited": streamed_and_awaited,
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@every_way
def test_thoughts_text_and_usage_arrive(way: Any, asked: Asked) -> None:
    answer = way(**asked("an answer"))
    [choice] = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == (SAID, "Let me see.")
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 23
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 23
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4


@every_way
def test_calls_arrive_whole(way: Any, asked: Asked) -> None:
    [choice] = way(**asked("two calls", tools=[WEATHER])).choices
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"] * 2
    assert [json.loads(call.function.arguments)["location"] for call in calls] == ["Paris", "Rome"]
    assert len({call.id for call in calls}) == 2
    assert choice.finish_reason == "tool_calls"


@every_way
def test_a_tool_is_forced(way: Any, asked: Asked) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        [answered] = way(**asked("an answer", tools=[WEATHER], tool_choice=choice)).choices
        [call] = answered.message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments).keys() == {"location"}


class Place(BaseModel):
    city: str
    capital: bool


FORMS: dict[str, Any] = {
    "a schema": {"type": "json_schema", "json_schema": {"name": "place", "schema": Place.model_json_schema()}},
    "a class": Place,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@every_way
def test_json_matches_its_schema(way: Any, form: Any, asked: Asked) -> None:
    [choice] = way(**asked("an answer", response_format=form)).choices
    Place.model_validate_json(choice.message.content)


def test_an_answer_goes_back_as_it_came(asked: Asked, backend: Any) -> None:
    asking = asked("a call", tools=[WEATHER])
    message = litellm.completion(**asking).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees"}
    again = litellm.completion(**{**asking, "messages": [*asking["messages"], message, result]})
    assert again.choices[0].message.content == SAID
    assert "<|message|>18 degrees<|end|>" in backend.prompts[-1]
    assert "Let me see." in backend.prompts[-1]


EFFORTS: dict[str, dict[str, Any]] = {
    "allowed": {"reasoning_effort": "high", "allowed_openai_params": ["reasoning_effort"]},
    "as an object": {"reasoning": {"effort": "high"}},
}


@pytest.mark.parametrize("fields", EFFORTS.values(), ids=EFFORTS)
def test_the_effort_reaches_the_prompt(fields: dict[str, Any], asked: Asked, backend: Any) -> None:
    litellm.completion(**asked("an answer", **fields))
    assert "Reasoning: high" in backend.prompts[-1]


def test_parameters_reach_the_backend(asked: Asked, backend: Any) -> None:
    answer = litellm.completion(**asked("an answer", temperature=0.25, seed=7, max_tokens=3, top_k=9, min_p=0.1, n=2))
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    sent = [request.json for request in backend.fake.requests if request.path == "/v1/completions"][-1]
    assert (sent["temperature"], sent["max_tokens"], sent["top_k"], sent["min_p"]) == (0.25, 3, 9, 0.1)
    assert (sent["seed"], sent["model"]) in ((7, "openai/gpt-oss-20b"), (6, "openai/gpt-oss-20b"))


def test_how_an_answer_came_to_be_is_beside_it(asked: Asked) -> None:
    told = litellm.completion(**asked("an answer")).choices[0].message.provider_specific_fields["unisono"]
    assert told == {"recoveries": [], "failovers": 0, "backend": "vllm-1"}
    chunks = list(litellm.completion(stream=True, **asked("an answer")))
    [told] = [chunk.provider_specific_fields for chunk in chunks if chunk.provider_specific_fields]
    assert told["unisono"]["backend"] == "vllm-1"


# -- failures


def refusing(status: int) -> Refusal:
    return Refusal(status, b'{"error": {"message": "no", "type": "x", "param": null, "code": 1}}')


FAILURES: dict[str, tuple[Any, dict[str, Any], type[Exception]]] = {
    "a server that fails": (refusing(500), {}, litellm.BadGatewayError),
    "a server that is busy": (refusing(429), {}, litellm.ServiceUnavailableError),
    "a server that rejects it": (refusing(400), {}, litellm.BadRequestError),
    "a prompt too long": (vllm_context_error(), {}, litellm.ContextWindowExceededError),
    "a silent server": (stall_at(0), {"timeout": 0.5}, litellm.Timeout),
    "nobody there": (None, {"api_base": "http://127.0.0.1:9"}, litellm.ServiceUnavailableError),
    "a field with a wrong value": (None, {"seed": "seven"}, litellm.BadRequestError),
    "what is not had": (None, {"logprobs": True}, litellm.BadRequestError),
    "an unknown kind": (None, {"model": "unisono/nothing/gpt-oss"}, litellm.BadRequestError),
}


@pytest.mark.parametrize(("fault", "fields", "kind"), FAILURES.values(), ids=FAILURES)
@every_way
def test_failures_are_litellms(
    way: Any, fault: Any, fields: dict[str, Any], kind: Any, asked: Asked, backend: Any
) -> None:
    asking = asked("an answer", **fields)
    if fault is not None:
        # Whatever is tried again fails again.
        backend.fails += [fault] * 8
    with pytest.raises(openai.APIError) as raised:
        way(**asking)
    # What a stream fails with at a server, LiteLLM wraps for its fallbacks.
    failure = getattr(raised.value, "original_exception", None) or raised.value
    assert isinstance(failure, kind)
    assert "model_list" not in str(failure)
    backend.fails.clear()


@pytest.mark.parametrize("way", ["streamed", "streamed and awaited"])
def test_a_stream_that_breaks_off_raises_behind_what_there_is(way: str, asked: Asked, backend: Any) -> None:
    asking = asked("an answer")
    backend.fails += [reset_at(12)] + [refusing(503)] * 8
    chunks: list[Any] = []

    async def taken() -> None:
        async for chunk in await litellm.acompletion(stream=True, **asking):
            chunks.append(chunk)

    def take() -> None:
        if way == "streamed":
            chunks.extend(litellm.completion(stream=True, **asking))
        else:
            asyncio.run(taken())

    with pytest.raises(openai.APIError) as raised:
        take()
    assert type(raised.value).__module__.startswith("litellm")
    assert any(chunk.choices[0].delta.get("reasoning_content") for chunk in chunks)
    backend.fails.clear()


# -- lives


def test_who_leaves_a_stream_frees_the_backend(asked: Asked, backend: Any) -> None:
    stream = litellm.completion(stream=True, **asked("a long answer"))
    next(iter(stream))
    stream.completion_stream.close()
    asyncio.run_coroutine_threadsafe(backend.fake.gone(), backend.loop).result(10)


async def test_who_is_cancelled_frees_the_backend(asked: Asked, backend: Any) -> None:
    async def take() -> None:
        async for _ in await litellm.acompletion(stream=True, **asked("a long answer")):
            taken.set()

    taken = asyncio.Event()
    task = asyncio.create_task(take())
    await taken.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(backend.fake.gone(), backend.loop))


def test_engines_are_kept_by_backend_and_closed_when_asked_to(provider: Any, asked: Asked) -> None:
    litellm.completion(**asked("an answer"))
    kept = provider._site.engines._engines
    before = len(kept)
    for _ in range(3):
        litellm.completion(**asked("an answer"))
    assert len(kept) == before
    litellm.completion(**asked("an answer", api_key="another"))
    assert len(kept) == before + 1
    provider.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "unisono"]
    provider.close()
    assert litellm.completion(**asked("an answer")).choices[0].message.content == SAID


def test_callers_on_many_loops_and_threads_are_served_at_once(asked: Asked) -> None:
    asking = asked("an answer")
    answers: list[str] = []

    async def several() -> None:
        answers.extend(
            answer.choices[0].message.content
            for answer in await asyncio.gather(*(litellm.acompletion(**asking) for _ in range(4)))
        )

    threads = [threading.Thread(target=lambda: asyncio.run(several())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [SAID] * 12


def test_a_recording_is_played() -> None:
    asking = {"model": "unisono/replay/demo", "messages": [{"role": "user", "content": "Hi"}]}
    told = {name: way(**asking).choices[0].message.content for name, way in WAYS.items()}
    assert len(set(told.values())) == 1
    assert told["whole"]
