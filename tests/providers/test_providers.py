"""A gateway with the extra `litellm`, in front of providers that are served over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.e2e.gateway import Answer, Gateway, gateway
from tests.fakes import Refusal
from tests.fakes.dialects import chunked
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript
from tests.fakes.wire import Seen, Step, WireServer, Write
from unisono.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ANSWER = OpenAiScript()
MEMORY = {"url": "memory://"}


def entry(model: str, base: str, **params: Any) -> dict[str, Any]:
    return {"model_name": "m", "litellm_params": {"model": model, "api_base": base, "api_key": "sk-theirs", **params}}


@asynccontextmanager
async def openai(script: Any = ANSWER, **params: Any) -> AsyncIterator[tuple[Gateway, FakeOpenAi]]:
    async with FakeOpenAi(script) as fake:
        one = entry("openai/gpt-4o", f"{fake.url}/v1", **params)
        async with gateway({"model_list": [one]}) as running:
            yield running, fake


def anthropic_answer(seen: Seen) -> list[Step]:
    content = [{"type": "text", "text": "Hello from there."}]
    usage = {"input_tokens": 3, "output_tokens": 4}
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": content}
    return Refusal(200, json.dumps(head | {"stop_reason": "end_turn", "usage": usage}).encode()).steps()


def text_of(answer: Answer) -> str:
    if answer.body is not None:
        return str(answer.body["choices"][0]["message"]["content"])
    return "".join(c["delta"].get("content") or "" for event in answer.events for c in event["choices"])


@STREAM
async def test_a_chat_completion_of_another_provider(stream: bool) -> None:
    async with openai(organization="org-1", extra_headers={"x-team": "blue"}) as (running, fake):
        answer = await running.chat(model="m", stream=stream, temperature=0.5, unknown={"a": 1})
    [asked] = fake.requests
    assert answer.status == 200, answer.raw
    assert text_of(answer) == "Four."
    assert {one["model"] for one in answer.events or [answer.body]} == {"m"}
    assert answer.headers["x-unisono-backend"] == "openai-1"
    assert asked.json["model"] == "gpt-4o"
    assert (asked.json["temperature"], asked.json["unknown"]) == (0.5, {"a": 1})
    assert asked.headers["authorization"] == "Bearer sk-theirs"
    assert (asked.headers["x-team"], asked.headers["openai-organization"]) == ("blue", "org-1")
    assert answer.done is stream
    assert not any("usage" in event for event in answer.events)


@STREAM
async def test_half_a_letter_of_a_provider_ends_no_answer(stream: bool) -> None:
    async with openai(OpenAiScript(words=("Fo\ud83dur", "."))) as (running, _):
        answer = await running.chat(model="m", stream=stream)
        body = {"model": "m", "input": "Hi", "stream": stream}
        response = await running.post("/v1/responses", json.dumps(body).encode())
    assert text_of(answer) == "Fo\ufffdur."
    assert answer.done is stream
    response = response.events[-1]["response"] if stream else response.body
    assert response["output"][0]["content"][0]["text"] == "Fo\ufffdur."


@STREAM
async def test_a_response_of_another_provider(stream: bool) -> None:
    async with openai() as (running, fake):
        body = {"model": "m", "input": "Hi", "stream": stream, "previous_response_id": "resp_theirs"}
        answer = await running.post("/v1/responses", json.dumps(body).encode())
    assert answer.status == 200, answer.raw
    assert fake.requests[0].path == "/v1/responses"
    assert fake.requests[0].json["previous_response_id"] == "resp_theirs"
    response = answer.events[-1]["response"] if stream else answer.body
    assert response["output"][0]["content"][0]["text"] == "Four."
    assert (response["status"], response["model"]) == ("completed", "m")


async def test_what_a_provider_speaks_is_translated() -> None:
    async with (
        WireServer(anthropic_answer) as there,
        gateway({"model_list": [entry("anthropic/claude-sonnet-4-5", there.url)]}) as running,
    ):
        chat = await running.chat(model="m", max_tokens=7)
        response = await running.post("/v1/responses", b'{"model": "m", "input": "Hi"}')
        odd = await running.chat(model="m", x_odd=1)
    assert text_of(chat) == "Hello from there."
    assert chat.body["usage"]["total_tokens"] == 7
    assert there.requests[0].headers["x-api-key"] == "sk-theirs"
    assert there.requests[0].json["max_tokens"] == 7
    assert response.body["output"][0]["content"][0]["text"] == "Hello from there."
    assert (odd.status, odd.body["error"]["param"]) == (400, "x_odd")


HIJACKS = {
    "api_base": "http://127.0.0.1:9",
    "base_url": "http://127.0.0.1:9",
    "api_key": "sk-mine",
    "custom_llm_provider": "anthropic",
    "extra_headers": {"authorization": "Bearer sk-mine"},
    "headers": {"authorization": "Bearer sk-mine"},
    "mock_response": "not theirs",
    "fallbacks": [{"model": "openai/x", "api_base": "http://127.0.0.1:9"}],
    "extra_body": {"model": "another"},
}


@pytest.mark.parametrize("field", HIJACKS)
async def test_no_client_says_where_a_request_goes_or_with_which_key(field: str) -> None:
    async with openai() as (running, fake):
        answer = await running.chat(model="m", **{field: HIJACKS[field]})
    assert (answer.status, text_of(answer)) == (200, "Four.")
    assert fake.requests[0].headers["authorization"] == "Bearer sk-theirs"
    assert fake.requests[0].json["model"] == "gpt-4o"


REFUSED: dict[str, tuple[Refusal, int, str]] = {
    "a wrong request": (Refusal(400, b'{"error": {"message": "temperature is odd"}}'), 400, "backend_rejected_request"),
    "too long": (
        Refusal(400, b'{"error": {"message": "This model\'s maximum context length is 1 tokens"}}'),
        400,
        "context_length_exceeded",
    ),
    "the gateway's key": (Refusal(401, b'{"error": {"message": "bad key sk-theirs"}}'), 503, "backend_unavailable"),
    "busy": (Refusal(429, b"{}"), 503, "backend_overloaded"),
    "broken": (Refusal(500, b"{}"), 502, "backend_error"),
}


@STREAM
async def test_what_a_provider_repeats_of_the_configuration_is_told_to_nobody(stream: bool) -> None:
    own = {"extra_headers": {"x-auth": "Token theirs-too"}, "organization": "org-123456"}
    async with openai(**own) as (running, fake):
        said = f"sk-theirs Token theirs-too org-123456 {fake.url}/v1 {fake.url.partition('://')[2]}"
        fake.script = Refusal(400, json.dumps({"error": {"message": said}}).encode())
        answer = await running.chat(model="m", stream=stream)
    told = answer.body["error"]["message"]
    assert told.startswith("the provider rejected the request: ")
    assert "theirs" not in told
    assert "org-1" not in told
    assert "127.0.0.1" not in told


ODD: dict[str, dict[str, Any]] = {
    "no list": {"messages": "Hi"},
    "no object": {"messages": [5]},
    "content that is none": {"messages": [{"role": "user", "content": 5}]},
}


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD)
async def test_no_odd_request_has_a_provider_rest_for_everybody(fields: dict[str, Any]) -> None:
    async with openai() as (running, fake):
        for _ in range(5):
            odd = await running.chat(model="m", **fields)
            assert (odd.status, odd.body["error"]["code"]) == (400, "backend_rejected_request"), odd.raw
        ready = (await running.get("/health/readiness")).body
        answer = await running.chat(model="m")
    assert text_of(answer) == "Four."
    assert ready["models"] == {"ready": 1, "total": 1}
    assert len(fake.requests) == 1


@STREAM
async def test_a_provider_that_is_not_there_cannot_be_reached(stream: bool) -> None:
    async with gateway({"model_list": [entry("openai/gpt-4o", "http://127.0.0.1:9/v1")]}) as running:
        answer = await running.chat(model="m", stream=stream)
    assert (answer.status, answer.body["error"]["code"]) == (503, "backend_unavailable")


def broken_off(*events: dict[str, Any]) -> Callable[[Seen], list[Step]]:
    """A stream that ends behind these, as if it were over."""
    written = [Write(b"data: %b\n\n" % json.dumps(event).encode(), framed=True) for event in events]
    return lambda _: chunked(b"text/event-stream", written)


def said(text: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "q", "choices": [choice]}


async def test_an_answer_that_breaks_off_does_not_end_well() -> None:
    async with (
        WireServer(broken_off(said("Four"))) as there,
        gateway({"model_list": [entry("openai/gpt-4o", f"{there.url}/v1")]}) as running,
    ):
        answer = await running.chat(model="m", stream=True)
    assert text_of_events(answer) == "Four"
    assert answer.events[-1]["error"]["code"] == "backend_protocol_error"
    assert not answer.done


HEAD = {"id": "m", "type": "message", "role": "assistant", "model": "c", "content": []}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
BLOCKS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {**HEAD, "usage": {"input_tokens": 1, "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": CALL},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"city"'}},
]


async def test_a_call_that_breaks_off_is_never_told_as_whole() -> None:
    async with (
        WireServer(broken_off(*BLOCKS)) as there,
        gateway({"model_list": [entry("anthropic/claude-sonnet-4-5", there.url)]}) as running,
    ):
        response = await running.post("/v1/responses", b'{"model": "m", "input": "Hi", "stream": true}')
        chat = await running.chat(model="m", stream=True)
    types = [event["type"] for event in response.events]
    assert (types[-1], response.events[-1]["code"]) == ("error", "backend_protocol_error")
    assert not {"response.function_call_arguments.done", "response.output_item.done", "response.completed"} & {*types}
    assert chat.events[-1]["error"]["code"] == "backend_protocol_error"


@pytest.mark.parametrize("cost", [None, 0.5], ids=["none", "the provider's"])
async def test_no_price_is_told_that_is_not_the_providers(cost: float | None) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, **({} if cost is None else {"cost": cost})}
    end = {**said(""), "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    events = [said("Four"), end, {**said(""), "choices": [], "usage": usage}]
    async with (
        WireServer(broken_off(*events)) as there,
        gateway({"model_list": [entry("openai/gpt-4o", f"{there.url}/v1")]}) as running,
    ):
        answer = await running.chat(model="m", stream=True, stream_options={"include_usage": True})
    assert answer.done
    assert answer.events[-1]["usage"]["total_tokens"] == 9
    assert answer.events[-1]["usage"].get("cost") == cost


async def test_a_response_without_an_input_is_refused_here() -> None:
    async with openai() as (running, fake):
        answer = await running.post("/v1/responses", b'{"model": "m"}')
    assert (answer.status, answer.body["error"]["param"]) == (400, "input")
    assert fake.requests == []


async def test_a_stream_that_is_none_goes_to_the_next_provider() -> None:
    async with WireServer(broken_off()) as there, FakeOpenAi() as fake:
        first, second = (entry("openai/gpt-4o", f"{one.url}/v1", order=n) for n, one in enumerate((there, fake)))
        async with gateway({"model_list": [first, second]}) as running:
            answer = await running.chat(model="m", stream=True)
    assert text_of_events(answer) == "Four."
    assert answer.done


def text_of_events(answer: Answer) -> str:
    return "".join(c["delta"].get("content") or "" for event in answer.events for c in event.get("choices", ()))


def test_no_library_below_logs_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def asked() -> None:
        async with openai(extra_headers={"x-auth": "Token theirs-too"}) as (running, _):
            await running.chat(model="m", messages=[{"role": "user", "content": "a secret of mine"}])
            caplog.clear()
            await running.chat(model="m", messages=[{"role": "user", "content": "a secret of mine"}])

    asyncio.run(asked())
    assert "a secret of mine" not in caplog.text
    assert "theirs" not in caplog.text


@STREAM
@pytest.mark.parametrize(("refusal", "status", "code"), REFUSED.values(), ids=REFUSED)
async def test_failures_are_told_as_those_of_any_backend(
    refusal: Refusal, status: int, code: str, stream: bool
) -> None:
    async with openai(refusal) as (running, fake):
        answer = await running.chat(model="m", stream=stream)
    assert (answer.status, answer.body["error"]["code"]) == (status, code), answer.raw
    assert "sk-theirs" not in answer.raw.decode()
    # What may pass is tried again, since there is no other deployment.
    assert len(fake.requests) == (3 if code in {"backend_overloaded", "backend_error"} else 1)


async def test_an_entry_for_all_models_of_a_provider_takes_the_clients_name() -> None:
    async with FakeOpenAi() as fake:
        one = {**entry("openai/*", f"{fake.url}/v1"), "model_name": "openai/*"}
        async with gateway({"model_list": [one]}) as running:
            answer = await running.chat(model="openai/gpt-4.1-nano")
    assert answer.body["model"] == "openai/gpt-4.1-nano"
    assert fake.requests[0].json["model"] == "gpt-4.1-nano"


async def test_a_client_that_leaves_ends_the_stream_there() -> None:
    async with openai(OpenAiScript(words=("a",) * 100, delay_s=0.1)) as (running, fake):
        await running.chat(model="m")  # loads what has to be loaded
        body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}).encode()
        asking = asyncio.ensure_future(running.post("/v1/chat/completions", body))
        await fake.asked(2)
        await asyncio.sleep(0.3)
        asking.cancel()
        await fake.gone()


SLOW: dict[str, dict[str, Any]] = {
    "silence": {"stream_timeout": 0.5},
    "all of it": {"timeout": 3},
}


@pytest.mark.parametrize("params", SLOW.values(), ids=SLOW)
async def test_a_stream_has_its_times(params: dict[str, Any]) -> None:
    delay_s = 0.2 if "timeout" in params else 5.0
    async with openai(OpenAiScript(words=("a",) * 100, delay_s=delay_s), **params) as (running, fake):
        answer = await running.chat(model="m", stream=True)
        await fake.gone()
    told = answer.events[-1] if answer.events else answer.body
    assert told["error"]["code"] == "backend_timeout"
    assert not answer.done


LOADED = """
import asyncio, json, sys
import unisono.app
from unisono.config import parse
app = unisono.app.build(parse(json.loads(sys.argv[1]), {}).config)
async def started():
    async with app.router.lifespan_context(app):
        print(json.dumps("litellm" in sys.modules))
