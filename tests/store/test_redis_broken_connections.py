"""Tests of broken connections: each store operation ends in a store error.

The next operation succeeds.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError

from tests.contract.servers import Server, cluster, end
from tests.contract.state import conversation, response, said
from unisono.core.access import KeyRecord
from unisono.core.directory import AuditRecord, DirectoryEntry, EntryKind
from unisono.core.quotas import Account, KeyLimits, LedgerLine, QuotaReservation, TokenUsage, UsageRecord
from unisono.core.recordings import StoredTrace
from unisono.core.request_counts import MINUTE_S
from unisono.core.request_filter import RequestFilter
from unisono.core.request_record import RequestRecord
from unisono.core.state_store import BackgroundRun, Lease, LogWrite, Store
from unisono.errors import StoreUnavailable
from unisono.store.redis import RedisStore
from unisono.store.redis.clients import open_clients

ERRORS: dict[str, Exception] = {
    "uvloop, closed transport": RuntimeError("unable to perform operation on <TCPTransport closed=True>"),
    "redis-py, no writer": AttributeError("'NoneType' object has no attribute 'writelines'"),
    "redis-py, empty answer": IndexError("list index out of range"),
    "redis-py, wrong type": TypeError("a bytes-like object is required, not 'NoneType'"),
    "redis-py, protocol": InvalidResponse("Protocol Error: b'?'"),
    "redis-py, connection": RedisConnectionError("Connection closed by server."),
    "server": ResponseError("UNBLOCKED force unblock from blocking operation"),
    "reset": ConnectionResetError(104, "Connection reset by peer"),
    "host": OSError(113, "No route to host"),
    "short read": asyncio.IncompleteReadError(b"", 1),
    "state": asyncio.InvalidStateError("invalid state"),
    "tls": ssl.SSLError("record layer failure"),
    "end of file": EOFError(),
    "text": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
}

ACCOUNT = Account("ann", "key")
LEASE = Lease("ann", "resp", "me", 1)
CLAIM = QuotaReservation(ACCOUNT, "once", KeyLimits(rpm=5), input=1, expected_output=1, max_output=1, for_s=30.0)
RUN = BackgroundRun("ann", "resp")
ENTRY = DirectoryEntry(EntryKind.TEAM, "team", 0.0)
AUDIT = AuditRecord("audit", 0.0, "key", "created", "team", "team")

OPERATIONS: dict[str, Callable[[Store], Awaitable[Any]]] = {
    "start": lambda store: store.start(),
    "check": lambda store: store.check(),
    "create": lambda store: store.create("ann", response()),
    "update": lambda store: store.update("ann", response()),
    "responses": lambda store: store.responses("ann", ["resp"]),
    "delete_response": lambda store: store.delete_response("ann", "resp"),
    "item": lambda store: store.item("ann", "item"),
    "log": lambda store: store.log(LEASE, "resp", LogWrite(0, (b"0",))),
    "is_log_complete": lambda store: store.is_log_complete(LEASE, "resp"),
    "events": lambda store: store.events("ann", "resp", 0),
    "tokens": lambda store: store.tokens("ann", "resp"),
    "create_conversation": lambda store: store.create_conversation("ann", conversation()),
    "conversation": lambda store: store.conversation("ann", "conv"),
    "conversation_items": lambda store: store.conversation_items("ann", "conv"),
    "conversation_item": lambda store: store.conversation_item("ann", "conv", "item"),
    "append": lambda store: store.append("ann", "conv", [said("more")]),
    "set_metadata": lambda store: store.set_metadata("ann", "conv", {}),
    "delete_item": lambda store: store.delete_item("ann", "conv", "item"),
    "delete_conversation": lambda store: store.delete_conversation("ann", "conv"),
    "acquire": lambda store: store.acquire("ann", "resp", "me", 5),
    "renew": lambda store: store.renew(LEASE, 5),
    "release": lambda store: store.release(LEASE),
    "watch": lambda store: store.watch(RUN, 5),
    "unwatch": lambda store: store.unwatch(RUN),
    "lapsed": lambda store: store.lapsed(),
    "claim": lambda store: store.claim("ann", "key", "digest", "resp"),
    "unclaim": lambda store: store.unclaim("ann", "key", "resp"),
    "secret": lambda store: store.secret("salt", b"x"),
    "count": lambda store: store.count("ann", "tokens", 5, once="a", for_s=60),
    "put_key": lambda store: store.put_key(KeyRecord("key", "ann", (), 0.0)),
    "key": lambda store: store.key("key"),
    "key_of": lambda store: store.key_of("digest"),
    "keys": lambda store: store.keys(),
    "reserve": lambda store: store.reserve(CLAIM),
    "extend": lambda store: store.extend(CLAIM),
    "settle": lambda store: store.settle(
        UsageRecord("once", LedgerLine(ACCOUNT, "m", "2026-11-20", TokenUsage(input=1)))
    ),
    "raise_spent": lambda store: store.raise_spent(ACCOUNT, "month:0", None, TokenUsage(input=1)),
    "ledger": lambda store: store.ledger("0000", "9999"),
    "keep_traces": lambda store: store.keep_traces(StoredTrace("ann", "req", 0.0), for_s=5, most=5),
    "trace": lambda store: store.trace("ann", "req"),
    "traces": lambda store: store.traces("ann"),
    "delete_requests": lambda store: store.delete_requests("key_1", 5),
    "keep_requests": lambda store: store.keep_requests(RequestRecord("req", 0.0, 1.0), for_s=5, most=5),
    "request": lambda store: store.request("req"),
    "requests": lambda store: store.requests(RequestFilter(), 5),
    "request_counts": lambda store: store.request_counts(RequestFilter(since=0.0, until=60.0), MINUTE_S),
    "put_entry": lambda store: store.put_entry(ENTRY, AUDIT),
    "delete_entry": lambda store: store.delete_entry(ENTRY, AUDIT),
    "entries": lambda store: store.entries((EntryKind.TEAM, "team")),
    "directory": lambda store: store.directory(EntryKind.TEAM),
    "audit_records": lambda store: store.audit_records(0, 5),
}


def test_table_contains_every_operation() -> None:
    operations = {
        name for name, method in inspect.getmembers(RedisStore, inspect.iscoroutinefunction) if name[0] != "_"
    }
    assert operations - {"aclose"} == set(OPERATIONS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    try:
        yield server.start()
    finally:
        server.end()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Cluster with one node."""
    nodes = cluster(tmp_path_factory.mktemp("cluster"), 1)
    try:
        yield nodes[0]
    finally:
        end(nodes)


