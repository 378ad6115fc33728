"""A real Phoenix receives the spans, and its API returns inputs and outputs only if content is enabled."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.e2e.gateway import config_of, gateway
from tests.fakes import FakeVllm
from tests.phoenix.conftest import PHOENIX
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(600)

OUTPUT = load_encoding().encode_marked(
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>the answer<|return|>"
)
START_S = 400.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("phoenix"), free_port()
    settings = {
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([PHOENIX, "serve"], env={**os.environ, **settings}, stdout=log, stderr=log) as process,
    ):
        try:
            wait_for(port, process, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


async def sent_spans(phoenix: str, question: str, **otel: Any) -> list[dict[str, Any]]:
    """Send a request through a gateway, and return its spans from Phoenix's API."""
    settings = {"unisono": {"otel": {"endpoint": f"{phoenix}/v1/traces", "timeout_s": 60, **otel}}}
    async with FakeVllm(tokens=OUTPUT) as fake, gateway(config_of(f"vllm@{fake.url}", **settings)) as running:
        messages = [{"role": "user", "content": question}]
        answer = await running.chat(messages=messages, user="ann", temperature=0.5)
        assert answer.status == 200
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        while True:
            async with session.get(f"{phoenix}/v1/projects/default/spans", params={"limit": 100}) as response:
                spans = (await response.json())["data"] if response.status == 200 else []
            wanted = answer.headers["x-request-id"]
            traces = [span["context"]["trace_id"] for span in spans if wanted in str(span["attributes"])]
            found = [span for span in spans if span["context"]["trace_id"] in traces]
            if len(found) == 3:
                return found
            await asyncio.sleep(0.5)


async def test_phoenix_shows_inputs_and_outputs_only_on_request(phoenix: str) -> None:
    assert urlsplit(phoenix).hostname == "127.0.0.1"
    plain = await sent_spans(phoenix, "question without content")
    assert "question" not in str(plain)
    assert "the answer" not in str(plain)
    spans = await sent_spans(phoenix, "question with content", content=True)
    assert sorted(span["name"] for span in spans) == ["chat gpt-oss", "chat gpt-oss", "step 0"]
    [span] = [span for span in spans if "unisono.request.id" in span["attributes"]]
    assert span["span_kind"] == "LLM"
    attributes = span["attributes"]
    assert attributes["llm.input_messages.0.message.role"] == "user"
    assert "question with content" in inputs(attributes)
    assert "the answer" in outputs(attributes)
    assert attributes["llm.model_name"] == "gpt-oss"
    assert attributes["llm.token_count.completion"] == len(OUTPUT)
    assert '"temperature": 0.5' in attributes["llm.invocation_parameters"]


def inputs(attributes: dict[str, Any]) -> str:
    return str([value for name, value in attributes.items() if name.startswith("llm.input_messages")])


def outputs(attributes: dict[str, Any]) -> str:
    return str([value for name, value in attributes.items() if name.startswith("llm.output_messages")])
