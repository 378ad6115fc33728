"""Guard against server-side request forgery: decides which addresses may be dialled.

Addresses that the operator configured are not checked. Every address that a client, a model, a tool server or a web
page names is checked here, and the caller dials only the addresses that were checked.

An aiohttp client gets the addresses of a host name from `resolved`. For a host that is written as an address, the
client resolves no name. Each socket from `checked_sockets` therefore checks its address too.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, TypeAlias, TypedDict

from unisono.net.special_addresses import (
    CLOUD_METADATA,
    GLOBAL_UNICAST_IPV6,
    SPECIAL_IPV4,
    SPECIAL_IPV6,
    embedded_ipv4,
)

MAX_ADDRESSES: Final = 16
MAX_URL_LENGTH: Final = 2048
MAX_HOST_LENGTH: Final = 253

Address: TypeAlias = IPv4Address | IPv6Address

# Lookup of a host name's addresses for a port; raises OSError if there are none.
Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]

# Scheme, host, port, path with query. ASCII only, no user, no fragment, no escapes in the host.
_URL = re.compile(r"(https?)://(\[[0-9a-fA-F:.]+\]|[^/?#\[\]:@\\%]+)(?::([0-9]{1,5}))?([/?][!-\"$-~]*)?")
# Label of a host name. Underscores occur in names of internal services.
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class DestinationNotAllowed(Exception):
    """Refusal of a URL, a host or one of its addresses."""


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """Rule for hosts that requests may name.

    The host is `mcp.example.com`, `*.example.com` (any subdomain) or `*` (any). A URL must have one of `ports`; an
    empty set allows all ports. It must use https, unless `plain_http` is True. Its addresses must be public, unless
    `private` is True.
    """

    host: str
    ports: frozenset[int] = frozenset({443})
    plain_http: bool = False
    private: bool = False

    def covers(self, scheme: str, host: str, port: int) -> bool:
        """Return whether the rule matches; this is checked before any name is resolved."""
        if self.host != "*" and host != self.host and not (self.host[:2] == "*." and host.endswith(self.host[1:])):
            return False
        return (not self.ports or port in self.ports) and (scheme == "https" or self.plain_http)


@dataclass(frozen=True, slots=True)
class DialTarget:
    """Checked URL in canonical form, and the only addresses that may be dialled for its host."""

    url: str
    scheme: str
    host: str
    port: int
    addresses: tuple[str, ...]


def is_public(address: Address) -> bool:
    """Return whether `address` belongs to an ordinary host of the public Internet.

    IPv6 addresses that embed an IPv4 address are not public, because a translator in the gateway's network may forward
    packets to that IPv4 address.
    """
    if _is_metadata(address):
        return False
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in network for network in SPECIAL_IPV4)
    if address.scope_id is not None or address not in GLOBAL_UNICAST_IPV6 or embedded_ipv4(address):
        return False
    return address.is_global and not any(address in network for network in SPECIAL_IPV6)


def is_permitted(address: Address, *, private: bool = False) -> bool:
    """Return True if `address` may be dialled.

    With `private`, every address except those of cloud metadata services may be dialled.
    """
    if not private:
        return is_public(address)
    forms: tuple[Address, ...] = (address,)
    if isinstance(address, IPv6Address):
        forms = (IPv6Address(int(address)), *embedded_ipv4(address))
    return not any(map(_is_metadata, forms))


def _is_metadata(address: Address) -> bool:
    return any(address in network for network in CLOUD_METADATA)


async def resolve(host: str, port: int) -> Sequence[str]:
    """Look up the addresses of a host with the system's resolver, and keep their order."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


async def checked_addresses(
    host: str, port: int, *, private: bool = False, resolver: Resolver = resolve
) -> tuple[str, ...]:
    """Resolve `host` once and return its addresses, if every one of them is permitted.

    Raises `DestinationNotAllowed`, or the resolver's OSError or UnicodeError.
    """
    if not is_plain_host(host):
        raise DestinationNotAllowed("the host is not written as a plain name or address")
    literal = parse_address(host)
    answers = [host] if literal is not None else list(await resolver(host, port))[:MAX_ADDRESSES]
    addresses = [parse_address(answer) for answer in answers]
    # One forbidden address refuses the whole name, because any of the returned addresses may be dialled.
    if not addresses or not all(entry is not None and is_permitted(entry, private=private) for entry in addresses):
        raise DestinationNotAllowed("it is not on the public Internet")
    return tuple(map(str, addresses))


