"""Virtual keys over real sockets: changes made by the command take effect on every replica."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from websockets.asyncio.client import connect

from tests.contract.servers import Server
from tests.e2e.gateway import Answer, config_of, gateway, message_of, to_answer
from tests.e2e.keyed import MASTER, bearing, keyed, raw_answer, ring, with_keys
from tests.e2e.replicas import Replica, replica
from tests.fakes import FakeVllm
from unisono.api.responses.background.job_record import rebuild_request
from unisono.bootstrap.engine import build_engine
from unisono.bootstrap.responses_api import responses_deps
from unisono.cli import main
from unisono.core.quotas import KeyLimits
from unisono.core.state_store import Lease
from unisono.errors import ModelNotAllowed
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(180)

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>Hello.<|return|>")
LONG = ENCODING.encode_marked("<|channel|>final<|message|>" + "la " * 60 + "<|return|>")
# Maximum time until every replica applies a changed key.
PROPAGATION_LIMIT_S = 1.0


def command(config: Path, *arguments: str) -> dict[str, Any]:
    """Run a `unisono keys` command and return its JSON output."""
    result = CliRunner().invoke(main, ["keys", arguments[0], "--config", str(config), *arguments[1:], "--json"])
    assert result.exit_code == 0, result.output
    printed: dict[str, Any] = json.loads(result.stdout)
    return printed


@dataclass
class Team:
    """Two gateway processes that share only the store."""

    gateways: list[Replica]
    session: aiohttp.ClientSession

    async def keys(self, *arguments: str) -> dict[str, Any]:
        return await asyncio.to_thread(command, self.gateways[0].path, *arguments)

    async def revoke(self, key_id: str) -> None:
        path = str(self.gateways[0].path)
        arguments = ["keys", "revoke", "--config", path, key_id]
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments)
        assert result.exit_code == 0, result.output

    async def statuses(self, key: str, path: str = "/v1/models") -> list[int]:
        statuses = []
        for replica_ in self.gateways:
            async with self.session.get(replica_.url + path, headers=bearing(key)) as response:
                statuses.append(response.status)
        return statuses

    async def until_status(self, key: str, status: int) -> float:
        """Wait until every gateway returns `status` for the key; return the time taken in seconds."""
        started = time.monotonic()
        while await self.statuses(key) != [status] * len(self.gateways):
            assert time.monotonic() - started < 10 * PROPAGATION_LIMIT_S
            await asyncio.sleep(0.02)
        return time.monotonic() - started


@asynccontextmanager
async def team(folder: Path, store: str, fake: FakeVllm, **settings: Any) -> AsyncIterator[Team]:
    config = with_keys(config_of(f"vllm@{fake.url}", unisono=settings), store)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        starting = [stack.enter_async_context(replica(folder / name, config)) for name in ("one", "two")]
        yield Team(list(await asyncio.gather(*starting)), session)


STORES: dict[str, Callable[[Path, pytest.FixtureRequest], str]] = {
    "redis": lambda _, request: str(request.getfixturevalue("redis_server").url),
    "sqlite": lambda folder, _: f"sqlite://{folder}/state.db",
}


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
async def test_a_key_change_reaches_every_gateway_within_a_second(
    tmp_path: Path, request: pytest.FixtureRequest, store: Callable[[Path, pytest.FixtureRequest], str]
) -> None:
    async with (
        FakeVllm(tokens=ANSWER) as fake,
        team(tmp_path, store(tmp_path, request), fake, log_level="debug") as team_of_two,
    ):
        secrets = [MASTER]
        created = await team_of_two.keys("create", "--name", "CI", "--models", "gpt-oss")
        key = created["key"]
        secrets.append(key)
        assert await team_of_two.statuses(key) == [200, 200]
        assert await team_of_two.statuses(key, "/v1/models/gpt-oss") == [200, 200]
        for replica_ in team_of_two.gateways:
            await present_key_in_every_place(replica_.url, key, team_of_two.session)
        # Permissions are reduced.
        await team_of_two.keys("update", created["id"], "--models", "others")
        await asyncio.sleep(PROPAGATION_LIMIT_S)
        assert await team_of_two.statuses(key, "/v1/models/gpt-oss") == [404, 404]
        # The key is rotated with a grace period for the old secret.
        rotated = await team_of_two.keys("rotate", created["id"], "--grace", "2s")
        rotated_at = time.monotonic()
        secrets.append(rotated["key"])
        assert await team_of_two.statuses(rotated["key"]) == [200, 200]
        assert await team_of_two.statuses(key) == [200, 200]
        await asyncio.sleep(max(2.0 + PROPAGATION_LIMIT_S - (time.monotonic() - rotated_at), 0.0))
        assert await team_of_two.statuses(key) == [401, 401]
        # The key is rotated without a grace period.
        rotated_again = await team_of_two.keys("rotate", created["id"])
        secrets.append(rotated_again["key"])
        assert await team_of_two.until_status(rotated["key"], 401) < PROPAGATION_LIMIT_S + 0.5
        assert await team_of_two.statuses(rotated_again["key"]) == [200, 200]
        await team_of_two.revoke(created["id"])
        assert await team_of_two.until_status(rotated_again["key"], 401) < PROPAGATION_LIMIT_S + 0.5
        dumped = stored_data(tmp_path, request)
        for secret in secrets:
            assert secret.encode() not in dumped
            assert secret.removeprefix("sk-uni-").encode() not in dumped
        assert created["id"].encode() in dumped


async def present_key_in_every_place(url: str, key: str, session: aiohttp.ClientSession) -> None:
    """Present the key in each accepted place, and in places where keys are not accepted."""
    async with session.get(url + "/v1/models", headers={"x-api-key": key}) as response:
        assert response.status == 200
    async with session.get(f"{url}/v1/models/{key}?key={key}", headers=bearing(key + "A")) as response:
        assert response.status == 401
        assert key not in await response.text()
    body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
    async with session.post(url + "/v1/chat/completions", json=body, headers=bearing(key)) as response:
        assert response.status == 200
    async with connect(url.replace("http", "ws", 1) + "/v1/responses", additional_headers=bearing(key)) as socket:
        await socket.send(json.dumps({"type": "response.create", "model": "gpt-oss", "input": "Hi"}))
        while json.loads(await socket.recv())["type"] != "response.completed":
            pass


def stored_data(folder: Path, request: pytest.FixtureRequest) -> bytes:
    """Read all stored data and logs of both gateways and of the store.

    The configuration is left out: the test wrote it.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "config.json"]
    if "redis_server" in request.fixturenames or "redis" in request.node.name:
        server = request.getfixturevalue("redis_server")
        files += [path for path in server.folder.rglob("*") if path.is_file()]
    return b"\n".join(path.read_bytes() for path in files)


