"""Limit of failed authentications of a client address, counted by each process.

A guess costs the store a lookup and may find a weak master key. An address with too many failures is refused without a
check of its key, except for keys that this process accepted from it before: their holders share the address of a proxy
or of an office with the one who guesses.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container
from functools import lru_cache
from typing import Final

from unisono.errors import TooManyFailures
from unisono.net.client_networks import network_of

WINDOW_S: Final = 60.0
# Further addresses displace the least recently counted one, further keys the least recently accepted one.
MAX_ADDRESSES: Final = 10_000
MAX_ACCEPTED: Final = 10_000

# Maximum number of addresses whose network is cached, and the maximum length of each in characters: a proxy may forward
# a text of any length.
MAX_CACHED_ADDRESSES: Final = 4_096
MAX_CACHED_LENGTH: Final = 64

_cached_network_of = lru_cache(MAX_CACHED_ADDRESSES)(network_of)


class FailedAuthentications:
    """Counts failures by client address, at most `most` in a minute; 0 is unlimited.

    `proxies` contains the addresses whose `X-Forwarded-For` is believed. `monotonic` returns seconds that never
    decrease.
    """

    def __init__(
        self, most: int, proxies: Container[str] = (), *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._proxies = proxies
        self._monotonic = monotonic
        # Start of the window and number of failures, by address.
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        # Python's hashes of texts have a random secret in each process, so that a client cannot choose them.
        self._accepted: OrderedDict[int, None] = OrderedDict()

    def client(self, peer: str, forwarded: str) -> str:
        """Return the address that failures count for.

        It is the last one in `forwarded` that is no trusted proxy, if the peer is one.
        """
        address = peer
        for hop in reversed(forwarded.split(",") if forwarded else ()):
            if address not in self._proxies:
                break
            if not (hop := hop.strip()):
                break
            address = hop
        return _cached_network_of(address) if len(address) <= MAX_CACHED_LENGTH else network_of(address)

    def check(self, client: str, key: str) -> None:
        """Raise `TooManyFailures` if the address had too many failures, unless its key is known."""
        if (failed := self._failures.get(client)) is None:
            return
        start, failures = failed
        left = start + WINDOW_S - self._monotonic()
        if not self._most or failures < self._most or left <= 0 or hash((client, key)) in self._accepted:
            return
        raise TooManyFailures(
            "This address has sent too many invalid API keys; use a valid key, after the time in `Retry-After`.",
            retry_after_s=left,
        )

    def failed(self, client: str) -> None:
        now = self._monotonic()
        start, failures = self._failures.get(client, (now, 0))
        self._failures[client] = (start, failures + 1) if now < start + WINDOW_S else (now, 1)
        self._failures.move_to_end(client)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def accepted(self, client: str, key: str) -> None:
        known = hash((client, key))
        self._accepted[known] = None
        self._accepted.move_to_end(known)
        if len(self._accepted) > MAX_ACCEPTED:
            self._accepted.popitem(last=False)
