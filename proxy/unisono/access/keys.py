"""Authentication: finds the caller of a request by the key in the request.

Keys are compared as keyed digests, so the comparison takes constant time and no plaintext is stored. The error message
is the same for unknown, expired and revoked keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import field, replace
from typing import Final, Protocol

from unisono.access.imported_keys import ImportedKeys
from unisono.core.access import (
    LOCAL_TENANT,
    MASTER_TENANT,
    AccessStore,
    Caller,
    KeyDigest,
    KeyRecord,
    caller_with_shares,
)
from unisono.core.frozen import dataclass
from unisono.core.lru_cache import RecentEntries
from unisono.errors import NotAuthenticated, StoreUnavailable

# Plaintext of virtual keys: how it is made and recognised, and the digest that is stored.
#
# A key ends in a seal, which only a gateway with the same salt can make. So the gateway recognises an invented key
# without the store, and a flood of invented keys costs neither memory nor lookups.

PREFIX: Final = "sk-uni-"
ENTROPY_BYTES: Final = 32
# Size of the seal in bytes. Entropy and seal are 42 bytes, which base64 encodes as 56 characters without padding.
SEAL_BYTES: Final = 10
# A complete key, including its seal.
FORM: Final = re.compile(PREFIX + r"[A-Za-z0-9_-]{56}")


class Mint:
    """Maker of virtual keys. `salt` is the gateway's secret, which is the same on all replicas.

    If the salt changes, all existing keys become invalid.
    """

    def __init__(self, salt: bytes) -> None:
        self._seal_key = hmac.digest(salt, b"unisono virtual keys: seal", hashlib.sha256)
        self._pepper = hmac.digest(salt, b"unisono virtual keys: digest", hashlib.sha256)
        self._derivation_key = hmac.digest(salt, b"unisono virtual keys: derivation", hashlib.sha256)
        # Digests of issued keys, by a keyed hash of the key, which is ten times as fast as the digest and as secret.
        self._digests: dict[bytes, str] = {}

    def new(self) -> str:
        """Return a new unguessable key. Its plaintext is not stored."""
        return self._sealed(secrets.token_bytes(ENTROPY_BYTES))

    def derived(self, name: str) -> str:
        """Return a key derived from `name` and the salt: a repeated request gets the same key.

        `name` consists of a random key id, and of the Idempotency-Key or the alias in the request.
        """
        return self._sealed(hmac.digest(self._derivation_key, name.encode("utf-8", "surrogatepass"), hashlib.sha256))

    def _sealed(self, entropy: bytes) -> str:
        return PREFIX + urlsafe_b64encode(entropy + self._seal(entropy)).decode()

    def digest(self, key: str) -> str:
        """Return the hexadecimal digest that identifies a key in the store."""
        return hmac.digest(self._pepper, key.encode(), hashlib.sha256).hex()

    def issued(self, presented: str) -> bool:
        """Return True if a key was made with this salt, even if the key has been revoked since.

        The check takes the same time for all keys in the form of a virtual key.
        """
        if not has_form(presented):
            return False
        content = urlsafe_b64decode(presented[len(PREFIX) :])
        entropy, seal = content[:ENTROPY_BYTES], content[ENTROPY_BYTES:]
        return hmac.compare_digest(self._seal(entropy), seal)

    def issued_digest(self, presented: str) -> str | None:
        """Return the digest of a key, or None if the key was not made with this salt."""
        keyed_hash = hashlib.blake2b(presented.encode(), key=self._pepper, digest_size=32).digest()
        if keyed_hash not in self._digests and self.issued(presented):
            if len(self._digests) >= MAX_CACHED_KEYS:
                self._digests.clear()
            self._digests[keyed_hash] = self.digest(presented)
        return self._digests.get(keyed_hash)

    def _seal(self, entropy: bytes) -> bytes:
        return hmac.digest(self._seal_key, entropy, hashlib.sha256)[:SEAL_BYTES]


def has_form(presented: str) -> bool:
    """Return True if `presented` has the form of a virtual key, of this or any other gateway."""
    return FORM.fullmatch(presented) is not None


# Life cycle of a virtual key: creation, rotation, revocation.
#
# Pure: the time is an argument. A plaintext is returned only once, for the owner of the key, and is never stored.

VISIBLE_SUFFIX_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Issued:
    """New or rotated key, with its plaintext, which is shown only once.

    The owner sends `plaintext` as the API key. `record` is for the store, and contains only a digest of the plaintext.
    """

    record: KeyRecord
    plaintext: str = field(repr=False)


def new_key_id() -> str:
    return f"key_{secrets.token_hex(12)}"


def issued(mint: Mint, now: float, *, tenant: str = "", key_id: str = "", plaintext: str = "") -> Issued:
    """Return a new key without restrictions.

    If `tenant` is empty, the key gets a tenant of its own, so that no other key can read the state that it stores. If
    `key_id` or `plaintext` is empty, a new id or plaintext is generated. `now` is the Unix time.
    """
    key_id, plaintext = key_id or new_key_id(), plaintext or mint.new()
    record = KeyRecord(
        id=key_id,
        tenant=tenant or key_id,
        digests=(KeyDigest(mint.digest(plaintext)),),
        created_at=now,
        ending=plaintext[-VISIBLE_SUFFIX_LENGTH:],
    )
    return Issued(replace(record, limits=replace(record.limits, budget_since=now)), plaintext)


def rotated(record: KeyRecord, mint: Mint, now: float, grace_s: float) -> Issued:
    """Return the key with a new secret.

    Earlier secrets expire `grace_s` seconds after `now`, a Unix time. Secrets that would expire sooner still do so.
    """
    plaintext = mint.new()
    until = now + grace_s
    earlier = (
        replace(digest, until=until if digest.until is None else min(digest.until, until)) for digest in record.digests
    )
    still_good = (digest for digest in earlier if digest.until is not None and digest.until > now)
    digests = (KeyDigest(mint.digest(plaintext)), *still_good)
    return Issued(replace(record, digests=digests, ending=plaintext[-VISIBLE_SUFFIX_LENGTH:]), plaintext)


def key_record_has(record: KeyRecord, mint: Mint, plaintext: str) -> bool:
    """Return True if `plaintext` is the newest secret of the key."""
    return bool(record.digests) and hmac.compare_digest(record.digests[0].digest, mint.digest(plaintext))


def revoked(record: KeyRecord, now: float) -> KeyRecord:
    """Return the record of the key as revoked from `now` on; an earlier revocation stays."""
    return record if record.revoked_at is not None else replace(record, revoked_at=now)


# Lookup of virtual keys in the store, with a cache of half a second.
#
# Every replica sees a revoked or changed key within that time. Concurrent requests with one key share one lookup.
# Keys not made by this gateway cause no lookup, except an occasional one for the secret that keys are made with. The
# cache is bounded.

# Cache lifetime of a lookup result, in seconds.
FRESH_S: Final = 0.5
# Maximum age of a valid cached key, in seconds, while a new lookup is pending.
STALLED_FRESH_S: Final = 5.0
# Time that a request waits for that new lookup, in seconds.
LOOKUP_WAIT_S: Final = 0.05
# Further keys displace the least recently used one.
MAX_CACHED_KEYS: Final = 4096

# Source of the gateway's secret, possibly from the store: raises `StoreUnavailable`.
Salt = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class FoundKey:
    """Key in the store. `caller` is None if the team or the user of the key is blocked."""

    record: KeyRecord
    caller: Caller | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """Result of a lookup, and the time at which the lookup began, by the monotonic clock."""

    found: FoundKey | None
    at: float


class VirtualKeys:
    """Cached lookup of virtual keys.

    While the store is down, all keys are refused. With `known_while_down`, keys that were looked up before are accepted
    with their last known settings. `clock` returns a Unix timestamp, `monotonic` seconds that never decrease.
    """

    def __init__(
        self,
        store: AccessStore,
        salt: Salt,
        *,
        known_while_down: bool = False,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._salt = salt
        self._valid_while_down = known_while_down
        self._clock = clock
        self._monotonic = monotonic
        self._imported = ImportedKeys(store, monotonic)
        self._mint: Mint | None = None
        self._salted_at = 0.0
        self._cache: RecentEntries[str, _Seen] = RecentEntries(MAX_CACHED_KEYS)
        self._lookups: dict[str, asyncio.Task[FoundKey | None]] = {}
        self._down_until = 0.0

    async def find(self, presented: str) -> Caller | None:
        """Return the caller with this key, or None if the key is unknown or no longer valid.

        Raises StoreUnavailable if the store is down and the key cannot be checked without the store.
        """
        digest = await (self._own_digest(presented) if has_form(presented) else self._imported.digest(presented))
        if digest is None:
            return None
        found = await self._record(digest)
        now = self._clock()
        if found is None or not found.record.is_valid(now):
            return None
        for one in found.record.digests:
            if hmac.compare_digest(one.digest, digest) and (one.until is None or now < one.until):
                return found.caller
        return None

    async def caller(self, tenant: str, key: str) -> Caller:
        """Return the caller with the current settings of the key, even if the key is invalid now.

        If the key no longer exists, the caller has no permissions. Raises StoreUnavailable if the key cannot be read.
        """
        record = await self._store.key(key)
        if record is None or record.tenant != tenant:
            return Caller(tenant, key, models=frozenset(), mcp_servers=frozenset())
        return await caller_with_shares(self._store, record) or record.caller

    async def _own_digest(self, presented: str) -> str | None:
        """Return the digest of a key, or None if the key was not made with the gateway's secret.

        The secret is read again from time to time, because a store that has lost its data gets a new secret.
        """
        if self._mint is not None and (digest := self._mint.issued_digest(presented)) is not None:
            return digest
        now = self._monotonic()
        if self._mint is None:
            self._mint, self._salted_at = Mint(await self._salt()), now
        elif now - self._salted_at >= FRESH_S:
            self._salted_at = now
            with suppress(StoreUnavailable):
                self._mint = Mint(await self._salt())
        return self._mint.issued_digest(presented)

    # -- cache

    async def _record(self, digest: str) -> FoundKey | None:
        seen, now = self._cache.get(digest), self._monotonic()
        if seen is not None and now - seen.at < FRESH_S:
            self._cache.move_to_end(digest)
            return seen.found
        if seen is not None and self._valid_while_down and now < self._down_until:
            return seen.found
        try:
            may_stall = now >= self._down_until
            if may_stall and seen is not None and seen.found is not None and now - seen.at < STALLED_FRESH_S:
                return await self._refresh(digest, seen.found)
            # Concurrent requests share one lookup, which goes on if one of them is cancelled.
            return await asyncio.shield(self._lookup(digest))
        except StoreUnavailable:
            self._down_until = self._monotonic() + FRESH_S
            if seen is None or not self._valid_while_down:
                raise
            return seen.found

    async def _refresh(self, digest: str, known: FoundKey) -> FoundKey | None:
        """Look up a key again; if the store is too slow, return `known`, which was valid before."""
        # Only the first request waits. Requests that find a pending lookup continue at once.
        is_overdue = digest in self._lookups
        looking = self._lookup(digest)
        if not is_overdue:
            await asyncio.wait({looking}, timeout=LOOKUP_WAIT_S)
        return looking.result() if looking.done() else known

    def _lookup(self, digest: str) -> asyncio.Task[FoundKey | None]:
        looking = self._lookups.get(digest)
        if looking is None:
            looking = asyncio.create_task(self._read_record(digest), name="looking for a key")
            self._lookups[digest] = looking
            looking.add_done_callback(lambda task: self._on_lookup(digest, task))
        return looking

    async def _read_record(self, digest: str) -> FoundKey | None:
        # The age of the result counts from the start of the lookup, because the key may change during the lookup.
        at = self._monotonic()
        try:
            found = await self._find(digest)
        except StoreUnavailable:
            if self._valid_while_down and digest in self._cache:
                raise
            # A busy machine sometimes misses the short deadline of the store. Without a retry, all waiting requests
            # would be refused.
            found = await self._find(digest)
        self._cache.put(digest, _Seen(found, at))
        return found

    async def _find(self, digest: str) -> FoundKey | None:
        record = await self._store.key_of(digest)
        return None if record is None else FoundKey(record, await caller_with_shares(self._store, record))

    def _on_lookup(self, digest: str, task: asyncio.Task[FoundKey | None]) -> None:
        del self._lookups[digest]
        if not task.cancelled():
            # Retrieve the exception, because all waiting requests may have been cancelled.
            task.exception()


class Keys(Protocol):
    """Authentication of requests by their keys."""

    async def identify(self, presented: str | None) -> Caller:
        """Return the caller with a key.

        `presented` is the key without the scheme (`Bearer`), or None if the request has no key. Raises NotAuthenticated
        if the key is missing or not valid, and StoreUnavailable if it cannot be looked up.
        """
        ...


class KeyFinder(Protocol):
    """Lookup of keys other than the master key."""

    async def find(self, presented: str) -> Caller | None:
        """Return the caller with this key, or None if the key is not valid. Raises StoreUnavailable."""
        ...


class MasterKey:
    """Authentication by the operator's key. `others` finds other keys; None makes them invalid."""

    def __init__(self, key: str, others: KeyFinder | None = None) -> None:
        if not key:
            raise ValueError("the master key must not be empty")
        # The pepper is random, so the digest of the master key is useless outside of this process.
        self._pepper = secrets.token_bytes(32)
        self._digest = self._digest_of(key)
        self._other_keys = others
        self._operator = Caller(MASTER_TENANT, raw=True)

    def _digest_of(self, key: str) -> bytes:
        # The text may contain lone surrogates, because headers may contain any bytes.
        # Keyed BLAKE2 is a MAC without the HMAC construction, and takes a third of the time of HMAC-SHA-256.
        data = key.encode("utf-8", errors="surrogatepass")
        return hashlib.blake2b(data, key=self._pepper, digest_size=32).digest()

    async def identify(self, presented: str | None) -> Caller:
        if presented is None:
            raise NotAuthenticated(
                "Send exactly one API key, as `Authorization: Bearer <key>`, `x-api-key: <key>` or `api-key: <key>`."
            )
        if hmac.compare_digest(self._digest_of(presented), self._digest):
            return self._operator
        caller = None if self._other_keys is None else await self._other_keys.find(presented)
        if caller is None:
            raise NotAuthenticated("The API key is not valid.")
        return caller


class NoKeys:
    """Authentication of a gateway without keys, on loopback: all clients are the local user."""

    async def identify(self, presented: str | None) -> Caller:
        del presented  # ignored, because client libraries always send a key
        return Caller(LOCAL_TENANT, raw=True)
