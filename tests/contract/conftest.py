"""Fixtures of the contract tests for backends and stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from tests.contract import stores
from tests.contract.kinds import HTTP_KINDS, KINDS, Kind
from tests.contract.servers import Server, cluster, end

# Files with tests that break sockets. They also run on uvloop, the gateway's loop, whose transports fail differently.
FILES_ON_BOTH_LOOPS = ("test_backend_failures.py", "test_backend_leaving.py", "test_http_connection.py")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in FILES_ON_BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=HTTP_KINDS)
def wired(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def flush(servers: list[Server]) -> None:
    for server in servers:
        with server.client() as client:
            client.flushall()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"), ("appendonly yes", "maxmemory-policy noeviction"))
    try:
        yield server.start()
    finally:
        server.end()


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    nodes = cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield nodes
    finally:
        end(nodes)


@pytest.fixture(params=["memory", "file", "redis", "cluster"])
async def factory(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[stores.StoreFactory]:
    """Store factory for every kind of store."""
    match request.param:
        case "memory":
            make = stores.in_memory(tmp_path)
        case "file":
            make = stores.in_file(tmp_path)
        case "redis":
            server = request.getfixturevalue("redis_server")
            flush([server])
            make = stores.in_redis(server.url)
        case _:
            nodes = request.getfixturevalue("redis_cluster")
            flush(nodes)
            make = stores.in_redis("redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes))
    async with stores.store_factory(make, shared=request.param != "memory") as opened:
        yield opened


@pytest.fixture(autouse=True)
async def no_tasks_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    for _ in range(50):
        remaining = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
        if not remaining:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"tasks still running: {remaining}")
