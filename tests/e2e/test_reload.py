"""SIGHUP reloads the configuration; running requests finish on their old configuration."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from tests.e2e.gateway import config_of
from tests.e2e.hooked import install
from tests.e2e.processes import MB, holdings
from tests.e2e.replicas import Replica, replica
from tests.fakes import FakeVllm
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(180)

ENCODING = load_encoding()
RELOADED = "the configuration was reloaded"


def answer_of(word: str, count: int = 40) -> list[int]:
    return ENCODING.encode_marked("<|channel|>final<|message|>" + f"{word} " * count + "<|return|>")


@dataclass
class Stage:
    """A gateway process, and two models that it may serve."""

    gateway: Replica
    old: FakeVllm
    new: FakeVllm
    session: aiohttp.ClientSession
    folder: Path
    reloads: int = 0

    def config(self, fake: FakeVllm, **sections: Any) -> dict[str, Any]:
        return config_of(f"vllm@{fake.url}", store={"url": f"sqlite://{self.folder}/state.db"}, **sections)

    async def reload(self, config: Any, workers: int = 1) -> None:
        self.gateway.write(config)
        self.reloads += workers
        self.gateway.signal(signal.SIGHUP)
        await self.gateway.logged(RELOADED, self.reloads)

    async def chat(self, **fields: Any) -> str:
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], **fields}
        async with self.session.post(f"{self.gateway.url}/v1/chat/completions", json=body) as response:
            text = await response.text()
            assert response.status == 200, text
            return text


@asynccontextmanager
async def running_stage(folder: Path, *, workers: int = 1, **script: Any) -> AsyncIterator[Stage]:
    async with (
        FakeVllm(tokens=answer_of("old"), **script) as old,
        FakeVllm(tokens=answer_of("new")) as new,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        gateway = Replica(folder, {})
        stage = Stage(gateway, old, new, session, folder)
        async with replica(folder, stage.config(old), "--workers", str(workers)) as gateway:
            stage.gateway = gateway
            yield stage


RELOADS = [(1, 1), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("workers", "reloads"), RELOADS)
async def test_new_requests_use_the_new_configuration_and_running_ones_finish(
    workers: int, reloads: int, tmp_path: Path
) -> None:
    async with running_stage(tmp_path, workers=workers, per_chunk=1, delay_s=0.1 * reloads) as stage:
        running = asyncio.ensure_future(stage.chat(stream=True))
        async with asyncio.timeout(10):
            while not stage.old.requests:
                await asyncio.sleep(0.01)
        for number in range(1, reloads):
            # The last of several reloads removes the deployment, not the first reload after the request began.
            await stage.reload(stage.config(stage.old, unisono={"max_queue": number}), workers)
        await stage.reload(stage.config(stage.new), workers)
        assert not running.done()
        for _ in range(4):
            assert "new new" in await stage.chat()
        text = await running
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"old') + text.count(" old") == 40


INVALID_CONFIGS: dict[str, tuple[str, str]] = {
    "unknown key": ('{"model_lst": []}', "model_lst: unknown key"),
    "no model": ("{}", "`model_list` is empty"),
    "not YAML": ('{"model_list": ', "config.json, line"),
    "unknown backend kind": (
        json.dumps(config_of("vlm/gpt-oss")),
        "model_list[0].litellm_params.model: `vlm` is not a backend kind",
    ),
    "unknown backend kind in an included file": (
        '{"include": ["more.json"]}',
        "/more.json)",
    ),
}


@pytest.mark.slow
async def test_an_invalid_configuration_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "more.json").write_text(json.dumps({"model_list": config_of("vlm/gpt-oss")["model_list"]}))
    async with running_stage(tmp_path) as stage:
        for number, (text, message) in enumerate(INVALID_CONFIGS.values(), 1):
            stage.gateway.path.write_text(text)
            stage.gateway.signal(signal.SIGHUP)
            await stage.gateway.logged("the configuration was not reloaded", number)
            assert message in stage.gateway.log
            assert "old old" in await stage.chat()
        await stage.reload(stage.config(stage.new))
        assert "new new" in await stage.chat()


async def test_the_old_application_continues_if_the_new_one_cannot_start(tmp_path: Path) -> None:
    used = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{used.sockets[0].getsockname()[1]}"
    async with used, running_stage(tmp_path) as stage:
        for number in (1, 2):
            stage.gateway.write(stage.config(stage.old, unisono={"metrics_listen": address}))
            stage.gateway.signal(signal.SIGHUP)
            await stage.gateway.logged(f"not reloaded: unisono.metrics_listen: cannot listen on {address}", number)
            assert "old old" in await stage.chat()
        await stage.reload(stage.config(stage.old))
        assert "old old" in await stage.chat()
        await stage.reload(stage.config(stage.new))
        assert "new new" in await stage.chat()
        assert "Traceback" not in stage.gateway.log


@pytest.mark.slow
async def test_settings_that_need_a_restart_are_reported(tmp_path: Path) -> None:
    async with running_stage(tmp_path) as stage:
        await stage.reload(stage.config(stage.old, unisono={"max_connections": 7, "write_timeout_s": 8}))
        for key in ("max_connections", "write_timeout_s"):
            assert f"unisono.{key}: the change takes effect after a restart" in stage.gateway.log
        # They still differ from the values in effect.
        await stage.reload(stage.config(stage.old, unisono={"max_connections": 7}))
        assert stage.gateway.log.count("unisono.max_connections: the change takes effect") == 2
        await stage.reload(stage.config(stage.old))
        assert stage.gateway.log.count("takes effect after a restart") == 3


@pytest.mark.slow
async def test_a_new_size_limit_of_requests_applies_to_new_websockets(tmp_path: Path) -> None:
    async with running_stage(tmp_path) as stage:
        url = stage.gateway.url.replace("http", "ws", 1) + "/v1/responses"
        request = json.dumps({"type": "response.create", "model": "gpt-oss", "input": "word " * 2000})
        for max_bytes, is_too_big in ((5_000, True), (100_000, False)):
            await stage.reload(stage.config(stage.old, unisono={"max_body_bytes": max_bytes}))
            async with connect(url) as socket, asyncio.timeout(10):
                await socket.send(request)
                if is_too_big:
                    with pytest.raises(ConnectionClosedError) as closed:
                        await socket.recv()
                    assert closed.value.rcvd is not None
                    assert closed.value.rcvd.code == 1009
                else:
                    assert json.loads(await socket.recv())["type"] == "response.created"


@pytest.mark.slow
async def test_conversations_and_websockets_survive_a_reload(tmp_path: Path) -> None:
    async with (
        running_stage(tmp_path) as stage,
        connect(stage.gateway.url.replace("http", "ws", 1) + "/v1/responses") as socket,
    ):
        body = {"model": "gpt-oss", "input": "Hi"}
        async with stage.session.post(f"{stage.gateway.url}/v1/responses", json=body) as response:
            first = (await response.json())["id"]
        await stage.reload(stage.config(stage.new))
        async with stage.session.post(
            f"{stage.gateway.url}/v1/responses", json={**body, "previous_response_id": first}
        ) as response:
            assert (response.status, (await response.json())["status"]) == (200, "completed")
        await socket.send(json.dumps({"type": "response.create", **body}))
        async with asyncio.timeout(10):
            while (event := json.loads(await socket.recv()))["type"] != "response.completed":
                pass
        # The WebSocket was opened before the reload.
        assert "old old" in json.dumps(event)


@pytest.mark.slow
async def test_a_background_response_finishes_under_the_old_configuration(tmp_path: Path) -> None:
    async with running_stage(tmp_path, per_chunk=1, delay_s=0.1) as stage:
        body = {"model": "gpt-oss", "input": "Hi", "background": True}
        async with stage.session.post(f"{stage.gateway.url}/v1/responses", json=body) as reply:
            response_id = (await reply.json())["id"]
        async with asyncio.timeout(10):
            while not stage.old.requests:
                await asyncio.sleep(0.01)
        await stage.reload(stage.config(stage.new))
        assert "new new" in await stage.chat()
        async with asyncio.timeout(30):
            while True:
                async with stage.session.get(f"{stage.gateway.url}/v1/responses/{response_id}") as reply:
                    response = await reply.json()
                if response["status"] not in ("queued", "in_progress"):
                    break
                await asyncio.sleep(0.1)
        assert response["status"] == "completed"
        assert json.dumps(response["output"]).count("old") == 40
        assert (len(stage.old.requests), len(stage.new.requests)) == (1, 1)


@pytest.mark.slow
async def test_a_shutdown_hands_over_the_background_responses_of_a_replaced_configuration(tmp_path: Path) -> None:
    async with running_stage(tmp_path, per_chunk=1, delay_s=0.2) as stage:
        body = {"model": "gpt-oss", "input": "Hi", "background": True}
        async with stage.session.post(f"{stage.gateway.url}/v1/responses", json=body) as reply:
            response_id = (await reply.json())["id"]
        async with asyncio.timeout(10):
            while not stage.old.requests:
                await asyncio.sleep(0.01)
        stage.new.script = stage.old.script
        await stage.reload(stage.config(stage.new))
        stage.gateway.signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await stage.gateway.ended() == 0
        async with replica(tmp_path / "next", stage.config(stage.new)) as following, asyncio.timeout(30):
            while not stage.new.requests:
                await asyncio.sleep(0.05)
            async with stage.session.post(f"{following.url}/v1/responses/{response_id}/cancel", json={}) as reply:
                response = await reply.json()
        assert response.get("status") == "cancelled", response
        assert len(stage.old.requests) == 1


CLOSING = """
import asyncio
import logging

