"""Embedded store without a server: a SQLite file, or memory.

Every operation is one transaction. With a file, one thread writes and a second one reads, and a write is synced to disk
before it is acknowledged. In memory, transactions run on the event loop. Several processes may share the file. Writers
wake waiting readers in their own process. Readers also poll, and thereby find events that other processes wrote.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, Unpack

from unisono.core.conversation import Json, Tokens
from unisono.core.quotas import Account, LedgerLine, QuotaReservation, QuotaStatus, TokenUsage, UsageRecord
from unisono.core.state_store import (
    NOTHING_LOGGED,
    BackgroundRun,
    EventPage,
    Lease,
    LogWrite,
    Retention,
    StoredConversation,
    StoredItem,
    StoredResponse,
    WriteOptions,
)
from unisono.errors import StoreUnavailable
from unisono.store.codec import StateLimits
from unisono.store.event_wait import Waiting, until_some
from unisono.store.sqlite import accounts, conversations, disk_space, leases, responses
from unisono.store.sqlite.access import SqliteAccess
from unisono.store.sqlite.connection import (
    LOCK_TIMEOUT_S,
    TROUBLE,
    OpenedFile,
    Transaction,
    connect,
    is_damage,
    is_unwritable,
    open_file,
    primary_code,
    unavailable,
)
from unisono.store.sqlite.expiry import FileUpkeep
from unisono.store.sqlite.idempotency_claims import claim, unclaim
from unisono.store.sqlite.request_records import SqliteRequests
from unisono.store.sqlite.traces import SqliteTraces

P = ParamSpec("P")
T = TypeVar("T")

# Lock timeout, in seconds, of a write that follows a timed-out write. It is short because many writes may be queued.
LOCKED_TIMEOUT_S = 0.2
NOT_OPEN = "the store is not open: it could not be started yet, or the gateway is shutting down; try again later"
log = logging.getLogger("unisono.store")

IN_MEMORY = "state is stored in memory only and is lost when this process ends"


class SqliteStore(SqliteAccess, SqliteTraces, SqliteRequests):
    """Store in a SQLite file.

    If `path` is None, everything is stored in memory. If `or_memory` is True and the file cannot be created or written,
    memory is used instead. `clock` returns seconds since 1970. `check` performs a trial write if the disk has fewer
    than `low_bytes` bytes left.
    """

    def __init__(
        self,
        path: Path | None,
        retention: Retention | None = None,
        bounds: StateLimits | None = None,
        clock: Callable[[], float] = time.time,
        *,
        or_memory: bool = False,
        low_bytes: int = disk_space.LOW_BYTES,
    ) -> None:
        self._path = path
        self._may_use_memory = or_memory
        self._low_bytes = low_bytes
        self._retention = retention or Retention()
        self._bounds = bounds or StateLimits()
        self._clock = clock
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="unisono-store")
        self._db: sqlite3.Connection | None = None
        # A transaction in memory takes less time than waking a thread, so it runs on the event loop.
        self._is_in_memory = path is None
        # Reads have their own thread, because a file can be read while another process has locked it for writing.
        self._reading_worker = self._worker
        self._reading_db: sqlite3.Connection | None = None
        self._file: OpenedFile | None = None
        self._is_locked = False
        self._upkeep = FileUpkeep()
        # True if an operation has failed and no check has performed a trial write since then.
        self._failed = False
        # Last error that showed damage of the file. It is kept, because a trial write can still succeed.
        self._damage: sqlite3.Error | None = None
        self._waiting = Waiting()

    async def start(self) -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        try:
            if self._path is None:
                self._db = await loop.run_in_executor(self._worker, connect, None)
            else:
                file = await loop.run_in_executor(self._worker, open_file, self._path)
                self._file, self._db, self._reading_db = file, file.writer, file.reader
                self._reading_worker = ThreadPoolExecutor(1, thread_name_prefix="unisono-store-reads")
        except StoreUnavailable as error:
            if not self._may_use_memory or not is_unwritable(error):
                raise
            self._db, self._is_in_memory = await loop.run_in_executor(self._worker, connect, None), True
            return (f"{self._path} cannot be used ({error.__cause__}); {IN_MEMORY}. Set store.url to a writable path",)
        return (IN_MEMORY,) if self._path is None else ()

    async def aclose(self) -> None:
        self._waiting.wake_all()
        if self._db is not None:
            await self._close_connections()
        self._reading_worker.shutdown(wait=False)
        self._worker.shutdown(wait=False)

    async def _close_connections(self) -> None:
        loop = asyncio.get_running_loop()
        db, file = await loop.run_in_executor(self._worker, self._forget)
        if file is not None:
            await loop.run_in_executor(self._reading_worker, file.reader.close)
            await loop.run_in_executor(self._worker, file.writer.close)
        elif db is not None:
            await loop.run_in_executor(self._worker, db.close)

    def _forget(self) -> tuple[sqlite3.Connection | None, OpenedFile | None]:
        """Refuse further operations; return the connections to close.

        Runs on the writing thread, so that no write is in progress.
        """
        opened = self._db, self._file
        self._db = self._reading_db = self._file = None
        return opened

    async def _run(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **named: P.kwargs) -> T:
        if self._is_in_memory:
            return self._run_transaction(self._db, True, work, *args, **named)
        self._check_open()
        asked_s = time.monotonic()

        def act() -> T:
            if self._file is not None:
                self._file.check()
            with self._lock_timeout(asked_s):
                return self._run_transaction(self._db, True, work, *args, **named)

        return await asyncio.get_running_loop().run_in_executor(self._worker, act)

    async def _read(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **named: P.kwargs) -> T:
        """Run work that only reads, on the reading thread; see `_run`."""
        if self._is_in_memory:
            return self._run_transaction(self._db, False, work, *args, **named)
        self._check_open()

        def act() -> T:
            return self._run_transaction(self._reading_db or self._db, False, work, *args, **named)

        return await asyncio.get_running_loop().run_in_executor(self._reading_worker, act)

    def _check_open(self) -> None:
        if self._db is None:
            raise StoreUnavailable(NOT_OPEN)

    @contextmanager
    def _lock_timeout(self, asked_s: float) -> Iterator[None]:
        """Limit the time for which a write waits for the lock of another process.

        The time since the write was requested, at `asked_s` (time.monotonic), counts towards the limit if the previous
        write timed out.
        """
        if self._db is None:
            raise StoreUnavailable(NOT_OPEN)
        timeout_s = LOCK_TIMEOUT_S
        if self._is_locked:
            timeout_s = min(LOCKED_TIMEOUT_S, asked_s + LOCK_TIMEOUT_S - time.monotonic())
        if timeout_s <= 0:
            raise StoreUnavailable(TROUBLE[sqlite3.SQLITE_BUSY])
        self._db.execute(f"PRAGMA busy_timeout = {int(timeout_s * 1000)}")
        is_locked = False
        try:
            yield
        except StoreUnavailable as error:
            is_locked = primary_code(error.__cause__) == sqlite3.SQLITE_BUSY
            raise
        finally:
            self._is_locked = is_locked

    def _run_transaction(
        self,
        db: sqlite3.Connection | None,
        writes: bool,
        work: Callable[Concatenate[Transaction, P], T],
        *args: P.args,
        **named: P.kwargs,
    ) -> T:
        """Run `work` in one transaction, on the thread of the caller.

        Raises `StoreUnavailable` for an error of SQLite.
        """
        if db is None:
            raise StoreUnavailable(NOT_OPEN)
        try:
            # A read takes no lock, so that other writers do not delay it.
            db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            # Commits, or rolls back after an error.
            with db:
                act = Transaction(db, self._clock(), self._retention, self._bounds)
                with self._upkeep.during(act) if writes else nullcontext():
                    return work(act, *args, **named)
        except sqlite3.Error as error:
            self._on_error(error)
            raise unavailable(error) from error

    def _on_error(self, error: sqlite3.Error) -> None:
        if is_damage(error):
            self._damage = error
        elif not self._failed and primary_code(error) not in TROUBLE:
            # If the next check succeeds, nothing else reports this error.
            log.error("an operation of the store failed", extra={"cause": f"{type(error).__name__}: {error}"})
        self._failed = True

    async def check(self, beginning: StoredResponse | None = None, tenant: str = "") -> None:
        if await self._run(disk_space.is_disk_low, self._path, self._low_bytes, beginning, tenant) or self._failed:
            # Two transactions are needed, because data that one transaction adds and deletes is never written to disk.
            await self._run(disk_space.fill)
            await self._run(disk_space.clear)
            self._failed = False
        if self._damage is not None:
            raise unavailable(self._damage) from self._damage
        if beginning is not None and beginning.ancestors:
            await self._run(responses.renew, tenant, beginning.ancestors)

    async def _save(
        self,
        tenant: str,
        response: StoredResponse,
        new: bool,
        lease: Lease | None = None,
        log: LogWrite = NOTHING_LOGGED,
        revision: int | None = None,
    ) -> None:
        try:
            await self._run(responses.save, tenant, response, new, lease, log, revision)
        finally:
            self._waiting.wake(_key(tenant, response.id))

    async def create(self, tenant: str, response: StoredResponse, **options: Unpack[WriteOptions]) -> None:
        await self._save(tenant, response, True, **options)

    async def update(self, tenant: str, response: StoredResponse, **options: Unpack[WriteOptions]) -> None:
        await self._save(tenant, response, False, **options)

    async def responses(self, tenant: str, ids: Sequence[str]) -> tuple[StoredResponse | None, ...]:
        return await self._read(responses.read, tenant, ids)

    async def delete_response(self, tenant: str, response: str) -> bool:
        try:
            return await self._run(responses.delete, tenant, response)
        finally:
            self._waiting.wake(_key(tenant, response))

    async def item(self, tenant: str, item: str) -> StoredItem | None:
        return await self._read(responses.item, tenant, item)

    async def log(self, lease: Lease, response: str, write: LogWrite) -> None:
        try:
            await self._run(responses.log, lease, response, write)
        finally:
            self._waiting.wake(_key(lease.tenant, response))

    async def is_log_complete(self, lease: Lease, response: str) -> bool:
        # Acknowledged events are synced to disk and cannot be lost. Only the lease is checked.
        await self._run(responses.log, lease, response, NOTHING_LOGGED)
        return True

    async def events(
        self, tenant: str, response: str, first: int, *, limit: int = 512, wait_s: float = 0.0
    ) -> EventPage | None:
        with self._waiting.on(_key(tenant, response)) as woken:
            return await until_some(lambda: self._read(responses.events, tenant, response, first, limit), woken, wait_s)

    async def tokens(self, tenant: str, response: str) -> Tokens:
        return await self._read(responses.tokens, tenant, response)

    async def create_conversation(
        self, tenant: str, conversation: StoredConversation, items: Sequence[StoredItem] = ()
    ) -> None:
        await self._run(conversations.create, tenant, conversation, items)

    async def conversation(self, tenant: str, conversation: str) -> StoredConversation | None:
        return await self._read(conversations.head, tenant, conversation)

    async def conversation_items(
        self,
        tenant: str,
        conversation: str,
        *,
        after: str | None = None,
        limit: int | None = None,
        newest_first: bool = False,
        upto: int | None = None,
    ) -> tuple[StoredItem, ...] | None:
        return await self._read(conversations.items, tenant, conversation, after, limit, newest_first, upto)

    async def conversation_item(self, tenant: str, conversation: str, item: str) -> StoredItem | None:
        return await self._read(conversations.item, tenant, conversation, item)

    async def append(
        self,
        tenant: str,
        conversation: str,
        items: Sequence[StoredItem],
        *,
        revision: int | None = None,
        lease: Lease | None = None,
    ) -> int:
        return await self._run(conversations.append, tenant, conversation, items, revision, lease)

    async def set_metadata(
        self, tenant: str, conversation: str, metadata: Mapping[str, Json]
    ) -> StoredConversation | None:
        return await self._run(conversations.set_metadata, tenant, conversation, metadata)

    async def delete_item(self, tenant: str, conversation: str, item: str) -> bool:
        return await self._run(conversations.delete_item, tenant, conversation, item)

    async def delete_conversation(self, tenant: str, conversation: str) -> bool:
        return await self._run(conversations.delete, tenant, conversation)

    async def acquire(
        self, tenant: str, anchor: str, owner: str, for_s: float, *, force: bool = False, reserve_s: float = 0.0
    ) -> Lease | None:
        return await self._run(leases.acquire, tenant, anchor, owner, for_s, force, reserve_s)

    async def renew(self, lease: Lease, for_s: float) -> bool:
        return await self._run(leases.extend, lease, for_s + lease.reserve_s)

    async def release(self, lease: Lease) -> None:
        await self._run(leases.extend, lease, 0.0)

    async def watch(self, run: BackgroundRun, for_s: float) -> None:
        await self._run(leases.watch, run, for_s)

    async def unwatch(self, run: BackgroundRun) -> None:
        await self._run(leases.unwatch, run)

    async def lapsed(self, limit: int = 16) -> tuple[BackgroundRun, ...]:
        return await self._read(leases.lapsed, limit)

    async def claim(self, tenant: str, key: str, digest: str, response: str, *, for_s: float | None = None) -> str:
        return await self._run(claim, tenant, key, digest, response, for_s)

    async def unclaim(self, tenant: str, key: str, response: str) -> None:
        await self._run(unclaim, tenant, key, response)

    async def secret(self, name: str, candidate: bytes) -> bytes:
        # A secret never changes, so only the first caller takes the write lock.
        known: bytes | None = await self._read(leases.known_secret, name)
        return known if known is not None else await self._run(leases.secret, name, candidate)

    async def count(self, tenant: str, name: str, amount: int, *, once: str, for_s: float) -> int:
        return await self._run(leases.count, tenant, name, amount, once, for_s)

    async def reserve(self, claim: QuotaReservation, *others: QuotaReservation) -> QuotaStatus:
        return await self._run(accounts.reserve, (claim, *others))

    async def extend(self, *claims: QuotaReservation) -> None:
        await self._run(accounts.extend, claims)

    async def settle(self, *settlements: UsageRecord) -> None:
        await self._run(accounts.settle, settlements)

    async def raise_spent(self, account: Account, period: str, ends: float | None, used: TokenUsage) -> None:
        await self._run(accounts.raise_spent, account, period, ends, used)

    async def ledger(self, since: str, until: str, account: Account | None = None) -> tuple[LedgerLine, ...]:
        return await self._read(accounts.ledger, since, until, account)


def _key(tenant: str, response: str) -> str:
    return f"{len(tenant)}:{tenant}:{response}"
