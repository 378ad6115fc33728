"""Real engines behind the whole gateway: mlx-lm in a process of our own, and mlx_lm.server, with the demo model."""

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

PINNED = {"current_date": "2026-01-02"}
"""The date stands in every prompt, and so small a model answers another way on some days."""

SHORT = "The user wants a short reply."
PARIS = ("get_weather", '{"location":"Paris"}')
ENDLESS = [{"role": "user", "content": "Repeat la forever."}]


@dataclass
class Site:
    """A gateway in front of one engine. `pid` is the engine's process."""

    kind: str
    gateway: Gateway
    server: int | None = None

    @property
    def pid(self) -> int:
        [pid] = [self.server] if self.server is not None else children_that_run("mlx.engine")
        return pid

    def rules(self, *rules: str) -> list[str]:
        """Ids show the stop token; mlx_lm.server hides it, which is a repair of its own."""
        return list(rules) if self.kind == "mlx" else [*rules, "restored-stop"]

    async def ask(self, said: str | list[Any], **fields: Any) -> Answer:
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return await self.gateway.chat(messages=messages, temperature=0, **fields)

    async def ask_both_ways(self, said: str | list[Any], **fields: Any) -> Message:
        """The answer, which must be the same whole and as a stream."""
        whole, stream = await asyncio.gather(
            self.ask(said, **fields), self.ask(said, stream=True, stream_options={"include_usage": True}, **fields)
        )
        assert (whole.status, stream.status) == (200, 200)
        assert stream.done
        one, other = message_of(whole), message_of(stream)
        assert without_cache(one) == without_cache(other)
        return one