from unisono.core.hooks import Hook

log = logging.getLogger("closing")


class Closing(Hook):
    def __init__(self, options):
        pass

    async def aclose(self):
        log.warning("a hook closes")
        await asyncio.sleep(1)
        log.warning("a hook has closed")
"""


@pytest.mark.slow
async def test_a_shutdown_while_a_replaced_configuration_closes_closes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, closing="closing:Closing")
    (tmp_path / "closing.py").write_text(CLOSING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with running_stage(tmp_path / "one") as stage:
        config = stage.config(stage.new, unisono={"hooks": ["closing"]})
        await stage.reload(config)
        await stage.reload(config)
        await stage.gateway.logged("a hook closes")
        stage.gateway.signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await stage.gateway.ended() == 0
    assert stage.gateway.log.count("a hook has closed") == 2
    assert '"level": "error"' not in stage.gateway.log


@pytest.mark.slow
async def test_memory_and_descriptors_stay_flat_over_many_reloads_under_traffic(tmp_path: Path) -> None:
    async with running_stage(tmp_path) as stage:
        is_over = asyncio.Event()
        request_count = 0

        async def send_requests() -> None:
            nonlocal request_count
            while not is_over.is_set():
                text = await stage.chat(stream=True)
                assert text.endswith("data: [DONE]\n\n")
                request_count += 1

        tasks = [asyncio.create_task(send_requests()) for _ in range(3)]
        fakes = (stage.new, stage.old)
        for number in range(10):
            await stage.reload(stage.config(fakes[number % 2]))
        before = holdings(stage.gateway.pid)
        for number in range(40):
            await stage.reload(stage.config(fakes[number % 2]))
        is_over.set()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0.5)
        after = holdings(stage.gateway.pid)
    assert request_count > 50
    assert after.descriptors <= before.descriptors + 4
    assert after.threads <= before.threads + 2
    assert after.memory < before.memory + 12 * MB, f"{(after.memory - before.memory) / MB:.1f} MB more"


def masking(word: str) -> dict[str, Any]:
    rule = {"keyword": word, "action": "MASK"}
    params = {"guardrail": "litellm_content_filter", "mode": "post_call", "default_on": True, "blocked_words": [rule]}
    return {"guardrails": [{"guardrail_name": word, "litellm_params": params}]}


@pytest.mark.slow
async def test_running_answers_keep_their_guardrails_and_new_ones_have_the_new(tmp_path: Path) -> None:
    async with running_stage(tmp_path, per_chunk=1, delay_s=0.05) as stage:
        await stage.reload(stage.config(stage.old, **masking("old")))
        guarded = asyncio.ensure_future(stage.chat(stream=True))
        async with asyncio.timeout(10):
            while not stage.old.requests:
                await asyncio.sleep(0.01)
        # The new configuration has another rule, and then none.
        await stage.reload(stage.config(stage.new, **masking("new")))
        masked = await stage.chat()
        assert "KEYWORD_REDACTED" in masked
        assert "new new" not in masked
        await stage.reload(stage.config(stage.new))
        assert not guarded.done()
        assert "new new" in await stage.chat()
        text = await guarded
        assert text.count("KEYWORD_REDACTED") == 40
        assert "old" not in text
