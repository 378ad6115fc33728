"""A gateway with the extra `litellm` and fake providers over real sockets."""

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
        deployment = entry("openai/gpt-4o", f"{fake.url}/v1", **params)
        async with gateway({"model_list": [deployment]}) as running:
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
    [request] = fake.requests
    assert answer.status == 200, answer.raw
    assert text_of(answer) == "Four."
    assert {event["model"] for event in answer.events or [answer.body]} == {"m"}
    assert answer.headers["x-unisono-backend"] == "openai-1"
    assert request.json["model"] == "gpt-4o"
    assert (request.json["temperature"], request.json["unknown"]) == (0.5, {"a": 1})
    assert request.headers["authorization"] == "Bearer sk-theirs"
    assert (request.headers["x-team"], request.headers["openai-organization"]) == ("blue", "org-1")
    assert answer.done is stream
    assert not any("usage" in event for event in answer.events)


@STREAM
async def test_a_lone_surrogate_of_a_provider_is_replaced(stream: bool) -> None:
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


async def test_the_anthropic_api_is_translated() -> None:
    async with (
        WireServer(anthropic_answer) as there,
        gateway({"model_list": [entry("anthropic/claude-sonnet-4-5", there.url)]}) as running,
    ):
        chat = await running.chat(model="m", max_tokens=7)
        response = await running.post("/v1/responses", b'{"model": "m", "input": "Hi"}')
        unknown_field = await running.chat(model="m", x_odd=1)
    assert text_of(chat) == "Hello from there."
    assert chat.body["usage"]["total_tokens"] == 7
    assert there.requests[0].headers["x-api-key"] == "sk-theirs"
    assert there.requests[0].json["max_tokens"] == 7
    assert response.body["output"][0]["content"][0]["text"] == "Hello from there."
    assert (unknown_field.status, unknown_field.body["error"]["param"]) == (400, "x_odd")


OVERRIDES = {
    "api_base": "http://127.0.0.1:9",
    "base_url": "http://127.0.0.1:9",
    "api_key": "sk-mine",
    "custom_llm_provider": "anthropic",
    "extra_headers": {"authorization": "Bearer sk-mine"},
    "headers": {"authorization": "Bearer sk-mine"},
    "extra_body": {"model": "another"},
}


@pytest.mark.parametrize(("sections", "status"), [({}, 400), ({"litellm_settings": {"drop_params": True}}, 200)])
async def test_a_field_without_a_counterpart_is_refused_unless_it_may_be_dropped(
    sections: dict[str, Any], status: int
) -> None:
    async with WireServer(anthropic_answer) as there:
        config = {"model_list": [entry("anthropic/claude-sonnet-4-5", there.url)], **sections}
        async with gateway(config) as running:
            answer = await running.chat(model="m", unknown_field={"a": 1})
    assert answer.status == status, answer.raw
    assert (len(there.requests) == 1) is (status == 200)
    assert not any("unknown_field" in request.json for request in there.requests)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mock_response": "not theirs"}, "mock_response"),
        ({"fallbacks": [{"model": "m", "api_base": "http://127.0.0.1:9"}]}, "fallbacks.0.api_base"),
    ],
)
async def test_what_is_not_forwarded_to_a_provider_is_refused(fields: dict[str, Any], named: str) -> None:
    async with openai() as (running, fake):
        answer = await running.chat(model="m", **fields)
    assert (answer.status, answer.body["error"]["param"]) == (400, named)
    assert not fake.requests


@pytest.mark.parametrize("field", OVERRIDES)
async def test_a_client_cannot_override_the_address_or_key_of_a_provider(field: str) -> None:
    async with openai() as (running, fake):
        answer = await running.chat(model="m", **{field: OVERRIDES[field]})
    assert (answer.status, text_of(answer)) == (200, "Four.")
    assert fake.requests[0].headers["authorization"] == "Bearer sk-theirs"
    assert fake.requests[0].json["model"] == "gpt-4o"


REFUSED: dict[str, tuple[Refusal, int, str]] = {
    "invalid request": (Refusal(400, b'{"error": {"message": "temperature is odd"}}'), 400, "backend_rejected_request"),
    "prompt too long": (
        Refusal(400, b'{"error": {"message": "This model\'s maximum context length is 1 tokens"}}'),
        400,
        "context_length_exceeded",
    ),
    "invalid API key": (Refusal(401, b'{"error": {"message": "bad key sk-theirs"}}'), 503, "backend_unavailable"),
    "busy": (Refusal(429, b"{}"), 503, "backend_overloaded"),
    "broken": (Refusal(500, b"{}"), 502, "backend_error"),
}