@pytest.fixture(params=["redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        server: Server = request.getfixturevalue("server")
        return server.url
    node: Server = request.getfixturevalue("node")
    return f"redis+cluster://127.0.0.1:{node.port}"


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
async def test_broken_connection_is_a_store_error_for_every_operation(
    url: str, replicas: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStore(url, deadline_s=5.0, replicas=replicas)

    async def fail(*arguments: object, **options: object) -> None:
        raise error

    try:
        assert await store.responses("ann", ["resp"]) == (None,)
        for name, operation in OPERATIONS.items():
            with monkeypatch.context() as broken:
                broken.setattr(AbstractConnection, "send_packed_command", fail)
                [result] = await asyncio.gather(operation(store), return_exceptions=True)
            assert isinstance(result, StoreUnavailable), (name, result)
            assert await store.responses("ann", ["resp"]) == (None,), name
    finally:
        await store.aclose()


async def test_no_command_gets_an_answer_that_follows_one_of_the_wrong_type(server: Server) -> None:
    commands = open_clients(server.url, 5.0).commands
    assert commands is not None
    try:
        commands.set_response_callback("ECHO", int)
        with pytest.raises(ValueError, match="invalid literal"):
            await commands.exchange([("ECHO", "text"), ("WAIT", 1, 100)])
        assert await commands.exchange([("GET", "missing")]) == [None]
    finally:
        await commands.aclose()
