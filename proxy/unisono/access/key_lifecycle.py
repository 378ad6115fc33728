"""What becomes of a virtual key: made, given another secret, revoked. Pure: the time comes in as an argument.

A plaintext is returned once, to whoever shows it to its owner, and is in no record.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from unisono.access.key_format import Mint
from unisono.core.access import KeyDigest, KeyRecord

ENDING_LETTERS = 4


@dataclass(frozen=True, slots=True)
class Issued:
    """`plaintext` is what its owner sends."""

    record: KeyRecord
    plaintext: str = field(repr=False)


def issued(mint: Mint, now: float, *, tenant: str = "") -> Issued:
    """A new key that may do everything. Without a `tenant` it is one of its own: nobody else sees what it stores."""
    key_id, plaintext = f"key_{secrets.token_hex(12)}", mint.new()
    record = KeyRecord(
        id=key_id,
        tenant=tenant or key_id,
        digests=(KeyDigest(mint.digest(plaintext)),),
        created_at=now,
        ending=plaintext[-ENDING_LETTERS:],
    )
    return Issued(replace(record, limits=replace(record.limits, budget_since=now)), plaintext)


def rotated(record: KeyRecord, mint: Mint, now: float, grace_s: float) -> Issued:
    """The same key with another secret. Those it had are good for `grace_s` seconds more, and no longer than they were
    to be."""
    plaintext = mint.new()
    until = now + grace_s
    earlier = (replace(one, until=until if one.until is None else min(one.until, until)) for one in record.digests)
    still_good = (one for one in earlier if one.until is not None and one.until > now)
    digests = (KeyDigest(mint.digest(plaintext)), *still_good)
    return Issued(replace(record, digests=digests, ending=plaintext[-ENDING_LETTERS:]), plaintext)


def revoked(record: KeyRecord, now: float) -> KeyRecord:
    """No good any more, now and for ever."""
    return record if record.revoked_at is not None else replace(record, revoked_at=now)
