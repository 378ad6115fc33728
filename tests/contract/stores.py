"""Stores of every kind for the contract tests, opened as the gateway opens them.

A `StoreFactory` opens stores on the same state, so that a test can simulate two replicas. It can shorten retention
times.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from unisono.core.state_store import Retention, Store
from unisono.store.codec import StateLimits
from unisono.store.redis import RedisStore
from unisono.store.sqlite import SqliteStore

# Limits that tests can reach.
SMALL = StateLimits(item=4_000, response=20_000, conversation=40_000)

StoreOpener = Callable[[Retention, StateLimits], Store]


@dataclass
class StoreFactory:
    """Factory of stores on the same state.

    `shared` is true if a second store sees the state of the first.
    """

    make: StoreOpener
    shared: bool = True
    opened: list[Store] = field(default_factory=list)

    async def open(self, retention: Retention | None = None, bounds: StateLimits | None = None) -> Store:
        store = self.make(retention or Retention(), bounds or StateLimits())
        await store.start()
        self.opened.append(store)
        return store

    async def close(self) -> None:
        for store in self.opened:
            await store.aclose()


@asynccontextmanager
async def store_factory(make: StoreOpener, shared: bool = True) -> AsyncIterator[StoreFactory]:
    factory = StoreFactory(make, shared)
    try:
        yield factory
    finally:
        await factory.close()


def in_memory(folder: Path) -> StoreOpener:
    return lambda retention, bounds: SqliteStore(None, retention, bounds)


def in_file(folder: Path) -> StoreOpener:
    return lambda retention, bounds: SqliteStore(folder / "deep" / "state.db", retention, bounds)


# A deadline that a busy machine meets; behaviour at the deadline is tested separately.
DEADLINE_S = 5.0


def in_redis(url: str) -> StoreOpener:
    return lambda retention, bounds: RedisStore(url, retention, bounds, deadline_s=DEADLINE_S)