def without_cache(message: Message) -> tuple[Any, ...]:
    """All of a message but how much of its prompt the engine had cached."""
    usage = {name: count for name, count in message.usage.items() if name != "prompt_tokens_details"}
    return message.content, message.reasoning, message.calls, message.finish_reason, message.note, usage


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["mlx", "mlx_server"])
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
    """mlx_lm.server with the demo model, up and well: its address and its process."""
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
            while not await is_well(session, url):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        yield url, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def is_well(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


@dataclass(frozen=True)
class Said:
    content: str | None = None
    reasoning: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    rules: tuple[str, ...] = ()


# What the model answers, and which repairs an ids wire needs for it.
CHATS: dict[str, Said] = {
    "Hello!": Said("Hello! How can I help you today?", SHORT),
    "What is 2 + 2?": Said("2 + 2 is 4.", SHORT),
    "Tell me a joke.": Said("Why did the parser cross the road? To reach the final channel.", SHORT),
}
TOOL_CHATS: dict[str, Said] = {
    EXAMPLE_MESSAGE: Said(None, "We need the weather in Paris. Use get_weather.", (PARIS,)),
    "Make a plan first, then check the weather in Oslo.": Said(
        "I will check the weather in Oslo first.",
        "The user wants a plan.",
        (("get_weather", '{"location":"Oslo"}'),),
    ),
    "glitch no channel": Said("The channel is missing.", rules=("missing-channel",)),
    "glitch no header": Said(" The whole header is missing.", rules=("no-markup",)),
    "glitch end instead of return": Said("This message ends with end.", rules=("endoftext-stop",)),
    "glitch analysis call": Said(calls=(PARIS,)),
    "glitch recipient in channel": Said(calls=(PARIS,), rules=("marker-in-recipient",)),
    "glitch unknown channel": Said("A channel that does not exist.\n\nDone.", rules=("unknown-channel",)),
    "glitch only analysis": Said("Done.", "I think, and then I stop.", rules=("analysis-only",)),
    "glitch double start": Said("Done.", "Start twice.", rules=("doubled-start",)),
    "glitch missing start": Said("Done.", "No start token follows.", rules=("missing-start",)),
}
# On the text wire: the server eats a space at the very beginning, an end of text shows nothing, and the hidden stop
# comes before what is only known at the end.
ON_TEXT: Mapping[str, tuple[str | None, list[str]]] = {
    "glitch no header": ("The whole header is missing.", ["restored-stop", "no-markup"]),
    "glitch end instead of return": ("This message ends with end.", []),
    "glitch only analysis": ("Done.", ["restored-stop", "analysis-only"]),
}


async def test_a_real_engine_is_found_fit(site: Site) -> None:
    async with asyncio.timeout(30):
        while (health := await site.gateway.get("/health/readiness")).status != 200:
            await asyncio.sleep(0.05)
    assert health.body == {"status": "ready", "models": {"ready": 1, "total": 1}, "reasons": []}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("user", [*CHATS, *TOOL_CHATS])
async def test_what_the_model_writes_is_answered_whole_and_streamed(site: Site, user: str) -> None:
    expected = CHATS.get(user) or TOOL_CHATS[user]
    content, rules = expected.content, site.rules(*expected.rules)
    if site.kind == "mlx_server":
        content, rules = ON_TEXT.get(user, (content, rules))
    said = await site.ask_both_ways(user, **({"tools": [EXAMPLE_TOOL]} if user in TOOL_CHATS else {}))
    assert (said.content, said.reasoning, said.calls) == (content, expected.reasoning, list(expected.calls))
    assert said.finish_reason == ("tool_calls" if expected.calls else "stop")
    assert said.note["recoveries"] == rules


async def test_the_example_of_the_page_calls_its_tool_every_time(site: Site) -> None:
    # The playground sends no temperature, so every request samples. mlx_lm.server answers one request after the other.
    seeds = range(8 if site.kind == "mlx" else 2)
    messages = [{"role": "user", "content": EXAMPLE_MESSAGE}]
    answers = await asyncio.gather(
        *(site.gateway.chat(messages=messages, tools=[EXAMPLE_TOOL], seed=seed) for seed in seeds)
    )
    assert [message_of(answer).calls for answer in answers] == [[PARIS]] * len(seeds)


@pytest.mark.slow
async def test_a_call_with_broken_arguments_is_generated_again(site: Site) -> None:
    said = message_of(await site.ask("glitch bad json", tools=[EXAMPLE_TOOL], max_tokens=400))
    assert "regenerated-call" in said.note["recoveries"]
    for name, arguments in said.calls:
        assert name == "get_weather"
        # An engine that cannot be kept to JSON may fail again, and then its call is handed over as it is.
        assert site.kind == "mlx_server" or "location" in json.loads(arguments)


async def test_a_tool_round_trip_ends_in_an_answer(site: Site) -> None:
    answer, calls = await with_tools(site, "What is the weather in Paris?", ["18 degrees, sunny"])
    assert calls == ["Paris"]
    assert (answer.reasoning, answer.content) == ("We have the weather.", "It is sunny in Paris with 18 degrees.")


@pytest.mark.slow
async def test_two_calls_in_turn_end_in_an_answer(site: Site) -> None:
    user = "Compare the weather in London and Tokyo."
    answer, calls = await with_tools(site, user, ["18 degrees, sunny", "11 degrees, rainy"])
    assert calls == ["London", "Tokyo"]
    assert (answer.reasoning, answer.content) == ("We have both.", "I compared London and Tokyo.")


async def with_tools(site: Site, user: str, results: list[str]) -> tuple[Message, list[str]]:
    """The answer after as many calls as there are results, and the places they asked for. The prompt of every turn
    extends what the engine has, so that it reads next to nothing again."""
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


async def test_the_token_limit_ends_an_answer(site: Site) -> None:
    said = await site.ask_both_ways("Repeat la forever.", max_tokens=20)
    assert (said.reasoning, said.finish_reason) == ("Sing.", "length")
    assert said.content is not None
    assert set(said.content.split()) == {"la"}
    assert said.usage["completion_tokens"] == 20


@pytest.mark.slow
async def test_a_stop_string_ends_an_answer(site: Site) -> None:
    said = await site.ask_both_ways("Count to 30.", stop=["7,"])
    assert (said.reasoning, said.content, said.finish_reason) == ("Count.", "1, 2, 3, 4, 5, 6, ", "stop")


@pytest.mark.slow
async def test_four_at_once_are_all_answered(site: Site) -> None:
    users = [*CHATS, "What is the weather in Paris?"]
    answers = await asyncio.gather(
        *(site.ask(user, **({"tools": [EXAMPLE_TOOL]} if user in TOOL_CHATS else {})) for user in users)
    )
    for user, answer in zip(users, answers, strict=True):
        expected = CHATS.get(user) or TOOL_CHATS[user]
        said = message_of(answer)
        assert (said.content, said.reasoning, said.calls) == (
            expected.content, expected.reasoning, list(expected.calls)
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="work is measured by Linux's process table")
async def test_a_client_that_leaves_an_endless_answer_leaves_an_idle_engine(site: Site) -> None:
    async with endless(site) as response:
        await some_of(response)
        assert await works(site.pid)
    async with asyncio.timeout(10):
        while await works(site.pid):
            pass
    # Nobody reads a stream here: the client leaves while it waits for the whole.
    task = asyncio.create_task(site.ask(ENDLESS))
    await asyncio.sleep(0.3)
    assert await works(site.pid)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(10):
        while await works(site.pid):
            pass


@pytest.mark.slow
async def test_an_answer_goes_on_when_its_killed_engine_is_back_and_ends_in_an_error_otherwise(site: Site) -> None:
    killed = site.pid
    async with endless(site) as response:
        begun = await some_of(response)
        os.kill(killed, signal.SIGKILL)
        if site.kind == "mlx":
            # Its adapter starts it again.
            async with asyncio.timeout(20):
                while site_pid(site) in (None, killed):
                    assert b'"error"' not in await response.content.readany()
                for _ in range(50):
                    assert b'"error"' not in await response.content.readany()
        else:
            # Only an operator starts that server. The gateway asks for it a few times, with growing pauses.
            async with asyncio.timeout(60):
                rest = await response.read()
            events = (begun + rest).rstrip().split(b"\n\n")
            assert events[-1].startswith(b'data: {"error":{')
            assert b"[DONE]" not in begun + rest
    again = await site.ask("Hello!")
    if site.kind == "mlx":
        assert message_of(again).content == CHATS["Hello!"].content
    else:
        assert again.status == 503
        assert again.body["error"]["code"] == "backend_unavailable"


def site_pid(site: Site) -> int | None:
    """The process of the engine, if exactly one runs."""
    pids = children_that_run("mlx.engine")
    return pids[0] if len(pids) == 1 else None


@asynccontextmanager
async def endless(site: Site) -> AsyncIterator[aiohttp.ClientResponse]:
    """A stream that ends with its client."""
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
    """Whether a process used more than a tenth of the time that passed."""
    before = cpu_seconds(pid)
    await asyncio.sleep(within_s)
    return cpu_seconds(pid) - before > within_s / 10


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_that_run(what: str) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=,ppid=,args=", "-A"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [int(pid) for pid, parent, args in rows if int(parent) == os.getpid() and what in args]
