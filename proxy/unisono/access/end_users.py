"""Limits, permitted models and blocks of end users.

A request names its end user in `user` or `safety_identifier`. Lookups in the store are cached for half a second, so
every process sees a change within this time. While the store is down, the last known entry of an end user applies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from unisono.core.access import Caller, SharedLimits, shared_account, with_budget
from unisono.core.directory import DirectoryEntry, DirectoryStore, EntryKind
from unisono.core.frozen import dataclass
from unisono.core.lru_cache import RecentEntries
from unisono.errors import NotAllowed, StoreUnavailable

# Time for which the result of a lookup is cached, in seconds.
FRESH_S: Final = 0.5
# Maximum number of cached end users. If there are more, the least recently used one is dropped.
MAX_CACHED: Final = 4096
# Maximum length of the name of an end user in the store, in characters. Longer names are not looked up.
MAX_NAME_LENGTH: Final = 256


@dataclass(frozen=True, slots=True)
class _Seen:
    """Result of a lookup.

    `entry` is the entry of the end user, with the limits of the budget that the entry names. It is None if the store
    has no such end user. `at` is the time at which the lookup began, by the monotonic clock.
    """

    entry: DirectoryEntry | None
    at: float


class EndUsers:
    """Cached lookup of end users in the directory.

    `monotonic` returns seconds of a clock that never goes back.
    """

    def __init__(self, store: DirectoryStore, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._cache: RecentEntries[str, _Seen] = RecentEntries(MAX_CACHED)
        self._down_until = 0.0

    async def apply(self, caller: Caller, name: str, field: str) -> Caller:
        """Return the caller, restricted also by the limits and permitted models of an end user.

        `name` is the name of the end user, and `field` the request field that contains it.

        Returns the caller unchanged if the directory has no such end user. Raises NotAllowed if the end user is
        blocked.
        """
        if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            return caller
        if (entry := await self._find(name)) is None:
            return caller
        if entry.is_blocked:
            raise NotAllowed(
                f"'{field}': this end user is blocked; an admin can unblock the end user with /customer/unblock.",
                param=field,
            )
        share = SharedLimits(shared_account(entry), entry.limits, is_counted=True)
        return replace(caller, shared_limits=(*caller.shared_limits, share), end_user_models=entry.models)

    async def _find(self, name: str) -> DirectoryEntry | None:
        seen, now = self._cache.get(name), self._monotonic()
        if seen is not None and now - seen.at < FRESH_S:
            self._cache.move_to_end(name)
            return seen.entry
        if now >= self._down_until:
            try:
                seen = _Seen(await self._read(name), now)
            except StoreUnavailable:
                self._down_until = self._monotonic() + FRESH_S
            else:
                self._cache.put(name, seen)
        return None if seen is None else seen.entry

    async def _read(self, name: str) -> DirectoryEntry | None:
        (entry,) = await self._store.entries((EntryKind.CUSTOMER, name))
        if entry is None or not entry.budget:
            return entry
        (budget,) = await self._store.entries((EntryKind.BUDGET, entry.budget))
        return replace(entry, limits=with_budget(entry.limits, entry.budget, budget))
