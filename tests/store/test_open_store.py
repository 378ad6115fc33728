"""An address names a store, or is refused with words that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.state import response
from unisono.errors import ConfigError
from unisono.store import open_store
from unisono.store.redis import RedisStore, keys
from unisono.store.sqlite import SqliteStore

GOOD = {
    "memory://": SqliteStore,
    "sqlite:///var/lib/unisono/state.db": SqliteStore,
    "sqlite:///~/.local/share/unisono/state.db": SqliteStore,
    "redis://localhost:6379/0": RedisStore,
    "rediss://user:p%40ss@example.com": RedisStore,
    "valkey://localhost": RedisStore,
    "unix:///run/redis.sock": RedisStore,
    "redis+sentinel://:secret@a:26379,b,[::1]:26380/state/2": RedisStore,
    "rediss+sentinel://a/state": RedisStore,
    "redis+cluster://a:7000,b": RedisStore,
    "valkey+cluster://a": RedisStore,
}

BAD = {
    "nothing": "",
    "a path": "/var/lib/state.db",
    "a relative path": "sqlite://state.db",
    "no path": "sqlite:///",
    "another database": "postgres://localhost",
    "another way": "redis+ring://a",
    "no service": "redis+sentinel://a:26379",
    "no host": "redis+cluster://a,,b",
    "a port that is none": "redis+cluster://a:port",
    "a database that is none": "redis+sentinel://a/state/two",
    "a redis database that is none": "redis://localhost:port",
}


@pytest.mark.parametrize("url", GOOD)
async def test_an_address_names_a_store(url: str) -> None:
    store = open_store(url)
    assert type(store) is GOOD[url]
    await store.aclose()


@pytest.mark.parametrize("name", BAD)
def test_an_address_that_names_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^store\.url: "):
        open_store(BAD[name])


async def test_a_path_is_taken_as_it_is_written(tmp_path: Path) -> None:
    store = open_store(f"sqlite://{tmp_path}/with%20space/state.db")
    await store.start()
    await store.create("ann", response())
    await store.aclose()
    assert (tmp_path / "with space" / "state.db").exists()


def test_no_spelling_of_a_tenant_or_an_id_reaches_the_names_of_another() -> None:
    parts = ("a", "a:", ":a", "a}", "{a", "a:b", "", "%3A", "a%3Aa", "A", "ä", "a\x00", "\ud800", "?")
    tags = [keys.tag(tenant, id) for tenant in parts for id in parts if "?" not in tenant + id]
    assert len(set(tags)) == len(tags)
    assert all(tag.count("{") == tag.count("}") == 1 for tag in tags)
