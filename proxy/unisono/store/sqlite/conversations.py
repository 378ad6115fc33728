"""SQL that stores and reads conversations and their items, in the caller's transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unisono.core.conversation import Json
from unisono.core.state_store import Lease, StoredConversation, StoredItem
from unisono.store import codec
from unisono.store.codec import UNLIMITED
from unisono.store.sqlite.connection import Transaction
from unisono.store.sqlite.leases import check_lease
from unisono.store.write_errors import refusal


def create(act: Transaction, tenant: str, conversation: StoredConversation, items: Sequence[StoredItem]) -> None:
    head = codec.encode_conversation(conversation)
    encoded = _encoded(act, items)
    last = digest(encoded)
    row = act.db.execute(
        "SELECT head, revision, last FROM conversations WHERE tenant = ? AND id = ? AND expires > ?",
        (tenant, conversation.id, act.now),
    ).fetchone()
    # If the stored conversation is equal to the new one, this call is a repetition. Items are compared by their digest.
    if row is not None:
        if row == (head, 0, last):
            return
        raise refusal("exists")
    # An expired conversation with the same id may still have rows.
    _forget(act, tenant, conversation.id)
    act.db.execute(
        "INSERT INTO conversations VALUES (?, ?, ?, 0, 0, 0, ?, ?)",
        (tenant, conversation.id, head, last, act.now + act.retention.conversation_s),
    )
    _add(act, tenant, conversation.id, encoded, upto=0, size=0)


def _encoded(act: Transaction, items: Sequence[StoredItem]) -> list[tuple[str, bytes]]:
    return list(zip((item.id for item in items), codec.encode_each(items, act.bounds, at="items"), strict=True))


def digest(encoded: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a digest of encoded items, to recognise a repeated create or append."""
    whole = hashlib.sha256()
    for _, data in encoded:
        whole.update(b"%d:" % len(data) + data)
    return whole.digest()


def _add(
    act: Transaction, tenant: str, conversation: str, encoded: Sequence[tuple[str, bytes]], *, upto: int, size: int
) -> None:
    """Add encoded items to a conversation from position `upto`.

    `size` is the size of the conversation in bytes so far. Raises `StoreTooLarge` if the conversation would exceed its
    limit. Raises `StoreConflict` if the conversation already contains an item with the same id, or if two new items
    have the same id. The caller's transaction then rolls back.
    """
    size += sum(len(data) for _, data in encoded)
    if size > act.bounds.conversation:
        raise refusal("large")
    # Ids are unique in a conversation, because clients page by them.
    if len({item for item, _ in encoded}) != len(encoded):
        raise refusal("repeated")
    expires = act.now + act.retention.conversation_s
    for position, (item, data) in enumerate(encoded, upto):
        if _position(act, tenant, conversation, item) is not None:
            raise refusal("repeated")
        act.db.execute(
            "INSERT INTO conversation_items VALUES (?, ?, ?, ?, ?)", (tenant, conversation, position, item, data)
        )
        act.db.execute("REPLACE INTO places VALUES (?, ?, NULL, ?, ?)", (tenant, item, conversation, expires))
    act.db.execute(
        "UPDATE conversations SET upto = ?, bytes = ?, expires = ? WHERE tenant = ? AND id = ?",
        (upto + len(encoded), size, expires, tenant, conversation),
    )


def check_room(act: Transaction, tenant: str, conversation: str, size: int) -> None:
    """Raise `StoreTooLarge` if a conversation has no room for `size` more bytes."""
    row = act.db.execute("SELECT bytes FROM conversations WHERE tenant = ? AND id = ?", (tenant, conversation))
    if sum(used for (used,) in row) + size > act.bounds.conversation:
        raise refusal("large")


def append(
    act: Transaction,
    tenant: str,
    conversation: str,
    items: Sequence[StoredItem],
    revision: int | None,
    lease: Lease | None,
) -> int:
    if lease is not None:
        act = replace(act, bounds=UNLIMITED)
    encoded = _encoded(act, items)
    last = digest(encoded)
    row = act.db.execute(
        "SELECT revision, upto, bytes, last FROM conversations WHERE tenant = ? AND id = ? AND expires > ?",
        (tenant, conversation, act.now),
    ).fetchone()
    if row is None:
        raise refusal("missing")
    current, upto, size, before = row
    # An earlier try of this append has succeeded, but its reply was lost. This is checked before the lease, because the
    # lease may have ended since then.
    if revision is not None and current == revision + 1 and before == last:
        return int(current)
    check_lease(act, tenant, conversation, lease)
    if revision is not None and current != revision:
        raise refusal("changed")
    _add(act, tenant, conversation, encoded, upto=upto, size=size)
    act.db.execute(
        "UPDATE conversations SET revision = ?, last = ? WHERE tenant = ? AND id = ?",
        (current + 1, last, tenant, conversation),
    )
    return int(current + 1)


