"""Networks of the clients that may connect."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from ipaddress import IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

# Prefix length of the IPv6 networks that are assumed to belong to one client each.
IPV6_PREFIX: Final = 64


class ClientNetworks:
    """Addresses and networks, given as texts. Host bits of a network are allowed, as in LiteLLM.

    Raises ValueError for a text that is neither an address nor a network.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._networks = tuple(ip_network(text, strict=False) for text in texts)

    def __contains__(self, address: object) -> bool:
        """Return whether an address belongs to one of the networks; a Unix socket has no address."""
        try:
            found = ip_address(str(address))
        except ValueError:
            return False
        plain = getattr(found, "ipv4_mapped", None) or found
        return any(plain in network for network in self._networks)


def network_of(address: str) -> str:
    """Return an IPv4 address as it is, and the network of an IPv6 address.

    A client with IPv6 usually has all addresses of a network with the prefix length `IPV6_PREFIX`.
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

    `peer` is the address of the connection, `forwarded` are the values of `X-Forwarded-For`. Each proxy appends the
    address from which it received the request. Only addresses that a proxy in `proxies` appended are trusted.
    """
    address = peer
    for text in reversed([text.strip() for value in forwarded for text in value.split(",")]):
        if address not in proxies:
            break
        address = text
    return address
