"""Limit for failed authentications from one client address; each process counts separately.

The limit protects the store from lookups, and a weak master key from being guessed. If an address has too many
failures, its requests are refused without checking their keys. Keys that this process has accepted from the address
before are still checked, because their owners may share the address of a proxy or an office with an attacker.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container
from functools import lru_cache
from typing import Final

from unisono.errors import TooManyFailures
from unisono.net.client_addresses import network_of

WINDOW_S: Final = 60.0
# Maximum number of addresses and of accepted keys that are remembered. If there are more, the address whose last
# failure is the oldest is dropped, or the key that was accepted the longest time ago.
MAX_ADDRESSES: Final = 10_000
MAX_ACCEPTED: Final = 10_000

# Maximum number of addresses whose network is cached, and the maximum length of each in characters: a proxy may forward
# a text of any length.
MAX_CACHED_ADDRESSES: Final = 4_096
MAX_CACHED_LENGTH: Final = 64

_cached_network_of = lru_cache(MAX_CACHED_ADDRESSES)(network_of)


class FailedAuthentications:
    """Counter of failed authentications by client address.

    `most` is the maximum number of failures of one address per minute; 0 means no limit. `proxies` are the addresses of
    proxies whose `X-Forwarded-For` is trusted. `monotonic` returns seconds of a clock that never goes back.
    """

    def __init__(
        self, most: int, proxies: Container[str] = (), *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._proxies = proxies
        self._monotonic = monotonic
        # Start of the current window and number of failures in the window, by address.
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        # Hashes of address and key. Clients cannot provoke collisions, because Python's hashes of strings depend on a
        # random secret of the process.
        self._accepted: OrderedDict[int, None] = OrderedDict()

    def client(self, peer: str, forwarded: str) -> str:
        """Return the client's address or network, for which failures are counted.

        `peer` is the address of the connection, and `forwarded` the value of `X-Forwarded-For`. If the peer is a
        trusted proxy, the address is the last one in `forwarded` that is not a trusted proxy.
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
        """Raise TooManyFailures if the address has too many failures.

        Does not raise if this process has accepted the key from the address before.
        """
        if (failed := self._failures.get(client)) is None:
            return
        start, failures = failed
        left = start + WINDOW_S - self._monotonic()
        if not self._most or failures < self._most or left <= 0 or hash((client, key)) in self._accepted:
            return
        raise TooManyFailures(
            "This address has sent too many invalid API keys; wait as `Retry-After` says, and then send a valid key.",
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
