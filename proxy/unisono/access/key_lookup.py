"""Lookup of virtual keys in the store, with a cache of half a second.

Every replica sees a revoked or changed key within that time. Concurrent requests with one key share one lookup. Keys
not made by this gateway cause no lookup, except an occasional one for the secret that keys are made with. The cache is
bounded.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from unisono.access.key_format import Mint, has_form
from unisono.core.access import Caller, KeyRecord, KeyStore
from unisono.errors import StoreUnavailable

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
class _Seen:
    """Result of a lookup, and its start by the monotonic clock."""

    record: KeyRecord | None
    at: float


class VirtualKeys:
    """Cached lookup of virtual keys.

    With `known_while_down`, keys seen before are accepted, as they were then, while the store is down; otherwise all
    keys are refused then. `clock` gives seconds since 1970, `monotonic` seconds that never decrease.
    """

    def __init__(
        self,
        store: KeyStore,
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
        self._mint: Mint | None = None
        self._salted_at = 0.0
        self._cache: OrderedDict[str, _Seen] = OrderedDict()
        self._lookups: dict[str, asyncio.Task[KeyRecord | None]] = {}
        self._down_until = 0.0

    async def find(self, presented: str) -> Caller | None:
        """Return the caller with this key; None if it is unknown or no longer valid.

        The result does not reveal which of the two applies. Raises `StoreUnavailable`.
        """
        if not has_form(presented):
            return None
        mint = await self._mint_of(presented)
        if mint is None:
            return None
        digest = mint.digest(presented)
        record = await self._record(digest)
        now = self._clock()
        if record is None or not record.is_valid(now):
            return None
        for one in record.digests:
            if hmac.compare_digest(one.digest, digest) and (one.until is None or now < one.until):
                return record.caller
        return None

    async def caller(self, tenant: str, key: str) -> Caller:
        """Return the caller with that key's current settings, even if the key is no longer valid.

        If there is no such key any more, the caller has no permissions. Raises `StoreUnavailable`.
        """
        record = await self._store.key(key)
        if record is None or record.tenant != tenant:
            return Caller(tenant, key, models=frozenset(), mcp_servers=frozenset())
        return record.caller

    async def _mint_of(self, presented: str) -> Mint | None:
        """Return the `Mint` of the gateway's secret if it issued the key, else None.

        The secret may have changed: a store that lost its data gets a new secret when the next key is issued.
        """
        if self._mint is not None and self._mint.issued(presented):
            return self._mint
        now = self._monotonic()
        if self._mint is None:
            self._mint, self._salted_at = Mint(await self._salt()), now
        elif now - self._salted_at >= FRESH_S:
            self._salted_at = now
            with suppress(StoreUnavailable):
                self._mint = Mint(await self._salt())
        return self._mint if self._mint.issued(presented) else None

    # -- remembering

    async def _record(self, digest: str) -> KeyRecord | None:
        seen, now = self._cache.get(digest), self._monotonic()
        if seen is not None and now - seen.at < FRESH_S:
            self._cache.move_to_end(digest)
            return seen.record
        if seen is not None and self._valid_while_down and now < self._down_until:
            return seen.record
        try:
            may_stall = now >= self._down_until
            if may_stall and seen is not None and seen.record is not None and now - seen.at < STALLED_FRESH_S:
                return await self._refresh(digest, seen.record)
            return await self._look_up(digest)
        except StoreUnavailable:
            self._down_until = self._monotonic() + FRESH_S
            if seen is None or not self._valid_while_down:
                raise
            return seen.record

    async def _look_up(self, digest: str) -> KeyRecord | None:
        """Look up a record; concurrent callers share one lookup, which survives their cancellation."""
        return await asyncio.shield(self._lookup(digest))

    async def _refresh(self, digest: str, known: KeyRecord) -> KeyRecord | None:
        """Look up a record, or return `known` if the store stalls: it was valid a moment ago."""
        # Only the first request waits; those that find a pending lookup continue at once.
        is_overdue = digest in self._lookups
        looking = self._lookup(digest)
        if not is_overdue:
            await asyncio.wait({looking}, timeout=LOOKUP_WAIT_S)
        return looking.result() if looking.done() else known

    def _lookup(self, digest: str) -> asyncio.Task[KeyRecord | None]:
        looking = self._lookups.get(digest)
        if looking is None:
            looking = asyncio.create_task(self._read_record(digest), name="looking for a key")
            self._lookups[digest] = looking
            looking.add_done_callback(lambda task: self._on_lookup(digest, task))
        return looking

    async def _read_record(self, digest: str) -> KeyRecord | None:
        # The age counts from the start of the lookup, so that a change during it is seen by the next one.
        at = self._monotonic()
        try:
            record = await self._store.key_of(digest)
        except StoreUnavailable:
            if self._valid_while_down and digest in self._cache:
                raise
            # A busy machine sometimes misses a short deadline; without a retry, all waiting requests would be
            # refused.
            record = await self._store.key_of(digest)
        self._cache[digest] = _Seen(record, at)
        self._cache.move_to_end(digest)
        while len(self._cache) > MAX_CACHED_KEYS:
            self._cache.popitem(last=False)
        return record

    def _on_lookup(self, digest: str, task: asyncio.Task[KeyRecord | None]) -> None:
        del self._lookups[digest]
        if not task.cancelled():
            # Retrieve the exception, since all waiting requests may have left.
            task.exception()
