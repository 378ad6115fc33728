"""Every kind of store the contract holds for, each opened as a replica of the gateway would open it.

A `Home` is where the state lies; it gives out stores, so that a test can be two replicas, and bends the lifetimes that
cannot be waited for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from unisono.core.state_store import Retention, StateLimits, Store
from unisono.store.redis import RedisStore
from unisono.store.sqlite import SqliteStore

SMALL = StateLimits(item=4_000, response=20_000, conversation=40_000)
"""Bounds that tests can reach."""

Opening = Callable[[Retention, StateLimits], Store]


@dataclass
class Home:
    """`shared` says that a second store sees the state of the first."""

    make: Opening
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
async def home(make: Opening, shared: bool = True) -> AsyncIterator[Home]:
    here = Home(make, shared)
    try:
        yield here
    finally:
        await here.close()


def in_memory(folder: Path) -> Opening:
    return lambda retention, bounds: SqliteStore(None, retention, bounds)


def in_a_file(folder: Path) -> Opening:
    return lambda retention, bounds: SqliteStore(folder / "deep" / "state.db", retention, bounds)


PATIENT_S = 5.0
"""A deadline that a busy machine keeps: how stores behave at their deadline is tested apart."""


def at(url: str) -> Opening:
    return lambda retention, bounds: RedisStore(url, retention, bounds, deadline_s=PATIENT_S)
