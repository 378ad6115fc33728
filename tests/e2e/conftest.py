"""The event loop of the whole gateway is uvloop, so what ends sockets and holds loops is tested there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop

from tests.contract.servers import Server

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
    """A Redis server as an operator would run it, with room for a database of each test's own."""
    options = ("appendonly yes", "maxmemory-policy noeviction", "databases 512")
    server = Server(tmp_path_factory.mktemp("redis"), options)
    try:
        yield server.start()
    finally:
        server.end()
