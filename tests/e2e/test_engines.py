"""Real engines with the demo model behind the whole gateway.

They are mlx-lm in an engine process of the gateway, and mlx_lm.server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer, Gateway, Message, config_of, gateway, message_of
from tests.example_tool import EXAMPLE_MESSAGE, EXAMPLE_TOOL
from unisono_adapters import demo

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

# The date is part of every prompt, and a model this small answers differently on some days.
PINNED = {"current_date": "2026-01-02"}

SHORT = "The user wants a short reply."
PARIS = ("get_weather", '{"location":"Paris"}')
ENDLESS = [{"role": "user", "content": "Repeat la forever."}]


@dataclass
class Site:
    """A gateway with one engine; `pid` is the engine's process."""

    kind: str
    gateway: Gateway
    server: int | None = None

    @property
    def pid(self) -> int:
        [pid] = [self.server] if self.server is not None else children_that_run("mlx.engine")
        return pid

    def rules(self, *rules: str) -> list[str]:
        """Return the expected recoveries; mlx_lm.server hides the stop token, which is one more."""
        return list(rules) if self.kind == "mlx" else [*rules, "restored-stop"]

    async def ask(self, content: str | list[Any], **fields: Any) -> Answer:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return await self.gateway.chat(messages=messages, temperature=0, **fields)

    async def ask_both_ways(self, content: str | list[Any], **fields: Any) -> Message:
        """Return the answer, which must be the same with and without streaming."""
        whole, stream = await asyncio.gather(
            self.ask(content, **fields),
            self.ask(content, stream=True, stream_options={"include_usage": True}, **fields),
        )
        assert (whole.status, stream.status) == (200, 200)
        assert stream.done
        whole_message, stream_message = message_of(whole), message_of(stream)
        assert without_cache(whole_message) == without_cache(stream_message)
        return whole_message


def without_cache(message: Message) -> tuple[Any, ...]:
    """Return all parts of a message except the number of cached tokens."""
    usage = {name: count for name, count in message.usage.items() if name != "prompt_tokens_details"}
    return message.content, message.reasoning, message.calls, message.finish_reason, message.note, usage


