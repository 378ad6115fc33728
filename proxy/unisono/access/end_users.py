"""Limits, models and blocks of end users.

Requests name them in `user` or `safety_identifier`. Lookups are cached for half a second, so that every process sees a
change within that time. While the store is down, an end user counts as this process saw it last.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from unisono.core.access import Caller, SharedLimits, shared_account, with_budget
from unisono.core.directory import DirectoryEntry, DirectoryStore, EntryKind
from unisono.core.frozen import dataclass
from unisono.errors import NotAllowed, StoreUnavailable

# Cache lifetime of a lookup result, in seconds.
FRESH_S: Final = 0.5
# Further end users displace the least recently used one.
MAX_CACHED: Final = 4096
# A longer name has no entry.
MAX_NAME_LENGTH: Final = 256


@dataclass(frozen=True, slots=True)
class _Seen:
    """Result of a lookup, and its start by the monotonic clock.

    The entry has the limits of its named budget.
    """

    entry: DirectoryEntry | None
    at: float


class EndUsers:
    """Cached lookup of end users in the directory.

    `monotonic` returns seconds that never decrease.
    """

    def __init__(self, store: DirectoryStore, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._cache: OrderedDict[str, _Seen] = OrderedDict()
        self._down_until = 0.0

    async def apply(self, caller: Caller, name: str, field: str) -> Caller:
        """Return the caller with the limits and models of an end user, if the directory has it.

        Raises `NotAllowed` for a blocked one, which the request names in `field`.
        """
        if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            return caller
        if (entry := await self._find(name)) is None:
            return caller
        if entry.is_blocked:
            raise NotAllowed(
                f"'{field}': this end user is blocked; an admin can unblock it with /customer/unblock.", param=field
            )
        share = SharedLimits(shared_account(EntryKind.CUSTOMER, name), entry.limits, is_counted=True)
        models = () if entry.models is None else (entry.models,)
        return replace(
            caller,
            shared_limits=(*caller.shared_limits, share),
            shared_models=(*caller.shared_models, *models),
        )

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
                self._cache[name] = seen
                self._cache.move_to_end(name)
                while len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
        return None if seen is None else seen.entry

    async def _read(self, name: str) -> DirectoryEntry | None:
        (entry,) = await self._store.entries((EntryKind.CUSTOMER, name))
        if entry is None or not entry.budget:
            return entry
        (budget,) = await self._store.entries((EntryKind.BUDGET, entry.budget))
        return replace(entry, limits=with_budget(entry.limits, entry.budget, budget))
