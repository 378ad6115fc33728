"""Chat Completions with a real engine, through the OpenAI SDK."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from urllib.request import urlopen

import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.asking import chat_request, fold_chunks, reasoning_of, unisono_fields

from conftest import Stage

COUNT_TO_30 = ", ".join(map(str, range(1, 31))) + "."
# Completion tokens of the answer with these numbers.
COUNT_TOKENS = 101


def test_a_whole_answer_has_content_and_reasoning(demo: OpenAI) -> None:
    completion = demo.chat.completions.create(**chat_request("Hello!"))
    (choice,) = completion.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello! How can I help you today?"
    assert choice.message.tool_calls is None
    assert choice.message.refusal is None
    assert choice.message.model_extra == {
        "reasoning": "The user wants a short reply.",
        "reasoning_content": "The user wants a short reply.",
    }
    assert completion.object == "chat.completion"
    assert completion.model == "gpt-oss-demo"
    assert abs(completion.created - time.time()) < 60
    assert unisono_fields(completion) == {"recoveries": [], "failovers": 0, "backend": "mlx-1"}


@pytest.mark.slow
def test_usage_reports_reasoning_tokens(demo: OpenAI) -> None:
    usage = demo.chat.completions.create(**chat_request("Hello!")).usage
    assert usage is not None
    assert usage.prompt_tokens > 50
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details is not None
    assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) < usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None


@pytest.mark.parametrize("question", ["Hello!", pytest.param("What is 2 + 2?", marks=pytest.mark.slow)])
def test_a_stream_matches_the_whole_answer(demo: OpenAI, question: str) -> None:
    whole = demo.chat.completions.create(**chat_request(question))
    chunks = list(demo.chat.completions.create(**chat_request(question), stream=True))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    first, last = chunks[0].choices[0], chunks[-1].choices[0]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert (last.finish_reason, last.delta.to_dict()) == ("stop", {})
    assert [choice.finish_reason for chunk in chunks[:-1] for choice in chunk.choices] == [None] * (len(chunks) - 1)
    assert all(chunk.usage is None for chunk in chunks)
    assert unisono_fields(chunks[-1]) == unisono_fields(whole)

    streamed = fold_chunks(chunks).choices[0].message
    assert streamed.content == whole.choices[0].message.content
    assert reasoning_of(streamed) == reasoning_of(whole.choices[0].message)
    assert reasoning_of(streamed)


@pytest.mark.slow
def test_reasoning_streams_before_the_text(demo: OpenAI) -> None:
    deltas: list[tuple[str, str]] = []
    for chunk in demo.chat.completions.create(**chat_request("Count to 30."), stream=True):
        delta = chunk.choices[0].delta
        deltas += [("thought", reasoning_of(delta))] if reasoning_of(delta) else []
        deltas += [("text", delta.content)] if delta.content else []
    kinds = [kind for kind, _ in deltas]
    assert kinds == sorted(kinds, reverse=True)
    assert kinds.count("text") > 10
    assert "".join(text for kind, text in deltas if kind == "text") == COUNT_TO_30


def test_include_usage_adds_a_last_chunk(demo: OpenAI) -> None:
    whole = demo.chat.completions.create(**chat_request("ping")).usage
    stream = demo.chat.completions.create(**chat_request("ping"), stream=True, stream_options={"include_usage": True})
    *before, last = stream
    assert last.choices == []
    assert last.usage is not None
    assert whole is not None
    assert last.usage.completion_tokens == whole.completion_tokens
    assert last.usage.completion_tokens_details == whole.completion_tokens_details
    assert last.usage.prompt_tokens == whole.prompt_tokens
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in before)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_n_returns_several_choices(demo: OpenAI, stream: bool) -> None:
    answer: Any = demo.chat.completions.create(**chat_request("Hello!", n=2), stream=stream)
    completion = fold_chunks(answer) if stream else answer
    assert sorted(choice.index for choice in completion.choices) == [0, 1]
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.content == "Hello! How can I help you today?"


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "content", "finish_reason"),
    [
        pytest.param({"stop": [", 4", "x"]}, "1, 2, 3", "stop", id="a stop string"),
        pytest.param({"max_tokens": 20}, "1, 2, 3", "length", id="max_tokens"),
        pytest.param({"max_completion_tokens": 20}, "1, 2, 3", "length", id="max_completion_tokens"),
    ],
)
def test_stop_strings_and_token_limits_end_an_answer(
    demo: OpenAI, fields: dict[str, Any], content: str, finish_reason: str, stream: bool
) -> None:
    answer: Any = demo.chat.completions.create(**chat_request("Count to 30.", **fields), stream=stream)
    choice = (fold_chunks(answer) if stream else answer).choices[0]
    assert choice.finish_reason == finish_reason
    text = choice.message.content or ""
    assert text.startswith(content)
    assert COUNT_TO_30.startswith(text)
    assert (text == content) is (finish_reason == "stop")


def test_truncated_reasoning_leaves_an_empty_answer(demo: OpenAI) -> None:
    completion = demo.chat.completions.create(**chat_request("Hello!", max_tokens=6))
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].message.content == ""
    assert "The user wants a short reply.".startswith(reasoning_of(completion.choices[0].message))
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 6


@pytest.mark.slow
def test_sampling_repeats_for_the_same_seed(demo: OpenAI) -> None:
    def answer(seed: int) -> str:
        sampled = chat_request("Tell me a joke.", temperature=1.5, seed=seed, max_tokens=12)
        message = demo.chat.completions.create(**sampled).choices[0].message
        return f"{reasoning_of(message)} {message.content}"

    assert answer(5) == answer(5)


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_every_reasoning_effort_is_accepted(demo: OpenAI, effort: Any) -> None:
    completion = demo.chat.completions.create(**chat_request("ping", reasoning_effort=effort, max_tokens=1))
    assert "notes" not in unisono_fields(completion)


@pytest.mark.slow
def test_fields_without_effect_are_accepted_and_noted(demo: OpenAI) -> None:
    completion = demo.chat.completions.create(
        **chat_request("ping"),
        user="u-1",
        metadata={"purpose": "check"},
        store=False,
        service_tier="auto",
        verbosity="low",
        prompt_cache_key="k",
        safety_identifier="s",
        extra_body={"something_else": 1},
    )
    assert completion.choices[0].message.content == "pong"
    noted = {note.partition(":")[0] for note in unisono_fields(completion)["notes"]}
    assert {"metadata", "service_tier", "verbosity", "something_else", "store"} <= noted


@pytest.mark.parametrize("suffix", [*(pytest.param(suffix, marks=pytest.mark.slow) for suffix in ("", "/")), "/v1/"])
def test_every_form_of_base_url_works(stage: Stage, connect: Callable[..., OpenAI], suffix: str) -> None:
    client = connect(stage.demo + suffix)
    assert client.chat.completions.create(**chat_request("ping")).choices[0].message.content == "pong"
    assert client.models.retrieve("gpt-oss-demo").id == "gpt-oss-demo"


@pytest.mark.slow
def test_the_environment_configures_the_client(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{stage.demo}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    with OpenAI() as client:
        assert client.chat.completions.create(**chat_request("ping", model="gpt-4o")).model == "gpt-4o"


def test_models_are_listed_and_retrieved(demo: OpenAI) -> None:
    listed = {model.id: model for model in demo.models.list()}
    assert listed.keys() == {"gpt-oss-demo", "gpt-4o"}
    model = demo.models.retrieve("gpt-oss-demo")
    assert model == listed["gpt-oss-demo"]
    assert model.object == "model"
    assert (model.model_extra or {})["context_length"] == 131072


@pytest.mark.slow
def test_a_whole_answer_has_headers(demo: OpenAI) -> None:
    raw = demo.chat.completions.with_raw_response.create(**chat_request("ping"))
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.headers["x-unisono-backend"] == "mlx-1"
    assert "x-unisono-recoveries" not in raw.headers
    completion = raw.parse()
    assert completion.choices[0].message.content == "pong"
    assert completion._request_id == raw.headers["x-request-id"]
    assert raw.headers["x-request-id"].startswith("req_")


@pytest.mark.slow
def test_stream_headers_precede_the_first_event(demo: OpenAI) -> None:
    raw = demo.chat.completions.with_raw_response.create(**chat_request("ping"), stream=True)
    assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert raw.headers["x-unisono-backend"] == "mlx-1"
    assert fold_chunks(raw.parse()).choices[0].message.content == "pong"


def test_raw_stream_lines_end_with_done(demo: OpenAI) -> None:
    with demo.chat.completions.with_streaming_response.create(**chat_request("ping"), stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


async def test_the_async_client_gets_whole_and_streamed_answers(async_demo: AsyncOpenAI) -> None:
    completion = await async_demo.chat.completions.create(**chat_request("ping"))
    assert completion.choices[0].message.content == "pong"
    stream = await async_demo.chat.completions.create(**chat_request("ping"), stream=True)
    assert fold_chunks([chunk async for chunk in stream]).choices[0].message.content == "pong"


@pytest.mark.slow
async def test_concurrent_requests_get_their_own_answers(async_demo: AsyncOpenAI) -> None:
    expected = {"ping": "pong", "What is 2 + 2?": "2 + 2 is 4.", "What color is the sky?": "The sky is blue."}

    async def answer(question: str) -> str | None:
        stream = await async_demo.chat.completions.create(**chat_request(question), stream=True)
        return fold_chunks([chunk async for chunk in stream]).choices[0].message.content

    questions = [*expected] * 2
    assert await asyncio.gather(*map(answer, questions)) == [expected[question] for question in questions]


def metric(stage: Stage, name: str) -> float:
    """Return the sum of a metric of the demo gateway over its labels."""
    with urlopen(f"{stage.demo}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"unisono_{name}{{"))


def test_closing_a_stream_frees_the_engine(demo: OpenAI, stage: Stage) -> None:
    before = metric(stage, "generation_tokens_total")
    with demo.chat.completions.create(**chat_request("Count to 30.", n=4), stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    pong = demo.chat.completions.create(**chat_request("ping"))
    assert pong.choices[0].message.content == "pong"
    deadline = time.monotonic() + 30
    while metric(stage, "backend_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert metric(stage, "generation_tokens_total") - before < 3 * COUNT_TOKENS
