"""Reservations of this process, renewed while their turns run, and settlements on their way to the store.

A settlement is never given up while the process lives: one that could not be written is tried until it can be. Several
that come at once are written together. One that no store can take is given up alone, and said.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from unisono.core.accounts import Account, Accounts, Claim, Entry, Settlement, Standing, Used
from unisono.errors import StoreError, StoreUnavailable

log = logging.getLogger("unisono.access")

RENEWALS: Final = 3
"""How often a claim is renewed in the time it is held for."""
TOGETHER: Final = 128
"""Settlements of one write."""
MOST_WAITING: Final = 100_000
"""Settlements that wait for a store that is down; the oldest are given up behind so many."""
PATIENCE_S: Final = 3.0
"""How long an answer waits for its settlement, in seconds."""
AGAIN_S: Final = 0.1
LONGEST_AGAIN_S: Final = 2.0
"""Between two tries of a write that failed, the first time and at most, in seconds."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A settlement that is not written yet, and whether somebody waits until it is."""

    settlement: Settlement
    written: asyncio.Future[None]
    insist: bool

    def done(self) -> None:
        if not self.written.done():
            self.written.set_result(None)


class Books:
    """Reserves and settles for the turns of this process. Claims are held for `held_s` seconds at a time."""

    def __init__(self, accounts: Accounts, *, held_s: float) -> None:
        self.held_s = held_s
        self._accounts = accounts
        self._open: dict[str, Claim] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._waiting: deque[_Waiting] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._down = False

    async def reserve(self, claim: Claim, *, insist: bool = False) -> Standing:
        """With `insist` a store that does not answer is asked once more: the same claim is held once. Raises
        `StoreUnavailable`."""
        try:
            standing = replace(await self._held(claim, insist=insist), limits=claim.limits)
        except BaseException:
            # Whether it is held now is unknown.
            self.release(claim)
            raise
        if standing.refused is None:
            self._open[claim.once] = claim
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.create_task(self._renew(), name="renewing claims")
        return standing

    async def _held(self, claim: Claim, *, insist: bool) -> Standing:
        if insist:
            with suppress(StoreUnavailable):
                return await self._accounts.reserve(claim)
            await asyncio.sleep(AGAIN_S)
        return await self._accounts.reserve(claim)

    def release(self, claim: Claim) -> None:
        """Give back what was held: nothing came of it."""
        self.enter(Settlement(f"given back {claim.once}", Entry(claim.account, "", "", Used()), claim))

    def enter(self, settlement: Settlement, *, insist: bool = False) -> asyncio.Future[None]:
        """Have it written; the future is done when it is, or, unless it is insisted on, when that was tried."""
        if settlement.claim is not None:
            self._open.pop(settlement.claim.once, None)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(settlement, written, insist))
        if len(self._waiting) > MOST_WAITING:
            lost = self._waiting.popleft().settlement
            log.error("an entry of the ledger is lost: the store has been down for too long", extra=_about(lost))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="writing the ledger")
        return written

    async def settle(self, settlement: Settlement, *, insist: bool) -> None:
        """Return when it is written, or, unless it is insisted on, when the store is down. Raises `StoreUnavailable`
        where that is insisted on; it is still written as soon as it can be."""
        was_down = self._down
        written = self.enter(settlement, insist=insist)
        if was_down and not insist:
            return
        await asyncio.wait({written}, timeout=PATIENCE_S)
        if insist and not written.done():
            raise StoreUnavailable("what this answer used could not be accounted for")

    async def aclose(self) -> None:
        """Write what waits, for a while, and renew no more."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=PATIENCE_S)
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        for one in self._waiting:
            log.error("an entry of the ledger is lost: the store is down", extra=_about(one.settlement))

    async def _renew(self) -> None:
        while self._open:
            await asyncio.sleep(self.held_s / RENEWALS)
            if not self._open:
                return
            try:
                await self._accounts.extend(*self._open.values())
            except StoreError as error:
                log.debug("claims could not be renewed", extra={"code": error.code})

    async def _write(self) -> None:
        pause_s, alone = AGAIN_S, 0
        while self._waiting:
            together = 1 if alone else TOGETHER
            alone = max(alone - 1, 0)
            batch = [self._waiting.popleft() for _ in range(min(together, len(self._waiting)))]
            try:
                await self._accounts.settle(*(one.settlement for one in batch))
            except StoreError as error:
                self._waiting.extendleft(reversed(batch))
                self._fail(batch, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_AGAIN_S)
            except Exception as error:
                if len(batch) == 1:
                    about = _about(batch[0].settlement)
                    log.exception("an entry of the ledger is lost: it cannot be written", exc_info=error, extra=about)
                    batch[0].done()
                else:
                    # One of them has something no store takes; which one shows when each goes by itself.
                    self._waiting.extendleft(reversed(batch))
                    alone = len(batch)
            except BaseException:
                self._waiting.extendleft(reversed(batch))
                raise
            else:
                self._down, pause_s = False, AGAIN_S
                for one in batch:
                    one.done()

    def _fail(self, batch: Sequence[_Waiting], error: StoreError) -> None:
        if not self._down:
            log.warning("the ledger cannot be written for now", extra={"code": error.code})
        self._down = True
        for one in batch:
            if not one.insist:
                one.done()


def _about(settlement: Settlement) -> dict[str, object]:
    account: Account = settlement.entry.account
    return {"tenant": account.tenant, "key": account.key, "model": settlement.entry.model, "day": settlement.entry.day}
