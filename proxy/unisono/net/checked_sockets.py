"""Sockets of HTTP clients, for addresses that the SSRF guard permits.

An aiohttp client gets the addresses of a host name from `resolved`. For a host that is written as an address, the
client resolves no name. Each socket therefore checks its address too.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypedDict

from unisono.net.ssrf_guard import DestinationNotAllowed, is_permitted, parse_address

# Description of an address by `getaddrinfo`.
AddressInfo: TypeAlias = tuple[Any, Any, int, str, tuple[Any, ...]]
SocketFactory: TypeAlias = Callable[[AddressInfo], socket.socket]


class NotDialled(DestinationNotAllowed, OSError):
    """Refusal of an address. HTTP clients expect an OSError."""


class ResolvedAddress(TypedDict):
    """Address of a host, as a resolver of aiohttp returns it."""

    hostname: str
    host: str
    port: int
    family: int
    proto: int
    flags: int


def resolved(host: str, port: int, addresses: Iterable[str]) -> list[ResolvedAddress]:
    """Return checked addresses in the form in which a resolver of aiohttp returns them."""
    return [
        ResolvedAddress(
            hostname=host,
            host=address,
            port=port,
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            proto=socket.IPPROTO_TCP,
            flags=socket.AI_NUMERICHOST,
        )
        for address in addresses
    ]


def checked_sockets(is_allowed: Callable[[str], bool], reason: str) -> SocketFactory:
    """Return a socket factory that raises NotDialled with `reason` for forbidden addresses."""

    def new_socket(info: AddressInfo) -> socket.socket:
        family, kind, protocol, _, where = info
        if not is_allowed(where[0]):
            raise NotDialled(reason)
        return socket.socket(family, kind, protocol)

    return new_socket


def permitted_sockets(reason: str, *, private: bool = False) -> SocketFactory:
    """Return a factory of sockets that allows only the addresses that the SSRF guard permits."""

    def is_allowed(text: str) -> bool:
        address = parse_address(text)
        return address is not None and is_permitted(address, private=private)

    return checked_sockets(is_allowed, reason)
