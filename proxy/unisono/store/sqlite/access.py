"""Virtual keys, the directory and audit records in SQLite."""

from __future__ import annotations

from dataclasses import replace

from unisono.core.access import KeyRecord
from unisono.core.directory import MAX_AUDIT_RECORDS, AuditRecord, DirectoryEntry, EntryKind
from unisono.store import codec
from unisono.store.sqlite.connection import Transaction, Transactions
from unisono.store.write_errors import refusal


class SqliteAccess:
    """Part of the SQLite store that implements `KeyStore` and `DirectoryStore`."""

    async def put_key(self: Transactions, record: KeyRecord, audit: AuditRecord | None = None) -> KeyRecord:
        return await self._run(_store_key, record, audit)

    async def key(self: Transactions, key: str) -> KeyRecord | None:
        return await self._read(_key_of_id, key)

    async def key_of(self: Transactions, digest: str) -> KeyRecord | None:
        return await self._read(_key_of_digest, digest)

    async def keys(self: Transactions) -> tuple[KeyRecord, ...]:
        return await self._read(_all_keys)

    async def put_entry(self: Transactions, entry: DirectoryEntry, audit: AuditRecord | None = None) -> DirectoryEntry:
        return await self._run(_store_entry, entry, audit)

    async def delete_entry(self: Transactions, entry: DirectoryEntry, audit: AuditRecord | None = None) -> None:
        await self._run(_delete_entry, entry, audit)

    async def entries(self: Transactions, *ids: tuple[EntryKind, str]) -> tuple[DirectoryEntry | None, ...]:
        return await self._read(_entries, ids)

    async def directory(self: Transactions, kind: EntryKind) -> tuple[DirectoryEntry, ...]:
        return await self._read(_entries_of_kind, kind)

    async def audit_records(self: Transactions, offset: int, limit: int) -> tuple[int, tuple[AuditRecord, ...]]:
        return await self._read(_audit_page, offset, limit)


# The functions below run SQL in the caller's transaction.


def _store_key(act: Transaction, record: KeyRecord, audit: AuditRecord | None) -> KeyRecord:
    changed = replace(record, revision=record.revision + 1)
    data = codec.encode_key(changed)
    row = act.db.execute("SELECT revision, data FROM virtual_keys WHERE id = ?", (record.id,)).fetchone()
    if row is not None and bytes(row[1]) == data:
        return changed
    if row is None and record.revision:
        raise refusal("missing")
    if row is not None and row[0] != record.revision:
        raise refusal("key changed" if record.revision else "exists")
    act.db.execute("DELETE FROM key_digests WHERE key = ?", (record.id,))
    for one in record.digests:
        if act.db.execute("SELECT 1 FROM key_digests WHERE digest = ?", (one.digest,)).fetchone():
            raise refusal("exists")
        act.db.execute("INSERT INTO key_digests VALUES (?, ?)", (one.digest, record.id))
    act.db.execute("REPLACE INTO virtual_keys VALUES (?, ?, ?)", (record.id, changed.revision, data))
    _add_audit(act, audit)
    return changed


def _key_of_id(act: Transaction, key: str) -> KeyRecord | None:
    row = act.db.execute("SELECT data FROM virtual_keys WHERE id = ?", (key,)).fetchone()
    return None if row is None else codec.decode_key(row[0])


def _key_of_digest(act: Transaction, digest: str) -> KeyRecord | None:
    row = act.db.execute(
        "SELECT data FROM virtual_keys JOIN key_digests ON virtual_keys.id = key_digests.key WHERE digest = ?",
        (digest,),
    ).fetchone()
    return None if row is None else codec.decode_key(row[0])


def _all_keys(act: Transaction) -> tuple[KeyRecord, ...]:
    rows = act.db.execute("SELECT data FROM virtual_keys").fetchall()
    return tuple(sorted((codec.decode_key(row[0]) for row in rows), key=lambda record: (record.created_at, record.id)))


def _store_entry(act: Transaction, entry: DirectoryEntry, audit: AuditRecord | None) -> DirectoryEntry:
    changed = replace(entry, revision=entry.revision + 1)
    data = codec.encode_entry(changed)
    row = _entry_row(act, entry)
    if row is not None and bytes(row[1]) == data:
        return changed
    _check_revision(row, entry)
    act.db.execute("REPLACE INTO directory VALUES (?, ?, ?, ?)", (entry.kind, entry.id, changed.revision, data))
    _add_audit(act, audit)
    return changed


def _delete_entry(act: Transaction, entry: DirectoryEntry, audit: AuditRecord | None) -> None:
    _check_revision(_entry_row(act, entry), entry)
    act.db.execute("DELETE FROM directory WHERE kind = ? AND id = ?", (entry.kind, entry.id))
    _add_audit(act, audit)


def _entry_row(act: Transaction, entry: DirectoryEntry) -> tuple[int, bytes] | None:
    row: tuple[int, bytes] | None = act.db.execute(
        "SELECT revision, data FROM directory WHERE kind = ? AND id = ?", (entry.kind, entry.id)
    ).fetchone()
    return row


def _check_revision(row: tuple[int, bytes] | None, entry: DirectoryEntry) -> None:
    if row is None and entry.revision:
        raise refusal("missing")
    if row is not None and row[0] != entry.revision:
        raise refusal("entry changed" if entry.revision else "exists")


def _entries(act: Transaction, ids: tuple[tuple[EntryKind, str], ...]) -> tuple[DirectoryEntry | None, ...]:
    found = (act.db.execute("SELECT data FROM directory WHERE kind = ? AND id = ?", one).fetchone() for one in ids)
    return tuple(None if row is None else codec.decode_entry(row[0]) for row in found)


def _entries_of_kind(act: Transaction, kind: EntryKind) -> tuple[DirectoryEntry, ...]:
    rows = act.db.execute("SELECT data FROM directory WHERE kind = ?", (kind,)).fetchall()
    return tuple(sorted((codec.decode_entry(row[0]) for row in rows), key=lambda entry: (entry.created_at, entry.id)))


def _audit_page(act: Transaction, offset: int, limit: int) -> tuple[int, tuple[AuditRecord, ...]]:
    total = act.db.execute("SELECT count(*) FROM audit").fetchone()[0]
    rows = act.db.execute("SELECT data FROM audit ORDER BY number DESC LIMIT ? OFFSET ?", (limit, offset)).fetchall()
    return total, tuple(codec.decode_audit(row[0]) for row in rows)


def _add_audit(act: Transaction, audit: AuditRecord | None) -> None:
    if audit is None:
        return
    number = act.db.execute("INSERT INTO audit (data) VALUES (?)", (codec.encode_audit(audit),)).lastrowid or 0
    act.db.execute("DELETE FROM audit WHERE number <= ?", (number - MAX_AUDIT_RECORDS,))
