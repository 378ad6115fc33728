"""Holding a lease while something goes on: it is renewed well before it ends and given back at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from unisono.api.responses.deps import ResponsesDeps
from unisono.core.state_store import Lease
from unisono.core.tasks import cancel_and_wait
from unisono.errors import StoreError

RENEWALS = 3
"""How often a lease is renewed in the time it holds: one that fails may fail once more."""

GIVEN_BACK_WITHIN_S = (0.02, 0.05, 0.1, 0.15)
"""Pauses while a lease may be given back: what held it has ended, or goes on for longer than this."""

log = logging.getLogger("unisono.responses")


async def soon_free(acquire: Callable[[], Awaitable[Lease | None]]) -> Lease | None:
    """A lease that may be just about to be given back: a client that was told the end asks for more at once."""
    for pause_s in GIVEN_BACK_WITHIN_S:
        if (lease := await acquire()) is not None:
            return lease
        await asyncio.sleep(pause_s)
    return await acquire()


@asynccontextmanager
async def held(means: ResponsesDeps, tenant: str, anchor: str, owner: str) -> AsyncIterator[Lease | None]:
    """The lease of `anchor`; None when somebody else has it. Losing it is found out by the next write under it."""
    lease = await soon_free(lambda: means.store.acquire(tenant, anchor, owner, means.lease_s))
    if lease is None:
        yield None
        return
    try:
        async with renewed(means, lease):
            yield lease
    finally:
        await release(means, lease)


@asynccontextmanager
async def renewed(means: ResponsesDeps, lease: Lease) -> AsyncIterator[None]:
    """Renew a lease until the end of the block. A lost lease is found by the next write under it."""
    renewing = asyncio.create_task(_renew(means, lease))
    try:
        yield
    finally:
        await cancel_and_wait(renewing)


async def _renew(means: ResponsesDeps, lease: Lease) -> None:
    while True:
        await asyncio.sleep(means.lease_s / RENEWALS)
        try:
            if not await means.store.renew(lease, means.lease_s):
                return
        except StoreError as error:
            log.warning("lease not renewed", extra={"code": error.code})


async def release(means: ResponsesDeps, lease: Lease) -> None:
    """Whether it worked does not matter: what is not given back ends by itself."""
    try:
        await asyncio.shield(means.store.release(lease))
    except StoreError as error:
        log.warning("lease not given back", extra={"code": error.code})