asyncio.run(started())
"""


FIRST = """
import asyncio, json, sys
from tests.providers.test_providers import openai
from unisono.passthrough.providers import _LOADED
async def asked():
    async with openai() as (running, fake):
        await _LOADED.get({})
        before = set(sys.modules)
        for stream in (False, True):
            await running.chat(model="m", stream=stream)
        print(json.dumps([len(before), sorted(set(sys.modules) - before)]))
asyncio.run(asked())
"""


def test_what_the_first_answers_need_is_loaded_beside_the_loop() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True, timeout=120)
    loaded, more = json.loads(done.stdout.splitlines()[-1])
    assert loaded > 2000
    # Small ones may be left, by provider.
    assert len(more) < 100, more
    assert not {"openai", "tiktoken", "tiktoken_ext"} & {name.partition(".")[0] for name in more}


def test_nothing_is_loaded_before_the_first_request() -> None:
    config = {"model_list": [entry("openai/gpt-4o", "http://127.0.0.1:9")], "store": MEMORY}
    asked = [sys.executable, "-c", LOADED, json.dumps(config)]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) is False


def test_a_provider_is_not_examined(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"model_list": [entry("openai/gpt-4o", "http://127.0.0.1:9")], "store": MEMORY}))
    done = CliRunner().invoke(main, ["check", "--config", str(file), "--json"])
    [told] = json.loads(done.stdout)["deployments"]
    assert (done.exit_code, told["kind"], told["usable"], told["findings"]) == (0, "litellm (openai)", True, [])
    assert "sk-theirs" not in done.output
    listed = CliRunner().invoke(main, ["models", "--config", str(file)]).output
    assert listed.splitlines()[1].split() == ["m", "openai-1", "litellm", "(openai)", "gpt-4o"]
