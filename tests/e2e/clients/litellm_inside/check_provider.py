"""LiteLLM as a library with the Unisono provider.

Most tests run four times: sync and async, whole and streamed.
"""

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

RequestFactory = Callable[..., dict[str, Any]]

ENCODING = load_encoding()
ANSWER = "Here is the answer: naïve 日本."
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


def complete_sync(**fields: Any) -> Any:
    return litellm.completion(**fields)


def stream_sync(**fields: Any) -> Any:
    return build_completion(
        list(litellm.completion(stream=True, stream_options={"include_usage": True}, **fields)), fields
    )


def complete_async(**fields: Any) -> Any:
    return asyncio.run(litellm.acompletion(**fields))


def stream_async(**fields: Any) -> Any:
    async def collect() -> list[Any]:
        options = {"include_usage": True}
        return [chunk async for chunk in await litellm.acompletion(stream=True, stream_options=options, **fields)]

    return build_completion(asyncio.run(collect()), fields)


def build_completion(chunks: list[Any], fields: dict[str, Any]) -> Any:
    return litellm.stream_chunk_builder(chunks, messages=fields["messages"])


VARIANTS = {
    "sync": complete_sync,
    "sync stream": stream_sync,
    "async": complete_async,
    "async stream": stream_async,
}
every_variant = pytest.mark.parametrize("complete", VARIANTS.values(), ids=VARIANTS)


@every_variant
def test_reasoning_text_and_usage_reach_the_caller(complete: Any, make_request: RequestFactory) -> None:
    answer = complete(**make_request("an answer"))
    [choice] = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == (ANSWER, "Let me see.")
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 23
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 23
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4


@every_variant
def test_tool_calls_reach_the_caller(complete: Any, make_request: RequestFactory) -> None:
    [choice] = complete(**make_request("two calls", tools=[WEATHER])).choices
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather"] * 2
    assert [json.loads(call.function.arguments)["location"] for call in calls] == ["Paris", "Rome"]
    assert len({call.id for call in calls}) == 2
    assert choice.finish_reason == "tool_calls"


@every_variant
def test_tool_choice_forces_a_call(complete: Any, make_request: RequestFactory) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        [answer] = complete(**make_request("an answer", tools=[WEATHER], tool_choice=choice)).choices
        [call] = answer.message.tool_calls
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
@every_variant
def test_json_output_matches_the_schema(complete: Any, form: Any, make_request: RequestFactory) -> None:
    [choice] = complete(**make_request("an answer", response_format=form)).choices
    Place.model_validate_json(choice.message.content)


def test_an_assistant_message_can_be_sent_back_unchanged(make_request: RequestFactory, backend: Any) -> None:
    request = make_request("a call", tools=[WEATHER])
    message = litellm.completion(**request).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees"}
    second = litellm.completion(**{**request, "messages": [*request["messages"], message, result]})
    assert second.choices[0].message.content == ANSWER
    assert "<|message|>18 degrees<|end|>" in backend.prompts[-1]
    assert "Let me see." in backend.prompts[-1]


EFFORTS: dict[str, dict[str, Any]] = {
    "as an allowed parameter": {"reasoning_effort": "high", "allowed_openai_params": ["reasoning_effort"]},
    "as an object": {"reasoning": {"effort": "high"}},
}


@pytest.mark.parametrize("fields", EFFORTS.values(), ids=EFFORTS)
def test_reasoning_effort_reaches_the_prompt(
    fields: dict[str, Any], make_request: RequestFactory, backend: Any
) -> None:
    litellm.completion(**make_request("an answer", **fields))
    assert "Reasoning: high" in backend.prompts[-1]


