"""Virtual keys over real sockets: made by the command, good at once on every replica, and as soon no more."""

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
from unisono.app import build_engine, responses_deps
from unisono.cli import main
from unisono.core.access import KeyLimits
from unisono.core.state_store import Lease
from unisono.errors import ModelNotAllowed
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(180)

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>Hello.<|return|>")
LONG = ENCODING.encode_marked("<|channel|>final<|message|>" + "la " * 60 + "<|return|>")
WITHIN_S = 1.0
"""The promise: what is changed is seen by every replica within that time."""


def command(config: Path, *arguments: str) -> dict[str, Any]:
    """What `unisono keys` prints as JSON."""
    result = CliRunner().invoke(main, ["keys", arguments[0], "--config", str(config), *arguments[1:], "--json"])
    assert result.exit_code == 0, result.output
    printed: dict[str, Any] = json.loads(result.stdout)
    return printed


@dataclass
class Team:
    """Two gateways, each a process of its own, with nothing but the store in common."""

    gateways: list[Replica]
    session: aiohttp.ClientSession

    async def keys(self, *arguments: str) -> dict[str, Any]:
        return await asyncio.to_thread(command, self.gateways[0].path, *arguments)

    async def revoke(self, key_id: str) -> None:
        path = str(self.gateways[0].path)
        asked = ["keys", "revoke", "--config", path, key_id]
        result = await asyncio.to_thread(CliRunner().invoke, main, asked)
        assert result.exit_code == 0, result.output

    async def statuses(self, key: str, path: str = "/v1/models") -> list[int]:
        found = []
        for each in self.gateways:
            async with self.session.get(each.url + path, headers=bearing(key)) as answer:
                found.append(answer.status)
        return found

    async def becomes(self, key: str, status: int) -> float:
        """How long it takes until every gateway answers so, in seconds."""
        began = time.monotonic()
        while await self.statuses(key) != [status] * len(self.gateways):
            assert time.monotonic() - began < 10 * WITHIN_S
            await asyncio.sleep(0.02)
        return time.monotonic() - began


@asynccontextmanager
async def team(folder: Path, store: str, fake: FakeVllm, **settings: Any) -> AsyncIterator[Team]:
    config = with_keys(config_of(f"vllm@{fake.url}", unisono=settings), store)
    async with AsyncExitStack() as opened:
        session = await opened.enter_async_context(aiohttp.ClientSession())
        starting = [opened.enter_async_context(replica(folder / name, config)) for name in ("one", "two")]
        yield Team(list(await asyncio.gather(*starting)), session)


STORES: dict[str, Callable[[Path, pytest.FixtureRequest], str]] = {
    "redis": lambda _, request: str(request.getfixturevalue("redis_server").url),
    "sqlite": lambda folder, _: f"sqlite://{folder}/state.db",
}


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
async def test_what_is_done_to_a_key_is_seen_by_every_gateway_within_a_second(
    tmp_path: Path, request: pytest.FixtureRequest, store: Callable[[Path, pytest.FixtureRequest], str]
) -> None:
    async with (
        FakeVllm(tokens=ANSWER) as fake,
        team(tmp_path, store(tmp_path, request), fake, log_level="debug") as two,
    ):
        planted = [MASTER]
        made = await two.keys("create", "--name", "CI", "--models", "gpt-oss")
        key = made["key"]
        planted.append(key)
        assert await two.statuses(key) == [200, 200]
        assert await two.statuses(key, "/v1/models/gpt-oss") == [200, 200]
        for each in two.gateways:
            await every_way_in(each.url, key, two.session)
        # Less is allowed.
        await two.keys("update", made["id"], "--models", "others")
        await asyncio.sleep(WITHIN_S)
        assert await two.statuses(key, "/v1/models/gpt-oss") == [404, 404]
        # Another secret; the earlier one is good for some time still.
        turned = await two.keys("rotate", made["id"], "--grace", "2s")
        rotated_at = time.monotonic()
        planted.append(turned["key"])
        assert await two.statuses(turned["key"]) == [200, 200]
        assert await two.statuses(key) == [200, 200]
        await asyncio.sleep(max(2.0 + WITHIN_S - (time.monotonic() - rotated_at), 0.0))
        assert await two.statuses(key) == [401, 401]
        # Another, at once.
        last = await two.keys("rotate", made["id"])
        planted.append(last["key"])
        assert await two.becomes(turned["key"], 401) < WITHIN_S + 0.5
        assert await two.statuses(last["key"]) == [200, 200]
        await two.revoke(made["id"])
        assert await two.becomes(last["key"], 401) < WITHIN_S + 0.5
        dumped = dump(tmp_path, request)
        for secret in planted:
            assert secret.encode() not in dumped
            assert secret.removeprefix("sk-uni-").encode() not in dumped
        assert made["id"].encode() in dumped