def head(act: Transaction, tenant: str, conversation: str) -> StoredConversation | None:
    row = act.db.execute(
        "SELECT head, revision, upto FROM conversations WHERE tenant = ? AND id = ? AND expires > ?",
        (tenant, conversation, act.now),
    ).fetchone()
    return row and codec.decode_conversation(*row)


def set_metadata(
    act: Transaction, tenant: str, conversation: str, metadata: Mapping[str, Json]
) -> StoredConversation | None:
    found = head(act, tenant, conversation)
    if found is None:
        return None
    changed = replace(found, metadata=dict(metadata))
    act.db.execute(
        "UPDATE conversations SET head = ?, expires = ? WHERE tenant = ? AND id = ?",
        (codec.encode_conversation(changed), act.now + act.retention.conversation_s, tenant, conversation),
    )
    return changed


def renew(act: Transaction, tenant: str, conversation: str) -> None:
    act.db.execute(
        "UPDATE conversations SET expires = ? WHERE tenant = ? AND id = ? AND expires > ?",
        (act.now + act.retention.conversation_s, tenant, conversation, act.now),
    )


def _position(act: Transaction, tenant: str, conversation: str, item: str) -> int | None:
    row = act.db.execute(
        "SELECT position FROM conversation_items WHERE tenant = ? AND conversation = ? AND id = ?",
        (tenant, conversation, item),
    ).fetchone()
    return row and int(row[0])


# Conditions for reading in both directions from the position of an item.
AFTER = {
    False: "position > ? ORDER BY position",
    True: "position < ? ORDER BY position DESC",
}


def items(
    act: Transaction,
    tenant: str,
    conversation: str,
    after: str | None,
    limit: int | None,
    newest_first: bool,
    upto: int | None,
) -> tuple[StoredItem, ...] | None:
    if head(act, tenant, conversation) is None:
        return None
    # Without `after`, the position lies outside of all items.
    start: int | None = (1 << 62) if newest_first else -1
    if after is not None:
        start = _position(act, tenant, conversation, after)
        if start is None:
            return None
    rows = act.db.execute(
        "SELECT data FROM conversation_items WHERE tenant = ? AND conversation = ? AND position < ? AND "  # noqa: S608
        + AFTER[newest_first]
        + " LIMIT ?",
        (tenant, conversation, (1 << 62) if upto is None else upto, start, -1 if limit is None else limit),
    )
    return tuple(codec.decode_item(row[0]) for row in rows)


def item(act: Transaction, tenant: str, conversation: str, item: str) -> StoredItem | None:
    row = act.db.execute(
        "SELECT data FROM conversation_items AS i JOIN conversations AS c ON i.tenant = c.tenant AND "
        "i.conversation = c.id WHERE c.tenant = ? AND c.id = ? AND c.expires > ? AND i.id = ?",
        (tenant, conversation, act.now, item),
    ).fetchone()
    return row and codec.decode_item(row[0])


def delete_item(act: Transaction, tenant: str, conversation: str, item: str) -> bool:
    if head(act, tenant, conversation) is None:
        return False
    check_lease(act, tenant, conversation, None)
    row = act.db.execute(
        "SELECT length(data) FROM conversation_items WHERE tenant = ? AND conversation = ? AND id = ?",
        (tenant, conversation, item),
    ).fetchone()
    if row is None:
        return False
    act.db.execute(
        "DELETE FROM conversation_items WHERE tenant = ? AND conversation = ? AND id = ?",
        (tenant, conversation, item),
    )
    # `last` is cleared, so that no later append is mistaken for a repetition of the append before the deletion.
    act.db.execute(
        "UPDATE conversations SET revision = revision + 1, last = NULL, bytes = bytes - ?, expires = ? "
        "WHERE tenant = ? AND id = ?",
        (row[0], act.now + act.retention.conversation_s, tenant, conversation),
    )
    return True


def delete(act: Transaction, tenant: str, conversation: str) -> bool:
    if head(act, tenant, conversation) is None:
        return False
    check_lease(act, tenant, conversation, None)
    _forget(act, tenant, conversation)
    return True


def _forget(act: Transaction, tenant: str, conversation: str) -> None:
    act.db.execute("DELETE FROM conversations WHERE tenant = ? AND id = ?", (tenant, conversation))
    act.db.execute("DELETE FROM conversation_items WHERE tenant = ? AND conversation = ?", (tenant, conversation))