async def public_target(url: str, resolver: Resolver = resolve) -> DialTarget:
    """Return the target for any http or https URL whose addresses are public.

    Raises `DestinationNotAllowed`, or the resolver's OSError or UnicodeError.
    """
    parts = parse_url(url)
    if parts is None:
        raise DestinationNotAllowed("it is not a plain http or https URL")
    return await _target(parts, private=False, resolver=resolver)


class SsrfGuard:
    """Checker of request URLs against the operator's list of allowed hosts."""

    def __init__(self, allowed: Sequence[AllowedHost] = (), resolver: Resolver = resolve) -> None:
        self._allowed = tuple(allowed)
        self._resolver = resolver

    async def check(self, url: str) -> DialTarget:
        """Return the target for `url`.

        Raises `DestinationNotAllowed` if no rule allows the URL, if an address is forbidden, or if the name does not
        exist.
        """
        parts = parse_url(url)
        rules = self._matching(*parts[:3]) if parts is not None else []
        if parts is None or not rules:
            raise DestinationNotAllowed("no rule allows this URL")
        try:
            return await _target(parts, private=any(rule.private for rule in rules), resolver=self._resolver)
        except (OSError, UnicodeError):
            # The client must not learn which names exist in the gateway's network.
            raise DestinationNotAllowed("the name has no address") from None

    def is_listed(self, url: str) -> bool:
        """Return True if a rule allows `url`.

        The addresses of the host are checked later, when the host is dialled.
        """
        parts = parse_url(url)
        return parts is not None and bool(self._matching(*parts[:3]))

    def _matching(self, scheme: str, host: str, port: int) -> list[AllowedHost]:
        return [rule for rule in self._allowed if rule.covers(scheme, host, port)]


async def _target(parts: tuple[str, str, int, str], *, private: bool, resolver: Resolver) -> DialTarget:
    scheme, host, port, rest = parts
    addresses = await checked_addresses(host, port, private=private, resolver=resolver)
    authority = f"[{host}]" if ":" in host else host
    return DialTarget(f"{scheme}://{authority}:{port}{rest}", scheme, host, port, addresses)


def parse_url(url: str) -> tuple[str, str, int, str] | None:
    """Split a URL into scheme, host (lower case, no brackets), port and path.

    Return None for a URL that is not in the plain form of `_URL`.
    """
    found = _URL.fullmatch(url) if len(url) <= MAX_URL_LENGTH else None
    if found is None:
        return None
    scheme, host, digits, rest = found[1], found[2].lower(), found[3], found[4] or "/"
    port = int(digits) if digits else _DEFAULT_PORTS[scheme]
    if not 0 < port < 65536:
        return None
    if host[0] == "[":
        address = parse_address(host[1:-1])
        host = str(address) if isinstance(address, IPv6Address) else ""
    if not is_plain_host(host):
        return None
    return scheme, host, port, rest if rest[0] == "/" else f"/{rest}"


def is_plain_host(host: str) -> bool:
    """Return whether every parser interprets `host` in the same way.

    This is true for a canonical address, and for a DNS name in lower case.
    """
    if isinstance(parse_address(host), IPv6Address):
        return True
    labels = host.split(".")
    if len(host) > MAX_HOST_LENGTH or not all(_LABEL.fullmatch(label) for label in labels):
        return False
    # Resolvers read a host that ends in a number as an IPv4 address, which has a dozen spellings.
    return not _NUMBER.fullmatch(labels[-1]) or isinstance(parse_address(host), IPv4Address)


def parse_address(text: str) -> Address | None:
    """Parse an address in canonical form; None for names and other spellings of addresses."""
    try:
        return ip_address(text)
    except ValueError:
        return None


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
