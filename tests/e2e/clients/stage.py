"""Gateways for the SDK suites: one with a real engine, one with a scripted backend.

Runs in the project's own environment, in its own process: `python -m tests.e2e.clients.stage`. It writes one line of
JSON with the addresses when all gateways are ready. It stops everything when its stdin is closed, so also when its
parent dies. The exit code is 1 if a gateway did not start, did not stop or logged an error.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.e2e.clients.scripts import script_of
from tests.fakes import FakeVllm
from tests.fakes.openai_modes import FakeModes, shared_words, word_vector
from tests.mcp.conftest import start_upstream

UNISONO = Path(sys.executable).with_name("unisono")
MASTER_KEY = "sk-the-only-key"
START_S = 60.0
END_S = 15.0
# Models that generate no text, with their modes.
OTHER_MODES = {
    "embedder": "embedding",
    "moderator": "moderation",
    "painter": "image_generation",
    "speaker": "audio_speech",
    "listener": "audio_transcription",
}
# Models for retrieval, which compare texts by their words.
RETRIEVAL_MODES = {"word-vectors": "embedding", "word-ranker": "rerank"}
ADDRESS = re.compile(rb"listens on (http://\S+)/v1")
TOOL_ADDRESS = re.compile(rb" at (http://\S+)")
# The only page that the browser tool can open, `capital.md`.
PAGE = "# Capitals\n\nParis is the capital of France.\n"


class Broken(Exception):
    """Failure of a gateway to start, stop or run without errors."""


def demo_config() -> dict[str, Any]:
    return {
        "model_list": [{"model_name": "gpt-oss-demo", "litellm_params": {"model": "mlx/demo"}}],
        "router_settings": {"model_group_alias": {"gpt-4o": "gpt-oss-demo"}},
        "store": {"url": "memory://"},
        # The date is part of every prompt, and a model this small answers differently on some days.
        "unisono": {"current_date": "2026-01-02"},
    }


def scripted_config(url: str, free: str, others: str, words: str, closed: str, tools: dict[str, str]) -> dict[str, Any]:
    """Return a configuration with one scripted backend under several names and settings.

    `free` is a backend without constrained decoding, `others` and `words` are servers of models that generate no text,
    `closed` is an address that refuses connections. `tools` maps labels to addresses of tool servers. `guarded`
    requires approval of every call.
    """

    def model(name: str, base: str = url, *, info: Any = None, ours: Any = None, **params: Any) -> dict[str, Any]:
        entry = {"model_name": name, "litellm_params": {"model": "vllm/tiny", "api_base": base, **params}}
        return entry | {"model_info": {"harmony": True, **(info or {})}, "unisono": ours or {}}

    return {
        "model_list": [
            # Scripts give their output again for every request, so a turn cannot be continued.
            model("scripted", ours={"recoveries": {"dangling-preamble": False}}),
            model("openai/gpt-oss-20b"),
            model("one-at-a-time", max_parallel_requests=1),
            model("impatient", stream_timeout=0.5),
            model("small", info={"max_input_tokens": 300}),
            model("early", ours={"stream_tool_arguments": True}),
            model("plain-reasoning", ours={"reasoning_field": "reasoning"}),
            model("free", free),
            model("down", closed),
            *(model(name, others, info={"mode": mode, "harmony": False}) for name, mode in OTHER_MODES.items()),
            *(model(name, words, info={"mode": mode, "harmony": False}) for name, mode in RETRIEVAL_MODES.items()),
        ],
        "mcp_servers": {
            label: {"url": address, "require_approval": "always" if label == "guarded" else "never"}
            for label, address in tools.items()
        },
        "general_settings": {"master_key": MASTER_KEY},
        # Backends fail on purpose here, so the circuit breaker must stay closed. Clients must see failures without
        # retries.
        "router_settings": {"allowed_fails": 10_000, "num_retries": 0},
        "store": {"url": "memory://"},
        "unisono": {
            "max_body_bytes": 500_000,
            "max_queue": 2,
            "builtin_tools": {"browser": "pages", "python": "runs"},
            "pause_after_rounds": 2,
            "raw_completions": True,
            # Schemathesis tries an invalid key with each operation.
            "failed_authentication": {"max_per_minute": 0},
        },
    }


@asynccontextmanager
async def served(folder: Path, name: str, config: dict[str, Any]) -> AsyncIterator[str]:
    """Run `unisono serve` on a free port and yield its address. Raises Broken."""
    path, log_path = folder / f"{name}.json", folder / f"{name}.log"
    path.write_text(json.dumps(config))
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(UNISONO, "serve", "--config", path, "--port", "0"), stdout=asyncio.subprocess.PIPE, stderr=log
        )
    try:
        yield await address_of(process, lambda: f"{name} did not start: {log_path.read_text()}")
    finally:
        code = await ended(process)
    if code != 0:
        raise Broken(f"{name} ended with {code}: {log_path.read_text()}")
    if faults := [line for line in log_path.read_text().splitlines() if '"level": "error"' in line]:
        raise Broken(f"{name} logged errors: " + "\n".join(faults))


async def address_of(process: asyncio.subprocess.Process, message: Callable[[], str]) -> str:
    assert process.stdout is not None
    address = ""
    try:
        async with asyncio.timeout(START_S):
            async for line in process.stdout:
                if found := ADDRESS.search(line):
                    address = found[1].decode()
                if line.startswith(b"Ctrl-C"):
                    return address
    except TimeoutError:
        pass
    raise Broken(message())


async def ended(process: asyncio.subprocess.Process) -> int:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(END_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
    assert process.returncode is not None
    return process.returncode


@asynccontextmanager
async def tool_server(*arguments: str | Path) -> AsyncIterator[str]:
    """Run `unisono mcp serve` on a free port and yield its address. Raises Broken."""
    process = await asyncio.create_subprocess_exec(
        *(UNISONO, "mcp", "serve", *arguments, "--port", "0"), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield await tool_address_of(process, f"the server {arguments[0]} did not start")
    finally:
        await ended(process)


async def tool_address_of(process: asyncio.subprocess.Process, message: str) -> str:
    assert process.stdout is not None
    with suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            async for line in process.stdout:
                if found := TOOL_ADDRESS.search(line):
                    return found[1].decode()
    raise Broken(message)


async def tool_servers(stack: AsyncExitStack, folder: Path) -> dict[str, str]:
    """Start tool servers and return their addresses by label.

    Two servers use the MCP SDK. The other two come with the gateway: a browser of a folder, and Python.
    """
    _, upstream = stack.enter_context(start_upstream(folder))
    pages = folder / "pages"
    pages.mkdir()
    (pages / "capital.md").write_text(PAGE)
    async with asyncio.TaskGroup() as starting:
        browser = starting.create_task(stack.enter_async_context(tool_server("browser", "--folder", pages)))
        python = starting.create_task(stack.enter_async_context(tool_server("python")))
    hosted = {"docs": upstream.urls["modern"], "guarded": upstream.urls["legacy"]}
    return {**hosted, "pages": browser.result(), "runs": python.result()}


@contextmanager
def nobody_at() -> Iterator[str]:
    """Yield an address that refuses connections and stays reserved."""
    with socket.socket() as closed:
        # Bound, but not listening.
        closed.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{closed.getsockname()[1]}"


async def until_told() -> None:
    """Return when stdin is closed, or at SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def read() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(stop.set)

    # A daemon thread, because SIGTERM must end the process while it still reads.
    threading.Thread(target=read, daemon=True).start()
    await stop.wait()


