"""Tests of store URLs: the store for each scheme, and errors for invalid URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.state import response
from unisono.errors import ConfigError
from unisono.store import open_store
from unisono.store.redis import RedisStore, keys
from unisono.store.redis.clients import open_clients
from unisono.store.sqlite import SqliteStore

GOOD = {
    "memory://": SqliteStore,
    "sqlite:///var/lib/unisono/state.db": SqliteStore,
    "sqlite:///~/.local/share/unisono/state.db": SqliteStore,
    "redis://localhost:6379/0": RedisStore,
    "redis://localhost:6379/": RedisStore,
    "redis://localhost?db=3": RedisStore,
    "redis+cluster://a/0": RedisStore,
    "rediss://user:p%40ss@example.com": RedisStore,
    "valkey://localhost": RedisStore,
    "unix:///run/redis.sock": RedisStore,
    "redis+sentinel://:secret@a:26379,b,[::1]:26380/state/2": RedisStore,
    "rediss+sentinel://a/state": RedisStore,
    "redis+cluster://a:7000,b": RedisStore,
    "valkey+cluster://a": RedisStore,
    "rediss://a?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem&ssl_check_hostname=false": RedisStore,
    "rediss+sentinel://a,b/state/2?ssl_ca_certs=/ca.pem": RedisStore,
    "rediss+cluster://a,b?ssl_ca_certs=/ca.pem&socket_keepalive=true": RedisStore,
    "unix:///run/redis.sock?db=2": RedisStore,
}

BAD = {
    "empty": "",
    "path without a scheme": "/var/lib/state.db",
    "relative path": "sqlite://state.db",
    "no path": "sqlite:///",
    "SQLite's name of a database in memory": "sqlite:///:memory:",
    "SQLite's URI": "sqlite:///file:state.db",
    "unsupported database": "postgres://localhost",
    "unsupported topology": "redis+ring://a",
    "no service": "redis+sentinel://a:26379",
    "no host": "redis+cluster://a,,b",
    "invalid port": "redis+cluster://a:port",
    "invalid database number": "redis+sentinel://a/state/two",
    "invalid port for a single server": "redis://localhost:port",
    "name instead of a database number": "redis://localhost:6379/prod",
    "name instead of a database number with TLS": "rediss://user:secret@localhost/prod?db=1",
    "open bracket": "redis://[::1/0",
    "two database numbers": "redis://localhost/1/2",
    "service name of a cluster": "redis+cluster://a:7000,b/prod",
    "database of a cluster": "redis+cluster://a:7000,b/1",
    "database of a cluster in an option": "redis+cluster://a:7000,b?db=1",
    "option that changes answers": "redis://localhost/0?decode_responses=true",
    "unknown option": "redis://localhost/0?foo=bar",
    "option without a value": "redis://localhost/0?foo",
    "option instead of the scheme": "redis://localhost/0?ssl=true",
    "unknown option of sentinels": "redis+sentinel://a/state?foo=bar",
    "option of TLS without TLS": "redis://localhost/0?ssl_ca_certs=/ca.pem",
    "invalid value of an option": "redis://localhost/0?db=two",
    "question mark in the password": "redis://:half?secret=1@localhost/0",
}


@pytest.mark.parametrize("url", GOOD)
async def test_url_selects_the_store_type(url: str) -> None:
    store = open_store(url)
    assert type(store) is GOOD[url]
    await store.aclose()


@pytest.mark.parametrize("name", BAD)
def test_invalid_url_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^store\.url: ") as raised:
        open_store(BAD[name])
    assert "secret" not in str(raised.value)


async def test_options_of_an_address_reach_sentinels_and_clusters() -> None:
    for url in ("rediss+sentinel://a,b/state/2?ssl_ca_certs=/ca.pem", "rediss+cluster://a,b?ssl_ca_certs=/ca.pem"):
        clients = open_clients(url, 1.0)
        assert clients.options["ssl"] is True
        assert clients.options["ssl_ca_certs"] == "/ca.pem"
        assert clients.service in ("state", "")
        await clients.client.aclose()


@pytest.mark.parametrize(
    ("path", "decoded"),
    [
        ("/with%20space/state.db", "with space/state.db"),
        ("/%3Fmode=memory%26%23%2541/ä%25.db", "?mode=memory&#%41/ä%.db"),
    ],
)
@pytest.mark.parametrize("slash", ["", "/"])
async def test_percent_encoded_sqlite_path_is_decoded(tmp_path: Path, slash: str, path: str, decoded: str) -> None:
    store = open_store(f"sqlite://{slash}{tmp_path}{path}")
    await store.start()
    stored = response()
    await store.create("ann", stored)
    assert await store.responses("ann", [stored.id]) == (stored,)
    await store.aclose()
    assert [file.relative_to(tmp_path) for file in tmp_path.rglob("*.db")] == [Path(decoded)]


def test_keys_of_different_tenants_and_ids_never_collide() -> None:
    parts = ("a", "a:", ":a", "a}", "{a", "a:b", "", "%3A", "a%3Aa", "A", "ä", "a\x00", "\ud800", "?")
    tags = [keys.tag(tenant, id) for tenant in parts for id in parts if "?" not in tenant + id]
    assert len(set(tags)) == len(tags)
    assert all(tag.count("{") == tag.count("}") == 1 for tag in tags)
