"""Reservations and settlements of this process, also during an outage of the store.

A generation reserves its maximum usage before it starts, and settles its actual usage at the end. An answer waits until
its settlement is durable: in the store's ledger, or in the local spool if the store is slow or fails. A settlement that
could not be written is retried. If the store rejects a settlement, only this settlement is dropped, and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from unisono.access.budget_reports import BudgetWatch
from unisono.access.outage_limits import OutageLimits
from unisono.access.usage_spool import SCAN_INTERVAL_S, UsageSpool
from unisono.core.quotas import (
    NO_TOKEN_USAGE,
    Account,
    AccountStore,
    LedgerLine,
    QuotaObserver,
    QuotaReservation,
    QuotaStatus,
    UsageRecord,
)
from unisono.errors import StoreError, StoreUnavailable

log = logging.getLogger("unisono.access")

# Number of renewals of a claim within the time for which it is reserved.
RENEWALS: Final = 3
# Maximum number of settlements in one write.
MAX_RECORDS_PER_WRITE: Final = 128
# Maximum number of settlements that wait in memory for the store. If there are more, the oldest is dropped.
MAX_WAITING_RECORDS: Final = 100_000
# Time for the last write when the process ends, in seconds.
CLOSING_TIMEOUT_S: Final = 3.0
# Time for which an answer waits for the store before its settlement is spooled, in seconds.
LEDGER_WAIT_S: Final = 0.05
# Pause after the first failed write, in seconds. It doubles after each further failure.
MIN_RETRY_PAUSE_S: Final = 0.1
# Maximum pause between two attempts to write, in seconds.
MAX_RETRY_PAUSE_S: Final = 2.0


@dataclass(slots=True, eq=False)
class _Waiting:
    """Settlement that is not written yet.

    `durable` is done as soon as the settlement is in the ledger or in the spool, or both have failed.
    """

    settlement: UsageRecord
    durable: asyncio.Future[None]
    is_written: bool = False
    is_spooled: bool = False

    @property
    def has_usage(self) -> bool:
        return self.settlement.entry.used != NO_TOKEN_USAGE

    def finish(self) -> None:
        if not self.durable.done():
            self.durable.set_result(None)


def _ignore() -> None:
    """Do nothing. Default of `on_failure` of `UsageLedger`."""


class UsageLedger:
    """Reservations and settlements of the generations in this process.

    Claims are reserved for `held_s` seconds and renewed until they are settled. `on_failure` is called when writing to
    the store begins to fail. `observers` are notified when a budget changes, and when a request is refused.
    """

    def __init__(
        self,
        accounts: AccountStore,
        *,
        held_s: float,
        spool: UsageSpool | None = None,
        on_failure: Callable[[], None] = _ignore,
        observers: Sequence[QuotaObserver] = (),
    ) -> None:
        self.reservation_s = held_s
        self._accounts = accounts
        self._spool = spool or UsageSpool()
        self._on_failure = on_failure
        self._local = OutageLimits()
        self._watch = BudgetWatch(observers)
        self._open: dict[tuple[Account, str], QuotaReservation] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._waiting: deque[_Waiting] = deque()
        self._write_task: asyncio.Task[None] | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._down = False
        self._store_is_back = asyncio.Event()
        # True if the last wait for the store took too long, and no write has been fast since. Settlements are then
        # spooled without waiting for the store.
        self._is_slow = False

    def start(self) -> None:
        """Start the task that writes the spooled records of other processes to the store."""
        if self._spool.folder is not None:
            self._replaying = asyncio.create_task(self._replay(), name="replaying the usage spool")

    @property
    def unwritten_records(self) -> int:
        """Number of usage records that are not in the store's ledger yet."""
        unspooled = (
            sum(1 for record in self._waiting if record.has_usage and not record.is_spooled) if self._down else 0
        )
        return self._spool.pending + unspooled

    async def reserve_even_in_outage(self, *claims: QuotaReservation, is_lenient: bool) -> QuotaStatus | None:
        """Reserve the claims in the store, or count them in this process while the store is down.

        If `is_lenient`, a request has no limits while the store is down, and the result is None. Otherwise raises
        StoreUnavailable if the store is down and a claim has a budget, since budgets cannot be counted locally.
        """
        # Rules while the store is down:
        # - With `is_lenient`, requests have no limits.
        # - Claims with a budget are refused, because this process does not know how much other processes spend.
        # - All other limits are counted by this process alone.
        can_count_locally = not is_lenient and not any(claim.limits.has_budget for claim in claims)
        # A request does not wait for a store that has just failed.
        if can_count_locally and self.is_down:
            return self.reserve_locally(*claims)
        try:
            return await self.reserve(*claims, insist=not is_lenient)
        except StoreUnavailable:
            if can_count_locally:
                return self.reserve_locally(*claims)
            if is_lenient:
                return None
            raise

    async def reserve(self, *claims: QuotaReservation, insist: bool = False) -> QuotaStatus:
        """Reserve all claims of a request, or none of them. Raises StoreUnavailable.

        If `insist` is True, a failed attempt is repeated once. Claims are not reserved twice by the repetition.
        """
        try:
            status = await self._try_reserve(*claims, insist=insist)
        except BaseException:
            # It is unknown whether the claims are reserved.
            self.release(*claims)
            raise
        self._watch.reserved(status)
        # The store works. Write waiting settlements now, because their reservations still count.
        self._store_is_back.set()
        if status.refused is None:
            for claim in claims:
                self._open[claim.account, claim.once] = claim
                # Count the claim here too, so that the limits still apply if the store fails.
                if not claim.limits.has_budget:
                    self._local.note(claim)
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._renew(), name="renewing quota reservations")
        return status

    @property
    def is_down(self) -> bool:
        """True if the last write failed; the write is repeated until the store accepts it."""
        return self._down

    def reserve_locally(self, *claims: QuotaReservation) -> QuotaStatus:
        """Reserve claims without a budget in this process alone. For use while the store is down."""
        return self._local.reserve(*claims)

    def report_refusal(self, status: QuotaStatus) -> None:
        """Report that a request was refused. A refused reservation alone is not a refused request."""
        self._watch.refused(status)

    async def _try_reserve(self, *claims: QuotaReservation, insist: bool) -> QuotaStatus:
        if insist:
            with suppress(StoreUnavailable):
                return await self._accounts.reserve(*claims)
            await asyncio.sleep(MIN_RETRY_PAUSE_S)
        return await self._accounts.reserve(*claims)

    def release(self, *claims: QuotaReservation) -> None:
        """Release reservations in the background, whether or not the store has them."""
        for claim in claims:
            self.record(
                UsageRecord(f"given back {claim.once}", LedgerLine(claim.account, "", "", NO_TOKEN_USAGE), claim)
            )

    def record(self, settlement: UsageRecord) -> None:
        """Queue a settlement, which is written in the background.

        Use `settle` to wait until it is durable.
        """
        self._queue(settlement)

    def _queue(self, settlement: UsageRecord) -> _Waiting:
        if settlement.claim is not None:
            self._open.pop((settlement.claim.account, settlement.claim.once), None)
            self._local.settle(settlement.claim, settlement.entry.used.tokens)
            self._watch.settled(settlement)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(settlement, loop.create_future())
        self._waiting.append(waiting)
        if len(self._waiting) > MAX_WAITING_RECORDS:
            oldest = self._waiting.popleft()
            # If the settlement is in the spool, it is written from the spool later.
            if not oldest.is_spooled:
                about = _about(oldest.settlement)
                log.error("usage record lost: the store was unavailable for too long", extra=about)
        if self._write_task is None or self._write_task.done():
            self._write_task = loop.create_task(self._write(), name="writing the ledger")
        return waiting

    async def settle(self, *settlements: UsageRecord) -> None:
        """Queue settlements, and wait until they are durable or both store and spool have failed.

        If both have failed, the caller can deliver the answer, which is already generated. The settlements are retried
        in the background.
        """
        waiting = [self._queue(settlement) for settlement in settlements]
        # A store in memory has written the settlements after one turn of the event loop.
        await asyncio.sleep(0)
        pending = _pending(waiting)
        if pending and not self._is_slow:
            await asyncio.wait({each.durable for each in pending}, timeout=LEDGER_WAIT_S)
            pending = _pending(pending)
        if pending:
            self._is_slow = True
            await self._spooled(pending)

    async def _spooled(self, batch: Sequence[_Waiting]) -> None:
        new = [record for record in batch if record.has_usage and not record.is_spooled and not record.is_written]
        if new and await self._spool.append([record.settlement for record in new]):
            for record in new:
                record.is_spooled = True
        # The store may have accepted settlements while they were written to the disk.
        self._spool.settled([record.settlement for record in new if record.is_written])
        for record in batch:
            record.finish()

    async def aclose(self) -> None:
        """Stop renewals, and write waiting settlements for up to `CLOSING_TIMEOUT_S` seconds.

        Settlements that are then still unwritten are spooled.
        """
        for task in (self._renewing, self._replaying):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._write_task is not None:
            # The process must end even if the store is down.
            await asyncio.wait({self._write_task}, timeout=CLOSING_TIMEOUT_S)
            self._write_task.cancel()
            await asyncio.gather(self._write_task, return_exceptions=True)
        unwritten = [record for record in self._waiting if record.has_usage]
        await self._spooled(unwritten)
        await self._spool.release()
        for record in unwritten:
            if not record.is_spooled:
                log.error("usage record lost: the store is unavailable", extra=_about(record.settlement))

    async def _replay(self) -> None:
        cause = ""
        while True:
            try:
                await self._spool.replay(self._accounts)
                cause = ""
            except StoreError as error:
                log.debug("usage spool not replayed: the store is unavailable", extra={"code": error.code})
            except OSError as error:
                if cause != (cause := str(error)):
                    log.warning("usage spool unreadable", extra={"cause": cause})
            except Exception as error:
                # Continue, so that other records need not wait for a restart.
                log.exception("replay of the usage spool failed", exc_info=error)
            await asyncio.sleep(SCAN_INTERVAL_S)

    async def _renew(self) -> None:
        while self._open:
            await asyncio.sleep(self.reservation_s / RENEWALS)
            if not self._open:
                return
            try:
                await self._accounts.extend(*self._open.values())
            except StoreError as error:
                log.debug("quota reservations not renewed", extra={"code": error.code})

    async def _write(self) -> None:
        while self._waiting:
            await self._write_waiting()
            # Release spooled records that were dropped from memory, so that they are replayed. Further settlements may
            # arrive meanwhile.
            await self._spool.seal()

    async def _write_waiting(self) -> None:
        pause_s, alone = MIN_RETRY_PAUSE_S, 0
        loop = asyncio.get_running_loop()
        while self._waiting:
            together = 1 if alone else MAX_RECORDS_PER_WRITE
            alone = max(alone - 1, 0)
            batch = [self._waiting.popleft() for _ in range(min(together, len(self._waiting)))]
            started_at = loop.time()
            try:
                await self._accounts.settle(*[one.settlement for one in batch])
            except StoreError as error:
                self._waiting.extendleft(reversed(batch))
                self._store_is_back.clear()
                await self._fail(batch, error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._store_is_back.wait()
                pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)
            except Exception as error:
                if len(batch) == 1:
                    about = _about(batch[0].settlement)
                    log.exception("usage record lost: the store rejects it", exc_info=error, extra=about)
                    await self._on_written(batch)
                else:
                    # The store rejects a settlement in the batch. Write them one by one to find it.
                    self._waiting.extendleft(reversed(batch))
                    alone = len(batch)
            except BaseException:
                self._waiting.extendleft(reversed(batch))
                raise
            else:
                self._down, pause_s = False, MIN_RETRY_PAUSE_S
                if loop.time() - started_at <= LEDGER_WAIT_S:
                    self._is_slow = False
                await self._on_written(batch)

    async def _on_written(self, batch: Sequence[_Waiting]) -> None:
        for record in batch:
            record.is_written = True
            record.finish()
        if self._spool.folder is not None:
            self._spool.settled([record.settlement for record in batch if record.has_usage])
            await self._spool.shrink()

    async def _fail(self, batch: Sequence[_Waiting], error: StoreError) -> None:
        if not self._down:
            log.warning("usage records not written: the store is unavailable", extra={"code": error.code})
            self._on_failure()
        self._down = self._is_slow = True
        await self._spooled(batch)


def _pending(records: Sequence[_Waiting]) -> list[_Waiting]:
    """Return the settlements that are not durable yet."""
    return [record for record in records if not record.durable.done()]


def _about(settlement: UsageRecord) -> dict[str, object]:
    account: Account = settlement.entry.account
    return {"tenant": account.tenant, "key": account.key, "model": settlement.entry.model, "day": settlement.entry.day}
