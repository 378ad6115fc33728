"""Spans sent to a real collector: their content, trace propagation, and collector failures."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.collector import Collector, collector, traced
from tests.e2e.gateway import Gateway, config_of, gateway, message_of
from tests.e2e.hosting import calls, hosts
from tests.e2e.keyed import bearing, keyed
from tests.e2e.responses import ANSWER, line
from tests.e2e.wires import WIRES
from tests.fakes import FakeVllm, Refusal, VllmScript
from tests.fakes.faults import reset_at, stall_at
from tests.listening import connected, listening
from tests.mcp.conftest import Upstream
from unisono.harmony.encoding import load_encoding

OUTPUT = load_encoding().encode_marked(
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
)
LOOK = {"name": "look", "arguments": '{"at": "map"}'}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
async def collector_() -> AsyncIterator[Collector]:
    async with collector() as running:
        yield running


async def test_a_request_has_spans_for_itself_its_step_and_its_attempt(collector_: Collector) -> None:
    async with FakeVllm(tokens=OUTPUT) as fake, gateway(config_of(f"vllm@{fake.url}", **traced(collector_))) as running:
        response = await running.chat(stream=True, stream_options={"include_usage": True})
        request_span, step_span, attempt_span = await collector_.settled(3)
        usage = message_of(response).usage
    assert [span.name for span in (request_span, step_span, attempt_span)] == ["chat gpt-oss", "step 0", "chat gpt-oss"]
    assert [span.kind for span in (request_span, step_span, attempt_span)] == ["SERVER", "INTERNAL", "CLIENT"]
    assert (request_span.parent, step_span.parent, attempt_span.parent) == ("", request_span.id, step_span.id)
    assert len({request_span.trace, step_span.trace, attempt_span.trace}) == 1
    assert (
        request_span.start
        <= step_span.start
        <= attempt_span.start
        <= attempt_span.end
        <= step_span.end
        <= request_span.end
    )
    assert abs(request_span.start / 1e9 - time.time()) < 60
    assert request_span.attributes["gen_ai.operation.name"] == "chat"
    assert request_span.attributes["gen_ai.request.model"] == "gpt-oss"
    assert request_span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert request_span.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert request_span.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert request_span.attributes["unisono.request.id"] == response.headers["x-request-id"]
    assert attempt_span.attributes["gen_ai.provider.name"] == "vllm"
    assert attempt_span.attributes["unisono.backend"] == "vllm-1"
    assert 0 < attempt_span.attributes["gen_ai.response.time_to_first_chunk"] < 10
    assert request_span.resource["service.name"] == "unisono"


async def test_a_clients_trace_continues_to_the_backend(collector_: Collector) -> None:
    async with FakeVllm(tokens=OUTPUT) as fake, gateway(config_of(f"vllm@{fake.url}", **traced(collector_))) as running:
        body = b'{"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}'
        head = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=a"}
        await running.post("/v1/chat/completions", body, **head)
        request_span, _, attempt_span = await collector_.settled(3)
        [backend_request] = [seen for seen in fake.requests if not seen.is_probe]
    assert (request_span.trace, request_span.parent) == (TRACE, PARENT)
    assert backend_request.headers["traceparent"] == f"00-{TRACE}-{attempt_span.id}-01"
    assert backend_request.headers["tracestate"] == "vendor=a"


INVALID_TRACEPARENTS = {
    "no traceparent": "x" * 55,
    "zero trace id": f"00-{'0' * 32}-{PARENT}-01",
    "invalid version": f"ff-{TRACE}-{PARENT}-01",
    "trailing data": f"00-{TRACE}-{PARENT}-01-x",
    "upper case": f"00-{TRACE.upper()}-{PARENT}-01",
}


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("parent", INVALID_TRACEPARENTS.values(), ids=INVALID_TRACEPARENTS)
async def test_an_invalid_traceparent_starts_a_new_trace(collector_: Collector, parent: str) -> None:
    async with FakeVllm(tokens=OUTPUT) as fake, gateway(config_of(f"vllm@{fake.url}", **traced(collector_))) as running:
        body = b'{"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}'
        await running.post("/v1/chat/completions", body, traceparent=parent)
        request_span, _, attempt_span = await collector_.settled(3)
        [backend_request] = [seen for seen in fake.requests if not seen.is_probe]
    assert request_span.trace.lower() != TRACE
    assert request_span.parent == ""
    assert backend_request.headers["traceparent"] == f"00-{request_span.trace}-{attempt_span.id}-01"


async def test_unsampled_requests_and_disabled_telemetry_send_no_spans(collector_: Collector) -> None:
    body = b'{"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}'
    async with FakeVllm(tokens=OUTPUT) as fake:
        async with gateway(config_of(f"vllm@{fake.url}", **traced(collector_))) as running:
            await running.post("/v1/chat/completions", body, traceparent=f"00-{TRACE}-{PARENT}-00")
            await running.chat()
            await collector_.settled(3)
        async with gateway(config_of(f"vllm@{fake.url}")) as running:
            await running.post("/v1/chat/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01")
        traceparents = [seen.headers.get("traceparent", "") for seen in fake.requests if not seen.is_probe]
    assert TRACE not in {span.trace for span in collector_.spans}
    assert traceparents[0].startswith(f"00-{TRACE}-")
    assert traceparents[0].endswith("-00")
    assert traceparents[2] == ""


async def test_every_attempt_is_a_span_with_its_error(collector_: Collector) -> None:
    async with FakeVllm(tokens=OUTPUT) as good, FakeVllm(tokens=OUTPUT) as bad:
        bad.script = lambda request: Refusal(503, b"{}")
        async with gateway(config_of(f"vllm@{bad.url}", f"vllm@{good.url}", **traced(collector_))) as running:
            for _ in range(4):
                assert (await running.chat()).status == 200
            await collector_.settled(12)
            while not [span for span in collector_.spans if span.error]:
                await running.chat()
                await asyncio.sleep(0.05)
    failed = next(span for span in collector_.spans if span.error and span.kind == "CLIENT")
    assert failed.attributes["error.type"] == failed.error == "backend_overloaded"
    assert failed.attributes["unisono.backend"] == "vllm-1"
    attempts = [span for span in collector_.spans if span.parent == failed.parent]
    assert [span.attributes["unisono.backend"] for span in attempts] == ["vllm-1", "vllm-2"]
    [request_span] = [span for span in collector_.spans if span.kind == "SERVER" and span.trace == failed.trace]
    assert (request_span.error, request_span.attributes["unisono.failovers"]) == ("", 1)


@asynccontextmanager
async def recording_relay(url: str, recorded: list[bytes]) -> AsyncIterator[str]:
    """Relay a server and record the data that clients send."""
    address = urlsplit(url)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: list[bytes] | None) -> None:
        while data := await reader.read(65536):
            if received is not None:
                received.append(data)
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert address.port is not None
        async with connected(address.port) as (server_reader, server_writer):
            await asyncio.gather(
                relay(reader, server_writer, recorded), relay(server_reader, writer, None), return_exceptions=True
            )

    async with listening(serve) as listener:
        yield listener.url + address.path


async def test_a_server_tool_call_is_a_span_and_propagates_the_trace(collector_: Collector, upstream: Upstream) -> None:
    recorded: list[bytes] = []
    async with recording_relay(upstream.urls["modern"], recorded) as url:
        sections = {**hosts(upstream), **traced(collector_)}
        sections["mcp_servers"]["docs"]["url"] = url
        async with line(WIRES["vllm"], **sections) as harness:
            harness.more = {"tools": [{"type": "mcp", "server_label": "docs"}]}
            harness.say(calls("echo", text="hello"), ANSWER)
            await harness.whole()
            await collector_.settled(6)
    [tool_span] = collector_.named("execute_tool echo")
    [request_span] = [span for span in collector_.spans if span.kind == "SERVER"]
    assert (tool_span.trace, tool_span.parent, tool_span.kind, tool_span.error) == (
        request_span.trace,
        request_span.id,
        "CLIENT",
        "",
    )
    assert tool_span.attributes["gen_ai.operation.name"] == "execute_tool"
    assert tool_span.attributes["mcp.method.name"] == "tools/call"
    assert tool_span.attributes["unisono.tool_server"] == "docs"
    assert {span.name for span in collector_.spans if span.parent == request_span.id} == {
        "step 0",
        "step 1",
        "execute_tool echo",
    }
    traceparents = re.findall(rb'"traceparent" *: *"([^"]*)"', b"".join(recorded))
    assert f"00-{request_span.trace}-{tool_span.id}-01".encode() in traceparents
    steps = collector_.named("step 0") + collector_.named("step 1")
    assert steps[0].end <= tool_span.start <= tool_span.end <= steps[1].start


async def test_a_disconnect_ends_the_span_with_an_error(collector_: Collector) -> None:
    async with (
        FakeVllm(tokens=OUTPUT * 200) as fake,
        gateway(config_of(f"vllm@{fake.url}", **traced(collector_))) as running,
    ):
        fake.script = lambda request: VllmScript(tokens=OUTPUT * 200, delay_s=0.02)
        body = '{"model": "gpt-oss", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}'
        head = {"content-type": "application/json"}
        async with running.session.post(running.url + "/v1/chat/completions", data=body, headers=head) as response:
            await response.content.readany()
        [request_span, *_] = await collector_.settled(3)
    assert (request_span.error, request_span.attributes["error.type"]) == ("cancelled", "cancelled")


FAILING_COLLECTORS = {"rejects": {"status": 503}, "never answers": {"stalls": True}}


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILING_COLLECTORS.values(), ids=FAILING_COLLECTORS)
async def test_a_failing_collector_loses_only_spans(collector_: Collector, failure: dict[str, Any]) -> None:
    for name, value in failure.items():
        setattr(collector_, name, value)
    settings = traced(collector_, max_queue=8, timeout_s=0.3)
    async with FakeVllm(tokens=OUTPUT) as fake, gateway(config_of(f"vllm@{fake.url}", **settings)) as running:
        for outcome in ("failed", "dropped"):
            # Requests arrive faster than the queue is emptied while the collector is slow.
            async with asyncio.timeout(30):
                while not re.search(rf'spans_total{{outcome="{outcome}"}} [1-9]', text := await metrics_of(running)):
                    started = time.monotonic()
                    assert (await running.chat()).status == 200
                    assert time.monotonic() - started < 2
    assert 'outcome="exported"' not in text


async def metrics_of(running: Gateway) -> str:
    async with running.session.get(f"{running.url}/metrics") as response:
        return await response.text()


async def test_a_span_has_the_sender_the_ids_and_the_sampling(collector_: Collector, tmp_path: Path) -> None:
    async with FakeVllm(tokens=OUTPUT) as fake:
        config = config_of(f"vllm@{fake.url}", **traced(collector_))
        config["model_list"][0]["unisono"] = {"price": {"input": 0.0, "output": 100.0}}
        async with keyed(config, tmp_path) as (running, keys):
            record, key = await keys.issue("red")
            answer = await running.chat_as(key, user="ann", temperature=0.5, top_p=0.9, seed=7, max_tokens=99, stop="x")
            await collector_.settled(3)
            conversation = (await running.post("/v1/conversations", b"{}", **bearing(key))).body["id"]
            body = json.dumps(
                {"model": "gpt-oss", "input": "Hi", "conversation": conversation, "stream": True}
            ).encode()
            response = await running.post("/v1/responses", body, **bearing(key))
            spans = await collector_.settled(6)
    first, second = (span.attributes for span in spans if span.kind == "SERVER")
    assert (first["unisono.key.id"], first["unisono.team.id"], first["user.id"]) == (record.id, "red", "ann")
    assert (first["gen_ai.response.id"], first["gen_ai.response.model"]) == (answer.body["id"], "gpt-oss")
    assert (first["gen_ai.request.temperature"], first["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (first["gen_ai.request.seed"], first["gen_ai.request.max_tokens"]) == (7, 99)
    assert first["gen_ai.request.stop_sequences"] == ["x"]
    assert first["gen_ai.usage.cost"] == pytest.approx(len(OUTPUT) * 100 / 1e6)
    assert second["gen_ai.response.id"] == response.events[0]["response"]["id"]
    assert second["gen_ai.conversation.id"] == second["session.id"] == conversation
    assert "user.id" not in second
    assert b"gen_ai.input.messages" not in b"".join(collector_.raw)


async def test_the_span_of_a_background_response_has_its_ids(collector_: Collector, tmp_path: Path) -> None:
    async with FakeVllm(tokens=OUTPUT) as fake:
        config = config_of(f"vllm@{fake.url}", **traced(collector_), store={"url": f"sqlite://{tmp_path}/state.db"})
        async with gateway(config) as running:
            conversation = (await running.post("/v1/conversations", b"{}")).body["id"]
            body = {"model": "gpt-oss", "input": "Hi", "conversation": conversation, "background": True}
            response = await running.post("/v1/responses", json.dumps(body).encode())
            spans = await collector_.settled(3)
    [found] = [span.attributes for span in spans if span.kind == "SERVER"]
    assert found["gen_ai.response.id"] == response.body["id"]
    assert found["gen_ai.conversation.id"] == found["session.id"] == conversation


async def test_a_refused_request_has_a_span(collector_: Collector, tmp_path: Path) -> None:
    async with (
        FakeVllm(tokens=OUTPUT) as fake,
        keyed(config_of(f"vllm@{fake.url}", **traced(collector_)), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue()
        unknown = await running.chat_as("sk-unknown")
        missing = await running.chat_as(key, model="missing")
        traceparent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await running.post("/v1/chat/completions", b"{", **bearing(key), **traceparent)
        await running.get("/health/readiness")
        spans = await collector_.settled(3)
    assert [span.kind for span in spans] == ["SERVER"] * 3
    assert [span.error for span in spans][:2] == ["invalid_api_key", "model_not_found"]
    assert spans[0].attributes["unisono.request.id"] == unknown.headers["x-request-id"]
    assert spans[1].name == "POST /v1/chat/completions"
    assert spans[1].attributes["unisono.request.id"] == missing.headers["x-request-id"]
    assert spans[1].attributes["gen_ai.request.model"] == "missing"
    assert spans[1].attributes["unisono.key.id"] == record.id
    assert spans[1].attributes["http.response.status_code"] == 404
    assert (spans[2].trace, spans[2].parent) == (TRACE, PARENT)


async def test_messages_are_in_spans_only_on_request(collector_: Collector) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "secret question"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": LOOK}]},
        {"role": "tool", "tool_call_id": "c1", "content": "secret result"},
    ]
    async with FakeVllm(tokens=OUTPUT) as fake:
        async with gateway(config_of(f"vllm@{fake.url}", **traced(collector_))) as running:
            assert (await running.chat(messages=messages)).status == 200
            await collector_.settled(3)
        without = b"".join(collector_.raw)
        async with gateway(config_of(f"vllm@{fake.url}", **traced(collector_, content=True))) as running:
            assert (await running.chat(messages=messages)).status == 200
            await collector_.settled(6)
        sections = {**traced(collector_, content=True), "litellm_settings": {"turn_off_message_logging": True}}
        collector_.raw.clear()
        async with gateway(config_of(f"vllm@{fake.url}", **sections)) as running:
            assert (await running.chat(messages=messages)).status == 200
            await collector_.settled(9)
    for text in (b"secret", b"Be brief", b"Hello."):
        assert text not in without
        assert text not in b"".join(collector_.raw)
    found = collector_.spans[3].attributes
    assert json.loads(found["gen_ai.system_instructions"]) == [{"type": "text", "content": "Be brief."}]
    call = {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": "map"}}
    result = {"type": "tool_call_response", "id": "c1", "response": "secret result"}
    assert json.loads(found["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "secret question"}]},
        {"role": "assistant", "parts": [call]},
        {"role": "tool", "parts": [result]},
    ]
    parts = [{"type": "reasoning", "content": "Hm."}, {"type": "text", "content": "Hello."}]
    assert json.loads(found["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": parts, "finish_reason": "stop"}
    ]


@pytest.mark.parametrize("leaves", [False, True], ids=["backend breaks", "client disconnects"])
async def test_a_span_of_an_unfinished_answer_has_its_text_and_usage(collector_: Collector, leaves: bool) -> None:
    last = len(OUTPUT) - 1
    script = VllmScript(tokens=OUTPUT, faults=(stall_at(last) if leaves else reset_at(last),))
    config = {**traced(collector_, content=True), "router_settings": {"num_retries": 0}}
    body = '{"model": "gpt-oss", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}'
    head = {"content-type": "application/json"}
    async with FakeVllm(script=lambda _: script) as fake, gateway(config_of(f"vllm@{fake.url}", **config)) as running:
        async with running.session.post(running.url + "/v1/chat/completions", data=body, headers=head) as response:
            async for line in response.content:
                if leaves and b"Hello" in line:
                    break
            received = "Hello" if leaves else "Hello."
        spans = await collector_.settled(3)
    [found] = [span.attributes for span in spans if span.kind == "SERVER"]
    [answer] = json.loads(found["gen_ai.output.messages"])
    assert [part["type"] for part in answer["parts"]] == ["reasoning", "text"]
    assert answer["parts"][1]["content"].startswith(received)
    assert found["gen_ai.usage.input_tokens"] > 0
    assert found["gen_ai.usage.output_tokens"] == last
    assert found["gen_ai.usage.reasoning.output_tokens"] == 2


async def test_the_content_of_a_span_is_bounded(collector_: Collector) -> None:
    messages = [{"role": "user", "content": f"{number} " + "ä" * 400} for number in range(20)]
    settings = traced(collector_, content=True, content_max_bytes=2000)
    async with FakeVllm(tokens=OUTPUT) as fake, gateway(config_of(f"vllm@{fake.url}", **settings)) as running:
        await running.chat(messages=messages)
        await running.chat(messages=[{"role": "user", "content": "a" * 1000 + "middle" + "z" * 1000}])
        spans = await collector_.settled(6)
    many, long = (span.attributes["gen_ai.input.messages"] for span in spans if span.kind == "SERVER")
    assert [each["parts"][0]["content"][:2] for each in json.loads(many)] == ["18", "19"]
    assert len(many.encode()) <= 2000
    [message] = json.loads(long)
    assert message["parts"][0]["content"].startswith("aaa")
    assert message["parts"][0]["content"].endswith("zzz")
    assert "middle" not in long
