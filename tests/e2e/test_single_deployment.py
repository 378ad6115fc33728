"""A deployment without another one: a failure that passes reaches no client, and a retry repeats nothing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, config_of, gateway, message_of
from tests.e2e.playing import ENCODING, Play, fake_of, staged
from tests.e2e.test_failover import SCRIPTS, TOOL, essence
from tests.fakes import Refusal, close_at, inject_at, reset_at
from tests.fakes.faults import Fault

KINDS = ("vllm", "llamacpp", "ollama", "mlx_server", "sglang")
# What happens to the first attempts, one after the other.
FAILURES: dict[str, Callable[[], list[Fault | Refusal]]] = {
    "reset before the first token": lambda: [reset_at(0)],
    "close before the first token": lambda: [close_at(0)],
    "500": lambda: [Refusal(500, b"boom")],
    "503": lambda: [Refusal(503, b"busy")],
    "500 twice": lambda: [Refusal(500, b"boom"), Refusal(500, b"boom")],
    "reset at token 5": lambda: [reset_at(5)],
    "garbage at token 5": lambda: [inject_at(5, b"data: {garbage\n\n")],
    "reset at token 5, then 503": lambda: [reset_at(5), Refusal(503, b"loading")],
    "reset at token 5 twice": lambda: [reset_at(5), reset_at(5)],
}
SETTINGS = {"allowed_fails": 100_000, "cooldown_time": 0.01}


def config(*deployments: str, num_retries: int = 2, timeout: float = 60, **sections: Any) -> dict[str, Any]:
    found = config_of(*deployments, router_settings={**SETTINGS, "num_retries": num_retries}, **sections)
    for entry in found["model_list"]:
        entry["litellm_params"] |= {"timeout": timeout}
    return found


class Cases(Play):
    """One server for all cases at once. The client names its case, `[case 3]`, and each has failures of its own."""

    def __init__(self) -> None:
        super().__init__("")
        self.scripts: list[str] = []
        self.left: list[list[Fault | Refusal]] = []

    def add(self, script: str, failures: list[Fault | Refusal]) -> str:
        """The text that a client names the case with."""
        self.scripts.append(script)
        self.left.append(failures)
        return f"[case {len(self.left) - 1}]"

    def _answer(self, kind: str, prompt: str | Sequence[int], *, fails: bool) -> Any:
        marked = prompt if isinstance(prompt, str) else ENCODING.decode(prompt)
        named = re.search(r"\[case (\d+)\]", marked)
        # The gateway's own probes name none.
        self.script = self.scripts[int(named[1])] if named else next(iter(SCRIPTS.values()))
        self.failures = self.left[int(named[1])] if named else []
        return super()._answer(kind, prompt, fails=fails)


@asynccontextmanager
async def before(kind: str, **sections: Any) -> AsyncIterator[tuple[Cases, Gateway]]:
    async with fake_of(kind) as fake:
        cases = Cases()
        cases.serve(kind, fake)
        async with gateway(config(f"{kind}@{fake.url}", **sections)) as running:
            yield cases, running


async def check_kind(kind: str, *, stream: bool) -> None:
    async with before(kind) as (cases, running):

        async def check(name: str, script: str) -> None:
            failures = FAILURES[name]()
            undisturbed, disturbed = cases.add(script, []), cases.add(script, failures)
            whole, answer = [
                await running.chat(stream=stream, tools=[TOOL], messages=[{"role": "user", "content": case}])
                for case in (undisturbed, disturbed)
            ]
            assert answer.status == 200, (kind, name, answer.raw)
            assert essence(answer) == essence(whole), (kind, name)
            assert failures == []
            # On a busy machine the gateway's own check of the backend may fail as well, which is one more.
            assert message_of(answer).note["failovers"] >= len(FAILURES[name]()), (kind, name)

        await asyncio.gather(*(check(name, script) for name in FAILURES for script in SCRIPTS.values()))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failure_that_passes_reaches_no_client(stream: bool) -> None:
    # All at once: most of the time is spent in pauses.
    await asyncio.gather(*(check_kind(kind, stream=stream) for kind in KINDS))


PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
PATHS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "responses": ("/v1/responses", lambda case: {"input": case}),
    "messages": ("/v1/messages", lambda case: {"messages": [{"role": "user", "content": case}], "max_tokens": 500}),
    "completions": ("/v1/completions", lambda case: {"prompt": PROMPT.replace("Hi", case), "max_tokens": 500}),
}


def texts(value: Any) -> str:
    """Every `text`, and every `delta` that is one, in order."""
    if isinstance(value, list):
        return "".join(map(texts, value))
    if not isinstance(value, dict):
        return ""
    own = [value[name] for name in ("text", "delta") if isinstance(value.get(name), str)]
    return "".join(own) + "".join(map(texts, value.values()))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_on_every_surface(stream: bool) -> None:
    async with before("vllm", unisono={"raw_completions": True}) as (cases, running):

        async def check(name: str, path: str) -> None:
            failures = FAILURES[name]()
            where, fields = PATHS[path]
            case = cases.add(SCRIPTS["thoughts and text"], failures)
            answer = await running.post(
                where, json.dumps({"model": "gpt-oss", "stream": stream, **fields(case)}).encode()
            )
            assert answer.status == 200, (name, path, answer.raw)
            assert "and “quoted”, to the end." in texts(answer.events if stream else answer.body), (name, path)
            assert "error" not in {event.get("type") for event in answer.events}
            assert failures == []

        # In turn, so that the budget of the group pays for all of them.
        for path in PATHS:
            await asyncio.gather(*(check(name, path) for name in FAILURES))


async def test_retry_after_is_honoured_within_the_total_time() -> None:
    async with staged(SCRIPTS["thoughts and text"], ["vllm"], config, timeout=5.0) as (play, running):
        loop = asyncio.get_running_loop()
        play.failures = [Refusal(503, b"busy", headers={"Retry-After": "2"})]
        began = loop.time()
        assert (await running.chat()).status == 200
        assert loop.time() - began >= 2.0
        # It would be over by then, so the client is told at once.
        play.failures = [Refusal(503, b"busy", headers={"Retry-After": "9"})]
        began = loop.time()
        answer = await running.chat()
        assert (answer.status, answer.headers["retry-after"]) == (503, "9")
        assert loop.time() - began < 2.0


ONCE: dict[str, tuple[int, Refusal]] = {
    "a wrong request": (400, Refusal(400, b'{"error": {"message": "top_k: too odd"}}')),
    "refused credentials": (503, Refusal(401, b"no")),
    "an unknown model": (502, Refusal(404, b"no")),
}


@pytest.mark.parametrize("case", ONCE)
async def test_what_would_fail_again_is_asked_once(case: str) -> None:
    status, refusal = ONCE[case]
    async with staged(SCRIPTS["thoughts and text"], ["vllm"], config) as (play, running):
        play.asked.clear()
        play.failures = [refusal]
        assert (await running.chat()).status == status
        assert play.asked == ["vllm"]


async def test_retries_are_as_many_as_are_configured() -> None:
    for num_retries in (0, 1, 2):
        async with staged(SCRIPTS["thoughts and text"], ["vllm"], config, num_retries=num_retries) as (play, running):
            play.asked.clear()
            play.failures = [Refusal(500, b"boom")] * 9
            answer = await running.chat()
            assert (answer.status, answer.body["error"]["code"]) == (502, "backend_error")
            assert len(play.asked) == 1 + num_retries


async def test_a_client_that_leaves_in_the_pause_frees_everything_at_once() -> None:
    def one_at_a_time(*deployments: str) -> dict[str, Any]:
        found = config(*deployments)
        found["model_list"][0]["litellm_params"]["max_parallel_requests"] = 1
        return found

    async with staged(SCRIPTS["thoughts and text"], ["vllm"], one_at_a_time) as (play, running):
        play.asked.clear()
        play.failures = [Refusal(503, b"busy", headers={"Retry-After": "30"})]
        asking = asyncio.create_task(running.chat())
        async with asyncio.timeout(20):
            while not play.asked:
                await asyncio.sleep(0.01)
            # Its place is somebody else's while it pauses.
            assert (await running.chat()).status == 200
            assert not asking.done()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert (await running.chat()).status == 200
        # And it is not asked for again.
        assert len(play.asked) == 3


@pytest.mark.parametrize("name", ["reset before the first token", "500", "503", "reset at token 5"])
@pytest.mark.parametrize("num_retries", [1, 2])
async def test_a_deployment_is_retried_while_the_other_one_is_down(name: str, num_retries: int) -> None:
    def one_is_down(up: str) -> dict[str, Any]:
        return config(up, "vllm@http://127.0.0.1:9", num_retries=num_retries)

    async with staged(SCRIPTS["thoughts and text"], ["vllm"], one_is_down) as (play, running):
        assert running.app is not None
        await running.app.state.gateway.pool.settled(5)
        play.failures = FAILURES[name]()
        answer = await running.chat(stream=True)
        assert message_of(answer).finish_reason == "stop", answer.raw
        assert play.failures == []
