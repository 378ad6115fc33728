"""LiteLLM with Unisono inside, in front of a scripted backend on a real socket; and LiteLLM's proxy, as the docs have
it configured. Every check runs in one process with the engine."""

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
# The doubles are the project's own.
sys.path.insert(0, str(ROOT))
# Prices are looked up on the network otherwise.
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
NAMED = re.compile(r"script: ([a-z ]+)")
START_S = 90.0
PROXY_KEY = f"sk-{token_hex(24)}"
MODEL = "unisono/vllm/openai/gpt-oss-20b"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What LiteLLM warns of is its own affair."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@dataclass
class Backend:
    """A vLLM that writes the script a request's last user message names. `fails` is what becomes of the next one."""

    fake: Any
    url: str
    loop: asyncio.AbstractEventLoop
    fails: list[Any] = field(default_factory=list)

    @property
    def prompts(self) -> list[str]:
        from unisono.harmony.encoding import load_encoding

        asked = (request.json for request in self.fake.requests if request.path == "/v1/completions")
        return [load_encoding().decode(body["prompt"]) for body in asked]

    def answer(self, asked: dict[str, Any]) -> Any:
        from tests.fakes import Refusal, VllmScript, constraints
        from unisono.harmony.encoding import load_encoding

        encoding = load_encoding()
        prompt = encoding.decode(asked["prompt"])
        named = NAMED.findall(prompt)
        if not named:
            return VllmScript(tokens=encoding.encode_marked(SCRIPTS["an answer"]))
        if self.fails:
            failing = self.fails.pop(0)
            if isinstance(failing, Refusal):
                return failing
            return VllmScript(tokens=encoding.encode_marked(SCRIPTS[named[-1]]), faults=(failing,))
        if (held := constraints.vllm(asked)) is not None:
            return VllmScript(tokens=encoding.encode_marked(held.example() + "<|return|>"))
        said = prompt.rpartition("<|end|><|start|>assistant")[2]
        script = SCRIPTS[named[-1]]
        if "<|start|>functions." in prompt:
            script = SCRIPTS["an answer"]
        rest = script.removeprefix(said) if script.startswith(said) else script
        slow = {"delay_s": 0.02} if named[-1] == "a long answer" else {}
        return VllmScript(tokens=encoding.encode_marked(rest), **slow)


@pytest.fixture(scope="session")
def backend() -> Iterator[Backend]:
    """On a loop of its own, so that callers may block theirs."""
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
    """The handler, registered as the docs say."""
    import litellm

    from unisono.integrations.litellm_provider import handler

    litellm.suppress_debug_info = True
    litellm.custom_provider_map = [{"provider": "unisono", "custom_handler": handler}]
    yield handler
    handler.close()


@pytest.fixture
def asked(provider: Any, backend: Backend) -> Callable[..., dict[str, Any]]:
    """Arguments for `completion` that have the backend write a script."""

    def asked(script: str, **fields: Any) -> dict[str, Any]:
        backend.fails.clear()
        said = [{"role": "user", "content": f"script: {script}"}]
        return {"model": MODEL, "api_base": backend.url, "messages": said, "num_retries": 0, **fields}

    return asked


def config_in_the_docs(url: str) -> str:
    """The proxy's configuration, but for where the server is."""
    text = (ROOT / "docs" / "litellm-provider.md").read_text()
    [config] = re.findall(r"```yaml\n(model_list:.*?)```", text, re.DOTALL)
    assert "http://localhost:8000" in config
    return str(config).replace("http://localhost:8000", url)


@pytest.fixture(scope="session")
def proxy(backend: Backend) -> Iterator[tuple[str, str]]:
    """Its address and its key."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        config = Path(folder, "config.yaml")
        config.write_text(config_in_the_docs(backend.url))
        program = str(Path(sys.executable).with_name("litellm"))
        command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        environment = {**os.environ, "LITELLM_MASTER_KEY": PROXY_KEY}
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=folder, env=environment)
        try:
            _wait_for(f"http://127.0.0.1:{port}/health/liveliness", process)
            yield f"http://127.0.0.1:{port}", PROXY_KEY
        except TimeoutError:
            said.seek(0)
            pytest.fail(f"LiteLLM's proxy did not start: {said.read()[-3000:]}")
        finally:
            process.terminate()
            process.wait(30)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError
