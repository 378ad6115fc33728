"""Prometheus metrics of a whole gateway: values, access, sums over workers and reloads."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.gateway import Gateway, config_of, gateway, message_of
from tests.e2e.hosting import calls, desk
from tests.e2e.replicas import replica
from tests.e2e.responses import ANSWER
from tests.fakes import FakeVllm, Refusal, VllmScript
from tests.mcp.conftest import Upstream
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
OUTPUT = ENCODING.encode_marked(
    "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
)
BROKEN_OUTPUT = ENCODING.encode_marked(
    "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hi.<|return|>"
)
MODEL = {"model": "gpt-oss"}


class Metrics:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        """Return the sum of all samples with these labels."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"unisono_{name}" and labels.items() <= sample.labels.items()
        )


async def read(url: str, **headers: str) -> Metrics:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics", headers=headers) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        return Metrics(await response.text())


@asynccontextmanager
async def gateway_with(fake: FakeVllm, **sections: Any) -> AsyncIterator[Gateway]:
    async with gateway(config_of(f"vllm@{fake.url}", **sections)) as running:
        yield running


async def test_a_request_is_counted_by_model_api_channel_and_backend() -> None:
    async with FakeVllm(tokens=OUTPUT) as fake, gateway_with(fake) as running:
        usage = message_of(await running.chat()).usage
        await running.post("/v1/responses", b'{"model": "gpt-oss", "input": "Hi", "stream": true}')
        await running.messages(stream=True)
        metrics = await read(running.url)
    for surface in ("chat", "responses", "messages"):
        labels = {**MODEL, "surface": surface}
        assert metrics("requests_total", **labels, outcome="completed", error="") == 1
        assert metrics("request_duration_seconds_count", **labels) == 1
        assert metrics("time_to_first_token_seconds_count", **labels) == 1
    assert metrics("requests_in_flight", **MODEL) == 0
    assert metrics("prompt_tokens_total", **MODEL) == 3 * usage["prompt_tokens"]
    assert metrics("generation_tokens_total", **MODEL) == 3 * usage["completion_tokens"] == 3 * len(OUTPUT)
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert metrics("generation_tokens_total", **MODEL, channel="analysis") == 3 * reasoning
    assert metrics("generation_tokens_total", **MODEL, channel="final") == 3 * len(ENCODING.encode_marked("Hello."))
    assert metrics("backend_requests_total", backend="vllm-1", outcome="ok") == 3
    assert metrics("inter_token_latency_seconds_count", backend="vllm-1") <= 3 * (len(OUTPUT) - 1)
    assert metrics("backend_up", backend="vllm-1") == 1
    assert metrics("http_requests_total", route="/v1/chat/completions", method="POST", status="200") == 1
    assert metrics("http_requests_total", route="/v1/responses", method="POST", status="200") == 1
    assert metrics("store_operation_duration_seconds_count", operation="create") >= 1


async def test_recoveries_and_failovers_are_counted() -> None:
    async with FakeVllm(tokens=BROKEN_OUTPUT) as good, FakeVllm() as bad:
        bad.script = lambda request: Refusal(503, b"{}")
        async with gateway(config_of(f"vllm@{bad.url}", f"vllm@{good.url}")) as running:
            for _ in range(6):
                response = await running.chat()
                assert response.headers["x-unisono-recoveries"] == "missing-end"
            metrics = await read(running.url)
    assert metrics("recoveries_total", rule="missing-end", backend="vllm-2", **MODEL) == 6
    failed = metrics("backend_requests_total", backend="vllm-1", outcome="backend_overloaded")
    assert 1 <= failed == metrics("failovers_total", **MODEL)


