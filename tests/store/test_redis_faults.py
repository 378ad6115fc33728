"""Tests of a failing Redis server: errors in time, no lost, repeated or partial writes."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.servers import Server
from tests.contract.state import answered, conversation, response, said
from unisono.core.state_store import EventPage, LogWrite, Retention, Status
from unisono.errors import StoreUnavailable
from unisono.store.redis import RedisStore, pubsub

DEADLINE_S = 0.25
# Allowance for a busy machine.
SLACK_S = 0.25


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "redis", ("appendonly yes", "appendfsync everysec"))
    try:
        yield server.start()
    finally:
        server.end()


@asynccontextmanager
async def opened(server: Server, deadline_s: float = DEADLINE_S) -> AsyncIterator[RedisStore]:
    store = RedisStore(server.url, Retention(), deadline_s=deadline_s)
    try:
        await store.check()
        yield store
    finally:
        await store.aclose()


@contextmanager
def within_deadline() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < DEADLINE_S + SLACK_S


async def test_stalled_server_fails_in_time_without_repeated_writes(server: Server) -> None:
    async with opened(server) as store:
        chat, turn = conversation(), (said("hi"), answered("ho"))
        await store.create_conversation("ann", chat)
        in_progress = response()
        lease = await store.acquire("ann", in_progress.id, "me", 30)
        assert lease
        await store.create("ann", in_progress, lease=lease, log=LogWrite(events=(b"0",)))
        server.signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                with within_deadline(), pytest.raises(StoreUnavailable):
                    await store.append("ann", chat.id, turn, revision=0)
                with within_deadline(), pytest.raises(StoreUnavailable):
                    await store.log(lease, in_progress.id, LogWrite(1, (b"1", b"2"), 0, (7, 8)))
                with within_deadline(), pytest.raises(StoreUnavailable):
                    await store.count("ann", "tokens", 5, once="a", for_s=60)
                with within_deadline(), pytest.raises(StoreUnavailable):
                    await store.responses("ann", [in_progress.id])
        finally:
            server.signal(signal.SIGCONT)
        await asyncio.sleep(0.1)
        assert await store.append("ann", chat.id, turn, revision=0) == 1
        await store.log(lease, in_progress.id, LogWrite(1, (b"1", b"2"), 0, (7, 8)))
        assert await store.conversation_items("ann", chat.id) == turn
        assert await store.events("ann", in_progress.id, 0) == EventPage(0, (b"0", b"1", b"2"))
        assert await store.tokens("ann", in_progress.id) == (7, 8)
        assert await store.count("ann", "tokens", 5, once="a", for_s=60) == 5


async def read_concurrently(store: RedisStore) -> list[object]:
    """Return the results of 100 concurrent reads, including errors."""
    reads = (store.responses("ann", [f"resp_{number}"]) for number in range(100))
    return list(await asyncio.gather(*reads, return_exceptions=True))


@pytest.mark.slow
async def test_concurrent_callers_of_a_stalled_server_fail_in_time(server: Server) -> None:
    async with opened(server) as store:
        server.signal(signal.SIGSTOP)
        try:
            with within_deadline():
                results = await read_concurrently(store)
        finally:
            server.signal(signal.SIGCONT)
        assert {type(result) for result in results} == {StoreUnavailable}
        # All callers reconnect; how soon depends on the machine.
        async with asyncio.timeout(10):
            while StoreUnavailable in map(type, answers := await read_concurrently(store)):
                await asyncio.sleep(0.1)
        assert answers == [(None,)] * 100


async def test_late_reply_is_not_used_for_a_later_request(server: Server) -> None:
    async with opened(server) as store:
        stored = [response() for _ in range(5)]
        for each in stored:
            await store.create("ann", each)
        with server.client() as client:
            client.execute_command("CLIENT", "PAUSE", 600, "ALL")
        with within_deadline(), pytest.raises(StoreUnavailable, match="did not answer within"):
            await store.responses("ann", [stored[0].id])
        await asyncio.sleep(0.6)
        for each in stored[1:]:
            assert await store.responses("ann", [each.id]) == (each,)


async def test_acknowledged_writes_survive_a_killed_server(server: Server) -> None:
    async with opened(server) as store:
        in_progress = response()
        lease = await store.acquire("ann", in_progress.id, "me", 60)
        assert lease
        await store.create("ann", in_progress, lease=lease, log=LogWrite(events=(b"0",)))
        logged = 0
        stored_ids: list[str] = []

        async def write() -> None:
            nonlocal logged
            while True:
                completed = response(status=Status.COMPLETED)
                try:
                    await store.create("ann", completed)
                    stored_ids.append(completed.id)
                    await store.log(lease, in_progress.id, LogWrite(logged + 1, (b"%d" % (logged + 1),)))
                    logged += 1
                except StoreUnavailable:
                    return

        writing = asyncio.create_task(write())
        await asyncio.sleep(0.4)
        server.signal(signal.SIGKILL)
        await asyncio.wait_for(writing, 2)
        server.end()
        with within_deadline(), pytest.raises(StoreUnavailable, match="reached"):
            await store.check()
        server.start()
        assert logged > 20
        assert all(await store.responses("ann", stored_ids))
        page = await store.events("ann", in_progress.id, 0, limit=10_000)
        assert page is not None
        assert page.events[: logged + 1] == tuple(b"%d" % number for number in range(logged + 1))
        # The fence survives the restart too: only the owner can continue.
        assert await store.acquire("ann", in_progress.id, "you", 5) is None
        await store.log(lease, in_progress.id, LogWrite(len(page.events), (b"on",)))


async def test_read_only_server_still_serves_reads(server: Server) -> None:
    async with opened(server) as store:
        stored = response()
        await store.create("ann", stored)
        with server.client() as client:
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(StoreUnavailable, match="rejects writes"):
                await store.update("ann", replace(stored, status=Status.COMPLETED))
            with pytest.raises(StoreUnavailable, match="rejects writes"):
                await store.secret("salt", b"x")
            assert await store.responses("ann", [stored.id]) == (stored,)
            client.replicaof("NO", "ONE")
        await store.update("ann", replace(stored, status=Status.COMPLETED))


async def test_full_server_rejects_writes_as_a_whole(server: Server) -> None:
    async with opened(server) as store:
        chat = conversation()
        await store.create_conversation("ann", chat)
        done = response(status=Status.COMPLETED, conversation=chat.id, output=(answered("x" * 1_000),))
        with server.client() as client:
            client.config_set("maxmemory", 1)
            with pytest.raises(StoreUnavailable, match="full"):
                await store.create("ann", done, revision=0, log=LogWrite(events=(b"0",)))
            with pytest.raises(StoreUnavailable, match="full"):
                await store.append("ann", chat.id, [said("more")])
            assert await store.responses("ann", [done.id]) == (None,)
            assert await store.conversation_items("ann", chat.id) == ()
            assert await store.conversation("ann", chat.id) == chat
            client.config_set("maxmemory", 0)
        await store.create("ann", done, revision=0, log=LogWrite(events=(b"0",)))
        assert await store.responses("ann", [done.id]) == (done,)


async def test_connections_that_the_server_closed_are_replaced(server: Server) -> None:
    async with opened(server) as store:
        await asyncio.gather(*(store.responses("ann", ["resp"]) for _ in range(5)))
        with server.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.sleep(0.05)
        for _ in range(5):
            assert await store.responses("ann", ["resp"]) == (None,)


async def test_scripts_are_loaded_again_after_a_flush(server: Server) -> None:
    async with opened(server) as store:
        for _ in range(2):
            with server.client() as client:
                client.script_flush()
            each = response()
            await store.create("ann", each)
            assert await store.responses("ann", [each.id]) == (each,)


async def test_waiting_reader_survives_a_killed_pubsub_connection(server: Server) -> None:
    async with opened(server) as store:
        in_progress = response()
        lease = await store.acquire("ann", in_progress.id, "me", 30)
        assert lease
        await store.create("ann", in_progress, lease=lease, log=LogWrite(events=(b"0",)))
        assert await store.events("ann", in_progress.id, 1, wait_s=0.1) == EventPage(1)
        with server.client() as client:
            client.client_kill_filter(_type="pubsub")
        reader = asyncio.create_task(store.events("ann", in_progress.id, 1, wait_s=10))
        await asyncio.sleep(0.4)
        started = time.monotonic()
        await store.log(lease, in_progress.id, LogWrite(1, (b"1",)))
        assert await reader == EventPage(1, (b"1",))
        assert time.monotonic() - started < 1.5


async def test_channel_of_a_log_is_unsubscribed_without_readers(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub, "LINGER_S", 0.1)
    async with opened(server) as store:
        in_progress = [response() for _ in range(20)]
        for each in in_progress:
            await store.create("ann", each, log=LogWrite(events=(b"0",)))
        with server.client() as client:
            readers = [asyncio.create_task(store.events("ann", each.id, 1, wait_s=3)) for each in in_progress]
            async with asyncio.timeout(10):
                while len(client.pubsub_channels()) < 20:
                    await asyncio.sleep(0.02)
            assert await asyncio.gather(*readers) == [EventPage(1)] * 20
            async with asyncio.timeout(10):
                while len(client.pubsub_channels()) > 1:
                    await asyncio.sleep(0.02)
            assert len(client.client_list(_type="pubsub")) == 1
            reader = asyncio.create_task(store.events("ann", in_progress[0].id, 1, wait_s=5))
            await asyncio.sleep(0.1)
            assert await store.delete_response("ann", in_progress[0].id)
            assert await asyncio.wait_for(reader, 4) is None


async def test_cancelled_read_does_not_affect_other_reads(server: Server) -> None:
    async with opened(server) as store:
        stored = [response() for _ in range(10)]
        for each in stored:
            await store.create("ann", each)
        for each in stored:
            read = asyncio.create_task(store.responses("ann", [stored[0].id]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)
            assert await store.responses("ann", [each.id]) == (each,)


WARNINGS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "safe settings": ({}, ()),
    "eviction": ({"maxmemory-policy": "allkeys-lru"}, ("allkeys-lru",)),
    "eviction of expiring keys": ({"maxmemory-policy": "volatile-ttl"}, ("volatile-ttl",)),
    "no append-only file": ({"appendonly": "no"}, ("appendonly",)),
    "no fsync": ({"appendfsync": "no"}, ("appendfsync",)),
    "both": ({"appendonly": "no", "maxmemory-policy": "allkeys-random"}, ("allkeys-random", "appendonly")),
}


async def test_start_warns_about_settings_that_can_lose_state(server: Server) -> None:
    safe_settings = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}
    async with opened(server) as store:
        for settings, expected in WARNINGS.values():
            with server.client() as client:
                for name, value in {**safe_settings, **settings}.items():
                    client.config_set(name, value)
            warnings = await store.start()
            assert len(warnings) == len(expected)
            assert all(word in warning for word, warning in zip(expected, warnings, strict=True))


async def test_start_warns_if_the_server_hides_its_settings(server: Server) -> None:
    with server.client() as client:
        client.execute_command(
            "ACL", "SETUSER", "app", "on", ">secret", "~t:*", "resetchannels", "&t:*", "+@all", "-config"
        )
    store = RedisStore(server.url.replace("//", "//app:secret@"))
    (warning,) = await store.start()
    assert "hides its settings" in warning
    await store.create("ann", response())
    await store.aclose()
    unauthorized = RedisStore(server.url.replace("//", "//app:wrong@"))
    with pytest.raises(StoreUnavailable):
        await unauthorized.start()
    await unauthorized.aclose()


async def test_every_key_expires_and_stays_in_its_slot(server: Server) -> None:
    async with opened(server) as store:
        chat = conversation()
        await store.create_conversation("a:n}n", chat, [said("hi")])
        lease = await store.acquire("a:n}n", chat.id, "me", 30)
        assert lease
        in_progress = response(conversation=chat.id)
        await store.create("a:n}n", in_progress, lease=lease, log=LogWrite(0, (b"0",), 0, (1,)))
        await store.claim("a:n}n", "key", "digest", in_progress.id)
        await store.count("a:n}n", "tokens", 1, once="a", for_s=5)
        with server.client() as client:
            keys = [key.decode() for key in client.keys("*")]
            assert len(keys) > 10
            assert all(client.pttl(key) > 0 for key in keys)
            assert all(key.startswith("t:{a%3An%7Dn:") for key in keys)
            conversation_keys = [key for key in keys if f":{chat.id}}}" in key]
            assert len(conversation_keys) == 8


UNWRITABLE = {
    "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "full"),
    "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "rejects writes"),
    "without replicas": (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
        "store",
    ),
}


@pytest.mark.parametrize("name", UNWRITABLE)
async def test_check_detects_a_server_that_rejects_writes(server: Server, name: str) -> None:
    break_command, repair_command, message = UNWRITABLE[name]
    async with opened(server) as store:
        stored = response()
        await store.create("ann", stored)
        with server.client() as client:
            keys = sorted(client.keys())
            client.execute_command(*break_command)
            with pytest.raises(StoreUnavailable, match=message):
                await store.check()
            assert await store.responses("ann", [stored.id]) == (stored,)
            client.execute_command(*repair_command)
            await store.check()
            assert sorted(client.keys()) == keys


@pytest.mark.slow
async def test_response_with_many_items_is_stored_within_the_deadline(server: Server) -> None:
    async with opened(server) as store:
        large_response = response(input=tuple(said("a") for _ in range(20_000)))
        await store.check(large_response)
        await store.create("ann", large_response)
        assert await store.item("ann", large_response.input[-1].id) == large_response.input[-1]