@STREAM
async def test_configuration_secrets_in_provider_errors_are_redacted(stream: bool) -> None:
    credentials = {"extra_headers": {"x-auth": "Token theirs-too"}, "organization": "org-123456"}
    async with openai(**credentials) as (running, fake):
        provider_message = f"sk-theirs Token theirs-too org-123456 {fake.url}/v1 {fake.url.partition('://')[2]}"
        fake.script = Refusal(400, json.dumps({"error": {"message": provider_message}}).encode())
        answer = await running.chat(model="m", stream=stream)
    message = answer.body["error"]["message"]
    assert message.startswith("the provider rejected the request: ")
    assert "theirs" not in message
    assert "org-1" not in message
    assert "127.0.0.1" not in message


MALFORMED: dict[str, dict[str, Any]] = {
    "messages as text": {"messages": "Hi"},
    "message as a number": {"messages": [5]},
    "content as a number": {"messages": [{"role": "user", "content": 5}]},
}


@pytest.mark.parametrize("fields", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_requests_do_not_open_the_circuit_breaker(fields: dict[str, Any]) -> None:
    async with openai() as (running, fake):
        for _ in range(5):
            rejected = await running.chat(model="m", **fields)
            assert (rejected.status, rejected.body["error"]["code"]) == (400, "backend_rejected_request"), rejected.raw
        ready = (await running.get("/health/readiness")).body
        answer = await running.chat(model="m")
    assert text_of(answer) == "Four."
    assert ready["models"] == {"ready": 1, "total": 1}
    assert len(fake.requests) == 1


@STREAM
async def test_an_unreachable_provider_is_reported_as_unavailable(stream: bool) -> None:
    async with gateway({"model_list": [entry("openai/gpt-4o", "http://127.0.0.1:9/v1")]}) as running:
        answer = await running.chat(model="m", stream=stream)
    assert (answer.status, answer.body["error"]["code"]) == (503, "backend_unavailable")


def cut_stream(*events: dict[str, Any]) -> Callable[[Seen], list[Step]]:
    """Return a script for a stream that ends after the given events without `[DONE]`."""
    written = [Write(b"data: %b\n\n" % json.dumps(event).encode(), framed=True) for event in events]
    return lambda _: chunked(b"text/event-stream", written)


def text_chunk(text: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "q", "choices": [choice]}


async def test_a_cut_stream_ends_with_an_error() -> None:
    async with (
        WireServer(cut_stream(text_chunk("Four"))) as there,
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


async def test_a_cut_tool_call_is_not_reported_as_complete() -> None:
    async with (
        WireServer(cut_stream(*BLOCKS)) as there,
        gateway({"model_list": [entry("anthropic/claude-sonnet-4-5", there.url)]}) as running,
    ):
        response = await running.post("/v1/responses", b'{"model": "m", "input": "Hi", "stream": true}')
        chat = await running.chat(model="m", stream=True)
    types = [event["type"] for event in response.events]
    assert (types[-1], response.events[-1]["code"]) == ("error", "backend_protocol_error")
    assert not {"response.function_call_arguments.done", "response.output_item.done", "response.completed"} & {*types}
    assert chat.events[-1]["error"]["code"] == "backend_protocol_error"


@pytest.mark.parametrize("cost", [None, 0.5], ids=["no cost", "cost of the provider"])
async def test_the_cost_field_is_only_that_of_the_provider(cost: float | None) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, **({} if cost is None else {"cost": cost})}
    end = {**text_chunk(""), "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    events = [text_chunk("Four"), end, {**text_chunk(""), "choices": [], "usage": usage}]
    async with (
        WireServer(cut_stream(*events)) as there,
        gateway({"model_list": [entry("openai/gpt-4o", f"{there.url}/v1")]}) as running,
    ):
        answer = await running.chat(model="m", stream=True, stream_options={"include_usage": True})
    assert answer.done
    assert answer.events[-1]["usage"]["total_tokens"] == 9
    assert answer.events[-1]["usage"].get("cost") == cost


async def test_a_response_without_input_is_rejected_by_the_gateway() -> None:
    async with openai() as (running, fake):
        answer = await running.post("/v1/responses", b'{"model": "m"}')
    assert (answer.status, answer.body["error"]["param"]) == (400, "input")
    assert fake.requests == []


async def test_an_empty_stream_fails_over_to_the_next_provider() -> None:
    async with WireServer(cut_stream()) as there, FakeOpenAi() as fake:
        first, second = (
            entry("openai/gpt-4o", f"{provider.url}/v1", order=n) for n, provider in enumerate((there, fake))
        )
        async with gateway({"model_list": [first, second]}) as running:
            answer = await running.chat(model="m", stream=True)
    assert text_of_events(answer) == "Four."
    assert answer.done


def text_of_events(answer: Answer) -> str:
    return "".join(c["delta"].get("content") or "" for event in answer.events for c in event.get("choices", ()))


def test_libraries_do_not_log_messages_or_credentials(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def send_requests() -> None:
        async with openai(extra_headers={"x-auth": "Token theirs-too"}) as (running, _):
            await running.chat(model="m", messages=[{"role": "user", "content": "a secret of mine"}])
            caplog.clear()
            await running.chat(model="m", messages=[{"role": "user", "content": "a secret of mine"}])

    asyncio.run(send_requests())
    assert "a secret of mine" not in caplog.text
    assert "theirs" not in caplog.text


@STREAM
@pytest.mark.parametrize(("refusal", "status", "code"), REFUSED.values(), ids=REFUSED)
async def test_provider_failures_have_the_error_codes_of_backends(
    refusal: Refusal, status: int, code: str, stream: bool
) -> None:
    async with openai(refusal) as (running, fake):
        answer = await running.chat(model="m", stream=stream)
    assert (answer.status, answer.body["error"]["code"]) == (status, code), answer.raw
    assert "sk-theirs" not in answer.raw.decode()
    # Temporary failures are retried on the same deployment, because there is no other.
    assert len(fake.requests) == (3 if code in {"backend_overloaded", "backend_error"} else 1)


async def test_a_wildcard_entry_passes_the_requested_model_name() -> None:
    async with FakeOpenAi() as fake:
        deployment = {**entry("openai/*", f"{fake.url}/v1"), "model_name": "openai/*"}
        async with gateway({"model_list": [deployment]}) as running:
            answer = await running.chat(model="openai/gpt-4.1-nano")
    assert answer.body["model"] == "openai/gpt-4.1-nano"
    assert fake.requests[0].json["model"] == "gpt-4.1-nano"


async def test_a_client_disconnect_closes_the_provider_stream() -> None:
    async with openai(OpenAiScript(words=("a",) * 100, delay_s=0.1)) as (running, fake):
        await running.chat(model="m")  # imports litellm
        body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}).encode()
        request = asyncio.ensure_future(running.post("/v1/chat/completions", body))
        await fake.asked(2)
        await asyncio.sleep(0.3)
        request.cancel()
        await fake.gone()


TIMEOUTS: dict[str, dict[str, Any]] = {
    "silence": {"stream_timeout": 0.5},
    "total": {"timeout": 3},
}


@pytest.mark.parametrize("params", TIMEOUTS.values(), ids=TIMEOUTS)
async def test_a_stream_has_timeouts(params: dict[str, Any]) -> None:
    delay_s = 0.2 if "timeout" in params else 5.0
    async with openai(OpenAiScript(words=("a",) * 100, delay_s=delay_s), **params) as (running, fake):
        answer = await running.chat(model="m", stream=True)
        await fake.gone()
    last_body = answer.events[-1] if answer.events else answer.body
    assert last_body["error"]["code"] == "backend_timeout"
    assert not answer.done


LITELLM_AT_START = """
import asyncio, json, sys
import unisono.app
from unisono.config import parse
app = unisono.app.build(parse(json.loads(sys.argv[1]), {}).config)
async def started():
    async with app.lifespan():
        print(json.dumps("litellm" in sys.modules))
asyncio.run(started())
"""


MODULES_OF_FIRST_REQUESTS = """
import asyncio, json, sys
from tests.providers.test_providers import openai
from unisono.passthrough.litellm_backend import _LOADED
async def asked():
    async with openai() as (running, fake):
        await _LOADED.get({})
        before = set(sys.modules)
        for stream in (False, True):
            await running.chat(model="m", stream=stream)
        print(json.dumps([len(before), sorted(set(sys.modules) - before)]))
asyncio.run(asked())
"""


def test_the_first_requests_import_few_modules_on_the_event_loop() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", MODULES_OF_FIRST_REQUESTS], capture_output=True, text=True, check=True, timeout=120
    )
    loaded, more = json.loads(completed.stdout.splitlines()[-1])
    assert loaded > 2000
    # A few small modules of the provider may be imported later.
    assert len(more) < 100, more
    assert not {"openai", "tiktoken", "tiktoken_ext"} & {name.partition(".")[0] for name in more}


def test_litellm_is_not_imported_before_the_first_request() -> None:
    config = {"model_list": [entry("openai/gpt-4o", "http://127.0.0.1:9")], "store": MEMORY}
    command = [sys.executable, "-c", LITELLM_AT_START, json.dumps(config)]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(completed.stdout) is False


def test_check_does_not_probe_a_provider(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"model_list": [entry("openai/gpt-4o", "http://127.0.0.1:9")], "store": MEMORY}))
    completed = CliRunner().invoke(main, ["check", "--config", str(file), "--json"])
    [report] = json.loads(completed.stdout)["deployments"]
    assert (completed.exit_code, report["kind"], report["usable"], report["findings"]) == (
        0,
        "litellm (openai)",
        True,
        [],
    )
    assert "sk-theirs" not in completed.output
    listed = CliRunner().invoke(main, ["models", "--config", str(file)]).output
    assert listed.splitlines()[1].split() == ["m", "openai-1", "litellm", "(openai)", "gpt-4o"]
