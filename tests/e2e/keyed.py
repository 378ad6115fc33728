"""A gateway with virtual keys, which are created in its store like by `unisono keys`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute, Route, WebSocketRoute

from tests.e2e.gateway import Gateway, gateway
from unisono.access.keys import Mint, issued, revoked
from unisono.core.access import KeyRecord
from unisono.core.quotas import KeyLimits
from unisono.core.state_store import Store
from unisono.store import open_store

MASTER = "sk-master-of-the-tests"
SALT = "a salt of the tests, long enough"


def with_keys(config: Mapping[str, Any], store: str) -> dict[str, Any]:
    """Return the configuration with a master key and the store at that address."""
    gateway_settings = {"salt_key": SALT, **config.get("unisono", {})}
    return {
        **config,
        "general_settings": {"master_key": MASTER, **config.get("general_settings", {})},
        "unisono": gateway_settings,
        "store": {"url": store},
    }


@dataclass
class Ring:
    """Creates and revokes keys in a store."""

    store: Store
    mint: Mint = field(default_factory=lambda: Mint(SALT.encode()))

    async def issue(self, tenant: str = "", limits: KeyLimits | None = None, **fields: Any) -> tuple[KeyRecord, str]:
        new = issued(self.mint, time.time(), tenant=tenant)
        record = replace(new.record, **fields, limits=limits or new.record.limits)
        return await self.store.put_key(record), new.plaintext

    async def revoke(self, record: KeyRecord) -> None:
        current = await self.store.key(record.id)
        assert current is not None
        await self.store.put_key(revoked(current, time.time()))


@asynccontextmanager
async def ring(address: str) -> AsyncIterator[Ring]:
    store = open_store(address, deadline_s=5.0)
    await store.start()
    try:
        yield Ring(store)
    finally:
        await store.aclose()


@asynccontextmanager
async def keyed(config: Mapping[str, Any], folder: Path) -> AsyncIterator[tuple[Gateway, Ring]]:
    """Run a gateway on a store in that folder, and yield it with its keys."""
    address = f"sqlite://{folder}/state.db"
    async with gateway(with_keys(config, address)) as running, ring(address) as keys:
        yield running, keys


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# -- routes


@dataclass(frozen=True)
class Place:
    """A route. `method` is WEBSOCKET for a WebSocket."""

    method: str
    path: str

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(part.partition(":")[0] for part in self.path.replace("}", "{").split("{")[1::2])

    def at(self, **values: str) -> str:
        """Return the path with its parameters filled in."""
        filled = self.path
        for part in self.path.replace("}", "{").split("{")[1::2]:
            filled = filled.replace("{" + part + "}", values[part.partition(":")[0]])
        return filled

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def places_of(routes: Sequence[BaseRoute]) -> Iterator[Place]:
    """Yield all routes of an application.

    Raises TypeError for an unknown kind of route, which would otherwise stay untested.
    """
    for route in routes:
        if isinstance(route, WebSocketRoute):
            yield Place("WEBSOCKET", route.path)
        elif isinstance(route, Route):
            for method in sorted(route.methods or ()):
                yield Place(method, route.path)
        else:
            raise TypeError(f"{route!r} is an unknown kind of route")


async def raw_answer(url: str, request: bytes) -> bytes:
    """Send raw bytes to a server and return its response up to the end of the connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(), 20.0)
    finally:
        writer.close()
