"""Redis in trouble: fails within the deadline, loses nothing it acknowledged, writes nothing twice or by half."""

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
SLACK_S = 0.25
"""What a busy machine may add to a deadline."""


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
def within_the_deadline() -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < DEADLINE_S + SLACK_S


async def test_a_stalled_server_fails_in_time_and_writes_nothing_twice(server: Server) -> None:
    async with opened(server) as store:
        talk, turn = conversation(), (said("hi"), answered("ho"))
        await store.create_conversation("ann", talk)
        running = response()
        lease = await store.acquire("ann", running.id, "me", 30)
        assert lease
        await store.create("ann", running, lease=lease, log=LogWrite(events=(b"0",)))
        server.signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                with within_the_deadline(), pytest.raises(StoreUnavailable):
                    await store.append("ann", talk.id, turn, revision=0)
                with within_the_deadline(), pytest.raises(StoreUnavailable):
                    await store.log(lease, running.id, LogWrite(1, (b"1", b"2"), 0, (7, 8)))
                with within_the_deadline(), pytest.raises(StoreUnavailable):
                    await store.count("ann", "tokens", 5, once="a", for_s=60)
                with within_the_deadline(), pytest.raises(StoreUnavailable):
                    await store.responses("ann", [running.id])
        finally:
            server.signal(signal.SIGCONT)
        await asyncio.sleep(0.1)
        assert await store.append("ann", talk.id, turn, revision=0) == 1
        await store.log(lease, running.id, LogWrite(1, (b"1", b"2"), 0, (7, 8)))
        assert await store.conversation_items("ann", talk.id) == turn
        assert await store.events("ann", running.id, 0) == EventPage(0, (b"0", b"1", b"2"))
        assert await store.tokens("ann", running.id) == (7, 8)
        assert await store.count("ann", "tokens", 5, once="a", for_s=60) == 5


async def asked_by_many(store: RedisStore) -> list[object]:
    """What 100 callers at once are answered, errors included."""
    asking = (store.responses("ann", [f"resp_{number}"]) for number in range(100))
    return list(await asyncio.gather(*asking, return_exceptions=True))


@pytest.mark.slow
async def test_many_callers_of_a_stalled_server_all_fail_in_time(server: Server) -> None:
    async with opened(server) as store:
        server.signal(signal.SIGSTOP)
        try:
            with within_the_deadline():
                results = await asked_by_many(store)
        finally:
            server.signal(signal.SIGCONT)
        assert {type(result) for result in results} == {StoreUnavailable}
        # All of them connect anew, and how soon they can is the machine's affair.
        async with asyncio.timeout(10):
            while StoreUnavailable in map(type, answers := await asked_by_many(store)):
                await asyncio.sleep(0.1)
        assert answers == [(None,)] * 100


async def test_slow_answers_fail_in_time_and_are_not_taken_for_later_ones(server: Server) -> None:
    async with opened(server) as store:
        kept = [response() for _ in range(5)]
        for one in kept:
            await store.create("ann", one)
        with server.client() as client:
            client.execute_command("CLIENT", "PAUSE", 600, "ALL")
        with within_the_deadline(), pytest.raises(StoreUnavailable, match="in time"):
            await store.responses("ann", [kept[0].id])
        await asyncio.sleep(0.6)
        for one in kept[1:]:
            assert await store.responses("ann", [one.id]) == (one,)


async def test_nothing_acknowledged_is_lost_to_a_killed_server(server: Server) -> None:
    async with opened(server) as store:
        running = response()
        lease = await store.acquire("ann", running.id, "me", 60)
        assert lease
        await store.create("ann", running, lease=lease, log=LogWrite(events=(b"0",)))
        logged = 0
        kept: list[str] = []

        async def write() -> None:
            nonlocal logged
            while True:
                one = response(status=Status.COMPLETED)
                try:
                    await store.create("ann", one)
                    kept.append(one.id)
                    await store.log(lease, running.id, LogWrite(logged + 1, (b"%d" % (logged + 1),)))
                    logged += 1
                except StoreUnavailable:
                    return

        writing = asyncio.create_task(write())
        await asyncio.sleep(0.4)
        server.signal(signal.SIGKILL)
        await asyncio.wait_for(writing, 2)
        server.end()
        with within_the_deadline(), pytest.raises(StoreUnavailable, match="reached"):
            await store.check()
        server.start()
        assert logged > 20
        assert all(await store.responses("ann", kept))
        page = await store.events("ann", running.id, 0, limit=10_000)
        assert page is not None
        assert page.events[: logged + 1] == tuple(b"%d" % number for number in range(logged + 1))
        # The fence outlives the server too: the owner goes on, nobody else does.
        assert await store.acquire("ann", running.id, "you", 5) is None
        await store.log(lease, running.id, LogWrite(len(page.events), (b"on",)))


