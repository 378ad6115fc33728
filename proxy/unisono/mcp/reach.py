"""Which servers a request may name, and where their packets may go: the guard against being sent to places inside.

A server that the operator configured is not judged here. Any other must have a host on the operator's list, and every
address its name has must be public, unless the operator said of that host that it may be private. Names are resolved
once; what was judged is what is dialled. Only one spelling of an address is understood, the plain one: what could be
read in two ways is refused, and every refusal reads the same, so that nothing is learned from it.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, TypeAlias

from unisono.errors import ToolServerNotAllowed

REFUSAL: Final = "This tool server may not be reached from here; its host has to be allowed by the operator."

MOST_ADDRESSES: Final = 16

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""From a host name and a port to addresses; raises OSError when there are none."""


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """A host requests may name: `mcp.example.com`, `*.example.com` (any below it) or `*` (any). Only by https on the
    listed ports, unless `plain_http`; only public addresses, unless `private`. No ports listed means all of them."""

    host: str
    ports: frozenset[int] = frozenset({443})
    plain_http: bool = False
    private: bool = False

    def covers(self, scheme: str, host: str, port: int) -> bool:
        if self.host != "*" and host != self.host and not (self.host[:2] == "*." and host.endswith(self.host[1:])):
            return False
        return (not self.ports or port in self.ports) and (scheme == "https" or self.plain_http)


@dataclass(frozen=True, slots=True)
class Route:
    """A judged way to a server: the address to use in `url`, and the only addresses its host may be dialled at."""

    url: str
    scheme: str
    host: str
    port: int
    addresses: tuple[str, ...]


_URL = re.compile(r"(https?)://(\[[0-9a-fA-F:.]+\]|[^/?#\[\]:@\\%]+)(?::([0-9]{1,5}))?([/?][!-\"$-~]*)?")
"""Scheme, host, port, path with query. ASCII only, no user, no fragment, no escapes in the host."""
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")

_INSIDE_V4: Final = tuple(map(IPv4Network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4",
    "168.63.129.16/32",  # the platform's own address in Azure, routed from inside only
)))  # fmt: skip
_OUTSIDE_V6: Final = IPv6Network("2000::/3")
_INSIDE_V6: Final = tuple(map(IPv6Network, (
    "2001::/23",  # protocol assignments, Teredo among them: an IPv4 address in disguise
    "2001:db8::/32", "3fff::/20",  # documentation
    "2002::/16",  # 6to4: an IPv4 address in disguise
)))  # fmt: skip


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether packets to it leave for the public Internet, however it is written. Everything that carries an IPv4
    address inside an IPv6 one is taken for private: whoever translates it may be inside."""
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in network for network in _INSIDE_V4)
    if address.scope_id is not None or address not in _OUTSIDE_V6:
        return False
    return address.is_global and not any(address in network for network in _INSIDE_V6)


async def resolve(host: str, port: int) -> Sequence[str]:
    """What the system says, in its order."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


class Reach:
    """The operator's list, applied."""

    def __init__(self, allowed: Sequence[AllowedHost] = (), resolver: Resolver = resolve) -> None:
        self._allowed = tuple(allowed)
        self._resolve = resolver

    async def route(self, url: str) -> Route:
        """The way to `url`. Raises `ToolServerNotAllowed`, with one text for every reason."""
        parts = _read(url)
        if parts is None:
            raise ToolServerNotAllowed(REFUSAL)
        scheme, host, port, rest = parts
        rules = self._rules(scheme, host, port)
        if not rules:
            raise ToolServerNotAllowed(REFUSAL)
        addresses = await self._addresses(host, port)
        judged = [_parsed(address) for address in addresses[:MOST_ADDRESSES]]
        private = any(rule.private for rule in rules)
        if not judged or not all(entry is not None and (private or is_public(entry)) for entry in judged):
            raise ToolServerNotAllowed(REFUSAL)
        shown = f"[{host}]" if ":" in host else host
        return Route(f"{scheme}://{shown}:{port}{rest}", scheme, host, port, tuple(str(entry) for entry in judged))

    def may_name(self, url: str) -> bool:
        """Whether `url` is on a host of the list; where its name leads is judged when it is gone to."""
        parts = _read(url)
        return parts is not None and bool(self._rules(*parts[:3]))

    def _rules(self, scheme: str, host: str, port: int) -> list[AllowedHost]:
        return [rule for rule in self._allowed if rule.covers(scheme, host, port)]

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        if _parsed(host) is not None:
            return (host,)
        try:
            return await self._resolve(host, port)
        except (OSError, UnicodeError):
            # A name that nobody knows is refused like any other: who asks is not told which names exist.
            return ()


def _read(url: str) -> tuple[str, str, int, str] | None:
    """Scheme, host (lower case, no brackets), port and the rest, or None for what is not written plainly."""
    found = _URL.fullmatch(url)
    if found is None or len(url) > 2048:
        return None
    scheme, authority, digits, rest = found[1], found[2].lower(), found[3], found[4] or "/"
    port = int(digits) if digits else {"http": 80, "https": 443}[scheme]
    if not 0 < port < 65536:
        return None
    if authority[0] == "[":
        address = _parsed(authority[1:-1])
        return (scheme, str(address), port, rest) if isinstance(address, IPv6Address) else None
    labels = authority.split(".")
    if len(authority) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return None
    # A host that ends in a number is an IPv4 address to most readers, in any of a dozen spellings.
    if _NUMBER.fullmatch(labels[-1]) and not isinstance(_parsed(authority), IPv4Address):
        return None
    return scheme, authority, port, rest if rest[0] == "/" else f"/{rest}"


def _parsed(address: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(address)
    except ValueError:
        return None
