"""A single deployment: retries hide transient failures, and a retry repeats no output."""

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
# Failures of the first attempts, in order.
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
    result = config_of(*deployments, router_settings={**SETTINGS, "num_retries": num_retries}, **sections)
    for entry in result["model_list"]:
        entry["litellm_params"] |= {"timeout": timeout}
    return result


class Cases(Play):
    """One server for all cases; clients name their case, `[case 3]`, which has its own failures."""

    def __init__(self) -> None:
        super().__init__("")
        self.scripts: list[str] = []
        self.failures_by_case: list[list[Fault | Refusal]] = []

    def add(self, script: str, failures: list[Fault | Refusal]) -> str:
        """Add a case; return the text with which a client names it."""
        self.scripts.append(script)
        self.failures_by_case.append(failures)
        return f"[case {len(self.failures_by_case) - 1}]"

    def _answer(self, kind: str, prompt: str | Sequence[int], *, fails: bool) -> Any:
        marked = prompt if isinstance(prompt, str) else ENCODING.decode(prompt)
        match = re.search(r"\[case (\d+)\]", marked)
        # The gateway's probes name no case.
        self.script = self.scripts[int(match[1])] if match else next(iter(SCRIPTS.values()))
        self.failures = self.failures_by_case[int(match[1])] if match else []
        return super()._answer(kind, prompt, fails=fails)


@asynccontextmanager
async def gateway_with_cases(kind: str, **sections: Any) -> AsyncIterator[tuple[Cases, Gateway]]:
    async with fake_of(kind) as fake:
        cases = Cases()
        cases.serve(kind, fake)
        async with gateway(config(f"{kind}@{fake.url}", **sections)) as running:
            yield cases, running


async def check_backend_kind(kind: str, *, stream: bool) -> None:
    async with gateway_with_cases(kind) as (cases, running):

        async def check(name: str, script: str) -> None:
            failures = FAILURES[name]()
            undisturbed, disturbed = cases.add(script, []), cases.add(script, failures)
            undisturbed_answer, disturbed_answer = [
                await running.chat(stream=stream, tools=[TOOL], messages=[{"role": "user", "content": case}])
                for case in (undisturbed, disturbed)
            ]
            assert disturbed_answer.status == 200, (kind, name, disturbed_answer.raw)
            assert essence(disturbed_answer) == essence(undisturbed_answer), (kind, name)
            assert failures == []
            # A retry on the same deployment is not a failover.
            assert message_of(disturbed_answer).note["failovers"] == 0, (kind, name)

        await asyncio.gather(*(check(name, script) for name in FAILURES for script in SCRIPTS.values()))


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "stream"])
async def test_a_transient_failure_reaches_no_client(stream: bool) -> None:
    # In parallel, because most of the time is spent in retry delays.
    await asyncio.gather(*(check_backend_kind(kind, stream=stream) for kind in KINDS))


PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
PATHS: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "responses": ("/v1/responses", lambda case: {"input": case}),
    "messages": ("/v1/messages", lambda case: {"messages": [{"role": "user", "content": case}], "max_tokens": 500}),
    "completions": ("/v1/completions", lambda case: {"prompt": PROMPT.replace("Hi", case), "max_tokens": 500}),
}


def texts(value: Any) -> str:
    """Join every `text`, and every `delta` that is text, in order."""
    if isinstance(value, list):
        return "".join(map(texts, value))
    if not isinstance(value, dict):
        return ""
    direct = [value[name] for name in ("text", "delta") if isinstance(value.get(name), str)]
    return "".join(direct) + "".join(map(texts, value.values()))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_transient_failure_reaches_no_client_of_other_apis(stream: bool) -> None:
    async with gateway_with_cases("vllm", unisono={"raw_completions": True}) as (cases, running):

        async def check(name: str, path: str) -> None:
            failures = FAILURES[name]()
            url_path, fields = PATHS[path]
            case = cases.add(SCRIPTS["reasoning and text"], failures)
            response = await running.post(
                url_path, json.dumps({"model": "gpt-oss", "stream": stream, **fields(case)}).encode()
            )
            assert response.status == 200, (name, path, response.raw)
            assert "and “quoted”, to the end." in texts(response.events if stream else response.body), (name, path)
            assert "error" not in {event.get("type") for event in response.events}
            assert failures == []

        # One after another, so that the retry budget of the group suffices.
        for path in PATHS:
            await asyncio.gather(*(check(name, path) for name in FAILURES))


