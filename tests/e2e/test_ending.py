"""The end of a gateway as its clients see it: what runs is finished, and what cannot be is told why."""

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
    one: Replica
    fake: FakeVllm
    session: aiohttp.ClientSession

    def post(self, path: str, **body: Any) -> Any:
        return self.session.post(self.one.url + path, json=body)

    async def begun(self, count: int = 1) -> None:
        async with asyncio.timeout(10):
            while len(self.fake.requests) < count:
                await asyncio.sleep(0.005)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.one.signal(number)

    async def ended(self, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            assert await self.one.ended() == 0


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
        async with replica(folder, config, "--workers", str(workers)) as one, aiohttp.ClientSession() as session:
            yield Stage(one, fake, session)


def events_in(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and "[DONE]" not in line]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_answers_that_do_not_end_in_time_say_why_in_the_shape_of_their_surface(
    workers: int, tmp_path: Path
) -> None:
    async with staged(tmp_path, workers=workers, per_chunk=1, faults=(stall_at(5),)) as stage:
        asked = [
            stage.post("/v1/chat/completions", **CHAT, stream=True),
            stage.post("/v1/chat/completions", **CHAT),
            stage.post("/v1/responses", **RESPONSE, stream=True),
            stage.post("/v1/responses", **RESPONSE),
        ]
        answering = [asyncio.ensure_future(read(each)) for each in asked]
        await stage.begun(4)
        stage.end()
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
        "The gateway is shutting down; ask again.",
    )
    log = stage.one.log
    assert "Traceback" not in log
    assert "unexpected" not in log


async def read(asked: Any) -> tuple[int, Any, str]:
    async with asked as answer:
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


async def test_an_interrupt_of_a_hook_is_a_failed_one_and_that_of_the_terminal_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, interrupting="interrupting:Interrupting")
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with staged(tmp_path / "one", hooks=["interrupting"]) as stage:
        for last in (False, True):
            asked = asyncio.ensure_future(read(stage.post("/v1/chat/completions", **CHAT)))
            if last:
                # The hook keeps the whole process busy when the signal comes.
                await asyncio.sleep(0.1)
                stage.end(signal.SIGINT)
            status, _, body = await asyncio.wait_for(asked, 10)
            assert (status, json.loads(body)["error"]["code"]) == (503, "hook_failed")
        await stage.ended(10)
    assert stage.one.log.count("a hook failed") == 2
    assert stage.one.log.count("cannot close a hook") == 1


@pytest.mark.slow
async def test_what_runs_is_finished_and_a_second_connection_is_refused(tmp_path: Path) -> None:
    async with staged(tmp_path, grace_s=20, delay_s=0.03) as stage:
        answering = asyncio.ensure_future(read(stage.post("/v1/chat/completions", **CHAT, stream=True)))
        await stage.begun()
        stage.end()
        await refused(stage)
        assert (await answering)[2].endswith("data: [DONE]\n\n")
        await stage.ended(5)


async def refused(stage: Stage) -> None:
    """Return once nobody listens any more."""
    port = int(stage.one.url.rpartition(":")[2])
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_who_asks_for_readiness_hears_of_the_end_while_others_are_still_answered(
    workers: int, tmp_path: Path
) -> None:
    async with staged(tmp_path, grace_s=20, workers=workers, first_delay_s=0.01) as stage:
        for _ in range(2 * workers):
            # A connection of its own each, so that every worker has been asked.
            async with aiohttp.ClientSession() as other, other.get(stage.one.url + READY) as answer:
                assert answer.status == 200
        stage.end()
        statuses = []
        async with asyncio.timeout(3):
            while 503 not in statuses:
                async with stage.session.get(stage.one.url + READY) as answer:
                    statuses.append(answer.status)
                    told = await answer.json()
                await asyncio.sleep(0.02)
        assert (told["status"], told["reasons"]) == ("shutting down", ["shutting_down"])
        status, headers, body = await read(stage.post("/v1/chat/completions", **CHAT))
        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(body)["choices"][0]["finish_reason"] == "stop"
        await stage.ended(15)


@pytest.mark.slow
@pytest.mark.parametrize("notice_s", [0, 1.5])
async def test_how_long_there_is_to_notice_is_configured(notice_s: float, tmp_path: Path) -> None:
    async with staged(tmp_path, grace_s=20, notice_s=notice_s) as stage:
        async with aiohttp.ClientSession() as other, other.get(stage.one.url + READY) as answer:
            assert answer.status == 200
        began = time.monotonic()
        stage.end()
        await refused(stage)
        taken = time.monotonic() - began
        assert notice_s - 0.1 <= taken < notice_s + 1.5
        await stage.ended(5)


