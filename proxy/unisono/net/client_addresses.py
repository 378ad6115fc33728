"""Addresses of clients, and the networks from which clients may connect."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from ipaddress import IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

# Prefix length of the IPv6 networks that are assumed to belong to one client each.
IPV6_PREFIX: Final = 64


class ClientNetworks:
    """Set of networks, parsed from `texts` such as `10.0.0.1` or `10.0.0.0/8`.

    As in LiteLLM, a network may have host bits (`10.0.0.1/8`). Raises ValueError for a text that is neither an address
    nor a network.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._networks = tuple(ip_network(text, strict=False) for text in texts)

    def __contains__(self, address: object) -> bool:
        """Return whether `address` is in one of the networks; False if it is not an IP address."""
        try:
            found = ip_address(str(address))
        except ValueError:
            return False
        plain = getattr(found, "ipv4_mapped", None) or found
        return any(plain in network for network in self._networks)


def network_of(address: str) -> str:
    """Return an IPv4 address unchanged, and for an IPv6 address the network that contains it.

    An IPv6 client usually has all addresses of a network with the prefix length `IPV6_PREFIX`. Any other text is
    returned unchanged, up to 64 characters.
    """
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or IPv6Network((found, IPV6_PREFIX), strict=False))


def client_address(peer: str, forwarded: Sequence[str], proxies: Container[str]) -> str:
    """Return the address of the client behind trusted proxies.

    `peer` is the address of the connection, and `forwarded` contains the values of the `X-Forwarded-For` headers. Each
    proxy appends the address from which it received the request. Only addresses that a proxy in `proxies` appended are
    trusted.
    """
    address = peer
    for text in reversed([text.strip() for value in forwarded for text in value.split(",")]):
        if address not in proxies:
            break
        address = text
    return address