# The start of mlx_lm.server is slow. Quick tests of this backend kind use a fake of the server.
ENGINES = ["mlx", pytest.param("mlx_server", marks=pytest.mark.slow)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    if request.param == "mlx":
        async with gateway(config_of("mlx/demo", unisono=PINNED)) as running:
            yield Site("mlx", running)
        return
    log = tmp_path_factory.mktemp("mlx_lm.server") / "log"
    async with mlx_lm_server(log) as (url, pid), gateway(config_of(f"mlx_server@{url}", unisono=PINNED)) as running:
        yield Site("mlx_server", running, pid)


@asynccontextmanager
async def mlx_lm_server(log: Path) -> AsyncIterator[tuple[str, int]]:
    """Run mlx_lm.server with the demo model; yield its address and process id."""
    folder = await asyncio.to_thread(demo.expand, demo.default_folder())
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    program = Path(sys.executable).parent / "mlx_lm.server"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            program, "--model", folder, "--host", "127.0.0.1", "--port", str(port),
            env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=output, stderr=output,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while not await is_healthy(session, url):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        yield url, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def is_healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


@dataclass(frozen=True)
class Expected:
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    rules: tuple[str, ...] = ()


# Answers of the model, and the recoveries that they need on an ids wire.
CHATS: dict[str, Expected] = {
    "Hello!": Expected("Hello! How can I help you today?", SHORT),
    "What is 2 + 2?": Expected("2 + 2 is 4.", SHORT),
    "Tell me a joke.": Expected("Why did the parser cross the road? To reach the final channel.", SHORT),
}
TOOL_CHATS: dict[str, Expected] = {
    EXAMPLE_MESSAGE: Expected(None, "We need the weather in Paris. Use get_weather.", (PARIS,)),
    "Make a plan first, then check the weather in Oslo.": Expected(
        "I will check the weather in Oslo first.",
        "The user wants a plan.",
        (("get_weather", '{"location":"Oslo"}'),),
    ),
    "glitch no channel": Expected("The channel is missing.", rules=("missing-channel",)),
    "glitch no header": Expected(" The whole header is missing.", rules=("no-markup",)),
    "glitch end instead of return": Expected("This message ends with end.", rules=("endoftext-stop",)),
    "glitch analysis call": Expected(calls=(PARIS,)),
    "glitch recipient in channel": Expected(calls=(PARIS,), rules=("marker-in-recipient",)),
    "glitch unknown channel": Expected("A channel that does not exist.\n\nDone.", rules=("unknown-channel",)),
    "glitch only analysis": Expected("Done.", "I think, and then I stop.", rules=("analysis-only",)),
    "glitch double start": Expected("Done.", "Start twice.", rules=("doubled-start",)),
    "glitch missing start": Expected("Done.", "No start token follows.", rules=("missing-start",)),
}
# On the text wire, the server drops a leading space and an end of text is invisible. The restored stop is reported
# before recoveries that are known only at the end.
ON_TEXT: Mapping[str, tuple[str | None, list[str]]] = {
    "glitch no header": ("The whole header is missing.", ["restored-stop", "no-markup"]),
    "glitch end instead of return": ("This message ends with end.", []),
    "glitch only analysis": ("Done.", ["restored-stop", "analysis-only"]),
}


@pytest.mark.slow
async def test_real_engine_passes_its_probe(site: Site) -> None:
    async with asyncio.timeout(30):
        while (health := await site.gateway.get("/health/readiness")).status != 200:
            await asyncio.sleep(0.05)
    assert health.body == {"status": "ready", "models": {"ready": 1, "total": 1}, "reasons": []}


@pytest.mark.slow
@pytest.mark.parametrize("user", [*CHATS, *TOOL_CHATS])
async def test_model_output_gives_the_same_answer_whole_and_streamed(site: Site, user: str) -> None:
    expected = CHATS.get(user) or TOOL_CHATS[user]
    content, rules = expected.content, site.rules(*expected.rules)
    if site.kind == "mlx_server":
        content, rules = ON_TEXT.get(user, (content, rules))
    message = await site.ask_both_ways(user, **({"tools": [EXAMPLE_TOOL]} if user in TOOL_CHATS else {}))
    assert (message.content, message.reasoning, message.calls) == (content, expected.reasoning, list(expected.calls))
    assert message.finish_reason == ("tool_calls" if expected.calls else "stop")
    assert message.note["recoveries"] == rules


@pytest.mark.slow
async def test_playground_example_calls_its_tool_with_any_seed(site: Site) -> None:
    # The playground sends no temperature, so every request samples. mlx_lm.server processes requests one by one.
    seeds = range(8 if site.kind == "mlx" else 2)
    messages = [{"role": "user", "content": EXAMPLE_MESSAGE}]
    answers = await asyncio.gather(
        *(site.gateway.chat(messages=messages, tools=[EXAMPLE_TOOL], seed=seed) for seed in seeds)
    )
    assert [message_of(answer).calls for answer in answers] == [[PARIS]] * len(seeds)


@pytest.mark.slow
async def test_call_with_invalid_arguments_is_regenerated(site: Site) -> None:
    message = message_of(await site.ask("glitch bad json", tools=[EXAMPLE_TOOL], max_tokens=400))
    assert "regenerated-call" in message.note["recoveries"]
    for name, arguments in message.calls:
        assert name == "get_weather"
        # An engine without constrained decoding may fail again; then its call is returned as it is.
        assert site.kind == "mlx_server" or "location" in json.loads(arguments)


@pytest.mark.slow
async def test_tool_round_trip_ends_in_an_answer(site: Site) -> None:
    answer, calls = await with_tools(site, "What is the weather in Paris?", ["18 degrees, sunny"])
    assert calls == ["Paris"]
    assert (answer.reasoning, answer.content) == ("We have the weather.", "It is sunny in Paris with 18 degrees.")


@pytest.mark.slow
async def test_two_sequential_calls_end_in_an_answer(site: Site) -> None:
    user = "Compare the weather in London and Tokyo."
    answer, calls = await with_tools(site, user, ["18 degrees, sunny", "11 degrees, rainy"])
    assert calls == ["London", "Tokyo"]
    assert (answer.reasoning, answer.content) == ("We have both.", "I compared London and Tokyo.")


async def with_tools(site: Site, user: str, results: list[str]) -> tuple[Message, list[str]]:
    """Answer one call per result; return the final answer and the requested places.

    The prompt of every turn extends the engine's cache, so almost nothing is processed again.
    """
    messages: list[Any] = [{"role": "user", "content": user}]
    places: list[str] = []
    for result in results:
        body = (await site.ask(messages, tools=[EXAMPLE_TOOL])).body
        [call] = body["choices"][0]["message"]["tool_calls"]
        places.append(call["function"]["arguments"].removeprefix('{"location":"').removesuffix('"}'))
        messages += [
            body["choices"][0]["message"],
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
        generated_to = body["usage"]["total_tokens"]
    answer = message_of(await site.ask(messages, tools=[EXAMPLE_TOOL]))
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] >= generated_to - 8
    return answer, places


@pytest.mark.slow
async def test_token_limit_ends_an_answer(site: Site) -> None:
    message = await site.ask_both_ways("Repeat la forever.", max_tokens=20)
    assert (message.reasoning, message.finish_reason) == ("Sing.", "length")
    assert message.content is not None
    assert set(message.content.split()) == {"la"}
    assert message.usage["completion_tokens"] == 20


@pytest.mark.slow
async def test_stop_string_ends_an_answer(site: Site) -> None:
    message = await site.ask_both_ways("Count to 30.", stop=["7,"])
    assert (message.reasoning, message.content, message.finish_reason) == ("Count.", "1, 2, 3, 4, 5, 6, ", "stop")


@pytest.mark.slow
async def test_four_concurrent_requests_are_answered(site: Site) -> None:
    users = [*CHATS, "What is the weather in Paris?"]
    answers = await asyncio.gather(
        *(site.ask(user, **({"tools": [EXAMPLE_TOOL]} if user in TOOL_CHATS else {})) for user in users)
    )
    for user, answer in zip(users, answers, strict=True):
        expected = CHATS.get(user) or TOOL_CHATS[user]
        message = message_of(answer)
        assert (message.content, message.reasoning, message.calls) == (
            expected.content, expected.reasoning, list(expected.calls)
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processor time is read from Linux's /proc")
async def test_client_disconnect_leaves_an_idle_engine(site: Site) -> None:
    async with endless(site) as response:
        await some_of(response)
        assert await works(site.pid)
    async with asyncio.timeout(10):
        while await works(site.pid):
            pass
    # Without streaming, the client disconnects while it waits for the answer.
    task = asyncio.create_task(site.ask(ENDLESS))
    await asyncio.sleep(0.3)
    assert await works(site.pid)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(10):
        while await works(site.pid):
            pass


@pytest.mark.slow
async def test_answer_continues_after_an_engine_restart_and_fails_without_one(site: Site) -> None:
    killed = site.pid
    async with endless(site) as response:
        received = await some_of(response)
        os.kill(killed, signal.SIGKILL)
        if site.kind == "mlx":
            # The adapter restarts its engine.
            async with asyncio.timeout(20):
                while site_pid(site) in (None, killed):
                    assert b'"error"' not in await response.content.readany()
                for _ in range(50):
                    assert b'"error"' not in await response.content.readany()
        else:
            # Only an operator restarts this server. The gateway retries a few times, with growing pauses.
            async with asyncio.timeout(60):
                rest = await response.read()
            events = (received + rest).rstrip().split(b"\n\n")
            assert events[-1].startswith(b'data: {"error":{')
            assert b"[DONE]" not in received + rest
    again = await site.ask("Hello!")
    if site.kind == "mlx":
        assert message_of(again).content == CHATS["Hello!"].content
    else:
        assert again.status == 503
        assert again.body["error"]["code"] == "backend_unavailable"


def site_pid(site: Site) -> int | None:
    """Return the process id of the engine if exactly one runs."""
    pids = children_that_run("mlx.engine")
    return pids[0] if len(pids) == 1 else None


@asynccontextmanager
async def endless(site: Site) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield an endless stream and close it afterwards."""
    body = {"model": "gpt-oss", "messages": ENDLESS, "temperature": 0, "stream": True}
    url = f"{site.gateway.url}/v1/chat/completions"
    async with site.gateway.session.post(url, json=body) as response:
        try:
            yield response
        finally:
            response.close()


async def some_of(response: aiohttp.ClientResponse) -> bytes:
    read = b""
    async with asyncio.timeout(10):
        while read.count(b'"content":" la"') < 5:
            read += await response.content.readany()
    return read


async def works(pid: int, within_s: float = 0.25) -> bool:
    """Return whether a process used more than a tenth of the elapsed time."""
    before = cpu_seconds(pid)
    await asyncio.sleep(within_s)
    return cpu_seconds(pid) - before > within_s / 10


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_that_run(what: str) -> list[int]:
    output = subprocess.run(["ps", "-o", "pid=,ppid=,args=", "-A"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in output.splitlines()]
    return [int(pid) for pid, parent, args in rows if int(parent) == os.getpid() and what in args]