async def test_a_server_that_takes_no_writes_still_answers(server: Server) -> None:
    async with opened(server) as store:
        kept = response()
        await store.create("ann", kept)
        with server.client() as client:
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(StoreUnavailable, match="rejects writes"):
                await store.update("ann", replace(kept, status=Status.COMPLETED))
            with pytest.raises(StoreUnavailable, match="rejects writes"):
                await store.secret("salt", b"x")
            assert await store.responses("ann", [kept.id]) == (kept,)
            client.replicaof("NO", "ONE")
        await store.update("ann", replace(kept, status=Status.COMPLETED))


async def test_a_full_server_refuses_whole_writes(server: Server) -> None:
    async with opened(server) as store:
        talk = conversation()
        await store.create_conversation("ann", talk)
        done = response(status=Status.COMPLETED, conversation=talk.id, output=(answered("x" * 1_000),))
        with server.client() as client:
            client.config_set("maxmemory", 1)
            with pytest.raises(StoreUnavailable, match="full"):
                await store.create("ann", done, revision=0, log=LogWrite(events=(b"0",)))
            with pytest.raises(StoreUnavailable, match="full"):
                await store.append("ann", talk.id, [said("more")])
            assert await store.responses("ann", [done.id]) == (None,)
            assert await store.conversation_items("ann", talk.id) == ()
            assert await store.conversation("ann", talk.id) == talk
            client.config_set("maxmemory", 0)
        await store.create("ann", done, revision=0, log=LogWrite(events=(b"0",)))
        assert await store.responses("ann", [done.id]) == (done,)


async def test_scripts_the_server_forgot_are_sent_again(server: Server) -> None:
    async with opened(server) as store:
        for _ in range(2):
            with server.client() as client:
                client.script_flush()
            one = response()
            await store.create("ann", one)
            assert await store.responses("ann", [one.id]) == (one,)


async def test_a_reader_that_waits_outlives_a_server_that_comes_back(server: Server) -> None:
    async with opened(server) as store:
        running = response()
        lease = await store.acquire("ann", running.id, "me", 30)
        assert lease
        await store.create("ann", running, lease=lease, log=LogWrite(events=(b"0",)))
        assert await store.events("ann", running.id, 1, wait_s=0.1) == EventPage(1)
        with server.client() as client:
            client.client_kill_filter(_type="pubsub")
        reading = asyncio.create_task(store.events("ann", running.id, 1, wait_s=10))
        await asyncio.sleep(0.4)
        begun = time.monotonic()
        await store.log(lease, running.id, LogWrite(1, (b"1",)))
        assert await reading == EventPage(1, (b"1",))
        assert time.monotonic() - begun < 1.5


async def test_logs_nobody_reads_any_more_are_not_listened_to(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub, "LINGER_S", 0.1)
    async with opened(server) as store:
        running = [response() for _ in range(20)]
        for one in running:
            await store.create("ann", one, log=LogWrite(events=(b"0",)))
        with server.client() as client:
            reading = [asyncio.create_task(store.events("ann", one.id, 1, wait_s=0.3)) for one in running]
            await asyncio.sleep(0.2)
            assert len(client.pubsub_channels()) == 20
            assert await asyncio.gather(*reading) == [EventPage(1)] * 20
            await asyncio.sleep(0.4)
            assert len(client.pubsub_channels()) <= 1
            assert len(client.client_list(_type="pubsub")) == 1
            again = asyncio.create_task(store.events("ann", running[0].id, 1, wait_s=5))
            await asyncio.sleep(0.1)
            assert await store.delete_response("ann", running[0].id)
            assert await asyncio.wait_for(again, 0.5) is None