async def every_way_in(url: str, key: str, session: aiohttp.ClientSession) -> None:
    """Show the key in each place that takes one, and in some that do not."""
    async with session.get(url + "/v1/models", headers={"x-api-key": key}) as answer:
        assert answer.status == 200
    async with session.get(f"{url}/v1/models/{key}?key={key}", headers=bearing(key + "A")) as answer:
        assert answer.status == 401
        assert key not in await answer.text()
    body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
    async with session.post(url + "/v1/chat/completions", json=body, headers=bearing(key)) as answer:
        assert answer.status == 200
    async with connect(url.replace("http", "ws", 1) + "/v1/responses", additional_headers=bearing(key)) as socket:
        await socket.send(json.dumps({"type": "response.create", "model": "gpt-oss", "input": "Hi"}))
        while json.loads(await socket.recv())["type"] != "response.completed":
            pass


def dump(folder: Path, request: pytest.FixtureRequest) -> bytes:
    """All that is kept and was logged: the files of both gateways and of the store. What a test wrote itself is the
    configuration, which is left out."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "config.json"]
    if "redis_server" in request.fixturenames or "redis" in request.node.name:
        server = request.getfixturevalue("redis_server")
        files += [path for path in server.folder.rglob("*") if path.is_file()]
    return b"\n".join(path.read_bytes() for path in files)


async def test_an_expired_key_is_no_good_from_that_moment_on(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        _, key = await keys.issue(expires_at=time.time() + 1.0)
        assert (await running.get("/v1/models", **bearing(key))).status == 200
        await asyncio.sleep(1.05)
        assert (await running.get("/v1/models", **bearing(key))).status == 401


async def test_the_key_is_taken_from_either_header(tmp_path: Path) -> None:
    async with keyed(config_of("vllm@http://127.0.0.1:9"), tmp_path) as (running, keys):
        _, key = await keys.issue()
        assert (await running.get("/v1/models", x_api_key=key)).status == 401  # not a header's name
        assert (await running.get("/v1/models", **{"x-api-key": key})).status == 200
        assert (await running.get("/v1/models", authorization=f"bearer {key}")).status == 200
        assert (await running.get("/v1/models", authorization=f"Basic {key}")).status == 401


@pytest.mark.parametrize("shared", [False, True])
async def test_what_backends_cache_is_a_tenants_own_unless_it_is_shared(tmp_path: Path, shared: bool) -> None:
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


# -- streams and sockets


@pytest.mark.slow
async def test_fifty_streams_go_on_when_their_key_is_revoked(tmp_path: Path) -> None:
    async with (
        FakeVllm(tokens=LONG, delay_s=0.05) as fake,
        keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue()
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        begun: asyncio.Queue[None] = asyncio.Queue()

        async def streamed() -> Answer:
            async with running.session.post(
                running.url + "/v1/chat/completions", json=body, headers=bearing(key)
            ) as answer:
                first = await answer.content.readuntil(b"\n\n")
                begun.put_nowait(None)
                return to_answer(answer.status, answer.headers, first + await answer.read())

        streams = [asyncio.create_task(streamed()) for _ in range(50)]
        for _ in streams:
            await begun.get()
        await keys.revoke(record)
        await asyncio.sleep(0.6)
        assert (await running.get("/v1/models", **bearing(key))).status == 401
        assert sum(stream.done() for stream in streams) < len(streams)
        for answer in await asyncio.gather(*streams):
            assert answer.done
            assert message_of(answer).content == "la " * 60


@pytest.mark.slow
async def test_an_open_socket_takes_nothing_new_from_a_key_that_is_revoked(tmp_path: Path) -> None:
    asks = json.dumps({"type": "response.create", "model": "gpt-oss", "input": "Hi"})

    async with (
        FakeVllm(tokens=LONG, delay_s=0.05) as fake,
        keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue()
        url = running.url.replace("http", "ws", 1) + "/v1/responses"
        async with connect(url, additional_headers=bearing(key)) as socket:
            await socket.send(asks)
            events = [json.loads(await socket.recv())]
            await keys.revoke(record)
            await asyncio.sleep(0.6)
            while events[-1]["type"] != "response.completed":
                events.append(json.loads(await socket.recv()))
            await socket.send(asks)
            refused = json.loads(await socket.recv())
        assert (refused["type"], refused["status"]) == ("error", 401)
        assert refused["error"]["code"] == "invalid_api_key"
        assert len(fake.requests) == 1


async def test_an_open_socket_sees_what_its_key_may_by_now(tmp_path: Path) -> None:
    asks = json.dumps({"type": "response.create", "model": "gpt-oss", "input": "Hi"})
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        record, key = await keys.issue(models=frozenset({"another"}))
        url = running.url.replace("http", "ws", 1) + "/v1/responses"
        async with connect(url, additional_headers=bearing(key)) as socket:
            await socket.send(asks)
            assert json.loads(await socket.recv())["error"]["code"] == "model_not_allowed"
            now = await keys.store.key(record.id)
            assert now is not None
            await keys.store.put_key(replace(now, models=None))
            await asyncio.sleep(0.6)
            await socket.send(asks)
            assert json.loads(await socket.recv())["type"] == "response.created"


async def test_whoever_goes_on_with_a_response_counts_it_for_the_key_it_was_asked_with(tmp_path: Path) -> None:
    async with (
        FakeVllm(tokens=LONG, delay_s=0.05) as fake,
        keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue("team")
        asked = json.dumps({"model": "gpt-oss", "input": "Hi", "background": True}).encode()
        begun = await running.post("/v1/responses", asked, **bearing(key))
        [kept] = await keys.store.responses("team", [begun.body["id"]])
        assert kept is not None
        now = await keys.store.put_key(replace(record, limits=KeyLimits(rpm=3), models=frozenset({"gpt-oss"})))
        await keys.revoke(now)
        site = running.app.state.gateway
        means = responses_deps(site, build_engine(site.pool))
        again = await rebuild_request(means, "team", kept, Lease("team", kept.anchor, "another process", 2))
        assert again.generation.request.caller == now.caller
        # What it may not ask for any more it is not answered.
        await keys.store.put_key(replace(now, models=frozenset(), revision=now.revision + 1))
        with pytest.raises(ModelNotAllowed):
            await rebuild_request(means, "team", kept, Lease("team", kept.anchor, "another process", 3))


# -- tool servers


SERVERS = {
    "docs": {"url": "https://docs.example.com/mcp"},
    "mail": {"url": "https://mail.example.com/mcp"},
}
ALLOWED_ONLY: dict[str, Any] = {
    "by its label": {"server_label": "mail"},
    "by its address": {"server_label": "x", "server_url": "https://mail.example.com/mcp"},
    "under an allowed label": {"server_label": "docs", "server_url": "https://mail.example.com/mcp"},
    "on a host anybody may name": {"server_label": "x", "server_url": "https://open.example.com/mcp"},
}


@pytest.mark.parametrize("named", ALLOWED_ONLY.values(), ids=ALLOWED_ONLY)
async def test_a_key_reaches_only_the_tool_servers_it_may(tmp_path: Path, named: dict[str, Any]) -> None:
    served = config_of(
        "vllm@http://127.0.0.1:9",
        mcp_servers=SERVERS,
        unisono={"mcp_allowed_hosts": ["open.example.com"]},
    )
    async with keyed(served, tmp_path) as (running, keys):
        _, limited = await keys.issue(mcp_servers=frozenset({"docs"}))
        body = json.dumps({"model": "gpt-oss", "input": "Hi", "tools": [{"type": "mcp", **named}]}).encode()
        refused = await running.post("/v1/responses", body, **bearing(limited))
        assert refused.status in (400, 403), refused.raw
        assert refused.body["error"]["param"].startswith("tools.0.")
        # A server the key may not use is as good as none.
        gone = json.loads(json.dumps(named).replace("mail", "gone"))
        body = json.dumps({"model": "gpt-oss", "input": "Hi", "tools": [{"type": "mcp", **gone}]}).encode()
        missing = await running.post("/v1/responses", body, **bearing(limited))
        assert refused.raw.replace(b"mail", b"gone") == missing.raw


async def test_hosted_tools_of_chat_are_those_a_key_may_use(tmp_path: Path) -> None:
    served = config_of("vllm@http://127.0.0.1:9", mcp_servers=SERVERS)
    served["mcp_servers"] = {
        label: {**server, "require_approval": "never"} for label, server in served["mcp_servers"].items()
    }
    for entry in served["model_list"]:
        entry["unisono"] = {"run_tools": True}
    async with keyed(served, tmp_path) as (running, keys):
        _, none = await keys.issue(mcp_servers=frozenset())
        asked = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
        body = json.dumps({**asked, "unisono": {"run_tools": True}}).encode()
        # Nothing to run, so nobody is asked for tools: what fails is the backend, which is not there.
        answer = await running.post("/v1/chat/completions", body, **bearing(none))
        assert answer.body["error"]["code"].startswith("backend_"), answer.raw


# -- while the store is away


@pytest.mark.parametrize(("setting", "known"), [("refuse", 503), ("known_keys", 200)])
async def test_what_happens_while_the_store_is_down_is_a_setting(tmp_path: Path, setting: str, known: int) -> None:
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
                    while (await running.get("/v1/models", **bearing(seen))).status != known:
                        await asyncio.sleep(0.05)
                for _ in range(3):
                    answer = await running.get("/v1/models", **bearing(seen))
                    assert answer.status == known, answer.raw
                assert (await running.get("/v1/models", **bearing(unseen))).status == 503
                assert (await running.get("/v1/models", **bearing(revoked))).status in (401, 503)
                assert (await running.get("/v1/models", **bearing("sk-uni-" + "A" * 56))).status == 401
                assert (await running.get("/v1/models", **bearing(MASTER))).status == 200
    finally:
        server.end()


# -- hostile keys


HOSTILE: dict[str, bytes] = {
    "ten kilobytes": b"k" * 10_000,
    "ten kilobytes of the right kind": b"sk-uni-" + b"A" * 10_000,
    "quotes": b"' OR 1=1 --",
    "a glob": b"sk-uni-*",
    "latin-1": b"sk-uni-\xe4\xf6\xfc" + b"A" * 53,
    "half a character": b"sk-uni-\xed\xa0\x80" + b"A" * 53,
    "emoji": "🔑".encode() * 20,
    "a tab inside": b"sk-uni-" + b"A" * 20 + b"\t" + b"A" * 35,
    "a comma": b"sk-uni-" + b"A" * 56 + b", Bearer x",
    "percent": b"%00%0d%0a",
    "other letters of base64": b"sk-uni-" + b"+/" * 28,
    "nothing": b"",
}
BROKEN: dict[str, bytes] = {
    "NUL": b"sk-uni-\x00" + b"A" * 55,
    "a line break and a header": b"sk-uni-A\r\nX-Admin: 1\r\nauthorization: Bearer " + MASTER.encode(),
    "a bare line feed": b"sk-uni-A\nX-Admin: 1",
}


def asking(key: bytes) -> bytes:
    return b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\nConnection: close\r\n\r\n" % key


async def test_hostile_keys_are_refused_alike_and_at_once(tmp_path: Path) -> None:
    async with keyed(config_of("vllm@http://127.0.0.1:9"), tmp_path) as (running, _):
        told = {}
        for name, key in HOSTILE.items():
            took_s = []
            for _ in range(3):
                began = time.monotonic()
                answer = await raw_answer(running.url, asking(key))
                took_s.append(time.monotonic() - began)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.split()[1] == b"401", (name, answer)
            told[name] = body
            # The fastest of three: what else goes on on the machine is no business of the key's.
            assert min(took_s) < 0.05, (name, took_s)
        sent = told.pop("nothing")
        assert b"Send exactly one API key" in sent
        assert len(set(told.values())) == 1


@pytest.mark.parametrize("key", BROKEN.values(), ids=BROKEN)
async def test_a_key_that_breaks_the_header_lets_nobody_in(tmp_path: Path, key: bytes) -> None:
    async with keyed(config_of("vllm@http://127.0.0.1:9"), tmp_path) as (running, _):
        answer = await raw_answer(running.url, asking(key))
        assert answer.split()[1] in (b"400", b"401"), answer
        assert b"gpt-oss" not in answer


async def test_a_flood_of_made_up_keys_asks_the_store_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path / "redis", ())
    (tmp_path / "redis").mkdir()
    server.start()
    try:
        async with gateway(with_keys(config_of("vllm@http://127.0.0.1:9"), server.url)) as running:
            await running.get("/v1/models", **bearing("sk-uni-" + "A" * 56))

            def gets() -> int:
                with server.client() as client:
                    stats = client.info("commandstats")
                return int(stats.get("cmdstat_hget", {}).get("calls", 0))

            before = gets()
            keys = [f"sk-uni-{number:056d}" for number in range(300)]
            answers = await asyncio.gather(*(running.get("/v1/models", **bearing(key)) for key in keys))
            assert {answer.status for answer in answers} == {401}
            assert gets() == before
    finally:
        server.end()


async def test_a_gateway_without_a_master_key_asks_for_none_whatever_the_store_holds(tmp_path: Path) -> None:
    address = f"sqlite://{tmp_path}/state.db"
    async with ring(address) as keys:
        record, key = await keys.issue()
        await keys.revoke(record)
    served = {**config_of("vllm@http://127.0.0.1:9"), "store": {"url": address}}
    async with gateway(served) as running:
        assert (await running.get("/v1/models", **bearing(key))).status == 200
        # It stays on this machine for that.
        asked = b"GET /v1/models HTTP/1.1\r\nHost: gateway.example.com\r\nConnection: close\r\n\r\n"
        host = await raw_answer(running.url, asked)
        assert host.split()[1] == b"403"
