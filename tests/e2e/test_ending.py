"""Shutdown of a gateway as its clients see it: requests finish or fail with a clear error."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError

from tests.e2e.gateway import config_of
from tests.e2e.hooked import install
from tests.e2e.replicas import Replica, replica
from tests.fakes import FakeVllm, VllmScript, stall_at
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 40 + "<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
RESPONSE = {"model": "gpt-oss", "input": "Hi"}
READY = "/health/readiness"


@dataclass
class Stage:
    process: Replica
    fake: FakeVllm
    session: aiohttp.ClientSession

    def post(self, path: str, **body: Any) -> Any:
        return self.session.post(self.process.url + path, json=body)

    async def requests_received(self, count: int = 1) -> None:
        async with asyncio.timeout(10):
            while len(self.fake.requests) < count:
                await asyncio.sleep(0.005)

    def send_signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.signal(number)

    async def ended(self, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            assert await self.process.ended() == 0


@asynccontextmanager
async def staged(
    folder: Path,
    *,
    grace_s: int = 1,
    notice_s: float = 5.0,
    workers: int = 1,
    hooks: Sequence[str] = (),
    **script: Any,
) -> AsyncIterator[Stage]:
    store = {"url": f"sqlite://{folder}/state.db"}
    async with FakeVllm(tokens=ANSWER, **script) as fake:
        unisono = {"shutdown_grace_s": grace_s, "shutdown_delay_s": notice_s, "hooks": hooks}
        config = config_of(f"vllm@{fake.url}", store=store, unisono=unisono)
        async with replica(folder, config, "--workers", str(workers)) as process, aiohttp.ClientSession() as session:
            yield Stage(process, fake, session)


def events_in(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and "[DONE]" not in line]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_unfinished_answers_end_with_an_error_in_the_format_of_their_api(workers: int, tmp_path: Path) -> None:
    async with staged(tmp_path, workers=workers, per_chunk=1, faults=(stall_at(5),)) as stage:
        requests = [
            stage.post("/v1/chat/completions", **CHAT, stream=True),
            stage.post("/v1/chat/completions", **CHAT),
            stage.post("/v1/responses", **RESPONSE, stream=True),
            stage.post("/v1/responses", **RESPONSE),
        ]
        answering = [asyncio.ensure_future(read(each)) for each in requests]
        await stage.requests_received(4)
        stage.send_signal()
        chat, whole, response, whole_response = await asyncio.wait_for(asyncio.gather(*answering), 15)
        await stage.ended(10)
    for status, headers, body in (whole, whole_response):
        assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
        assert int(headers["retry-after"]) >= 1
        assert headers["connection"] == "close"
    assert events_in(chat[2])[-1]["error"]["code"] == "shutting_down"
    assert "[DONE]" not in chat[2]
    *_, failed = events_in(response[2])
    assert (failed["type"], failed["response"]["error"]["message"]) == (
        "response.failed",
        "The gateway is shutting down; send the request again.",
    )
    log = stage.process.log
    assert "Traceback" not in log
    assert "unexpected" not in log


async def read(request: Any) -> tuple[int, Any, str]:
    async with request as answer:
        return answer.status, answer.headers, await answer.text()


INTERRUPTING = """
import time

from unisono.core.hooks import Hook


class Interrupting(Hook):
    def __init__(self, options):
        pass

    async def before(self, request):
        time.sleep(0.3)
        raise KeyboardInterrupt

    async def aclose(self):
        raise KeyboardInterrupt
