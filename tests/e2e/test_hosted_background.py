"""Background responses with tools when their gateway stops: only idempotent calls repeat."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.responses.folding import fold
from tests.contract.servers import Server
from tests.e2e.gateway import config_of, gateway
from tests.e2e.hosting import DOCS, calls, hosts, made, result
from tests.e2e.replicas import LEASE_S, Client, Json, Told, replica
from tests.e2e.responses import ANSWER
from tests.e2e.wires import ENCODING, WIRES
from tests.fakes import FakeVllm
from tests.mcp.conftest import Upstream
from unisono.engine.server_tools.call_verdicts import OUTCOME_UNKNOWN

WIRE = WIRES["vllm"]


def configuration(upstream: Upstream, fake: FakeVllm, redis: Server, database: int, **entry: Any) -> Json:
    store = {"url": f"{redis.url.removesuffix('/0')}/{database}", "deadline_s": 5, "lease_s": LEASE_S}
    return config_of(f"vllm@{fake.url}", store=store, mcp_servers=hosts(upstream, **entry)["mcp_servers"])


def model(name: str, seconds: float) -> Any:
    """Script: call the tool once, then answer, whichever gateway sends the prompt."""
    called = calls("slow", seconds=seconds, name=name)

    def script(body: Json) -> Any:
        return WIRE.script(ANSWER if name in ENCODING.decode(body["prompt"]) else called)

    return script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("idempotent", "begun", "status"), [([], 1, "failed"), (["slow"], 2, "completed")], ids=["once", "safe to repeat"]
)
async def test_interrupted_call_is_repeated_only_if_idempotent(
    upstream: Upstream, redis_server: Server, tmp_path: Path, idempotent: list[str], begun: int, status: str
) -> None:
    name = f"killed{len(idempotent)}"
    async with FakeVllm(tokens=[]) as fake, aiohttp.ClientSession() as session:
        fake.script = model(name, 2.0)
        config = configuration(upstream, fake, redis_server, len(idempotent), idempotent=idempotent)
        async with replica(tmp_path / "b", config) as second, replica(tmp_path / "a", config) as first:
            a, b = Client(first.url, session), Client(second.url, session)
            body = {"model": "gpt-oss", "input": "Go", "tools": [DOCS], "background": True}
            response = await a.post("/v1/responses", body)
            await upstream.until_noted(f"slow begins {name}", within=30)
            first.kill()
            await first.ended()
            ended = await b.over(response["id"])
            assert ended["status"] == "completed"
            [call] = made(ended)
            assert call["status"] == status
            assert len(upstream.noted(f"slow begins {name}")) == begun
            received = await b.resumes(Told(), response["id"])
            assert fold(received.events).response == ended
            last = ENCODING.decode(fake.requests[-1].json["prompt"])
            assert result("slow", "done" if idempotent else OUTCOME_UNKNOWN) in last


@pytest.mark.slow
async def test_stored_tool_result_is_used_after_a_takeover(
    upstream: Upstream, redis_server: Server, tmp_path: Path
) -> None:
    """The gateway crashes while the model answers after the call."""
    gate = asyncio.Event()
    async with FakeVllm(tokens=[]) as fake, aiohttp.ClientSession() as session:
        called = calls("echo", text="kept")

        def script(body: Json) -> Any:
            prompt = ENCODING.decode(body["prompt"])
            if result("echo", "kept") not in prompt:
                return WIRE.script(called)
            if not gate.is_set():
                gate.set()
                return WIRE.script(ANSWER, first_delay_s=30.0)
            return WIRE.script(ANSWER)

        fake.script = script
        config = configuration(upstream, fake, redis_server, 7)
        async with replica(tmp_path / "b", config) as second, replica(tmp_path / "a", config) as first:
            a, b = Client(first.url, session), Client(second.url, session)
            body = {"model": "gpt-oss", "input": "Go", "tools": [DOCS], "background": True}
            response = await a.post("/v1/responses", body)
            async with asyncio.timeout(30):
                await gate.wait()
            # The result is stored shortly after its event.
            await asyncio.sleep(0.3)
            first.kill()
            await first.ended()
            ended = await b.over(response["id"])
            assert [call["output"] for call in made(ended)] == ["kept"]
            assert upstream.noted("echo kept") == ["echo kept"]
            received = await b.resumes(Told(), response["id"])
            assert fold(received.events).response == ended


@pytest.mark.slow
async def test_cancelling_a_response_cancels_its_tool_call(
    upstream: Upstream, redis_server: Server, tmp_path: Path
) -> None:
    async with FakeVllm(tokens=[]) as fake, aiohttp.ClientSession() as session:
        fake.script = model("cancelled", 30.0)
        config = configuration(upstream, fake, redis_server, 8)
        async with replica(tmp_path / "a", config) as first:
            a = Client(first.url, session)
            body = {"model": "gpt-oss", "input": "Go", "tools": [DOCS], "background": True}
            response = await a.post("/v1/responses", body)
            await upstream.until_noted("slow begins cancelled", within=30)
            ended = await a.post(f"/v1/responses/{response['id']}/cancel")
            assert ended["status"] == "cancelled"
            assert made(ended)[0]["status"] == "incomplete"
            await upstream.until_noted("slow cancelled cancelled", within=10)


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("grace_s", "output"), [(20.0, "done"), pytest.param(0.1, None, marks=pytest.mark.slow)], ids=["in time", "late"]
)
async def test_a_handover_waits_for_a_tool_call_within_its_grace_period(
    upstream: Upstream, request: pytest.FixtureRequest, tmp_path: Path, kind: str, grace_s: float, output: str | None
) -> None:
    name = f"handed-{kind}-{grace_s}"
    url = f"sqlite:///{tmp_path}/state.db"
    if kind == "redis":
        url = request.getfixturevalue("redis_server").url.removesuffix("/0") + f"/{30 + int(grace_s)}"
    async with FakeVllm(tokens=[]) as fake, aiohttp.ClientSession() as session:
        fake.script = model(name, 0.6)
        store = {"url": url, "deadline_s": 5, "lease_s": LEASE_S}
        config = config_of(f"vllm@{fake.url}", store=store, mcp_servers=hosts(upstream)["mcp_servers"])
        async with gateway(config) as first:
            assert first.app is not None
            body = {"model": "gpt-oss", "input": "Go", "tools": [DOCS], "background": True}
            response = await Client(first.url, session).post("/v1/responses", body)
            await upstream.until_noted(f"slow begins {name}", within=30)
            await first.app.state.gateway.hand_over(grace_s)
            assert bool(upstream.noted(f"slow ends {name}")) == (output is not None)
            # The first gateway did not prompt the model again.
            assert len(prompts_of(fake)) == 1
        async with gateway(config) as second:
            client = Client(second.url, session)
            ended = await client.over(response["id"])
            received = await client.resumes(Told(), response["id"])
        assert ended["status"] == "completed"
        assert [call["output"] for call in made(ended)] == [output]
        assert len(upstream.noted(f"slow begins {name}")) == 1
        assert fold(received.events).response == ended
        expected = result("slow", output or OUTCOME_UNKNOWN)
        assert expected in ENCODING.decode(fake.requests[-1].json["prompt"])


ENDINGS: dict[str, tuple[list[signal.Signals], int, str | None]] = {
    # Signals, grace period in seconds, output of the call.
    "SIGTERM": ([signal.SIGTERM], 20, "done"),
    "SIGTERM and a grace period that is too short": ([signal.SIGTERM], 1, None),
    "SIGTERM twice": ([signal.SIGTERM, signal.SIGTERM], 20, None),
    "SIGHUP": ([signal.SIGHUP], 20, "done"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("signals", "grace_s", "output"), ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_stopping_process_finishes_its_tool_call(
    upstream: Upstream,
    redis_server: Server,
    tmp_path: Path,
    kind: str,
    signals: list[signal.Signals],
    grace_s: int,
    output: str | None,
) -> None:
    name = f"{kind}-{list(ENDINGS.values()).index((signals, grace_s, output))}"
    url = f"sqlite:///{tmp_path}/state.db"
    if kind == "redis":
        url = f"{redis_server.url.removesuffix('/0')}/{60 + len(upstream.noted('slow begins'))}"
    async with FakeVllm(tokens=[]) as fake, aiohttp.ClientSession() as session:
        fake.script = model(name, 4.0)
        store = {"url": url, "deadline_s": 5, "lease_s": LEASE_S}
        unisono = {"shutdown_grace_s": grace_s, "shutdown_delay_s": 0}
        servers = hosts(upstream)["mcp_servers"]
        config = config_of(f"vllm@{fake.url}", store=store, unisono=unisono, mcp_servers=servers)
        async with replica(tmp_path / "a", config) as first:
            body = {"model": "gpt-oss", "input": "Go", "tools": [DOCS], "background": True}
            response = await Client(first.url, session).post("/v1/responses", body)
            await upstream.until_noted(f"slow begins {name}", within=30)
            for number in signals:
                first.signal(number)
                await asyncio.sleep(0.2)
            if signals == [signal.SIGHUP]:
                ended = await Client(first.url, session).over(response["id"])
            else:
                assert await asyncio.wait_for(first.ended(), 15) == 0
                if output is not None:
                    assert upstream.noted(f"slow ends {name}")
                async with replica(tmp_path / "b", config) as second:
                    ended = await Client(second.url, session).over(response["id"])
        assert ended["status"] == "completed"
        assert [call["output"] for call in made(ended)] == [output]
        assert len(upstream.noted(f"slow begins {name}")) == 1
        assert result("slow", output or OUTCOME_UNKNOWN) in ENCODING.decode(fake.requests[-1].json["prompt"])


def prompts_of(fake: FakeVllm) -> list[list[int]]:
    return [seen.json["prompt"] for seen in fake.requests if seen.path == "/v1/completions"]
