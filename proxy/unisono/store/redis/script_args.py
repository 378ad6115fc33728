"""Builders of the arguments of the Lua scripts, in the order in which the scripts read them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from unisono.core.state_store import Lease, LogWrite, Retention, StoredItem
from unisono.store import codec
from unisono.store.codec import StateLimits
from unisono.store.write_errors import refusal

Args = list[str | bytes | int]


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def fence(tenant: str, anchor: str, lease: Lease | None) -> str:
    """Return the fence of a lease as text, empty without a lease.

    Raises `StoreConflict` if the lease belongs to a different tenant or anchor.
    """
    if lease is None:
        return ""
    if (lease.tenant, lease.anchor) != (tenant, anchor):
        raise refusal("taken")
    return str(lease.fence)


def of_items(items: Sequence[StoredItem], retention: Retention, bounds: StateLimits) -> Args:
    """Return the arguments for new items of a conversation.

    Raises `StoreTooLarge` if an item exceeds `bounds.item`.
    """
    encoded = [codec.encode_item(item, bounds) for item in items]
    digest = hashlib.sha256(b"".join(b"%d:" % len(data) + data for data in encoded)).hexdigest()
    args: Args = [digest, bounds.conversation, milliseconds(retention.conversation_s), len(items)]
    for item, data in zip(items, encoded, strict=True):
        args += [item.id, data]
    return args


def of_log(log: LogWrite) -> Args:
    return [log.first_event, len(log.events), *log.events, log.first_token, codec.encode_tokens(log.tokens)]
