"""Limit of failed authentications by client address."""

from __future__ import annotations

import pytest

from unisono.access.failed_authentications import (
    MAX_CACHED_ADDRESSES,
    WINDOW_S,
    FailedAuthentications,
    _cached_network_of,
)
from unisono.errors import TooManyFailures
from unisono.net.client_addresses import ClientNetworks


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_only_the_failing_address_is_refused_and_only_for_a_minute() -> None:
    clock = Clock()
    failures = FailedAuthentications(3, monotonic=clock)
    failures.accepted("10.0.0.1", "known")
    for _ in range(3):
        failures.check("10.0.0.1", "guess")
        failures.failed("10.0.0.1")
    clock.now += 20
    with pytest.raises(TooManyFailures) as refused:
        failures.check("10.0.0.1", "valid")
    assert refused.value.retry_after_s == WINDOW_S - 20
    # A known key passes, but only at its address; any key passes at another address.
    failures.check("10.0.0.1", "known")
    failures.check("10.0.0.2", "valid")
    clock.now += WINDOW_S - 20
    failures.check("10.0.0.1", "guess")


ADDRESSES = {
    "connection": ("1.1.1.1", "9.9.9.9", "1.1.1.1"),
    "trusted proxy": ("10.0.0.1", "2.2.2.2", "2.2.2.2"),
    "invented first hop": ("10.0.0.1", "9.9.9.9, 2.2.2.2", "2.2.2.2"),
    "chain of trusted proxies": ("10.0.0.1", "2.2.2.2, 10.0.0.7", "2.2.2.2"),
    "only proxies": ("10.0.0.1", "10.0.0.2", "10.0.0.2"),
    "no header": ("10.0.0.1", "", "10.0.0.1"),
    "empty hop": ("10.0.0.1", "2.2.2.2,", "10.0.0.1"),
    "no address": ("10.0.0.1", "unknown", "unknown"),
    "network of IPv6": ("2001:db8:1:2:3::4", "", "2001:db8:1:2::/64"),
    "mapped address": ("::ffff:1.2.3.4", "", "1.2.3.4"),
    "Unix socket": ("", "2.2.2.2", ""),
}


@pytest.mark.parametrize(("peer", "forwarded", "client"), ADDRESSES.values(), ids=ADDRESSES)
def test_client_address_is_honest_behind_proxies(peer: str, forwarded: str, client: str) -> None:
    failures = FailedAuthentications(3, ClientNetworks(["10.0.0.0/8"]))
    assert failures.client(peer, forwarded) == client


def test_cache_of_networks_is_bounded() -> None:
    failures = FailedAuthentications(3, ClientNetworks(["10.0.0.0/8"]))
    for number in range(MAX_CACHED_ADDRESSES + 10):
        failures.client("10.0.0.1", f"2.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert _cached_network_of.cache_info().currsize == MAX_CACHED_ADDRESSES
    misses = _cached_network_of.cache_info().misses
    # A long text is cut off, and never cached.
    assert failures.client("10.0.0.1", "x" * 1000) == "x" * 64
    assert _cached_network_of.cache_info().misses == misses