async def test_a_caller_that_leaves_disturbs_nobody(server: Server) -> None:
    async with opened(server) as store:
        kept = [response() for _ in range(10)]
        for one in kept:
            await store.create("ann", one)
        for one in kept:
            leaving = asyncio.create_task(store.responses("ann", [kept[0].id]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert await store.responses("ann", [one.id]) == (one,)


WARNINGS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "all is well": ({}, ()),
    "evicts": ({"maxmemory-policy": "allkeys-lru"}, ("allkeys-lru",)),
    "evicts what expires": ({"maxmemory-policy": "volatile-ttl"}, ("volatile-ttl",)),
    "keeps no log": ({"appendonly": "no"}, ("appendonly",)),
    "never syncs": ({"appendfsync": "no"}, ("appendfsync",)),
    "both": ({"appendonly": "no", "maxmemory-policy": "allkeys-random"}, ("allkeys-random", "appendonly")),
}


async def test_settings_that_can_lose_state_are_told_at_start(server: Server) -> None:
    well = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}
    async with opened(server) as store:
        for settings, words in WARNINGS.values():
            with server.client() as client:
                for name, value in {**well, **settings}.items():
                    client.config_set(name, value)
            warnings = await store.start()
            assert len(warnings) == len(words)
            assert all(word in warning for word, warning in zip(words, warnings, strict=True))


async def test_settings_a_server_keeps_to_itself_are_told_too(server: Server) -> None:
    with server.client() as client:
        client.execute_command(
            "ACL", "SETUSER", "app", "on", ">secret", "~t:*", "resetchannels", "&t:*", "+@all", "-config"
        )
    store = RedisStore(server.url.replace("//", "//app:secret@"))
    (warning,) = await store.start()
    assert "hides its settings" in warning
    await store.create("ann", response())
    await store.aclose()
    wrong = RedisStore(server.url.replace("//", "//app:wrong@"))
    with pytest.raises(StoreUnavailable):
        await wrong.start()
    await wrong.aclose()


async def test_everything_kept_has_an_end_and_stays_in_its_slot(server: Server) -> None:
    async with opened(server) as store:
        talk = conversation()
        await store.create_conversation("a:n}n", talk, [said("hi")])
        lease = await store.acquire("a:n}n", talk.id, "me", 30)
        assert lease
        running = response(conversation=talk.id)
        await store.create("a:n}n", running, lease=lease, log=LogWrite(0, (b"0",), 0, (1,)))
        await store.claim("a:n}n", "key", "digest", running.id)
        await store.count("a:n}n", "tokens", 1, once="a", for_s=5)
        with server.client() as client:
            keys = [key.decode() for key in client.keys("*")]
            assert len(keys) > 10
            assert all(client.pttl(key) > 0 for key in keys)
            assert all(key.startswith("t:{a%3An%7Dn:") for key in keys)
            together = [key for key in keys if f":{talk.id}}}" in key]
            assert len(together) == 8


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
async def test_a_server_that_takes_no_writes_is_noticed_by_the_check(server: Server, name: str) -> None:
    breaking, mending, words = UNWRITABLE[name]
    async with opened(server) as store:
        kept = response()
        await store.create("ann", kept)
        with server.client() as client:
            keys = sorted(client.keys())
            client.execute_command(*breaking)
            with pytest.raises(StoreUnavailable, match=words):
                await store.check()
            assert await store.responses("ann", [kept.id]) == (kept,)
            client.execute_command(*mending)
            await store.check()
            assert sorted(client.keys()) == keys


@pytest.mark.slow
async def test_a_response_of_very_many_items_is_kept_within_the_deadline_of_one_operation(server: Server) -> None:
    async with opened(server) as store:
        huge = response(input=tuple(said("a") for _ in range(20_000)))
        await store.check(huge)
        await store.create("ann", huge)
        assert await store.item("ann", huge.input[-1].id) == huge.input[-1]