async def test_only_answers_that_another_backend_continued_count_as_failovers() -> None:
    refused = Refusal(500, b"{}")
    retried: list[Refusal | VllmScript] = [refused, VllmScript(tokens=OUTPUT)]
    async with FakeVllm(script=lambda _: retried.pop(0)) as fake, gateway_with(fake) as running:
        answer = await running.chat()
        metrics = await read(running.url)
    assert "x-unisono-failovers" not in answer.headers
    assert (message_of(answer).note["failovers"], metrics("failovers_total", **MODEL)) == (0, 0)
    async with (
        FakeVllm(script=lambda _: refused) as first,
        FakeVllm(script=lambda _: refused) as second,
        gateway(config_of(f"vllm@{first.url}", f"vllm@{second.url}")) as running,
    ):
        assert (await running.chat()).status == 502
        metrics = await read(running.url)
    assert metrics("failovers_total", **MODEL) == 0


async def test_failures_and_disconnects_are_separate_outcomes() -> None:
    async with FakeVllm() as fake, gateway_with(fake, router_settings={"num_retries": 0}) as running:
        fake.script = lambda request: Refusal(400, b'{"error": {"message": "no"}}')
        assert (await running.chat()).status == 400
        fake.script = lambda request: VllmScript(tokens=OUTPUT * 50, delay_s=0.02)
        body, head = '{"model": "gpt-oss", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}', {}
        head["content-type"] = "application/json"
        async with running.session.post(running.url + "/v1/chat/completions", data=body, headers=head) as response:
            await response.content.readany()
            assert (await read(running.url))("requests_in_flight", **MODEL) == 1
        async with asyncio.timeout(10):
            while (metrics := await read(running.url))("requests_in_flight", **MODEL):
                await asyncio.sleep(0.05)
    assert metrics("requests_total", outcome="failed", error="backend_rejected_request") == 1
    assert metrics("requests_total", outcome="left", error="") == 1


async def test_server_tools_are_counted_by_the_operators_label(upstream: Upstream) -> None:
    async with desk(upstream) as harness:
        harness.say(calls("echo", text="hello"), calls("echo", text="hello"), ANSWER)
        await harness.whole()
        metrics = await read(harness.gateway.url)
    assert metrics("tool_calls_total", server="docs", outcome="ok") == 2
    assert metrics("tool_call_duration_seconds_count", server="docs") == 2
    assert metrics("tool_output_tokens_total", **MODEL) > 0


async def test_client_input_never_becomes_a_label() -> None:
    async with FakeVllm(tokens=OUTPUT) as fake, gateway_with(fake) as running:
        await running.chat()
        before = await read(running.url)
        for odd in ("/v1/nothing/odd-1", "/odd-2", "/v1/models/odd-3", "/v1/responses/resp_odd-4"):
            await running.get(odd, x_odd="odd-5")
        await running.chat(model="odd-6")
        await running.chat(messages=[{"role": "user", "content": "odd-7"}], user="odd-8", prompt_cache_key="odd-9")
        async with running.session.request("ODDMETHOD", running.url + "/v1/models") as response:
            assert response.status >= 400
        after = await read(running.url)
    assert "odd" not in after.text.lower()
    known = {"/v1/models/{model:path}", "/v1/responses/{response_id}", "other", "/metrics", "/v1/models"}
    routes = {sample.labels["route"] for sample in after.samples if "route" in sample.labels}
    assert routes - {sample.labels["route"] for sample in before.samples if "route" in sample.labels} <= known


async def test_metrics_require_the_master_key_if_there_is_one() -> None:
    async with FakeVllm(tokens=OUTPUT) as fake:
        sections = {"general_settings": {"master_key": "sk-master-key"}}
        async with gateway_with(fake, **sections) as running:
            assert (await running.get("/metrics")).status == 401
            assert (await read(running.url, authorization="Bearer sk-master-key"))("build_info") == 1


async def test_metrics_can_be_disabled() -> None:
    async with FakeVllm(tokens=OUTPUT) as fake, gateway_with(fake, unisono={"metrics": False}) as running:
        await running.chat()
        assert (await running.get("/metrics")).status == 404


