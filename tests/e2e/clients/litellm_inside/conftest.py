"""LiteLLM with the Unisono provider, and LiteLLM's proxy with the documented configuration.

The backend is scripted and listens on a real socket. The provider runs in the process of the tests, the proxy in a
process of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[4]
# For the project's own fakes.
sys.path.insert(0, str(ROOT))
# LiteLLM otherwise looks prices up on the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
SCRIPTS = {
    "an answer": THOUGHT + "<|channel|>final<|message|>Here is the answer: naïve 日本.<|return|>",
    "a call": THOUGHT + CALL + '{"location":"Paris"}<|call|>',
    "two calls": THOUGHT
    + CALL
    + '{"location":"Paris"}<|call|><|start|>assistant'
    + CALL
    + '{"location":"Rome"}<|call|>',
    "a long answer": THOUGHT + "<|channel|>final<|message|>" + " word" * 1500 + "<|return|>",
}
SCRIPT_NAME = re.compile(r"script: ([a-z ]+)")
START_S = 90.0
PROXY_KEY = f"sk-{token_hex(24)}"
MODEL = "unisono/vllm/openai/gpt-oss-20b"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warnings of LiteLLM."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@dataclass
class Backend:
    """Fake vLLM server that writes the script named in the last user message of a request.

    `faults` are the faults of the next requests, in this order.
    """

    fake: Any
    url: str
    loop: asyncio.AbstractEventLoop
    faults: list[Any] = field(default_factory=list)

    @property
    def prompts(self) -> list[str]:
        from unisono.harmony.encoding import load_encoding

        bodies = (request.json for request in self.fake.requests if request.path == "/v1/completions")
        return [load_encoding().decode(body["prompt"]) for body in bodies]

    def answer(self, body: dict[str, Any]) -> Any:
        from tests.fakes import Refusal, VllmScript, constraints
        from unisono.harmony.encoding import load_encoding

        encoding = load_encoding()
        prompt = encoding.decode(body["prompt"])
        script_names = SCRIPT_NAME.findall(prompt)
        if not script_names:
            return VllmScript(tokens=encoding.encode_marked(SCRIPTS["an answer"]))
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Refusal):
                return fault
            return VllmScript(tokens=encoding.encode_marked(SCRIPTS[script_names[-1]]), faults=(fault,))
        if (constraint := constraints.vllm(body)) is not None:
            return VllmScript(tokens=encoding.encode_marked(constraint.example() + "<|return|>"))
        continued = prompt.rpartition("<|end|><|start|>assistant")[2]
        script = SCRIPTS[script_names[-1]]
        if "<|start|>functions." in prompt:
            script = SCRIPTS["an answer"]
        rest = script.removeprefix(continued) if script.startswith(continued) else script
        slow = {"delay_s": 0.02} if script_names[-1] == "a long answer" else {}
        return VllmScript(tokens=encoding.encode_marked(rest), **slow)


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    """Scripted backend on an event loop of its own, so that tests may block theirs."""
    from tests.fakes import FakeVllm

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    fake = FakeVllm(context=4096, model="openai/gpt-oss-20b")
    run(fake.__aenter__())
    backend = Backend(fake, fake.url, loop)
    fake.script = backend.answer
    yield backend
    run(fake.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture(scope="session")
def provider() -> Iterator[Any]:
    """Unisono's handler, registered with LiteLLM as documented."""
    import litellm

    from unisono.integrations.litellm_provider import handler

    litellm.suppress_debug_info = True
    litellm.custom_provider_map = [{"provider": "unisono", "custom_handler": handler}]
    yield handler
    handler.close()


@pytest.fixture
def make_request(provider: Any, backend: Backend) -> Callable[..., dict[str, Any]]:
    """Factory of arguments for `completion` that select a script of the backend."""

    def make_request(script: str, **fields: Any) -> dict[str, Any]:
        backend.faults.clear()
        messages = [{"role": "user", "content": f"script: {script}"}]
        return {"model": MODEL, "api_base": backend.url, "messages": messages, "num_retries": 0, **fields}

    return make_request


def documented_config(url: str) -> str:
    """Return the documented configuration of the proxy, with the URL of the backend."""
    text = (ROOT / "docs" / "litellm-provider.md").read_text()
    [config] = re.findall(r"```yaml\n(model_list:.*?)```", text, re.DOTALL)
    assert "http://localhost:8000" in config
    return str(config).replace("http://localhost:8000", url)


@pytest.fixture(scope="session")
def proxy(backend: Backend) -> Iterator[tuple[str, str]]:
    """URL and key of the proxy."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        config = Path(folder, "config.yaml")
        config.write_text(documented_config(backend.url))
        program = str(Path(sys.executable).with_name("litellm"))
        command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        environment = {**os.environ, "LITELLM_MASTER_KEY": PROXY_KEY}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment)
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}/health/liveliness", process)
            yield f"http://127.0.0.1:{port}", PROXY_KEY
        except TimeoutError:
            log.seek(0)
            pytest.fail(f"LiteLLM's proxy did not start: {log.read()[-3000:]}")
        finally:
            process.terminate()
            process.wait(30)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError
