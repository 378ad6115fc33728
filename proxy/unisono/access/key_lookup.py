"""Virtual keys: from what was presented to the record in the store, remembered for half a second.

Every replica sees a revoked or changed key within that time. The store is asked once for all requests that wait for
the same key, and never for what was not made here, except now and then for the secret that keys are made with. What
this process remembers is bounded.
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

FRESH_S: Final = 0.5
"""How long an answer of the store is good, in seconds."""
STALLED_FRESH_S: Final = 5.0
"""Longest age of a known key that is still accepted while a new lookup in the store has no result yet."""
LOOKUP_WAIT_S: Final = 0.05
"""How long a request waits for that second answer, in seconds."""
MOST_REMEMBERED: Final = 4096

Salt = Callable[[], Awaitable[bytes]]
"""The gateway's secret, which may have to be fetched from the store: raises `StoreUnavailable`."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the store knew of a digest when it was asked, by the monotonic clock."""

    record: KeyRecord | None
    at: float


class VirtualKeys:
    """`known_while_down` lets keys in that were seen before, as they were then, for as long as the store does not
    answer; otherwise nobody's key is good then. `clock` gives seconds since 1970, `monotonic` seconds that never go
    back."""

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
        self._known_while_down = known_while_down
        self._clock = clock
        self._monotonic = monotonic
        self._mint: Mint | None = None
        self._salted_at = 0.0
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self._looking: dict[str, asyncio.Task[KeyRecord | None]] = {}
        self._down_until = 0.0

    async def find(self, presented: str) -> Caller | None:
        """Whose key this is; None when it is nobody's, or may not be used any more, without a word on which of the two.
        Raises `StoreUnavailable`."""
        if not has_form(presented):
            return None
        mint = await self._maker(presented)
        if mint is None:
            return None
        digest = mint.digest(presented)
        record = await self._record(digest)
        now = self._clock()
        if record is None or not record.good(now):
            return None
        for one in record.digests:
            if hmac.compare_digest(one.digest, digest) and (one.until is None or now < one.until):
                return record.caller
        return None

    async def caller(self, tenant: str, key: str) -> Caller:
        """Whoever began something under that key's id, as the key is now, whether or not more may be begun with it;
        somebody who may do nothing, where there is no such key any more. Raises `StoreUnavailable`."""
        record = await self._store.key(key)
        if record is None or record.tenant != tenant:
            return Caller(tenant, key, models=frozenset(), mcp_servers=frozenset())
        return record.caller

    async def _maker(self, presented: str) -> Mint | None:
        """Who made a key, if it was made with the gateway's secret. That may be another one by now: a store that lost
        all it knew has a new one as soon as somebody makes a key."""
        if self._mint is not None and self._mint.made(presented):
            return self._mint
        now = self._monotonic()
        if self._mint is None:
            self._mint, self._salted_at = Mint(await self._salt()), now
        elif now - self._salted_at >= FRESH_S:
            self._salted_at = now
            with suppress(StoreUnavailable):
                self._mint = Mint(await self._salt())
        return self._mint if self._mint.made(presented) else None

    # -- remembering

    async def _record(self, digest: str) -> KeyRecord | None:
        seen, now = self._seen.get(digest), self._monotonic()
        if seen is not None and now - seen.at < FRESH_S:
            self._seen.move_to_end(digest)
            return seen.record
        if seen is not None and self._known_while_down and now < self._down_until:
            return seen.record
        try:
            may_stall = now >= self._down_until
            if may_stall and seen is not None and seen.record is not None and now - seen.at < STALLED_FRESH_S:
                return await self._asked_again(digest, seen.record)
            return await self._asked(digest)
        except StoreUnavailable:
            self._down_until = self._monotonic() + FRESH_S
            if seen is None or not self._known_while_down:
                raise
            return seen.record

    async def _asked(self, digest: str) -> KeyRecord | None:
        """What the store knows, asked once for everyone who waits; one of them who leaves takes nothing from the
        others."""
        return await asyncio.shield(self._lookup(digest))

    async def _asked_again(self, digest: str, known: KeyRecord) -> KeyRecord | None:
        """What the store knows, or `known` if it stalls: a request does not wait for a key that was good just now."""
        # Only the first request waits at all; those that find an overdue lookup go on at once.
        is_overdue = digest in self._looking
        looking = self._lookup(digest)
        if not is_overdue:
            await asyncio.wait({looking}, timeout=LOOKUP_WAIT_S)
        return looking.result() if looking.done() else known

    def _lookup(self, digest: str) -> asyncio.Task[KeyRecord | None]:
        looking = self._looking.get(digest)
        if looking is None:
            looking = asyncio.create_task(self._look(digest), name="looking for a key")
            self._looking[digest] = looking
            looking.add_done_callback(lambda task: self._looked(digest, task))
        return looking

    async def _look(self, digest: str) -> KeyRecord | None:
        # From before the question on: what changes while it is on its way is seen by the next one.
        at = self._monotonic()
        try:
            record = await self._store.key_of(digest)
        except StoreUnavailable:
            if self._known_while_down and digest in self._seen:
                raise
            # A busy machine misses a short deadline now and then; everybody who waits here would be refused for it.
            record = await self._store.key_of(digest)
        self._seen[digest] = _Seen(record, at)
        self._seen.move_to_end(digest)
        while len(self._seen) > MOST_REMEMBERED:
            self._seen.popitem(last=False)
        return record

    def _looked(self, digest: str, task: asyncio.Task[KeyRecord | None]) -> None:
        del self._looking[digest]
        if not task.cancelled():
            # Everyone who waited may have left.
            task.exception()
