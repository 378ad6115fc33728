"""Takeover of responses whose owners are gone. Generation continues at the end of the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from unisono.api.error_responses import failure_of
from unisono.api.responses.background.interrupted_answer import fail_response
from unisono.api.responses.background.job import BackgroundJob
from unisono.api.responses.background.job_record import (
    key_of,
    rebuild_request,
    reported_elsewhere,
    request_id_of,
    user_of,
    with_incomplete_journal,
    with_leaving_noted,
    with_takeover_counted,
)
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.lease_keeper import release_unused
from unisono.api.responses.persistence import retry_while_down
from unisono.api.responses.prepared_request import PreparedRequest
from unisono.core.conversation import Tokens
from unisono.core.error_texts import ConversationConflict
from unisono.core.quotas import NO_TOKEN_USAGE
from unisono.core.request_record import BACKGROUND, record_of_answer
from unisono.core.state_store import BackgroundRun, Lease, StoredResponse
from unisono.core.trace_context import identify
from unisono.errors import InternalError, StoreConflict, StoreUnavailable, StoreUnreadable, UnisonoError

# Maximum number of takeovers without a new token. After that, the response fails, because it may cause the crashes.
MAX_TAKEOVERS = 3
# Time in seconds after which a watch is removed if its response still does not exist.
FORGET_S = 60.0
# Time in seconds for which a response that this process cannot read is left to other processes.
UNREADABLE_S = 60.0
# Maximum time in seconds for which a response is left to other processes because this process rejects its request.
# After that, the response fails.
MAX_LEFT_S = 600.0
# Maximum size of the set of missing responses, which is then cleared, so that it does not grow without bound.
MAX_MISSING = 4096

# Errors that a process with a different configuration would raise too.
FINAL = (StoreConflict, InternalError)

log = logging.getLogger("unisono.responses")


class Acquire(Protocol):
    async def __call__(self, tenant: str, anchor: str, response_id: str, *, force: bool = False) -> Lease | None: ...


class Takeover:
    """Takeover of abandoned responses.

    `acquire` acquires the lease that a response needs, and `drive` starts a job. `has` returns True if this process
    already generates the given response. `running` returns the number of responses that this process generates.
    """

    def __init__(
        self,
        deps: ResponsesDeps,
        acquire: Acquire,
        drive: Callable[[BackgroundJob], None],
        has: Callable[[BackgroundRun], bool],
        running: Callable[[], int],
    ) -> None:
        self._deps = deps
        self._acquire = acquire
        self._drive = drive
        self._has = has
        self._running = running
        self._missing: set[BackgroundRun] = set()
        self._taking_over: set[BackgroundRun] = set()  # takeovers of this process that are in progress

    # -- abandoned responses

    async def take_over_lapsed(self, lapsed: Sequence[BackgroundRun], most: int) -> bool:
        """Take over abandoned responses; return False if some are left.

        `most` is the maximum number of responses that this process may generate at the same time.
        """
        for background_run in lapsed:
            if self._running() >= most:
                return False
            await self._try_take_over(background_run)
        return True

    async def _try_take_over(self, background_run: BackgroundRun) -> None:
        """Take over a response. If that fails, watch it again.

        The search returns a limited number of responses. Without a new watch, a response that always fails would hide
        others.
        """
        try:
            await self._handle_lapsed(background_run)
        except StoreUnavailable:
            raise
        except Exception as error:
            about = {"response": background_run.response, "code": failure_of(error).code}
            log.warning("takeover of an abandoned response failed", extra=about)
            await self._deps.store.watch(background_run, UNREADABLE_S)

    async def _handle_lapsed(self, background_run: BackgroundRun) -> None:
        store = self._deps.store
        if self._has(background_run):
            await store.watch(background_run, self._deps.lease_s)
            return
        [response] = await store.responses(background_run.tenant, [background_run.response])
        if response is None and background_run not in self._missing:
            # The response may not exist yet, because its watch is created first.
            if len(self._missing) >= MAX_MISSING:
                self._missing.clear()
            self._missing.add(background_run)
            await store.watch(background_run, FORGET_S)
        elif response is None or response.status.terminal:
            self._missing.discard(background_run)
            await store.unwatch(background_run)
        elif await self.take_over(background_run, response) is not None:
            log.info("response taken over", extra={"response": background_run.response})

    # -- takeover

    async def take_over(
        self, background_run: BackgroundRun, response: StoredResponse, *, force: bool = False
    ) -> BackgroundJob | None:
        """Take over a response, and return the job that continues it.

        Returns None if the response has finished or another process owns it. With `force`, the other process loses the
        lease, but still reports the answer; the caller must then cancel the job. Raises ConversationConflict if, with
        `force`, a different response of the conversation has the lease, and StoreError if the store fails. After an
        error, the response is unchanged.
        """
        store, lease_s = self._deps.store, self._deps.lease_s
        where = (background_run.tenant, response.anchor, background_run.response)
        lease = await self._acquire(*where)
        # A takeover in progress has no job yet that could report the answer.
        has_owner = lease is None and background_run not in self._taking_over
        if lease is None and force:
            lease = await self._acquire(*where, force=True)
        if lease is None:
            await store.watch(background_run, lease_s / 2)
            if force:
                raise ConversationConflict(
                    "The conversation has another response in progress; try again when that response has ended.",
                    param="response_id",
                )
            return None
        job = None
        self._taking_over.add(background_run)
        try:
            await store.watch(background_run, lease_s)
            job = await self._continued_job(background_run, lease, counted=not force, has_owner=has_owner)
        finally:
            self._taking_over.discard(background_run)
            if job is None:
                await asyncio.shield(release_unused(self._deps, lease))
        if job is not None:
            self._drive(job)
        return job

    async def _continued_job(
        self, background_run: BackgroundRun, lease: Lease, *, counted: bool, has_owner: bool
    ) -> BackgroundJob | None:
        store = self._deps.store
        # Read the response again, because another process may have written it before the lease was acquired.
        [response] = await store.responses(background_run.tenant, [background_run.response])
        if response is None or response.status.terminal:
            await store.unwatch(background_run)
            return None
        identify(user=user_of(response))
        tokens = await store.tokens(background_run.tenant, background_run.response)
        events = await self._count_events(background_run)
        is_complete = await retry_while_down(lambda: store.is_log_complete(lease, background_run.response))
        counted_response, tries = with_takeover_counted(response, len(tokens))
        if counted:
            await retry_while_down(lambda: store.update(background_run.tenant, counted_response, lease=lease))
        try:
            prepared = await self._restore_request(background_run, response, lease, tries if counted else 0)
            prepared = prepared if is_complete else with_incomplete_journal(prepared)
            prepared = reported_elsewhere(prepared) if has_owner else prepared
        except (StoreUnavailable, StoreUnreadable):
            raise
        except Exception as error:
            failure = failure_of(error)
            if not (counted and await self._leave(background_run, response, lease, failure)):
                # If the lookup of the caller fails because the store does not answer, the response is still unchanged.
                # Another takeover then charges its tokens.
                end = _interruption(failure) if counted else None
                await self._fail(background_run, response, lease, end, tokens, has_owner=has_owner)
            return None
        record = counted_response if counted else response
        return BackgroundJob(
            self._deps,
            background_run,
            prepared,
            lease,
            running=self._running,
            record=record,
            journal=tokens,
            logged=events,
        )

    async def _leave(
        self, background_run: BackgroundRun, response: StoredResponse, lease: Lease, error: UnisonoError
    ) -> bool:
        """Leave a response to other processes; return False if it must fail.

        The process that created the response accepted its request, and other processes may accept it too. For example,
        the model may be missing only here. The watch remains: when it expires, other processes find the response.
        """
        if isinstance(error, FINAL):
            return False
        deps, now = self._deps, self._deps.clock()
        left, since = with_leaving_noted(response, now)
        if now - since > MAX_LEFT_S:
            return False
        # This write also reverts the count of this takeover, because `response` is the state before the count.
        await retry_while_down(lambda: deps.store.update(background_run.tenant, left, lease=lease))
        about = {"response": background_run.response, "code": error.code, "reason": error.message}
        log.log(logging.WARNING if since == now else logging.DEBUG, "response left to other processes", extra=about)
        return True

    async def _fail(
        self,
        background_run: BackgroundRun,
        response: StoredResponse,
        lease: Lease,
        error: UnisonoError | None,
        tokens: Tokens,
        *,
        has_owner: bool,
    ) -> None:
        """End a response that cannot continue, and charge and record its logged tokens.

        If `error` is None, the response is cancelled. With `has_owner`, the process that generates the response writes
        the record.
        """
        deps = self._deps
        caller = await deps.caller_of(background_run.tenant, key_of(response))
        await fail_response(deps, background_run, response, lease, error)
        charged = NO_TOKEN_USAGE
        if tokens:
            charged = deps.charge_journal(caller, response.model, background_run.response, tokens)
        if not has_owner:
            request_id, code = request_id_of(response), "" if error is None else error.code
            record = record_of_answer(request_id, BACKGROUND, caller, response.model, (), at=deps.clock(), error=code)
            deps.record(record._replace(output_tokens=charged.output, cost=charged.cost))
        await deps.store.unwatch(background_run)

    async def _restore_request(
        self, background_run: BackgroundRun, response: StoredResponse, lease: Lease, tries: int
    ) -> PreparedRequest:
        if tries > MAX_TAKEOVERS:
            raise InternalError("The response failed, because every process that generated it crashed.")
        return await rebuild_request(self._deps, background_run.tenant, response, lease)

    async def _count_events(self, background_run: BackgroundRun) -> int:
        """Return the number of logged events.

        Uses a binary search instead of reading all events, which may be many megabytes.
        """

        async def is_there(number: int) -> bool:
            page = await self._deps.store.events(background_run.tenant, background_run.response, number, limit=1)
            return page is not None and bool(page.events)

        low, high = 0, 15
        while await is_there(high):
            low, high = high + 1, 4 * high
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if await is_there(middle) else (low, middle)
        return low


def _interruption(error: UnisonoError) -> UnisonoError:
    """Return the error of a response that cannot continue.

    The request was accepted before, so the error does not blame the client.
    """
    if isinstance(error, FINAL):
        return error
    return InternalError(f"No process can continue the response: {error.message}")
