"""One background response from its first event to its last, or until it is somebody else's.

Four things go on at once: the run is read, its events are logged, signs of life are given, and an order to end is
waited for. Whatever comes first decides how it goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from unisono.api.failures import failure_of
from unisono.api.responses.asked import Asked
from unisono.api.responses.background.log import PATIENCE_S, GrowingLog
from unisono.api.responses.holding import RENEWALS
from unisono.api.responses.keeping import as_kept, insisting, revision_for
from unisono.api.responses.means import Means
from unisono.api.responses.outbound.events import Events, WireEvent
from unisono.core.conversation import Tokens
from unisono.core.events import Event
from unisono.core.state import Lease, Run, Status, StoredResponse
from unisono.errors import NotFound, StoreConflict, StoreError, StoreTooLarge, StoreUnavailable, UnisonoError

PAUSE_S = 0.03
"""How long events wait for company before they are logged."""
PAUSE_EACH_S = 0.0005
"""How much longer with every other response that runs: a store has so many writes a second and no more."""

log = logging.getLogger("unisono.responses")


class Ending(Enum):
    """Why a life ends that did not come to its own end."""

    CANCELLED = auto()
    LEFT = auto()
    """This process goes; another one takes over."""
    LOST = auto()
    """Deleted, or somebody else's by now."""


