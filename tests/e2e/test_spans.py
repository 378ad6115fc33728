"""Spans on the way to a real collector: what a request did, who was told of it, and what a collector cannot break."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.e2e.collector import Collector, collector, traced
from tests.e2e.gateway import Gateway, config_of, gateway, message_of
from tests.e2e.hosting import calls, hosts
from tests.e2e.responses import ANSWER, line
from tests.e2e.wires import WIRES
from tests.fakes import FakeVllm, Refusal, VllmScript
from tests.listening import connected, listening
from tests.mcp.conftest import Upstream, start_upstream
from unisono.harmony.encoding import load_encoding

SAID = load_encoding().encode_marked(
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
)
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
async def there() -> AsyncIterator[Collector]:
    async with collector() as found:
        yield found


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


async def test_a_request_is_a_span_with_its_step_and_its_try_below(there: Collector) -> None:
    async with FakeVllm(tokens=SAID) as fake, gateway(config_of(f"vllm@{fake.url}", **traced(there))) as running:
        answer = await running.chat(stream=True, stream_options={"include_usage": True})
        turn, step, tried = await there.settled(3)
        told = message_of(answer).usage
    assert [span.name for span in (turn, step, tried)] == ["chat gpt-oss", "step 0", "chat gpt-oss"]
    assert [span.kind for span in (turn, step, tried)] == ["SERVER", "INTERNAL", "CLIENT"]
    assert (turn.parent, step.parent, tried.parent) == ("", turn.id, step.id)
    assert len({turn.trace, step.trace, tried.trace}) == 1
    assert turn.start <= step.start <= tried.start <= tried.end <= step.end <= turn.end
    assert abs(turn.start / 1e9 - time.time()) < 60
    assert turn.attributes["gen_ai.operation.name"] == "chat"
    assert turn.attributes["gen_ai.request.model"] == "gpt-oss"
    assert turn.attributes["gen_ai.usage.input_tokens"] == told["prompt_tokens"]
    assert turn.attributes["gen_ai.usage.output_tokens"] == told["completion_tokens"]
    assert turn.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert turn.attributes["unisono.request.id"] == answer.headers["x-request-id"]
    assert tried.attributes["gen_ai.provider.name"] == "vllm"
    assert tried.attributes["unisono.backend"] == "vllm-1"
    assert 0 < tried.attributes["gen_ai.response.time_to_first_chunk"] < 10
    assert turn.resource["service.name"] == "unisono"


async def test_the_trace_of_a_client_goes_on_to_the_backend(there: Collector) -> None:
    async with FakeVllm(tokens=SAID) as fake, gateway(config_of(f"vllm@{fake.url}", **traced(there))) as running:
        body = b'{"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}'
        head = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=a"}
        await running.post("/v1/chat/completions", body, **head)
        turn, _, tried = await there.settled(3)
        [asked] = [seen for seen in fake.requests if not seen.is_probe]
    assert (turn.trace, turn.parent) == (TRACE, PARENT)
    assert asked.headers["traceparent"] == f"00-{TRACE}-{tried.id}-01"
    assert asked.headers["tracestate"] == "vendor=a"


HOSTILE = {
    "not one": "x" * 55,
    "no ids": f"00-{'0' * 32}-{PARENT}-01",
    "a version there is not": f"ff-{TRACE}-{PARENT}-01",
    "more behind it": f"00-{TRACE}-{PARENT}-01-x",
    "upper case": f"00-{TRACE.upper()}-{PARENT}-01",
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("parent", HOSTILE.values(), ids=HOSTILE)
async def test_what_is_no_trace_begins_one(there: Collector, parent: str) -> None:
    async with FakeVllm(tokens=SAID) as fake, gateway(config_of(f"vllm@{fake.url}", **traced(there))) as running:
        body = b'{"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}'
        await running.post("/v1/chat/completions", body, traceparent=parent)
        turn, _, tried = await there.settled(3)
        [asked] = [seen for seen in fake.requests if not seen.is_probe]
    assert turn.trace.lower() != TRACE
    assert turn.parent == ""
    assert asked.headers["traceparent"] == f"00-{turn.trace}-{tried.id}-01"


async def test_a_client_that_is_not_sampled_is_not_told_of_and_what_is_off_sends_nothing(there: Collector) -> None:
    body = b'{"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}'
    async with FakeVllm(tokens=SAID) as fake:
        async with gateway(config_of(f"vllm@{fake.url}", **traced(there))) as running:
            await running.post("/v1/chat/completions", body, traceparent=f"00-{TRACE}-{PARENT}-00")
            await running.chat()
            await there.settled(3)
        async with gateway(config_of(f"vllm@{fake.url}")) as running:
            await running.post("/v1/chat/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01")
        asked = [seen.headers.get("traceparent", "") for seen in fake.requests if not seen.is_probe]
    assert TRACE not in {span.trace for span in there.spans}
    assert asked[0].startswith(f"00-{TRACE}-")
    assert asked[0].endswith("-00")
    assert asked[2] == ""


async def test_every_try_is_a_span_and_says_what_it_failed_with(there: Collector) -> None:
    async with FakeVllm(tokens=SAID) as good, FakeVllm(tokens=SAID) as bad:
        bad.script = lambda asked: Refusal(503, b"{}")
        async with gateway(config_of(f"vllm@{bad.url}", f"vllm@{good.url}", **traced(there))) as running:
            for _ in range(4):
                assert (await running.chat()).status == 200
            await there.settled(12)
            while not [span for span in there.spans if span.error]:
                await running.chat()
                await asyncio.sleep(0.05)
    failed = next(span for span in there.spans if span.error and span.kind == "CLIENT")
    assert failed.attributes["error.type"] == failed.error == "backend_overloaded"
    assert failed.attributes["unisono.backend"] == "vllm-1"
    beside = [span for span in there.spans if span.parent == failed.parent]
    assert [span.attributes["unisono.backend"] for span in beside] == ["vllm-1", "vllm-2"]
    [turn] = [span for span in there.spans if span.kind == "SERVER" and span.trace == failed.trace]
    assert (turn.error, turn.attributes["unisono.failovers"]) == ("", 1)


@asynccontextmanager
async def tapped(url: str, heard: list[bytes]) -> AsyncIterator[str]:
    """The same server behind a relay that keeps what clients say."""
    at = urlsplit(url)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: list[bytes] | None) -> None:
        while data := await reader.read(65536):
            if kept is not None:
                kept.append(data)
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert at.port is not None
        async with connected(at.port) as (there, to):
            await asyncio.gather(relay(reader, to, heard), relay(there, writer, None), return_exceptions=True)

    async with listening(serve) as listener:
        yield listener.url + at.path


async def test_a_hosted_tool_is_a_span_and_its_server_is_told_of_it(there: Collector, upstream: Upstream) -> None:
    heard: list[bytes] = []
    async with tapped(upstream.urls["modern"], heard) as url:
        sections = {**hosts(upstream), **traced(there)}
        sections["mcp_servers"]["docs"]["url"] = url
        async with line(WIRES["vllm"], **sections) as here:
            here.more = {"tools": [{"type": "mcp", "server_label": "docs"}]}
            here.say(calls("echo", text="hello"), ANSWER)
            await here.whole()
            await there.settled(6)
    [tool] = there.named("execute_tool echo")
    [turn] = [span for span in there.spans if span.kind == "SERVER"]
    assert (tool.trace, tool.parent, tool.kind, tool.error) == (turn.trace, turn.id, "CLIENT", "")
    assert tool.attributes["gen_ai.operation.name"] == "execute_tool"
    assert tool.attributes["mcp.method.name"] == "tools/call"
    assert tool.attributes["unisono.tool_server"] == "docs"
    assert {span.name for span in there.spans if span.parent == turn.id} == {"step 0", "step 1", "execute_tool echo"}
    told = re.findall(rb'"traceparent" *: *"([^"]*)"', b"".join(heard))
    assert f"00-{turn.trace}-{tool.id}-01".encode() in told
    steps = there.named("step 0") + there.named("step 1")
    assert steps[0].end <= tool.start <= tool.end <= steps[1].start


async def test_a_client_that_leaves_ends_its_span(there: Collector) -> None:
    async with FakeVllm(tokens=SAID * 200) as fake, gateway(config_of(f"vllm@{fake.url}", **traced(there))) as running:
        fake.script = lambda asked: VllmScript(tokens=SAID * 200, delay_s=0.02)
        body = '{"model": "gpt-oss", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}'
        head = {"content-type": "application/json"}
        async with running.session.post(running.url + "/v1/chat/completions", data=body, headers=head) as response:
            await response.content.readany()
        [turn, *_] = await there.settled(3)
    assert (turn.error, turn.attributes["error.type"]) == ("cancelled", "cancelled")


BROKEN = {"refuses": {"status": 503}, "never answers": {"stalls": True}}


@pytest.mark.slow
@pytest.mark.parametrize("how", BROKEN.values(), ids=BROKEN)
async def test_a_collector_that_does_not_work_costs_spans_and_nothing_else(
    there: Collector, how: dict[str, Any]
) -> None:
    for name, value in how.items():
        setattr(there, name, value)
    settings = traced(there, max_queue=8, timeout_s=0.3)
    async with FakeVllm(tokens=SAID) as fake, gateway(config_of(f"vllm@{fake.url}", **settings)) as running:
        for outcome in ("failed", "dropped"):
            # While the collector is waited for, more comes than may wait.
            async with asyncio.timeout(30):
                while not re.search(rf'spans_total{{outcome="{outcome}"}} [1-9]', text := await shown(running)):
                    began = time.monotonic()
                    assert (await running.chat()).status == 200
                    assert time.monotonic() - began < 2
    assert 'outcome="exported"' not in text


async def shown(running: Gateway) -> str:
    async with running.session.get(f"{running.url}/metrics") as answer:
        return await answer.text()