@pytest.mark.slow
async def test_without_anybody_who_asks_for_readiness_the_end_is_at_once(tmp_path: Path) -> None:
    async with staged(tmp_path, grace_s=20) as stage:
        began = time.monotonic()
        stage.end()
        await stage.ended(4.5)
    assert time.monotonic() - began < 4.5


async def rest_on(socket: ClientConnection) -> tuple[list[Any], int]:
    """What comes on a WebSocket until it is closed, and the code it is closed with."""
    frames = []
    async with asyncio.timeout(20):
        try:
            while True:
                frames.append(json.loads(await socket.recv()))
        except ConnectionClosedError as closed:
            return frames, closed.rcvd.code if closed.rcvd else 0


@pytest.mark.slow
async def test_a_websocket_is_closed_when_what_it_is_answered_is_over(tmp_path: Path) -> None:
    async with staged(tmp_path, grace_s=20, delay_s=0.02) as stage:
        address = stage.one.url.replace("http", "ws", 1) + "/v1/responses"
        async with connect(address) as busy, connect(address) as idle:
            await busy.send(json.dumps({"type": "response.create", **RESPONSE}))
            await stage.begun()
            stage.end()
            with pytest.raises(ConnectionClosedError) as closed:
                await asyncio.wait_for(idle.recv(), 5)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1012, "shutting_down")
            frames, code = await rest_on(busy)
            assert (frames[-1]["type"], code) == ("response.completed", 1012)
        await stage.ended(5)


@pytest.mark.slow
async def test_a_websocket_that_is_answered_too_long_is_told_so_and_closed(tmp_path: Path) -> None:
    async with staged(tmp_path, per_chunk=1, faults=(stall_at(5),)) as stage:
        async with connect(stage.one.url.replace("http", "ws", 1) + "/v1/responses") as socket:
            await socket.send(json.dumps({"type": "response.create", **RESPONSE}))
            await stage.begun()
            stage.end()
            frames, code = await rest_on(socket)
        assert (frames[-1]["type"], code) == ("response.failed", 1012)
        await stage.ended(5)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
async def test_a_second_signal_ends_it_at_once_and_clients_are_told(
    number: signal.Signals, workers: int, tmp_path: Path
) -> None:
    async with staged(tmp_path, grace_s=60, workers=workers, per_chunk=1, faults=(stall_at(5),)) as stage:
        answering = asyncio.ensure_future(read(stage.post("/v1/chat/completions", **CHAT, stream=True)))
        await stage.begun()
        stage.end(number)
        await asyncio.sleep(0.3)
        assert not answering.done()
        stage.end(number)
        _, _, body = await asyncio.wait_for(answering, 5)
        assert events_in(body)[-1]["error"]["code"] == "shutting_down"
        await stage.ended(8)


@pytest.mark.slow
async def test_the_readers_of_a_background_response_are_told_and_the_response_goes_on_elsewhere(tmp_path: Path) -> None:
    async with staged(tmp_path, per_chunk=1, faults=(stall_at(5),)) as stage:
        reading = asyncio.ensure_future(
            read(stage.post("/v1/responses", **RESPONSE, stream=True, background=True, store=True))
        )
        await stage.begun()
        await asyncio.sleep(0.2)
        stage.end()
        _, _, body = await asyncio.wait_for(reading, 10)
        *events, last = events_in(body)
        assert last["error"]["code"] == "shutting_down"
        await stage.ended(10)
        stage.fake.script = lambda asked: VllmScript(tokens=rest_of(asked))
        async with replica(tmp_path, stage.one.config) as again:
            response_id = events[0]["response"]["id"]
            async with asyncio.timeout(20):
                while True:
                    async with stage.session.get(f"{again.url}/v1/responses/{response_id}") as answer:
                        response = await answer.json()
                    if response["status"] not in ("queued", "in_progress"):
                        break
                    await asyncio.sleep(0.05)
        assert response["status"] == "completed"


def rest_of(asked: Any) -> list[int]:
    """The answer behind what of it stands in the prompt already."""
    prompt = asked["prompt"]
    said = next(count for count in range(len(ANSWER), -1, -1) if prompt[len(prompt) - count :] == ANSWER[:count])
    return list(ANSWER[said:])