async def test_a_key_is_rejected_from_its_expiry_on(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        _, key = await keys.issue(expires_at=time.time() + 1.0)
        assert (await running.get("/v1/models", **bearing(key))).status == 200
        await asyncio.sleep(1.05)
        assert (await running.get("/v1/models", **bearing(key))).status == 401


async def test_a_key_is_accepted_from_either_header(tmp_path: Path) -> None:
    async with keyed(config_of("vllm@http://127.0.0.1:9"), tmp_path) as (running, keys):
        _, key = await keys.issue()
        assert (await running.get("/v1/models", x_api_key=key)).status == 401  # not the header's name
        assert (await running.get("/v1/models", **{"x-api-key": key})).status == 200
        assert (await running.get("/v1/models", authorization=f"bearer {key}")).status == 200
        assert (await running.get("/v1/models", authorization=f"Basic {key}")).status == 401


@pytest.mark.parametrize("shared", [False, True])
async def test_prompt_caches_are_isolated_per_tenant_unless_shared(tmp_path: Path, shared: bool) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        config = config_of(f"vllm@{fake.url}")
        config["unisono"] = {**config.get("unisono", {}), "share_prompt_caches": shared, "raw_completions": True}
        async with keyed(config, tmp_path) as (running, keys):
            ann, bob = (await keys.issue("ann", raw=True))[1], (await keys.issue("bob"))[1]
            anns_other = (await keys.issue("ann"))[1]
            body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
            fake.requests.clear()
            for key in (ann, anns_other, bob, MASTER):
                assert (await running.post("/v1/chat/completions", body, **bearing(key))).status == 200
            raw = json.dumps({"model": "gpt-oss", "prompt": "Hi"}).encode()
            assert (await running.post("/v1/completions", raw, **bearing(ann))).status == 200
    salts = [request.json.get("cache_salt") for request in fake.requests]
    if shared:
        assert salts == [None] * 5
    else:
        assert salts[0] == salts[1] == salts[4] != salts[2]
        assert None not in salts[:3]
        assert salts[3] is None


# Streams and WebSockets


@pytest.mark.slow
async def test_running_streams_finish_after_their_key_is_revoked(tmp_path: Path) -> None:
    async with (
        FakeVllm(tokens=LONG, delay_s=0.05) as fake,
        keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue()
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        started: asyncio.Queue[None] = asyncio.Queue()

        async def stream_chat() -> Answer:
            async with running.session.post(
                running.url + "/v1/chat/completions", json=body, headers=bearing(key)
            ) as response:
                first = await response.content.readuntil(b"\n\n")
                started.put_nowait(None)
                return to_answer(response.status, response.headers, first + await response.read())

        streams = [asyncio.create_task(stream_chat()) for _ in range(50)]
        for _ in streams:
            await started.get()
        await keys.revoke(record)
        await asyncio.sleep(0.6)
        assert (await running.get("/v1/models", **bearing(key))).status == 401
        assert sum(stream.done() for stream in streams) < len(streams)
        for response in await asyncio.gather(*streams):
            assert response.done
            assert message_of(response).content == "la " * 60


@pytest.mark.slow
async def test_an_open_websocket_rejects_new_requests_after_revocation(tmp_path: Path) -> None:
    request = json.dumps({"type": "response.create", "model": "gpt-oss", "input": "Hi"})

    async with (
        FakeVllm(tokens=LONG, delay_s=0.05) as fake,
        keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue()
        url = running.url.replace("http", "ws", 1) + "/v1/responses"
        async with connect(url, additional_headers=bearing(key)) as socket:
            await socket.send(request)
            events = [json.loads(await socket.recv())]
            await keys.revoke(record)
            await asyncio.sleep(0.6)
            while events[-1]["type"] != "response.completed":
                events.append(json.loads(await socket.recv()))
            await socket.send(request)
            refused = json.loads(await socket.recv())
        assert (refused["type"], refused["status"]) == ("error", 401)
        assert refused["error"]["code"] == "invalid_api_key"
        assert len(fake.requests) == 1


async def test_an_open_websocket_applies_changed_model_permissions(tmp_path: Path) -> None:
    request = json.dumps({"type": "response.create", "model": "gpt-oss", "input": "Hi"})
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        record, key = await keys.issue(models=frozenset({"another"}))
        url = running.url.replace("http", "ws", 1) + "/v1/responses"
        async with connect(url, additional_headers=bearing(key)) as socket:
            await socket.send(request)
            assert json.loads(await socket.recv())["error"]["code"] == "model_not_allowed"
            current = await keys.store.key(record.id)
            assert current is not None
            await keys.store.put_key(replace(current, models=None))
            await asyncio.sleep(0.6)
            await socket.send(request)
            assert json.loads(await socket.recv())["type"] == "response.created"


async def test_a_takeover_uses_the_current_state_of_the_responses_key(tmp_path: Path) -> None:
    async with (
        FakeVllm(tokens=LONG, delay_s=0.05) as fake,
        keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue("team")
        body = json.dumps({"model": "gpt-oss", "input": "Hi", "background": True}).encode()
        created = await running.post("/v1/responses", body, **bearing(key))
        [stored] = await keys.store.responses("team", [created.body["id"]])
        assert stored is not None
        current = await keys.store.put_key(replace(record, limits=KeyLimits(rpm=3), models=frozenset({"gpt-oss"})))
        await keys.revoke(current)
        site = running.app.state.gateway
        deps = responses_deps(site, build_engine(site.pool))
        generation_job = await rebuild_request(deps, "team", stored, Lease("team", stored.anchor, "another process", 2))
        assert generation_job.generation.request.origin.caller == current.caller
        # A model that the key may no longer use is refused.
        await keys.store.put_key(replace(current, models=frozenset(), revision=current.revision + 1))
        with pytest.raises(ModelNotAllowed):
            await rebuild_request(deps, "team", stored, Lease("team", stored.anchor, "another process", 3))


# Tool servers


SERVERS = {
    "docs": {"url": "https://docs.example.com/mcp"},
    "mail": {"url": "https://mail.example.com/mcp"},
}
FORBIDDEN_SERVERS: dict[str, Any] = {
    "label": {"server_label": "mail"},
    "URL": {"server_label": "x", "server_url": "https://mail.example.com/mcp"},
    "URL under an allowed label": {"server_label": "docs", "server_url": "https://mail.example.com/mcp"},
    "URL on an allowed host": {"server_label": "x", "server_url": "https://open.example.com/mcp"},
}


@pytest.mark.parametrize("server", FORBIDDEN_SERVERS.values(), ids=FORBIDDEN_SERVERS)
async def test_a_key_reaches_only_its_allowed_tool_servers(tmp_path: Path, server: dict[str, Any]) -> None:
    config = config_of(
        "vllm@http://127.0.0.1:9",
        mcp_servers=SERVERS,
        unisono={"mcp_allowed_hosts": ["open.example.com"]},
    )
    async with keyed(config, tmp_path) as (running, keys):
        _, limited_key = await keys.issue(mcp_servers=frozenset({"docs"}))
        body = json.dumps({"model": "gpt-oss", "input": "Hi", "tools": [{"type": "mcp", **server}]}).encode()
        forbidden = await running.post("/v1/responses", body, **bearing(limited_key))
        assert forbidden.status in (400, 403), forbidden.raw
        assert forbidden.body["error"]["param"].startswith("tools.0.")
        # A forbidden server is indistinguishable from an unknown one.
        unknown_server = json.loads(json.dumps(server).replace("mail", "gone"))
        body = json.dumps({"model": "gpt-oss", "input": "Hi", "tools": [{"type": "mcp", **unknown_server}]}).encode()
        unknown = await running.post("/v1/responses", body, **bearing(limited_key))
        assert forbidden.raw.replace(b"mail", b"gone") == unknown.raw


async def test_chat_offers_no_server_tools_that_the_key_may_not_use(tmp_path: Path) -> None:
    config = config_of("vllm@http://127.0.0.1:9", mcp_servers=SERVERS)
    config["mcp_servers"] = {
        label: {**server, "require_approval": "never"} for label, server in config["mcp_servers"].items()
    }
    for entry in config["model_list"]:
        entry["unisono"] = {"run_tools": True}
    async with keyed(config, tmp_path) as (running, keys):
        _, key = await keys.issue(mcp_servers=frozenset())
        chat = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
        body = json.dumps({**chat, "unisono": {"run_tools": True}}).encode()
        # No tool may run, so no tool server is contacted; the error comes from the missing backend.
        response = await running.post("/v1/chat/completions", body, **bearing(key))
        assert response.body["error"]["code"].startswith("backend_"), response.raw


# Store outages


@pytest.mark.parametrize(("setting", "expected"), [("refuse", 503), ("known_keys", 200)])
async def test_when_store_is_down_setting_applies_to_known_keys(tmp_path: Path, setting: str, expected: int) -> None:
    server = Server(tmp_path / "redis", ("appendonly yes", "maxmemory-policy noeviction"))
    (tmp_path / "redis").mkdir()
    server.start()
    try:
        async with FakeVllm(tokens=ANSWER) as fake, ring(server.url) as keys:
            config = with_keys(config_of(f"vllm@{fake.url}", unisono={"when_store_is_down": setting}), server.url)
            async with gateway(config) as running:
                _, seen = await keys.issue()
                _, unseen = await keys.issue()
                revoked_record, revoked = await keys.issue()
                await keys.revoke(revoked_record)
                assert (await running.get("/v1/models", **bearing(seen))).status == 200
                assert (await running.get("/v1/models", **bearing(revoked))).status == 401
                server.end()
                await asyncio.sleep(0.6)
                async with asyncio.timeout(10):
                    # A connection that is refused slowly counts as a stall at first.
                    while (await running.get("/v1/models", **bearing(seen))).status != expected:
                        await asyncio.sleep(0.05)
                for _ in range(3):
                    response = await running.get("/v1/models", **bearing(seen))
                    assert response.status == expected, response.raw
                assert (await running.get("/v1/models", **bearing(unseen))).status == 503
                assert (await running.get("/v1/models", **bearing(revoked))).status in (401, 503)
                assert (await running.get("/v1/models", **bearing("sk-uni-" + "A" * 56))).status == 401
                assert (await running.get("/v1/models", **bearing(MASTER))).status == 200
    finally:
        server.end()


# Hostile keys


HOSTILE: dict[str, bytes] = {
    "ten kilobytes": b"k" * 10_000,
    "ten kilobytes after the prefix": b"sk-uni-" + b"A" * 10_000,
    "quotes": b"' OR 1=1 --",
    "glob": b"sk-uni-*",
    "latin-1": b"sk-uni-\xe4\xf6\xfc" + b"A" * 53,
    "half a surrogate pair": b"sk-uni-\xed\xa0\x80" + b"A" * 53,
    "emoji": "🔑".encode() * 20,
    "tab inside": b"sk-uni-" + b"A" * 20 + b"\t" + b"A" * 35,
    "comma": b"sk-uni-" + b"A" * 56 + b", Bearer x",
    "percent": b"%00%0d%0a",
    "standard base64 alphabet": b"sk-uni-" + b"+/" * 28,
    "empty": b"",
}
BROKEN: dict[str, bytes] = {
    "NUL": b"sk-uni-\x00" + b"A" * 55,
    "line break and header": b"sk-uni-A\r\nX-Admin: 1\r\nauthorization: Bearer " + MASTER.encode(),
    "bare line feed": b"sk-uni-A\nX-Admin: 1",
}


def request_with(key: bytes) -> bytes:
    return b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\nConnection: close\r\n\r\n" % key


async def test_hostile_keys_are_rejected_uniformly_and_quickly(tmp_path: Path) -> None:
    async with keyed(config_of("vllm@http://127.0.0.1:9"), tmp_path) as (running, _):
        bodies = {}
        for name, key in HOSTILE.items():
            durations_s = []
            for _ in range(3):
                started = time.monotonic()
                response = await raw_answer(running.url, request_with(key))
                durations_s.append(time.monotonic() - started)
            head, _, body = response.partition(b"\r\n\r\n")
            assert head.split()[1] == b"401", (name, response)
            bodies[name] = body
            # The fastest of three, so that other load on the machine does not count.
            assert min(durations_s) < 0.05, (name, durations_s)
        empty_key_body = bodies.pop("empty")
        assert b"Send exactly one API key" in empty_key_body
        assert len(set(bodies.values())) == 1


@pytest.mark.parametrize("key", BROKEN.values(), ids=BROKEN)
async def test_a_key_that_breaks_the_header_grants_no_access(tmp_path: Path, key: bytes) -> None:
    async with keyed(config_of("vllm@http://127.0.0.1:9"), tmp_path) as (running, _):
        response = await raw_answer(running.url, request_with(key))
        assert response.split()[1] in (b"400", b"401"), response
        assert b"gpt-oss" not in response


async def test_a_flood_of_invalid_keys_causes_no_store_reads(tmp_path: Path) -> None:
    server = Server(tmp_path / "redis", ())
    (tmp_path / "redis").mkdir()
    server.start()
    try:
        # Otherwise most of the requests would be refused without a look at their keys.
        unlimited = config_of("vllm@http://127.0.0.1:9", unisono={"failed_authentication": {"max_per_minute": 0}})
        async with gateway(with_keys(unlimited, server.url)) as running:
            await running.get("/v1/models", **bearing("sk-uni-" + "A" * 56))

            def key_reads() -> int:
                with server.client() as client:
                    stats = client.info("commandstats")
                return int(stats.get("cmdstat_hget", {}).get("calls", 0))

            before = key_reads()
            keys = [f"sk-uni-{number:056d}" for number in range(300)]
            responses = await asyncio.gather(*(running.get("/v1/models", **bearing(key)) for key in keys))
            assert {response.status for response in responses} == {401}
            assert key_reads() == before
    finally:
        server.end()


async def test_a_gateway_without_a_master_key_needs_no_key(tmp_path: Path) -> None:
    address = f"sqlite://{tmp_path}/state.db"
    async with ring(address) as keys:
        record, key = await keys.issue()
        await keys.revoke(record)
    config = {**config_of("vllm@http://127.0.0.1:9"), "store": {"url": address}}
    async with gateway(config) as running:
        assert (await running.get("/v1/models", **bearing(key))).status == 200
        # Without keys only requests to this machine are accepted.
        request = b"GET /v1/models HTTP/1.1\r\nHost: gateway.example.com\r\nConnection: close\r\n\r\n"
        foreign_host = await raw_answer(running.url, request)
        assert foreign_host.split()[1] == b"403"
