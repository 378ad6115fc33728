"""Generation of one background response, until it ends or another process takes over.

Four tasks run concurrently: one reads the generation stream, one logs its events, one renews the lease and the watch,
and one waits until the job is told to end. The first task that finishes decides how the job ends. Afterwards the
response is either finished, or its watch expires, so that another process finds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto

from unisono.api.automatic_compaction import start_answer
from unisono.api.error_responses import failure_of, with_attempts
from unisono.api.responses.background.event_log import PATIENCE_S, GrowingLog
from unisono.api.responses.background.interrupted_answer import fail_response
from unisono.api.responses.background.job_record import with_handover_noted
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.lease_keeper import (
    RENEWALS,
    hand_over,
    is_soon_cancelled,
    release_watched,
    renew_watched,
    watch_again,
)
from unisono.api.responses.outbound.compaction_events import events_type
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.api.responses.persistence import retry_while_down, revision_for, to_stored
from unisono.api.responses.prepared_request import PreparedRequest
from unisono.core.conversation import Tokens
from unisono.core.events import Event
from unisono.core.observer import GenerationDone
from unisono.core.request_record import BACKGROUND, GENERATIONS, record_of_answer
from unisono.core.state_store import BackgroundRun, Lease, Status, StoredResponse
from unisono.core.tasks import cancel_all
from unisono.engine.journal import must_be_kept
from unisono.engine.request import GenerationReport
from unisono.errors import NotFound, StoreConflict, StoreError, StoreUnavailable, UnisonoError

# Time in seconds for which events are collected before they are logged.
PAUSE_S = 0.03
# Additional seconds for each running response. A write costs a gateway about as much CPU time as five tokens, and so
# does each reader's lookup afterwards. A thousand writes per second use a fifth of a CPU.
PAUSE_EACH_S = 0.001

log = logging.getLogger("unisono.responses")


class JobEnding(Enum):
    """Reason why a job ends before its response is complete."""

    CANCELLED = auto()
    # This process shuts down, and another process takes over.
    LEFT = auto()
    DELETED = auto()


class BackgroundJob:
    """Generation of one background response.

    `record` is the stored response, or None if it is not stored yet. `journal` holds the tokens in the store, and
    `logged` is the number of events there. `running` returns the number of jobs of this process.
    """

    def __init__(
        self,
        deps: ResponsesDeps,
        background_run: BackgroundRun,
        prepared: PreparedRequest,
        lease: Lease,
        *,
        running: Callable[[], int],
        record: StoredResponse | None = None,
        journal: Tokens = (),
        logged: int = 0,
    ) -> None:
        self.background_run = background_run
        self._deps = deps
        self._prepared = prepared
        self._lease = lease
        self._journal = journal
        self._logged = logged
        request = prepared.generation.request
        taken_over = record is not None
        resumption = replace(request.resumption, journal=journal, is_journal_stored=True, is_taken_over=taken_over)
        request = replace(request, resumption=resumption, answer=replace(request.answer, whole=False))
        self._engine_run = start_answer(deps.service, request, prepared.generation.compaction)
        self._events = events_type(prepared.frame)(
            prepared.frame, self._engine_run.report, new_id=prepared.item_ids, clock=deps.clock
        )
        self._log = GrowingLog(
            deps,
            lease,
            background_run.response,
            events=logged,
            tokens=len(journal),
            pause_s=lambda: PAUSE_S + PAUSE_EACH_S * running(),
        )
        self._last_batch: tuple[list[WireEvent], list[int]] = ([], [])
        self._record = record
        self._finishing = False
        self._ending: JobEnding | None = None
        self._ended = asyncio.Event()
        # True while a server tool may be running.
        self._is_calling = False
        self._grace_ended = asyncio.Event()
        self._has_ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        # Generations in the answer's record, and the code of an error that belongs to no generation.
        self._generations: list[GenerationDone] = []
        self._error = ""

    @property
    def report(self) -> GenerationReport:
        return self._engine_run.report

    async def admit(self) -> None:
        """Check whether a new response is admitted.

        Raises an error if the limits of the key or a hook reject the request.
        """
        await self._engine_run.admit()

    async def abandon(self) -> None:
        """Release what `admit` reserved, for a job that is not started."""
        await self._engine_run.aclose()

    def first_events(self, record: StoredResponse) -> list[WireEvent]:
        """Return the first events of a new response.

        The caller stores them together with `record`, before it starts the job.
        """
        events = self._events.first_events(queued=True)
        self._record = record
        self._log.skip(len(events))
        return events

    def start(self, on_end: Callable[[], None]) -> None:
        """Start the job. `on_end` is called when it ends, for any reason."""
        # The generations of the request so far, such as descriptions of images, belong to the answer's record.
        if earlier := GENERATIONS.get():
            self._generations += earlier
            earlier.clear()
        self.task = asyncio.create_task(self._live(), name=f"background response {self.background_run.response}")
        self.task.add_done_callback(lambda _: on_end())

    def end(self, ending: JobEnding) -> None:
        if self._ending is None:
            self._ending = ending
            self._ended.set()

    async def leave(self, grace_s: float, within_s: float) -> None:
        """Hand the response over to another process.

        A running tool call has `grace_s` seconds to finish. Then the job has `within_s` seconds to end.
        """
        self.end(JobEnding.LEFT)
        if self._is_calling and self.task is not None:
            await asyncio.wait({self.task}, timeout=grace_s)
        # The grace period is over, also for a tool call that is still running.
        self._grace_ended.set()
        await self.wait_ended(within_s)

    async def wait_ended(self, within_s: float | None = None) -> None:
        """Wait until the job has ended. After `within_s` seconds it is cancelled."""
        if self.task is None:
            return
        done, _ = await asyncio.wait({self.task}, timeout=within_s)
        if not done:
            self.task.cancel()
            await asyncio.wait({self.task})

    # -- the job

    async def _live(self) -> None:
        about = {"response": self.background_run.response}
        GENERATIONS.set(self._generations)
        # A response that another process continues is recorded by that process.
        is_over = is_lost = False
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._send_heartbeats())
                is_handed_over = await self._generate_response()
                self._has_ended.set()
            is_over = not is_handed_over
            await (hand_over if is_handed_over else release_watched)(self._deps, self._lease, self.background_run)
        except* NotFound:
            is_over = True
            log.info("response deleted during generation", extra=about)
            # After a failover, the store may miss the response only temporarily. The next process that finds the watch
            # decides.
            await release_watched(self._deps, self._lease, self.background_run, is_missing=True)
        except* StoreConflict:
            is_lost = True
            log.info("response owned by another process", extra=about)
            await watch_again(self._deps, self.background_run)
        except* StoreUnavailable:
            # The response is not changed. When the store is available again, a process takes the response over.
            log.warning("response not stored: store unavailable", extra=about)
        except* Exception as errors:
            for error in errors.exceptions:
                if isinstance(error, Exception):
                    log.warning("background response interrupted", extra=about | {"code": failure_of(error).code})
        finally:
            await self._engine_run.aclose()
            # If another process cancels the response, this process still writes the record, because it generated the
            # answer.
            if is_over or (is_lost and await is_soon_cancelled(self._deps, self.background_run)):
                self._record_answer()

    def _record_answer(self) -> None:
        if self._prepared.generation.request.resumption.is_reported_elsewhere:
            return
        sender, model, now = self._prepared.sender, self._prepared.frame.model, self._deps.clock()
        self._deps.record(
            record_of_answer(
                sender.request_id, BACKGROUND, sender.caller, model, self._generations, at=now, error=self._error
            )
        )

    async def _generate_response(self) -> bool:
        """Generate the response to its end. Return True if another process continues it.

        Raises StoreError if the store fails, or if this process has lost the response.
        """
        batches = aiter(self._engine_run)
        failure = await self._catch_up(batches)
        if failure is not None:
            self._finishing, self._error = True, failure.code
            stored = to_stored(self._prepared, self._prepared.frame.stored(Status.IN_PROGRESS))
            await fail_response(self._deps, self.background_run, stored, self._lease, failure)
            return False
        if self._ending is None:
            failure = await self._generate(batches)
        await self._engine_run.aclose()
        if self._events.ended or failure is not None or self._ending is JobEnding.CANCELLED:
            await self._finish(failure)
        elif self._ending is JobEnding.LEFT:
            await self._log.flush()
            await self._hand_over()
            return True
        elif self._ending is None:
            await self._finish(failure_of(RuntimeError("the generation stream ended without a final event")))
        return False

    async def _catch_up(self, batches: AsyncIterator[list[Event]]) -> UnisonoError | None:
        """Advance the event writer to the end of the log, if the response was taken over with a log.

        If the response has a journal, reads the first of the `batches`, which repeats the logged output. Returns the
        error if the generation cannot be resumed, else None.
        """
        if not self._logged:
            return None
        batch: Sequence[Event] = ()
        if self._journal:
            try:
                batch = await anext(batches)
            except Exception as error:
                return failure_of(error)
        self._events.resume(batch, self._logged)
        return None

    async def _generate(self, batches: AsyncIterator[list[Event]]) -> UnisonoError | None:
        """Read the generation stream until it ends or the job is told to end.

        Returns the error of the stream, or None. Raises StoreError if the log cannot be written.
        """
        reading = asyncio.create_task(self._read(batches))
        ended = asyncio.create_task(self._ended.wait())
        writing = asyncio.create_task(self._log.keep_writing())
        grace = asyncio.create_task(self._grace_ended.wait())
        tasks = (reading, ended, writing, grace)
        try:
            done, _ = await asyncio.wait((reading, ended, writing), return_when=asyncio.FIRST_COMPLETED)
            if self._ending is JobEnding.LEFT and self._is_calling:
                # Wait for the tool call. The next owner could not repeat it, because its outcome would be unknown.
                done, _ = await asyncio.wait((reading, writing, grace), return_when=asyncio.FIRST_COMPLETED)
            # Close the backend's stream before the wait for a write in progress.
            await cancel_all(reading, ended)
            self._log.close()
            await asyncio.wait({writing})
        finally:
            await cancel_all(*tasks)
        await writing
        return await reading if reading in done else None

    async def _read(self, batches: AsyncIterator[list[Event]]) -> UnisonoError | None:
        """Log the events of the stream, except the last batch.

        `_finish` writes the last batch together with the end of the response.
        """
        journal = self._engine_run.report.journal
        seen = len(self._journal)
        await self._set_in_progress()
        try:
            async for batch in batches:
                events = self._events.write(batch)
                tokens, seen = journal[seen:], len(journal)
                if self._events.ended:
                    self._last_batch = (events, tokens)
                    return None
                # The tool call runs from here to the next batch, which contains its result.
                self._is_calling = must_be_kept(batch)
                self._log.add(events, tokens)
                if self._is_calling:
                    # The tool is called after this batch. The next owner must find this in the log.
                    await self._log.flush()
                elif self._ending is JobEnding.LEFT:
                    return None
                while self._log.is_behind:
                    await self._log.flush()
        except StoreError:
            raise
        except Exception as error:
            return failure_of(error)
        return None

    async def _set_in_progress(self) -> None:
        """Set the status of a new response to in progress."""
        if self._record is not None and self._record.status is Status.QUEUED:
            await self._update(replace(self._record, status=Status.IN_PROGRESS))

    async def _hand_over(self) -> None:
        """Record a graceful handover, so that the next owner does not count a crash."""
        if self._record is not None:
            await self._update(with_handover_noted(self._record))

    async def _update(self, record: StoredResponse) -> None:
        await retry_while_down(
            lambda: self._deps.store.update(self.background_run.tenant, record, lease=self._lease), PATIENCE_S
        )
        self._record = record

    async def _send_heartbeats(self) -> None:
        """Renew the lease and the watch until the job ends.

        Raises StoreConflict when the lease is lost, and NotFound when the response was deleted.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._deps.lease_s / RENEWALS):
                    await self._has_ended.wait()
                    return
            try:
                await renew_watched(self._deps, self._lease, self.background_run)
                await self._log.check_ownership()
            except StoreUnavailable as error:
                # The store's monitor logs an outage once. Here it is logged at debug level, because every job sees it.
                log.debug("lease not renewed", extra={"response": self.background_run.response, "code": error.code})
            except StoreConflict:
                # The end of the response may already be written. If not, that write fails because of the lost lease.
                if not self._finishing:
                    raise

    # -- endings

    async def _finish(self, failure: UnisonoError | None) -> None:
        """Write the end in one transaction: the last events, the record and the conversation."""
        await self._log.settle()
        self._finishing = True
        if self._events.ended:
            self._log.add(*self._last_batch)
        elif failure is not None:
            self._error = failure.code
            caller = self._prepared.generation.request.origin.caller
            self._log.add(self._events.fail(with_attempts(failure, caller)), ())
        else:
            self._log.add(self._events.cancel(), ())
        try:
            await self._write_end()
        except (StoreConflict, NotFound):
            if self._revision is None:
                raise
            # Either the conversation has changed, or the lease is lost. If the lease is lost, the next write fails too.
            changed = StoreConflict("The conversation changed during generation, so the response was not added to it.")
            self._error = changed.code
            self._log.add(self._events.fail(changed), ())
            await self._write_end()

    @property
    def _revision(self) -> int | None:
        response = self._events.stored
        return None if response is None else revision_for(self._prepared, response)

    async def _write_end(self) -> None:
        response = self._events.stored
        assert response is not None
        stored = to_stored(self._prepared, response)
        rest = self._log.rest()
        write = replace(rest, events=(*rest.events, self._events.last().data))
        store, revision = self._deps.store, self._revision
        await retry_while_down(
            lambda: store.update(self.background_run.tenant, stored, lease=self._lease, log=write, revision=revision),
            PATIENCE_S,
        )