LISTENER_REQUESTS: Mapping[str, tuple[bytes, bytes]] = {
    "scrape": (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n", b"HTTP/1.1 200 OK"),
    "with a query": (b"GET /metrics?x=1 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200 OK"),
    "HEAD request": (b"HEAD /metrics HTTP/1.1\r\nHost: [::1]:9\r\n\r\n", b"HTTP/1.1 200 OK"),
    "foreign host name": (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"HTTP/1.1 403"),
    "no host": (b"GET /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 403"),
    "two hosts": (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"HTTP/1.1 403"),
    "another path": (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 404"),
    "another method": (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 405"),
    "not HTTP": (b"\x16\x03\x01\x02\r\n\r\n", b"HTTP/1.1 400"),
    "head too large": (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", b""),
}


@pytest.mark.parametrize(("sent", "expected"), LISTENER_REQUESTS.values(), ids=LISTENER_REQUESTS)
async def test_the_listener_serves_only_scrapes_of_this_machine(sent: bytes, expected: bytes) -> None:
    port = free_port()
    async with FakeVllm() as fake, gateway_with(fake, unisono={"metrics_listen": f"127.0.0.1:{port}"}):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        response = b""
        try:
            writer.write(sent)
            response = await reader.read()
        except ConnectionError:
            assert expected == b""
        writer.close()
        assert response.startswith(expected)
        assert (b"unisono_build_info" in response) == (sent.startswith(b"GET") and expected.endswith(b"OK"))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    "address", ["0.0.0.0:9464", "10.0.0.1:9464", "9464", "127.0.0.1:x", "gpu-1:9464", "127.0.0.1:99999"]
)
async def test_a_listener_on_a_reachable_address_is_rejected(address: str) -> None:
    async with FakeVllm() as fake:
        with pytest.raises(ConfigError, match=r"unisono\.metrics_listen"):
            async with gateway_with(fake, unisono={"metrics_listen": address}):
                pass


@pytest.mark.slow
async def test_every_worker_reports_the_sum_and_a_dead_worker_keeps_its_counts(
    tmp_path: Path,
) -> None:
    port = free_port()
    config = config_of("replay/demo", unisono={"metrics_listen": f"127.0.0.1:{port}"})
    config["store"] = {"url": f"sqlite:///{tmp_path}/state.db"}
    async with replica(tmp_path, config, "--workers", "2") as replica_:
        await send_chats(replica_.url, 8)
        async with asyncio.timeout(20):
            while {(await read(replica_.url))("requests_total", **MODEL) for _ in range(6)} != {8}:
                await asyncio.sleep(0.1)
        assert (await read(f"http://127.0.0.1:{port}"))("requests_total", **MODEL) == 8
        await kill_a_worker(replica_.pid)
        await replica_.logged("a worker exited; another one is started")
        await send_chats(replica_.url, 4)
        async with asyncio.timeout(30):
            while {(await read(replica_.url))("requests_total", **MODEL) for _ in range(6)} != {12}:
                await asyncio.sleep(0.1)
        assert (await read(replica_.url))("requests_in_flight", **MODEL) == 0
        replica_.write({**config, "unisono": {**config["unisono"], "log_level": "debug"}})
        replica_.signal(signal.SIGHUP)
        await replica_.logged("configuration", 1)
        await send_chats(replica_.url, 2)
        assert (await read(replica_.url))("requests_total", **MODEL) == 14


async def send_chats(url: str, count: int) -> None:
    """Send each request on a new connection, so that every worker gets some."""
    body = {**MODEL, "messages": [{"role": "user", "content": "Hi"}]}

    async def send_chat() -> None:
        async with aiohttp.ClientSession() as session:
            for _ in range(20):
                try:
                    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                        assert response.status == 200
                        await response.read()
                        return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.2)
            raise AssertionError("no worker accepted the connection")

    await asyncio.gather(*(send_chat() for _ in range(count)))


async def kill_a_worker(supervisor: int) -> None:
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    workers = [pid for pid in children if b"unisono.server.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(int(workers[0]), signal.SIGKILL)


async def test_metric_names_have_units_and_a_description() -> None:
    async with FakeVllm(tokens=OUTPUT) as fake, gateway_with(fake) as running:
        await running.chat()
        metrics = await read(running.url)
    for family in metrics.families:
        assert re.fullmatch(r"(unisono|gen_ai)_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_token_usage"))