class Life:
    """One response being made. `journal` and `logged` are the tokens and the number of events in the store; `running`
    tells how many lives this process has."""

    def __init__(
        self,
        means: Means,
        run: Run,
        asked: Asked,
        lease: Lease,
        *,
        running: Callable[[], int],
        journal: Tokens = (),
        logged: int = 0,
    ) -> None:
        self.run = run
        self._means = means
        self._asked = asked
        self._lease = lease
        self._journal = journal
        self._logged = logged
        self._engine_run = means.turns.start(replace(asked.turn.turn, journal=journal, whole=False))
        self._events = Events(asked.frame, self._engine_run.report, new_id=asked.item_ids, clock=means.clock)
        self._log = GrowingLog(
            means,
            lease,
            run.response,
            events=logged,
            tokens=len(journal),
            pause_s=lambda: PAUSE_S + PAUSE_EACH_S * running(),
        )
        self._last_batch: tuple[list[WireEvent], list[int]] = ([], [])
        self._record: StoredResponse | None = None
        self._ending: Ending | None = None
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self, record: StoredResponse) -> list[WireEvent]:
        """The first events of a response that is new: they are created with its record, before the life starts."""
        begun = self._events.begin(queued=True)
        self._record = record
        self._log.skip(len(begun))
        return begun

    def start(self, over: Callable[[], None]) -> None:
        """Live. `over` is called at the end, whatever it is."""
        self._task = asyncio.create_task(self._live(), name=f"background response {self.run.response}")
        self._task.add_done_callback(lambda _: over())

    def end(self, ending: Ending) -> None:
        if self._ending is None:
            self._ending = ending
            self._ended.set()

    async def over(self) -> None:
        """Return when nothing of it goes on any more."""
        if self._task is not None:
            await asyncio.wait({self._task})

    # -- the life

    async def _live(self) -> None:
        try:
            await self._work()
        except (StoreConflict, NotFound):
            log.info("response is somebody else's or gone", extra={"response": self.run.response})
        except StoreUnavailable as error:
            # Left as it is: when the store is back, somebody finds it.
            log.warning("response cannot be kept", extra={"response": self.run.response, "code": error.code})
        except Exception as error:
            log.warning("response given up", extra={"response": self.run.response, "code": failure_of(error).code})
        finally:
            await self._engine_run.aclose()

    async def _work(self) -> None:
        batches = aiter(self._engine_run)
        failure = await self._catch_up(batches)
        if failure is None and self._ending is None:
            failure = await self._generate(batches)
        await self._engine_run.aclose()
        if self._events.ended or failure is not None:
            await self._finish(failure)
        elif self._ending is Ending.CANCELLED:
            await self._finish(None)
        elif self._ending is Ending.LEFT:
            await self._leave()

    async def _catch_up(self, batches: AsyncIterator[list[Event]]) -> UnisonoError | None:
        """Bring the events to where the log ends."""
        if not self._logged:
            return None
        batch: Sequence[Event] = ()
        if self._journal:
            try:
                batch = await anext(batches)
            except Exception as error:
                self._events.resume((), self._logged)
                return failure_of(error)
        self._events.resume(batch, self._logged)
        return None

    async def _generate(self, batches: AsyncIterator[list[Event]]) -> UnisonoError | None:
        """Read the run to its end, or until told to end; what it failed with. Raises the StoreError family."""
        reading = asyncio.create_task(self._read(batches))
        others: tuple[asyncio.Task[Any], ...] = (
            asyncio.create_task(self._log.keep_writing()),
            asyncio.create_task(self._show_life()),
            asyncio.create_task(self._ended.wait()),
        )
        try:
            done, _ = await asyncio.wait((reading, *others), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, *others):
                task.cancel()
            await asyncio.gather(reading, *others, return_exceptions=True)
        for task in done.intersection(others):
            if (error := task.exception()) is not None:
                raise error
        return reading.result() if reading in done else None

    async def _read(self, batches: AsyncIterator[list[Event]]) -> UnisonoError | None:
        """Events into the log. The last batch stays out of it: it is written with the end."""
        journal = self._engine_run.report.journal
        seen = len(self._journal)
        try:
            await self._started()
            async for batch in batches:
                made = self._events.write(batch)
                tokens, seen = journal[seen:], len(journal)
                if self._events.ended:
                    self._last_batch = (made, tokens)
                    return None
                self._log.add(made, tokens)
                while self._log.behind:
                    await self._log.flush()
        except StoreError:
            raise
        except Exception as error:
            return failure_of(error)
        return None

    async def _started(self) -> None:
        """A new response says that it waits no longer."""
        record = self._record
        if record is not None:
            begun = replace(record, status=Status.IN_PROGRESS)
            await insisting(lambda: self._means.store.update(self.run.tenant, begun, lease=self._lease), PATIENCE_S)

    async def _show_life(self) -> None:
        """Renew the lease and the watch; raises StoreConflict when the lease is lost."""
        lease_s = self._means.lease_s
        while True:
            await asyncio.sleep(lease_s / RENEWALS)
            try:
                if not await self._means.store.renew(self._lease, lease_s):
                    raise StoreConflict("the lease is lost")
                await self._means.store.watch(self.run, lease_s)
            except StoreUnavailable as error:
                log.warning("no sign of life given", extra={"response": self.run.response, "code": error.code})

    # -- ends

    async def _finish(self, failure: UnisonoError | None) -> None:
        """Write the end: the last events, the record and the conversation in one act."""
        await self._log.settle()
        if failure is not None:
            self._log.add(self._events.fail(failure), ())
        elif self._events.ended:
            self._log.add(*self._last_batch)
        else:
            self._log.add(self._events.cancel(), ())
        try:
            await self._write_end()
        except StoreTooLarge as error:
            self._log.add(self._events.fail(error, keep_output=False), ())
            await self._write_end()
        await self._means.store.unwatch(self.run)
        await self._means.store.release(self._lease)

    async def _write_end(self) -> None:
        response = self._events.stored
        assert response is not None
        rest = self._log.rest()
        write = replace(rest, events=(*rest.events, self._events.last().data))
        await insisting(
            lambda: self._means.store.update(
                self.run.tenant,
                as_kept(self._asked, response),
                lease=self._lease,
                log=write,
                revision=revision_for(self._asked, response),
            ),
            PATIENCE_S,
        )

    async def _leave(self) -> None:
        """Log what there is, and let whoever looks first take over."""
        await self._log.flush()
        await self._means.store.release(self._lease)
        await self._means.store.watch(self.run, 0.0)
