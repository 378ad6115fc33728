"""Fixtures: a Redis server, and the earlier version of the gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compat.earlier import COMMIT, extract, has_commit
from tests.contract.servers import Server


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"), ("appendonly yes", "maxmemory-policy noeviction"))
    try:
        yield server.start()
    finally:
        server.end()


@pytest.fixture(scope="session")
def earlier_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `unisono` runs the earlier version."""
    if not has_commit():
        pytest.skip(f"commit {COMMIT[:10]} with the earlier version is not in this clone; run `git fetch --unshallow`")
    return extract(tmp_path_factory.mktemp("earlier"))
