"""Access of commands to the configured store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import click

from unisono.bootstrap.store import store_address
from unisono.config import Config
from unisono.core.state_store import Store
from unisono.errors import ConfigError, UnisonoError
from unisono.store import open_store

# Timeout of one store operation, in seconds. It is long, because no stream depends on it.
PATIENCE_S = 5.0

Result = TypeVar("Result")


def run_on_store(
    config: Config, work: Callable[[Store], Awaitable[Result]], *, if_memory: str, writes: bool = False
) -> Result:
    """Open the store, return the result of `work`, and close the store.

    An error of the store ends the command with its message. Raises ConfigError with the reason `if_memory` if the store
    is in memory, and for an invalid address. If `writes` is True, the configured number of replicas must acknowledge
    each write.
    """
    address = store_address(config.store)
    if address.startswith("memory:"):
        raise ConfigError(f"store.url: {if_memory}; use redis:// or sqlite:///path")
    replicas = config.store.replicas if writes else None
    store = open_store(address, deadline_s=max(config.store.deadline_s, PATIENCE_S), replicas=replicas)

    async def worked() -> Result:
        try:
            await store.start()
            return await work(store)
        finally:
            await store.aclose()

    try:
        return asyncio.run(worked())
    except UnisonoError as error:
        raise click.ClickException(f"store: {error.message}") from error