"""


@pytest.mark.slow
async def test_hook_interrupt_is_a_hook_failure_but_sigint_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, interrupting="interrupting:Interrupting")
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with staged(tmp_path / "one", hooks=["interrupting"]) as stage:
        for is_last in (False, True):
            request = asyncio.ensure_future(read(stage.post("/v1/chat/completions", **CHAT)))
            if is_last:
                # The hook blocks the whole process when the signal arrives.
                await asyncio.sleep(0.1)
                stage.send_signal(signal.SIGINT)
            status, _, body = await asyncio.wait_for(request, 10)
            assert (status, json.loads(body)["error"]["code"]) == (503, "hook_failed")
        await stage.ended(10)
    assert stage.process.log.count("a hook failed") == 2
    assert stage.process.log.count("cannot close a hook") == 1


@pytest.mark.slow
async def test_running_request_finishes_while_new_connections_are_refused(tmp_path: Path) -> None:
    async with staged(tmp_path, grace_s=20, delay_s=0.03) as stage:
        answering = asyncio.ensure_future(read(stage.post("/v1/chat/completions", **CHAT, stream=True)))
        await stage.requests_received()
        stage.send_signal()
        await refused(stage)
        assert (await answering)[2].endswith("data: [DONE]\n\n")
        await stage.ended(5)


async def refused(stage: Stage) -> None:
    """Wait until new connections are refused."""
    port = int(stage.process.url.rpartition(":")[2])
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_readiness_fails_while_requests_are_still_answered(workers: int, tmp_path: Path) -> None:
    async with staged(tmp_path, grace_s=20, notice_s=3.0, workers=workers, first_delay_s=0.01) as stage:
        for _ in range(2 * workers):
            # Each has its own connection, so that every worker answers once.
            async with aiohttp.ClientSession() as session, session.get(stage.process.url + READY) as answer:
                assert answer.status == 200
        stage.send_signal()
        statuses = []
        async with asyncio.timeout(3):
            while 503 not in statuses:
                async with stage.session.get(stage.process.url + READY) as answer:
                    statuses.append(answer.status)
                    readiness = await answer.json()
                await asyncio.sleep(0.02)
        assert (readiness["status"], readiness["reasons"]) == ("shutting down", ["shutting_down"])
        status, headers, body = await read(stage.post("/v1/chat/completions", **CHAT))
        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(body)["choices"][0]["finish_reason"] == "stop"
        await stage.ended(15)


@pytest.mark.slow
@pytest.mark.parametrize("notice_s", [0, 1.5])
async def test_shutdown_delay_is_configurable(notice_s: float, tmp_path: Path) -> None:
    async with staged(tmp_path, grace_s=20, notice_s=notice_s) as stage:
        async with aiohttp.ClientSession() as session, session.get(stage.process.url + READY) as answer:
            assert answer.status == 200
        began = time.monotonic()
        stage.send_signal()
        await refused(stage)
        taken = time.monotonic() - began
        assert notice_s - 0.1 <= taken < notice_s + 1.5
        await stage.ended(5)


@pytest.mark.slow
async def test_shutdown_has_no_delay_if_readiness_was_never_requested(tmp_path: Path) -> None:
    async with staged(tmp_path, grace_s=20) as stage:
        began = time.monotonic()
        stage.send_signal()
        await stage.ended(4.5)
    assert time.monotonic() - began < 4.5


async def rest_on(socket: ClientConnection) -> tuple[list[Any], int]:
    """Return all frames of a WebSocket until it is closed, and the close code."""
    frames = []
    async with asyncio.timeout(20):
        try:
            while True:
                frames.append(json.loads(await socket.recv()))
        except ConnectionClosedError as closed:
            return frames, closed.rcvd.code if closed.rcvd else 0


@pytest.mark.slow
async def test_websocket_is_closed_after_its_running_response(tmp_path: Path) -> None:
    async with staged(tmp_path, grace_s=20, delay_s=0.02) as stage:
        address = stage.process.url.replace("http", "ws", 1) + "/v1/responses"
        async with connect(address) as busy, connect(address) as idle:
            await busy.send(json.dumps({"type": "response.create", **RESPONSE}))
            await stage.requests_received()
            stage.send_signal()
            with pytest.raises(ConnectionClosedError) as closed:
                await asyncio.wait_for(idle.recv(), 5)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1012, "shutting_down")
            frames, code = await rest_on(busy)
            assert (frames[-1]["type"], code) == ("response.completed", 1012)
        await stage.ended(5)


@pytest.mark.slow
async def test_websocket_response_fails_after_the_grace_period(tmp_path: Path) -> None:
    async with staged(tmp_path, per_chunk=1, faults=(stall_at(5),)) as stage:
        async with connect(stage.process.url.replace("http", "ws", 1) + "/v1/responses") as socket:
            await socket.send(json.dumps({"type": "response.create", **RESPONSE}))
            await stage.requests_received()
            stage.send_signal()
            frames, code = await rest_on(socket)
        assert (frames[-1]["type"], code) == ("response.failed", 1012)
        await stage.ended(5)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "Ctrl-C"]
)
async def test_second_signal_ends_the_process_at_once_with_errors_to_clients(
    number: signal.Signals, workers: int, tmp_path: Path
) -> None:
    async with staged(tmp_path, grace_s=60, workers=workers, per_chunk=1, faults=(stall_at(5),)) as stage:
        answering = asyncio.ensure_future(read(stage.post("/v1/chat/completions", **CHAT, stream=True)))
        await stage.requests_received()
        stage.send_signal(number)
        await asyncio.sleep(0.3)
        assert not answering.done()
        stage.send_signal(number)
        _, _, body = await asyncio.wait_for(answering, 5)
        assert events_in(body)[-1]["error"]["code"] == "shutting_down"
        await stage.ended(8)


@pytest.mark.slow
async def test_background_stream_ends_with_an_error_and_another_process_finishes(tmp_path: Path) -> None:
    async with staged(tmp_path, per_chunk=1, faults=(stall_at(5),)) as stage:
        reading = asyncio.ensure_future(
            read(stage.post("/v1/responses", **RESPONSE, stream=True, background=True, store=True))
        )
        await stage.requests_received()
        await asyncio.sleep(0.2)
        stage.send_signal()
        _, _, body = await asyncio.wait_for(reading, 10)
        *events, last = events_in(body)
        assert last["error"]["code"] == "shutting_down"
        await stage.ended(10)
        stage.fake.script = lambda body: VllmScript(tokens=rest_of(body))
        async with replica(tmp_path, stage.process.config) as restarted:
            response_id = events[0]["response"]["id"]
            async with asyncio.timeout(20):
                while True:
                    async with stage.session.get(f"{restarted.url}/v1/responses/{response_id}") as answer:
                        response = await answer.json()
                    if response["status"] not in ("queued", "in_progress"):
                        break
                    await asyncio.sleep(0.05)
        assert response["status"] == "completed"


def rest_of(body: Any) -> list[int]:
    """Return the rest of the answer after the part that the prompt already contains."""
    prompt = body["prompt"]
    generated = next(count for count in range(len(ANSWER), -1, -1) if prompt[len(prompt) - count :] == ANSWER[:count])
    return list(ANSWER[generated:])
