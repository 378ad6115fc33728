"""SQL that stores, reads and lists virtual keys, in the caller's transaction."""

from __future__ import annotations

from dataclasses import replace

from unisono.core.access import KeyRecord
from unisono.store import codec
from unisono.store.sqlite.schema import Transaction
from unisono.store.write_errors import refusal


def store_key(act: Transaction, record: KeyRecord) -> KeyRecord:
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
    return changed


def get(act: Transaction, key: str) -> KeyRecord | None:
    row = act.db.execute("SELECT data FROM virtual_keys WHERE id = ?", (key,)).fetchone()
    return None if row is None else codec.decode_key(row[0])


def find(act: Transaction, digest: str) -> KeyRecord | None:
    row = act.db.execute(
        "SELECT data FROM virtual_keys JOIN key_digests ON virtual_keys.id = key_digests.key WHERE digest = ?",
        (digest,),
    ).fetchone()
    return None if row is None else codec.decode_key(row[0])


def every(act: Transaction) -> tuple[KeyRecord, ...]:
    rows = act.db.execute("SELECT data FROM virtual_keys").fetchall()
    return tuple(sorted((codec.decode_key(row[0]) for row in rows), key=lambda record: (record.created_at, record.id)))
