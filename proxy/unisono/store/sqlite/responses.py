"""SQL that stores and reads responses, their items and logs, in the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unisono.core.conversation import Tokens
from unisono.core.state_store import EventPage, Lease, LogWrite, StoredItem, StoredResponse
from unisono.store import codec
from unisono.store.codec import UNLIMITED
from unisono.store.response_renewal import MIN_LEFT
from unisono.store.sqlite import conversations
from unisono.store.sqlite.connection import Transaction
from unisono.store.sqlite.leases import check_lease
from unisono.store.write_errors import refusal


def save(
    act: Transaction,
    tenant: str,
    response: StoredResponse,
    new: bool,
    lease: Lease | None,
    log: LogWrite,
    revision: int | None,
) -> None:
    if not new or response.status.terminal:
        act = replace(act, bounds=UNLIMITED)
    parts = codec.encode_response(response, act.bounds)
    row = act.db.execute(
        "SELECT head, input, output, terminal FROM responses WHERE tenant = ? AND id = ? AND expires > ?",
        (tenant, response.id, act.now),
    ).fetchone()
    # The checks have the same order as in the Redis script `SAVE`, so that both stores raise the same errors.
    if new and row is not None:
        if row[:3] == parts:
            return
        raise refusal("exists")
    if not new and row is None:
        raise refusal("missing")
    if row is not None and row[3]:
        if (row[0], row[2]) == (parts[0], parts[2]):
            return
        raise refusal("finished")
    check_lease(act, tenant, response.anchor, lease)
    if revision is not None and response.conversation:
        conversations.append(act, tenant, response.conversation, response.input + response.output, revision, lease)
    _write(act, tenant, response, new, parts)
    _extend_log(act, tenant, response.id, log)
    _append(act, tenant, response)
    if new:
        renew(act, tenant, response.ancestors)


def renew(act: Transaction, tenant: str, ancestors: Sequence[str]) -> None:
    """Renew `ancestors`, their items and their conversation, except recently renewed responses."""
    kept_s = act.retention.response_s
    due = [
        ancestor
        for ancestor in ancestors
        if act.db.execute(
            "SELECT 1 FROM responses WHERE tenant = ? AND id = ? AND expires BETWEEN ? AND ?",
            (tenant, ancestor, act.now, act.now + MIN_LEFT * kept_s),
        ).fetchone()
    ]
    expires = act.now + kept_s
    for response in read(act, tenant, due):
        if response is None:
            continue
        act.db.execute("UPDATE responses SET expires = ? WHERE tenant = ? AND id = ?", (expires, tenant, response.id))
        act.db.executemany(
            "UPDATE places SET expires = ? WHERE tenant = ? AND item = ? AND response = ?",
            [(expires, tenant, item.id, response.id) for item in response.input + response.output],
        )
        if response.conversation is not None:
            conversations.renew(act, tenant, response.conversation)


def _write(
    act: Transaction, tenant: str, response: StoredResponse, new: bool, parts: tuple[bytes, bytes, bytes]
) -> None:
    expires = act.now + act.retention.response_s
    # A finished response contains its items. Only clients that reconnect still need its log, which expires earlier.
    log_expires = act.now + act.retention.log_s if response.status.terminal else expires
    head, input, output = parts
    terminal = response.status.terminal
    if new:
        _forget(act, tenant, response.id)
        act.db.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (tenant, response.id, response.anchor, head, input, output, terminal, expires, log_expires),
        )
    else:
        act.db.execute(
            "UPDATE responses SET head = ?, output = ?, terminal = ?, expires = ?, log_expires = ? "
            "WHERE tenant = ? AND id = ?",
            (head, output, terminal, expires, log_expires, tenant, response.id),
        )


def _append(act: Transaction, tenant: str, response: StoredResponse) -> None:
    expires = act.now + act.retention.response_s
    # Clients refer to an item by its id alone. This table leads to the response or conversation that contains it.
    act.db.executemany(
        "REPLACE INTO places VALUES (?, ?, ?, NULL, ?)",
        [(tenant, item.id, response.id, expires) for item in response.input + response.output],
    )


def read(act: Transaction, tenant: str, ids: Sequence[str]) -> tuple[StoredResponse | None, ...]:
    found = []
    for response in ids:
        row = act.db.execute(
            "SELECT head, input, output FROM responses WHERE tenant = ? AND id = ? AND expires > ?",
            (tenant, response, act.now),
        ).fetchone()
        found.append(row and codec.decode_response(*row))
    return tuple(found)


def delete(act: Transaction, tenant: str, response: str) -> bool:
    alive = act.db.execute(
        "SELECT 1 FROM responses WHERE tenant = ? AND id = ? AND expires > ?", (tenant, response, act.now)
    ).fetchone()
    _forget(act, tenant, response)
    return alive is not None


def _forget(act: Transaction, tenant: str, response: str) -> None:
    act.db.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, response))
    act.db.execute("DELETE FROM events WHERE tenant = ? AND response = ?", (tenant, response))
    act.db.execute("DELETE FROM tokens WHERE tenant = ? AND response = ?", (tenant, response))


def item(act: Transaction, tenant: str, item: str) -> StoredItem | None:
    row = act.db.execute(
        "SELECT response, conversation FROM places WHERE tenant = ? AND item = ? AND expires > ?",
        (tenant, item, act.now),
    ).fetchone()
    if row is None:
        return None
    response, conversation = row
    if conversation is not None:
        return conversations.item(act, tenant, conversation, item)
    (home,) = read(act, tenant, (response,))
    return None if home is None else next((one for one in home.input + home.output if one.id == item), None)


def log(act: Transaction, lease: Lease, response: str, write: LogWrite) -> None:
    row = act.db.execute(
        "SELECT anchor, terminal FROM responses WHERE tenant = ? AND id = ? AND expires > ?",
        (lease.tenant, response, act.now),
    ).fetchone()
    if row is None:
        raise refusal("missing")
    check_lease(act, lease.tenant, row[0], lease)
    if row[1]:
        raise refusal("finished")
    _extend_log(act, lease.tenant, response, write)
    # A running response does not expire.
    kept_s = act.retention.response_s
    act.db.execute(
        "UPDATE responses SET expires = ?, log_expires = ? WHERE tenant = ? AND id = ? AND expires < ?",
        (act.now + kept_s, act.now + kept_s, lease.tenant, response, act.now + MIN_LEFT * kept_s),
    )


def _extend_log(act: Transaction, tenant: str, response: str, write: LogWrite) -> None:
    here = (tenant, response)
    upto = act.db.execute(
        "SELECT coalesce(max(seq) + 1, 0) FROM events WHERE tenant = ? AND response = ?", here
    ).fetchone()[0]
    if write.first_event > upto:
        raise refusal("gap")
    for seq, data in enumerate(write.events, write.first_event):
        if seq >= upto:
            act.db.execute("INSERT INTO events VALUES (?, ?, ?, ?)", (*here, seq, data))
        elif _event(act, tenant, response, seq) != data:
            raise refusal("differs")
    _extend_tokens(act, tenant, response, write)


def _event(act: Transaction, tenant: str, response: str, seq: int) -> bytes:
    row = act.db.execute(
        "SELECT data FROM events WHERE tenant = ? AND response = ? AND seq = ?", (tenant, response, seq)
    ).fetchone()
    return bytes(row[0])


def _extend_tokens(act: Transaction, tenant: str, response: str, write: LogWrite) -> None:
    here = (tenant, response)
    first, after = write.first_token, write.first_token + len(write.tokens)
    upto = act.db.execute(
        "SELECT coalesce(max(upto), 0) FROM tokens WHERE tenant = ? AND response = ?", here
    ).fetchone()[0]
    if first > upto:
        raise refusal("gap")
    if not write.tokens:
        return
    # Each write of tokens is one row, so that an append never rewrites earlier tokens.
    if first == upto:
        act.db.execute(
            "INSERT INTO tokens VALUES (?, ?, ?, ?, ?)",
            (tenant, response, first, after, codec.encode_tokens(write.tokens)),
        )
        return
    # A repeated write must contain the same tokens and nothing new.
    there = tokens(act, tenant, response)
    if after > upto or there[first:after] != write.tokens:
        raise refusal("differs")


def events(act: Transaction, tenant: str, response: str, first: int, limit: int) -> EventPage | None:
    row = act.db.execute(
        "SELECT terminal, (SELECT max(seq) FROM events WHERE tenant = r.tenant AND response = r.id) "
        "FROM responses AS r WHERE tenant = ? AND id = ? AND min(expires, log_expires) > ?",
        (tenant, response, act.now),
    ).fetchone()
    # A log without events is treated as missing, and so is an expired log.
    if row is None or row[1] is None:
        return None
    terminal, last = row
    rows = act.db.execute(
        "SELECT data FROM events WHERE tenant = ? AND response = ? AND seq >= ? ORDER BY seq LIMIT ?",
        (tenant, response, first, limit),
    ).fetchall()
    return EventPage(first, tuple(bytes(data) for (data,) in rows), bool(terminal) and first + len(rows) > last)


def tokens(act: Transaction, tenant: str, response: str) -> Tokens:
    rows = act.db.execute(
        "SELECT data FROM tokens WHERE tenant = ? AND response = ? AND EXISTS (SELECT 1 FROM responses WHERE "
        "tenant = tokens.tenant AND id = response AND min(expires, log_expires) > ?) ORDER BY first",
        (tenant, response, act.now),
    )
    return codec.decode_tokens(b"".join(data for (data,) in rows))
