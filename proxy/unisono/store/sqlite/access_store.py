"""Part of the SQLite store for virtual keys, the directory and audit records."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from unisono.core.access import KeyRecord
from unisono.core.directory import AuditRecord, DirectoryEntry, EntryKind
from unisono.store.sqlite import access
from unisono.store.sqlite.connection import Transaction

P = ParamSpec("P")
T = TypeVar("T")


class _Transactions(Protocol):
    """Runs work in a transaction."""

    def _run(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **named: P.kwargs) -> Awaitable[T]:
        """Run work that writes."""
        ...

    def _read(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **named: P.kwargs) -> Awaitable[T]:
        """Run work that only reads."""
        ...


class SqliteAccess:
    """Part of the SQLite store that implements `KeyStore` and `DirectoryStore`."""

    async def put_key(self: _Transactions, record: KeyRecord, audit: AuditRecord | None = None) -> KeyRecord:
        return await self._run(access.store_key, record, audit)

    async def key(self: _Transactions, key: str) -> KeyRecord | None:
        return await self._read(access.get, key)

    async def key_of(self: _Transactions, digest: str) -> KeyRecord | None:
        return await self._read(access.find, digest)

    async def keys(self: _Transactions) -> tuple[KeyRecord, ...]:
        return await self._read(access.every)

    async def put_entry(self: _Transactions, entry: DirectoryEntry, audit: AuditRecord | None = None) -> DirectoryEntry:
        return await self._run(access.store_entry, entry, audit)

    async def delete_entry(self: _Transactions, entry: DirectoryEntry, audit: AuditRecord | None = None) -> None:
        await self._run(access.delete_entry, entry, audit)

    async def entries(self: _Transactions, *ids: tuple[EntryKind, str]) -> tuple[DirectoryEntry | None, ...]:
        return await self._read(access.entries, ids)

    async def directory(self: _Transactions, kind: EntryKind) -> tuple[DirectoryEntry, ...]:
        return await self._read(access.directory, kind)

    async def audit_records(self: _Transactions, offset: int, limit: int) -> tuple[int, tuple[AuditRecord, ...]]:
        return await self._read(access.audit_page, offset, limit)
