"""Event loops and stores of the end-to-end tests.

The gateway runs on uvloop, so tests of closed sockets and blocked event loops use uvloop too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from tests.contract.servers import Server
from tests.e2e.administered import AdminClient, administered

ON_UVLOOP = (
    "test_engines.py",
    "test_engines_responses.py",
    "test_faults.py",
    "test_hostile.py",
    "test_injection.py",
    "test_leaving.py",
)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name in ON_UVLOOP:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Redis server with production settings and a separate database for every test."""
    options = ("appendonly yes", "maxmemory-policy noeviction", "databases 512")
    server = Server(tmp_path_factory.mktemp("redis"), options)
    try:
        yield server.start()
    finally:
        server.end()


@pytest.fixture(params=["file", "redis"])
def store_address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of an empty store of each kind."""
    if request.param == "file":
        return f"sqlite://{tmp_path}/state.db"
    server: Server = request.getfixturevalue("redis_server")
    with server.client() as client:
        client.flushall()
    return server.url


@pytest.fixture
async def admin(store_address: str) -> AsyncIterator[AdminClient]:
    """A gateway with the master key, on each kind of store."""
    async with administered(store_address) as running:
        yield running
