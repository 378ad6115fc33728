"""The responses this process owns: begun here or taken over, driven to their end, and given up when somebody else
owns them.

A response is durable before anybody hears of it. Its owner holds a lease and shows signs of life; when they stop, the
next process that looks takes it over and goes on behind the last logged token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from unisono.api.failures import failure_of
from unisono.api.responses.asked import Sender, assembled, busy
from unisono.api.responses.background.life import Ending, Life
from unisono.api.responses.background.record import fallen, rebuilt, recorded, tries_of
from unisono.api.responses.keeping import insisting
from unisono.api.responses.means import Means
from unisono.api.responses.past import recall
from unisono.api.responses.schema import ResponsesRequest
from unisono.core.conversation import Json
from unisono.core.state import Lease, LogWrite, Run, Status, StoredResponse
from unisono.errors import (
    BackendOverloaded,
    InternalError,
    InvalidRequest,
    NotFound,
    StoreConflict,
    StoreError,
    UnisonoError,
)

MOST_TAKEOVERS = 3
"""A response whose owners keep dying may be what kills them."""
MOST_AT_ONCE = 2048
"""Responses one process drives at the same time."""

log = logging.getLogger("unisono.responses")


class Runner:
    """Drives background responses. `process` tells this owner from every other; it is never used twice."""

    def __init__(self, means: Means, *, process: str) -> None:
        self._means = means
        self._process = process
        self._lives: dict[Run, Life] = {}
        self._reaping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for responses whose owners are gone."""
        self._reaping = asyncio.create_task(self._reap(), name="reaper of background responses")

    async def aclose(self) -> None:
        """Leave every response where it is, for others to take over at once."""
        if self._reaping is not None:
            self._reaping.cancel()
            with suppress(asyncio.CancelledError):
                await self._reaping
        lives = list(self._lives.values())
        for life in lives:
            life.end(Ending.LEFT)
        await asyncio.gather(*(life.over() for life in lives), return_exceptions=True)

    async def begin(
        self, sender: Sender, request: ResponsesRequest, body: Mapping[str, Json], *, response_id: str, size: int = 0
    ) -> StoredResponse:
        """Make the response durable and let it run. Raises what the request is refused with, and the StoreError
        family; then nothing of it is left."""
        if len(self._lives) >= MOST_AT_ONCE:
            raise BackendOverloaded("Too many responses run in the background; try again later.", retry_after_s=5)
        model = self._means.resolve(request.model)
        anchor = request.conversation.id if request.conversation else response_id
        lease = await self._lease(sender.tenant, anchor, response_id)
        if lease is None:
            raise busy(anchor)
        run = Run(sender.tenant, response_id)
        try:
            past = await recall(self._means.store, sender.tenant, request)
            asked = await assembled(
                self._means,
                sender,
                request,
                past,
                model,
                response_id=response_id,
                created_at=int(self._means.clock()),
                lease=lease,
                size=size,
            )
            response = recorded(asked, body)
            life = Life(self._means, run, asked, lease, running=self._running)
            begun = life.begin(response)
            # Watched first: what was created and then forgotten by a dead process must be found.
            await self._means.store.watch(run, self._means.lease_s)
            await insisting(
                lambda: self._means.store.create(
                    sender.tenant, response, lease=lease, log=LogWrite(0, tuple(event.data for event in begun))
                )
            )
        except BaseException:
            await self._let_go(run, lease)
            raise
        self._drive(life)
        return response

    async def cancel(self, tenant: str, response_id: str) -> StoredResponse:
        """Call a response off, wherever it runs, and return it as it is then. One that is over stays as it is. Raises
        NotFound, and InvalidRequest for one that does not run in the background."""
        store = self._means.store
        run = Run(tenant, response_id)
        [response] = await store.responses(tenant, [response_id])
        if response is None:
            raise missing(response_id)
        if not response.request.get("background"):
            raise InvalidRequest("Only responses that run in the background can be cancelled.", param="response_id")
        if response.status.terminal:
            return response
        life = self._lives.get(run)
        if life is None:
            # Another process has it: from here on it can write nothing more, and finds out.
            life = await self._take_over(run, response, force=True)
        if life is not None:
            life.end(Ending.CANCELLED)
            await life.over()
        [response] = await store.responses(tenant, [response_id])
        if response is None:
            raise missing(response_id)
        return response

    def forget(self, tenant: str, response_id: str) -> None:
        """The response was deleted: stop making it."""
        life = self._lives.get(Run(tenant, response_id))
        if life is not None:
            life.end(Ending.LOST)

    # -- owning

    def _running(self) -> int:
        return len(self._lives)

    def _drive(self, life: Life) -> None:
        self._lives[life.run] = life
        life.start(lambda: self._over(life))

    def _over(self, life: Life) -> None:
        if self._lives.get(life.run) is life:
            del self._lives[life.run]

    async def _lease(self, tenant: str, anchor: str, response_id: str, *, force: bool = False) -> Lease | None:
        owner = f"{self._process}:{response_id}"
        return await self._means.store.acquire(tenant, anchor, owner, self._means.lease_s, force=force)

    async def _let_go(self, run: Run, lease: Lease) -> None:
        try:
            await asyncio.shield(self._means.store.unwatch(run))
            await asyncio.shield(self._means.store.release(lease))
        except StoreError as error:
            log.warning("a response that was never begun still holds its place", extra={"code": error.code})

    # -- taking over

    async def _reap(self) -> None:
        while True:
            try:
                for run in await self._means.store.lapsed():
                    await self._found(run)
            except Exception as error:
                log.warning("cannot look for abandoned responses", extra={"code": failure_of(error).code})
            await asyncio.sleep(self._means.lease_s / 2)

    async def _found(self, run: Run) -> None:
        """Take over what nobody watches, or forget it where there is nothing to be done."""
        if run in self._lives or len(self._lives) >= MOST_AT_ONCE:
            return
        [response] = await self._means.store.responses(run.tenant, [run.response])
        if response is None or response.status.terminal:
            await self._means.store.unwatch(run)
            return
        life = await self._take_over(run, response)
        if life is not None:
            log.info("response taken over", extra={"response": run.response, "tries": tries_of(response)})

    async def _take_over(self, run: Run, response: StoredResponse, *, force: bool = False) -> Life | None:
        """The response as a life of this process; None when somebody else has it or it just ended."""
        store = self._means.store
        lease = await self._lease(run.tenant, response.anchor, run.response, force=force)
        if lease is None:
            return None
        await store.watch(run, self._means.lease_s)
        # Read again: until now somebody else could write.
        [response_now] = await store.responses(run.tenant, [run.response])
        if response_now is None or response_now.status.terminal:
            await self._let_go(run, lease)
            return None
        tokens = await store.tokens(run.tenant, run.response)
        events = await self._logged(run)
        tries = tries_of(response_now) + (not force)
        try:
            if tries > MOST_TAKEOVERS:
                raise InternalError("The response was given up: every process that made it came to an end.")
            asked = await rebuilt(self._means, run.tenant, response_now, lease)
        except UnisonoError as error:
            await fallen(self._means, run, response_now, lease, events, error)
            await self._let_go(run, lease)
            return None
        noted = replace(response_now, status=Status.IN_PROGRESS, notes={**response_now.notes, "tries": tries})
        try:
            await insisting(lambda: store.update(run.tenant, noted, lease=lease))
        except (StoreConflict, NotFound):
            return None
        life = Life(self._means, run, asked, lease, running=self._running, journal=tokens, logged=events)
        self._drive(life)
        return life

    async def _logged(self, run: Run) -> int:
        """How many events are logged."""
        count = 0
        while True:
            page = await self._means.store.events(run.tenant, run.response, count, limit=4096)
            if page is None or not page.events:
                return count
            count += len(page.events)


def missing(response_id: str) -> NotFound:
    """One answer for a response that is not there and for one of another tenant."""
    return NotFound(f"Response with id '{response_id[:128]}' not found.", param="response_id")
