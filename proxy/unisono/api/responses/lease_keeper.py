"""Leases of responses and conversations: acquired, renewed before they expire, and released.

A background response also has a watch. When the watch is no longer renewed, other processes find the response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.schema import ResponsesRequest
from unisono.core.state_store import BackgroundRun, Lease, Status
from unisono.core.tasks import cancel_and_wait
from unisono.errors import StoreConflict, StoreError, StoreUnavailable

# Number of renewals per lease duration. A failed renewal can be repeated before the lease expires.
RENEWALS = 3

# Pauses in seconds between attempts to acquire a lease. A holder that has finished releases it within this time.
GIVEN_BACK_WITHIN_S = (0.02, 0.05, 0.1, 0.15)

# Pauses in seconds before each read of a response that another process may be cancelling.
CANCELLED_WITHIN_S = (0.0, 0.05, 0.2, 0.5, 1.0)

log = logging.getLogger("unisono.responses")


def anchor_of(request: ResponsesRequest, response_id: str) -> str:
    """Return the anchor of a response's lease: its conversation's id, otherwise `response_id`."""
    return request.conversation.id if request.conversation else response_id


async def acquire_soon(acquire: Callable[[], Awaitable[Lease | None]]) -> Lease | None:
    """Acquire a lease; retry for a short time if another owner holds it.

    A client that has received the end of a response may send the next request before the lease is released. Returns
    None if the lease is not released within this time.
    """
    for pause_s in GIVEN_BACK_WITHIN_S:
        if (lease := await acquire()) is not None:
            return lease
        await asyncio.sleep(pause_s)
    return await acquire()


@asynccontextmanager
async def hold_lease(deps: ResponsesDeps, tenant: str, anchor: str, owner: str) -> AsyncIterator[Lease | None]:
    """Hold the lease of `anchor` until the block ends; yield None if another owner holds it.

    If the lease is lost within the block, the next write with this lease fails.
    """
    lease = await acquire_soon(lambda: deps.store.acquire(tenant, anchor, owner, deps.lease_s))
    if lease is None:
        yield None
        return
    try:
        async with renewed(deps, lease):
            yield lease
    finally:
        await release(deps, lease)


@asynccontextmanager
async def renewed(deps: ResponsesDeps, lease: Lease) -> AsyncIterator[None]:
    """Renew a lease until the block ends.

    If the lease is lost within the block, the next write with this lease fails.
    """
    renewing = asyncio.create_task(_renew(deps, lease))
    try:
        yield
    finally:
        await cancel_and_wait(renewing)


async def _renew(deps: ResponsesDeps, lease: Lease) -> None:
    while True:
        await asyncio.sleep(deps.lease_s / RENEWALS)
        try:
            if not await deps.store.renew(lease, deps.lease_s):
                return
        except StoreError as error:
            log.warning("lease not renewed", extra={"code": error.code})


async def release(deps: ResponsesDeps, lease: Lease) -> None:
    """Release a lease. Errors are only logged, because an unreleased lease expires."""
    try:
        await asyncio.shield(deps.store.release(lease))
    except StoreError as error:
        log.warning("lease not released", extra={"code": error.code})


async def release_unused(deps: ResponsesDeps, lease: Lease) -> None:
    """Release the lease of a response that this process does not start.

    If the release fails, the lease expires.
    """
    try:
        await deps.store.release(lease)
    except StoreError as error:
        log.debug("lease not released", extra={"code": error.code})


async def renew_watched(deps: ResponsesDeps, lease: Lease, run: BackgroundRun) -> None:
    """Renew the lease and the watch of a background response.

    Raises StoreConflict if the lease is lost, and StoreUnavailable if the store does not answer.
    """
    if not await deps.store.renew(lease, deps.lease_s):
        raise StoreConflict("This process has lost the lease of the response.")
    await deps.store.watch(run, deps.lease_s)


async def watch_again(deps: ResponsesDeps, run: BackgroundRun) -> None:
    """Restore the watch of a response that this process can no longer write.

    A failover of the store may have lost the watch together with the end of the event log. Without a watch, no process
    would find the response.
    """
    with _outage_logged("watch of the response not renewed", run):
        await deps.store.watch(run, deps.lease_s)


async def is_soon_cancelled(deps: ResponsesDeps, run: BackgroundRun) -> bool:
    """Wait up to two seconds; return True if another process cancels the response in this time."""
    for pause_s in CANCELLED_WITHIN_S:
        await asyncio.sleep(pause_s)
        with suppress(StoreError):
            [response] = await deps.store.responses(run.tenant, [run.response])
            if response is None or response.status.terminal:
                return response is not None and response.status is Status.CANCELLED
    return False


def reserve_of(deps: ResponsesDeps, anchor: str, response_id: str) -> float:
    """Return the seconds for which a background response's lease stays reserved after its end.

    In this time, no other response of the conversation can start. Otherwise the interrupted response could not
    continue. The value is 0 for a response without a conversation.
    """
    return deps.lease_s if anchor != response_id else 0.0


async def hand_over(deps: ResponsesDeps, lease: Lease, run: BackgroundRun) -> None:
    """End the lease and the watch, so that another process takes over the response.

    If the store is unavailable, the lease and the watch expire by themselves later.
    """
    with _outage_logged("lease not released", run):
        await deps.store.renew(lease, 0.0)
        await deps.store.watch(run, 0.0)


async def release_watched(deps: ResponsesDeps, lease: Lease, run: BackgroundRun, *, is_missing: bool = False) -> None:
    """Release the lease of a response that has ended, and remove its watch.

    If `is_missing` is True, the store did not have the response. The watch then expires now instead of being removed,
    so that another process looks for the response again. If the store is unavailable, the lease and the watch expire by
    themselves later.
    """
    with _outage_logged("lease not released", run):
        await deps.store.release(lease)
        await (deps.store.watch(run, 0.0) if is_missing else deps.store.unwatch(run))


@contextmanager
def _outage_logged(message: str, run: BackgroundRun) -> Iterator[None]:
    # The store's monitor logs an outage once. Here the outage is logged at debug level, because many responses see it.
    try:
        yield
    except StoreUnavailable as error:
        log.debug(message, extra={"response": run.response, "code": error.code})