async def test_retry_after_is_honoured_within_the_total_timeout() -> None:
    async with staged(SCRIPTS["reasoning and text"], ["vllm"], config, timeout=5.0) as (play, running):
        loop = asyncio.get_running_loop()
        play.failures = [Refusal(503, b"busy", headers={"Retry-After": "1"})]
        started = loop.time()
        assert (await running.chat()).status == 200
        assert loop.time() - started >= 1.0
        # The delay would exceed the timeout, so the client gets the error at once.
        play.failures = [Refusal(503, b"busy", headers={"Retry-After": "9"})]
        started = loop.time()
        response = await running.chat()
        assert (response.status, response.headers["retry-after"]) == (503, "9")
        assert loop.time() - started < 2.0


NOT_RETRIED: dict[str, tuple[int, Refusal]] = {
    "rejected request": (400, Refusal(400, b'{"error": {"message": "top_k: too odd"}}')),
    "rejected credentials": (503, Refusal(401, b"no")),
    "unknown model": (502, Refusal(404, b"no")),
}


@pytest.mark.parametrize("case", NOT_RETRIED)
async def test_a_permanent_failure_is_not_retried(case: str) -> None:
    status, refusal = NOT_RETRIED[case]
    async with staged(SCRIPTS["reasoning and text"], ["vllm"], config) as (play, running):
        play.asked.clear()
        play.failures = [refusal]
        assert (await running.chat()).status == status
        assert play.asked == ["vllm"]


async def test_num_retries_limits_the_attempts() -> None:
    for num_retries in (0, 2):
        async with staged(SCRIPTS["reasoning and text"], ["vllm"], config, num_retries=num_retries) as (play, running):
            play.asked.clear()
            play.failures = [Refusal(500, b"boom")] * 9
            response = await running.chat()
            assert (response.status, response.body["error"]["code"]) == (502, "backend_error")
            assert len(play.asked) == 1 + num_retries


async def test_a_disconnect_during_a_retry_delay_frees_the_slot() -> None:
    def one_at_a_time(*deployments: str) -> dict[str, Any]:
        result = config(*deployments)
        result["model_list"][0]["litellm_params"]["max_parallel_requests"] = 1
        return result

    async with staged(SCRIPTS["reasoning and text"], ["vllm"], one_at_a_time) as (play, running):
        play.asked.clear()
        play.failures = [Refusal(503, b"busy", headers={"Retry-After": "30"})]
        task = asyncio.create_task(running.chat())
        async with asyncio.timeout(20):
            while not play.asked:
                await asyncio.sleep(0.01)
            # Another request uses the slot during the retry delay.
            assert (await running.chat()).status == 200
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await running.chat()).status == 200
        # The request of the disconnected client is not retried.
        assert len(play.asked) == 3


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", ["reset before the first token", "500", "503", "reset at token 5"])
@pytest.mark.parametrize("num_retries", [1, 2])
async def test_a_deployment_is_retried_while_the_other_one_is_down(name: str, num_retries: int) -> None:
    def one_is_down(running_backend: str) -> dict[str, Any]:
        return config(running_backend, "vllm@http://127.0.0.1:9", num_retries=num_retries)

    async with staged(SCRIPTS["reasoning and text"], ["vllm"], one_is_down) as (play, running):
        assert running.app is not None
        await running.app.state.gateway.pool.wait_for_probes(5)
        play.failures = FAILURES[name]()
        response = await running.chat(stream=True)
        assert message_of(response).finish_reason == "stop", response.raw
        assert play.failures == []