def test_parameters_reach_the_backend(make_request: RequestFactory, backend: Any) -> None:
    answer = litellm.completion(
        **make_request("an answer", temperature=0.25, seed=7, max_tokens=3, top_k=9, min_p=0.1, n=2)
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    sent = [request.json for request in backend.fake.requests if request.path == "/v1/completions"][-2:]
    for body in sent:
        assert (body["temperature"], body["max_tokens"], body["top_k"], body["min_p"]) == (0.25, 3, 9, 0.1)
        assert body["model"] == "openai/gpt-oss-20b"
    # Every choice has its own seed, so that the choices differ.
    assert sorted(body["seed"] for body in sent) == [6, 7]


def test_an_answer_carries_the_unisono_object(make_request: RequestFactory) -> None:
    details = litellm.completion(**make_request("an answer")).choices[0].message.provider_specific_fields["unisono"]
    assert details == {"recoveries": [], "failovers": 0, "backend": "vllm-1"}
    chunks = list(litellm.completion(stream=True, **make_request("an answer")))
    [details] = [chunk.provider_specific_fields for chunk in chunks if chunk.provider_specific_fields]
    assert details["unisono"]["backend"] == "vllm-1"


# -- errors


def refusal(status: int) -> Refusal:
    return Refusal(status, b'{"error": {"message": "no", "type": "x", "param": null, "code": 1}}')


FAILURES: dict[str, tuple[Any, dict[str, Any], type[Exception]]] = {
    "a server error": (refusal(500), {}, litellm.BadGatewayError),
    "a busy server": (refusal(429), {}, litellm.ServiceUnavailableError),
    "a rejected request": (refusal(400), {}, litellm.BadRequestError),
    "a prompt beyond the context": (vllm_context_error(), {}, litellm.ContextWindowExceededError),
    "a silent server": (stall_at(0), {"timeout": 0.5}, litellm.Timeout),
    "an unreachable server": (None, {"api_base": "http://127.0.0.1:9"}, litellm.ServiceUnavailableError),
    "an invalid value": (None, {"seed": "seven"}, litellm.BadRequestError),
    "an unsupported field": (None, {"modalities": ["audio"]}, litellm.BadRequestError),
    "an unknown backend kind": (None, {"model": "unisono/nothing/gpt-oss"}, litellm.BadRequestError),
}


@pytest.mark.parametrize(("fault", "fields", "exception"), FAILURES.values(), ids=FAILURES)
@every_variant
def test_failures_raise_litellm_exceptions(
    complete: Any, fault: Any, fields: dict[str, Any], exception: Any, make_request: RequestFactory, backend: Any
) -> None:
    request = make_request("an answer", **fields)
    if fault is not None:
        # Retries fail as well.
        backend.faults += [fault] * 8
    with pytest.raises(openai.APIError) as raised:
        complete(**request)
    # LiteLLM wraps server errors of streams, for its own fallbacks.
    failure = getattr(raised.value, "original_exception", None) or raised.value
    assert isinstance(failure, exception)
    assert "model_list" not in str(failure)
    backend.faults.clear()


@pytest.mark.parametrize("variant", ["sync stream", "async stream"])
def test_a_broken_stream_raises_after_its_first_chunks(
    variant: str, make_request: RequestFactory, backend: Any
) -> None:
    request = make_request("an answer")
    backend.faults += [reset_at(12)] + [refusal(503)] * 8
    chunks: list[Any] = []

    async def read_async() -> None:
        async for chunk in await litellm.acompletion(stream=True, **request):
            chunks.append(chunk)

    def read() -> None:
        if variant == "sync stream":
            chunks.extend(litellm.completion(stream=True, **request))
        else:
            asyncio.run(read_async())

    with pytest.raises(openai.APIError) as raised:
        read()
    assert type(raised.value).__module__.startswith("litellm")
    assert any(chunk.choices[0].delta.get("reasoning_content") for chunk in chunks)
    backend.faults.clear()


# -- cancellation and concurrency


def test_closing_a_stream_frees_the_backend(make_request: RequestFactory, backend: Any) -> None:
    stream = litellm.completion(stream=True, **make_request("a long answer"))
    next(iter(stream))
    stream.completion_stream.close()
    asyncio.run_coroutine_threadsafe(backend.fake.gone(), backend.loop).result(10)


async def test_cancelling_a_task_frees_the_backend(make_request: RequestFactory, backend: Any) -> None:
    async def read() -> None:
        async for _ in await litellm.acompletion(stream=True, **make_request("a long answer")):
            started.set()

    started = asyncio.Event()
    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(backend.fake.gone(), backend.loop))


def test_engines_are_reused_until_the_provider_closes(provider: Any, make_request: RequestFactory) -> None:
    litellm.completion(**make_request("an answer"))
    engines = provider._site.engines._engines
    before = len(engines)
    for _ in range(3):
        litellm.completion(**make_request("an answer"))
    assert len(engines) == before
    litellm.completion(**make_request("an answer", api_key="another"))
    assert len(engines) == before + 1
    provider.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "unisono"]
    provider.close()
    assert litellm.completion(**make_request("an answer")).choices[0].message.content == ANSWER


def test_callers_on_many_loops_and_threads_are_served(make_request: RequestFactory) -> None:
    request = make_request("an answer")
    answers: list[str] = []

    async def ask_four_times() -> None:
        answers.extend(
            answer.choices[0].message.content
            for answer in await asyncio.gather(*(litellm.acompletion(**request) for _ in range(4)))
        )

    threads = [threading.Thread(target=lambda: asyncio.run(ask_four_times())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [ANSWER] * 12


def test_a_recording_is_replayed() -> None:
    request = {"model": "unisono/replay/demo", "messages": [{"role": "user", "content": "Hi"}]}
    contents = {variant: complete(**request).choices[0].message.content for variant, complete in VARIANTS.items()}
    assert len(set(contents.values())) == 1
    assert contents["sync"]
