"""Life cycle of a virtual key: creation, rotation, revocation.

Pure: the time is an argument. A plaintext is returned once, for its owner, and is in no record.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from unisono.access.key_format import Mint
from unisono.core.access import KeyDigest, KeyRecord

VISIBLE_SUFFIX_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Issued:
    """New or rotated key, with the secret to show once.

    The owner sends `plaintext` as the API key. `record` is for the store and contains only a digest of it.
    """

    record: KeyRecord
    plaintext: str = field(repr=False)


def issued(mint: Mint, now: float, *, tenant: str = "") -> Issued:
    """Return a new key without restrictions.

    Without `tenant`, the key gets its own tenant, so that no other key can read the state that it stores.
    """
    key_id, plaintext = f"key_{secrets.token_hex(12)}", mint.new()
    record = KeyRecord(
        id=key_id,
        tenant=tenant or key_id,
        digests=(KeyDigest(mint.digest(plaintext)),),
        created_at=now,
        ending=plaintext[-VISIBLE_SUFFIX_LENGTH:],
    )
    return Issued(replace(record, limits=replace(record.limits, budget_since=now)), plaintext)


def rotated(record: KeyRecord, mint: Mint, now: float, grace_s: float) -> Issued:
    """Return the key with another secret.

    Earlier secrets stay valid for `grace_s` seconds, but no longer than before.
    """
    plaintext = mint.new()
    until = now + grace_s
    earlier = (
        replace(digest, until=until if digest.until is None else min(digest.until, until)) for digest in record.digests
    )
    still_good = (digest for digest in earlier if digest.until is not None and digest.until > now)
    digests = (KeyDigest(mint.digest(plaintext)), *still_good)
    return Issued(replace(record, digests=digests, ending=plaintext[-VISIBLE_SUFFIX_LENGTH:]), plaintext)


def revoked(record: KeyRecord, now: float) -> KeyRecord:
    """Return the record of the key as revoked from `now` on; an earlier revocation stays."""
    return record if record.revoked_at is not None else replace(record, revoked_at=now)
