"""Background responses owned by this process: started here or taken over from another.

A response is stored before the client receives its id. Its owner holds a lease and renews it. When the renewals stop,
the next process that searches for abandoned responses takes it over, and continues after the last logged token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from unisono.api.field_types import shortened
from unisono.api.responses.background.job import BackgroundJob, JobEnding
from unisono.api.responses.background.job_record import recorded
from unisono.api.responses.background.takeover import Takeover
from unisono.api.responses.continued_history import recall
from unisono.api.responses.deps import ResponsesDeps, ResponsesModel
from unisono.api.responses.lease_keeper import RENEWALS, acquire_soon, anchor_of, release_unused, renewed, reserve_of
from unisono.api.responses.outbound.dialects import OPENAI
from unisono.api.responses.persistence import PAUSES_S, retry_while_down
from unisono.api.responses.prepared_request import Sender, assembled, check_store
from unisono.api.responses.schema import ResponsesRequest
from unisono.core.conversation import Json
from unisono.core.error_texts import ConversationConflict
from unisono.core.state_store import BackgroundRun, Lease, LogWrite, StoredResponse
from unisono.engine.request import GenerationReport
from unisono.errors import (
    BackendOverloaded,
    InvalidRequest,
    NotFound,
    StoreConflict,
    StoreError,
    StoreTooLarge,
    StoreUnavailable,
)

# Maximum number of responses that one process generates concurrently.
MAX_CONCURRENT_RESPONSES = 2048
# Time for jobs to log their events at shutdown, in seconds.
LEAVING_S = 3.0
# Pauses before each cancellation attempt, in seconds. Another process may be cancelling the response or taking it
# over.
CANCEL_PAUSES_S = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0)

log = logging.getLogger("unisono.responses")


class BackgroundRunner:
    """Runner of background responses.

    `process` is a unique owner name that is never reused. `jobs` are all jobs of the process, including those of
    runners with an earlier configuration. If `closing` is True, every new job is handed over to other processes at
    once.
    """

    def __init__(
        self,
        deps: ResponsesDeps,
        *,
        process: str,
        jobs: dict[BackgroundRun, BackgroundJob] | None = None,
        closing: bool = False,
    ) -> None:
        self._deps = deps
        self._process = process
        self._numbers = count()
        self._jobs = {} if jobs is None else jobs
        # Jobs that this runner started.
        self._own: set[BackgroundJob] = set()
        self._takeover = Takeover(deps, self._lease, self._drive, self._has, self._running)
        self._closing = closing

    async def take_over_lapsed(self, lapsed: Sequence[BackgroundRun]) -> bool:
        """Take over abandoned responses; return False if this process has no room for all of them."""
        return await self._takeover.take_over_lapsed(lapsed, MAX_CONCURRENT_RESPONSES)

    def tasks(self) -> set[asyncio.Task[None]]:
        """Return the tasks of the jobs that this runner started and that are still running."""
        return {job.task for job in self._own if job.task is not None}

    async def aclose(self, grace_s: float = 0.0) -> None:
        """Hand over every response of this runner to other processes.

        A running tool call has `grace_s` seconds to finish, and its result is logged before the handover.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + grace_s
        self._closing = True
        while jobs := list(self._own):
            await asyncio.gather(*(job.leave(max(ends_at - loop.time(), 0.0), LEAVING_S) for job in jobs))

    async def start_response(
        self,
        sender: Sender,
        request: ResponsesRequest,
        body: Mapping[str, Json],
        *,
        response_id: str,
        size: int = 0,
        confirm: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[StoredResponse, GenerationReport]:
        """Store a new response and start its generation; return the stored response and its report.

        `size` is the length of the request body in bytes. `confirm` is called before the response is stored, while the
        lease is held. Raises an error if the request is invalid or if `confirm` fails, and StoreError if the store
        fails. If the store fails while it stores the response, the response is deleted, unless the deletion fails too.
        """
        if len(self._jobs) >= MAX_CONCURRENT_RESPONSES:
            raise BackendOverloaded("Too many background responses are in progress; try again later.", retry_after_s=5)
        model = self._deps.resolve(request.model, sender.caller)
        anchor = anchor_of(request, response_id)
        lease = await acquire_soon(lambda: self._lease(sender.tenant, anchor, response_id, pauses_s=PAUSES_S))
        if lease is None:
            raise ConversationConflict
        try:
            # Renewed, because hooks and limits may delay the start for longer than the lease duration.
            async with renewed(self._deps, lease):
                if confirm is not None:
                    await confirm()
                job, response = await self._make_job(sender, request, body, model, response_id, size, lease)
                self._drive(job)
        except BaseException:
            await asyncio.shield(release_unused(self._deps, lease))
            raise
        return response, job.report

    async def _make_job(
        self,
        sender: Sender,
        request: ResponsesRequest,
        body: Mapping[str, Json],
        model: ResponsesModel,
        response_id: str,
        size: int,
        lease: Lease,
    ) -> tuple[BackgroundJob, StoredResponse]:
        """Store the response and create its job; return both. Raises as `start_response` does."""
        past = await recall(self._deps.store, sender.tenant, request)
        prepared = await assembled(
            self._deps,
            # Logs are stored in one dialect and translated when they are read.
            replace(sender, dialect=OPENAI),
            request,
            past,
            model,
            response_id=response_id,
            created_at=int(self._deps.clock()),
            lease=lease,
            size=size,
        )
        if request.conversation is not None:
            await check_store(self._deps, prepared)
        await prepared.approvals.claim()
        try:
            response = await recorded(self._deps, prepared, body, size)
            job = BackgroundJob(
                self._deps, BackgroundRun(sender.tenant, response_id), prepared, lease, running=self._running
            )
            await self._store_if_admitted(job, response, lease)
        except BaseException:
            await asyncio.shield(prepared.approvals.release_unused())
            raise
        return job, response

    async def cancel(self, tenant: str, response_id: str) -> StoredResponse:
        """Cancel a response, in whichever process it runs. Return its record.

        A finished response is unchanged. Raises NotFound, InvalidRequest for a response that does not run in the
        background, ConversationConflict if a different response of its conversation is in progress, and
        StoreUnavailable if the cancellation fails.
        """
        background_run = BackgroundRun(tenant, response_id)
        conflict: ConversationConflict | None = None
        for pause_s in CANCEL_PAUSES_S:
            await asyncio.sleep(pause_s)
            [response] = await self._deps.store.responses(tenant, [response_id])
            if response is None:
                raise missing(response_id)
            if not response.request.get("background"):
                raise InvalidRequest(
                    "Only background responses can be cancelled. To end any other response, close its connection.",
                    param="response_id",
                )
            if response.status.terminal:
                return response
            job = self._jobs.get(background_run)
            if job is None:
                # Another process owns the response. After this takeover, that process can no longer write, and ends its
                # job.
                try:
                    job = await self._takeover.take_over(background_run, response, force=True)
                except ConversationConflict as error:
                    conflict = error
                except (StoreConflict, NotFound):
                    pass
            if job is not None:
                job.end(JobEnding.CANCELLED)
                await job.wait_ended()
        raise conflict or StoreUnavailable("The response could not be cancelled; try again.")

    def forget(self, tenant: str, response_id: str) -> None:
        """Stop the generation of a deleted response.

        If another process generates the response, that process detects the deletion when it renews the lease.
        """
        job = self._jobs.get(BackgroundRun(tenant, response_id))
        if job is not None:
            job.end(JobEnding.DELETED)

    # -- ownership

    def _running(self) -> int:
        return len(self._jobs)

    def _has(self, background_run: BackgroundRun) -> bool:
        return background_run in self._jobs

    def _drive(self, job: BackgroundJob) -> None:
        self._jobs[job.background_run] = job
        self._own.add(job)
        if self._closing:
            job.end(JobEnding.LEFT)
        job.start(lambda: self._on_end(job))

    def _on_end(self, job: BackgroundJob) -> None:
        self._own.discard(job)
        if self._jobs.get(job.background_run) is job:
            del self._jobs[job.background_run]

    async def _lease(
        self,
        tenant: str,
        anchor: str,
        response_id: str,
        *,
        force: bool = False,
        pauses_s: tuple[float, ...] = (),
    ) -> Lease | None:
        store, lease_s = self._deps.store, self._deps.lease_s
        # Each job has its own owner name, because an interrupted job may still have writes in progress. All attempts of
        # one job share the name, because an earlier attempt may have acquired the lease without receiving the reply.
        owner = f"{self._process}:{next(self._numbers)}:{response_id}"
        reserve_s = reserve_of(self._deps, anchor, response_id)
        return await retry_while_down(
            lambda: store.acquire(tenant, anchor, owner, lease_s, force=force, reserve_s=reserve_s), pauses_s
        )

    async def _store_if_admitted(self, job: BackgroundJob, response: StoredResponse, lease: Lease) -> None:
        """Store the response if quotas and hooks admit the request. Otherwise nothing is stored."""
        first_events = LogWrite(0, tuple(event.data for event in job.first_events(response)))
        try:
            await job.admit()
            await self._create(job.background_run, response, lease, first_events)
        except BaseException:
            await asyncio.shield(job.abandon())
            raise

    async def _create(
        self, background_run: BackgroundRun, response: StoredResponse, lease: Lease, first_events: LogWrite
    ) -> None:
        """Create the watch of a new response, then store the response with its first events.

        If the write fails, the watch and the response are deleted.
        """
        store, lease_s, now = self._deps.store, self._deps.lease_s, asyncio.get_running_loop().time
        # The watch is created first. Other processes then find the response even if this process dies right after the
        # creation.
        await retry_while_down(lambda: store.watch(background_run, lease_s))
        watched_at = now()
        try:
            await retry_while_down(lambda: store.create(background_run.tenant, response, lease=lease, log=first_events))
            if now() - watched_at > lease_s / RENEWALS:
                await retry_while_down(lambda: store.watch(background_run, lease_s))
        except (NotFound, StoreTooLarge):
            await store.unwatch(background_run)
            raise
        except BaseException:
            await asyncio.shield(self._undo(background_run, response, lease))
            raise

    async def _undo(self, background_run: BackgroundRun, response: StoredResponse, lease: Lease) -> None:
        """Delete a response whose creation failed, and block a write that is still in progress.

        If the deletion fails, the response remains watched and is generated, although the client received an error.
        """
        store = self._deps.store
        try:
            await retry_while_down(lambda: store.release(lease))
            # The next owner's fence blocks a write that is still in progress.
            barrier = await self._lease(
                background_run.tenant, response.anchor, background_run.response, pauses_s=PAUSES_S
            )
            if barrier is not None:
                await retry_while_down(lambda: store.delete_response(background_run.tenant, background_run.response))
                await store.unwatch(background_run)
                await store.release(barrier)
        except StoreError as error:
            log.warning("response not deleted after a failed start; it may be generated", extra={"code": error.code})


def missing(response_id: str) -> NotFound:
    """Return the error for a missing response. A response of another tenant gets the same error."""
    return NotFound(f"Response with id '{shortened(response_id)}' not found.", param="response_id")