async def perform() -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-clients-")))
        fake = await stack.enter_async_context(FakeVllm(script=script_of()))
        free = await stack.enter_async_context(FakeVllm(script=script_of()))
        free.patient.constrains = False
        others = await stack.enter_async_context(FakeModes())
        words = await stack.enter_async_context(FakeModes(vector=word_vector, relevance=shared_words))
        closed = stack.enter_context(nobody_at())
        async with asyncio.TaskGroup() as starting:
            demo = starting.create_task(stack.enter_async_context(served(folder, "demo", demo_config())))
            tools = await tool_servers(stack, folder)
            scripted = starting.create_task(
                stack.enter_async_context(
                    served(
                        folder,
                        "scripted",
                        scripted_config(fake.url, free.url, others.url, words.url, closed, tools),
                    )
                )
            )
        addresses = {"demo": demo.result(), "scripted": scripted.result(), "key": MASTER_KEY, "tools": tools}
        print(json.dumps(addresses), flush=True)
        await until_told()


def run(perform: Callable[[], Coroutine[Any, Any, None]]) -> None:
    # Ctrl-C reaches the whole process group, but only the end of stdin must stop this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(perform())
    except* Broken as error:
        sys.exit("\n".join(map(str, error.exceptions)))


if __name__ == "__main__":
    run(perform)
