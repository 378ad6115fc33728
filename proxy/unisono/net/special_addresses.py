"""Addresses that do not belong to ordinary hosts of the public Internet.

Sources: the IANA IPv4 and IPv6 Special-Purpose Address Registries (every entry, also those marked as globally
reachable: they are protocol anycasts, not hosts) and the multicast registries. IANA publishes its protocol registries
under CC0 1.0. https://www.iana.org/assignments/iana-ipv4-special-registry,
https://www.iana.org/assignments/iana-ipv6-special-registry
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

_IPV4: Final = """
    0.0.0.0/8           this network
    10.0.0.0/8          private use
    100.64.0.0/10       shared address space (carrier NAT)
    127.0.0.0/8         loopback
    169.254.0.0/16      link local
    172.16.0.0/12       private use
    192.0.0.0/24        protocol assignments, DS-Lite, NAT64 discovery, PCP and TURN anycast
    192.0.2.0/24        documentation
    192.31.196.0/24     AS112
    192.52.193.0/24     AMT
    192.88.99.0/24      6to4 relay anycast, deprecated
    192.168.0.0/16      private use
    192.175.48.0/24     AS112 direct delegation
    198.18.0.0/15       benchmarking
    198.51.100.0/24     documentation
    203.0.113.0/24      documentation
    224.0.0.0/4         multicast
    240.0.0.0/4         reserved, limited broadcast
"""
_IPV6: Final = """
    ::/96               unspecified, loopback, IPv4-compatible
    ::ffff:0:0/96       IPv4-mapped
    64:ff9b::/96        IPv4-IPv6 translation
    64:ff9b:1::/48      IPv4-IPv6 translation, local use
    100::/64            discard only
    100:0:0:1::/64      dummy prefix
    2001::/23           protocol assignments: Teredo, PCP, TURN, DNS-SD, benchmarking, AMT, AS112, ORCHID, DRIP
    2001:db8::/32       documentation
    2002::/16           6to4
    2620:4f:8000::/48   AS112 direct delegation
    3fff::/20           documentation
    5f00::/16           segment routing SIDs
    fc00::/7            unique local
    fe80::/10           link local
    fec0::/10           site local, deprecated
    ff00::/8            multicast
"""

SPECIAL_IPV4: Final = tuple(IPv4Network(line.split()[0]) for line in _IPV4.strip().splitlines())
SPECIAL_IPV6: Final = tuple(IPv6Network(line.split()[0]) for line in _IPV6.strip().splitlines())

# IANA allocates unicast addresses from this block only.
GLOBAL_UNICAST_IPV6: Final = IPv6Network("2000::/3")

_METADATA: Final = """
    169.254.0.0/16      AWS (also containers and pods), GCP, Azure, Oracle, Tencent, Scaleway and most others
    168.63.129.16       Azure
    192.0.0.192         Oracle
    100.100.100.200     Alibaba
    fd00:ec2::/64       AWS
    fd20:ce::254        GCP
    fd00:c1::a9fe:a9fe  Oracle
    fd00:42::42         Scaleway
    fe80::a9fe:a9fe     OpenStack
"""
# Services of cloud platforms for their own virtual machines; some hand out credentials.
CLOUD_METADATA: Final = tuple(ip_network(line.split()[0]) for line in _METADATA.strip().splitlines())

IPV4_COMPATIBLE: Final = IPv6Network("::/96")
IPV4_MAPPED: Final = IPv6Network("::ffff:0:0/96")
NAT64: Final = IPv6Network("64:ff9b::/96")
NAT64_LOCAL: Final = IPv6Network("64:ff9b:1::/48")
SIX_TO_FOUR: Final = IPv6Network("2002::/16")
TEREDO: Final = IPv6Network("2001::/32")

# The upper half of an ISATAP interface identifier, with the universal bit cleared and set.
_ISATAP: Final = frozenset({0x0000_5EFE, 0x0200_5EFE})
_32_BITS: Final = 0xFFFF_FFFF


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and loopback addresses, which only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def embedded_ipv4(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """Return IPv4 addresses to which a translator or tunnel may forward packets for `address`."""
    bits = int(address)
    found: list[int] = []
    if any(address in network for network in (IPV4_COMPATIBLE, IPV4_MAPPED, NAT64, NAT64_LOCAL)):
        found.append(bits & _32_BITS)
    if address in NAT64_LOCAL:
        # RFC 6052, prefix of 48 bits: 16 bits of the address, 8 reserved bits, the other 16 bits.
        found.append((bits >> 64 & 0xFFFF) << 16 | bits >> 40 & 0xFFFF)
    if address in SIX_TO_FOUR:
        found.append(bits >> 80 & _32_BITS)
    if address in TEREDO:
        # RFC 4380: the address of the server as it is, and the address of the client with all bits inverted.
        found += [bits >> 64 & _32_BITS, ~bits & _32_BITS]
    if bits >> 32 & _32_BITS in _ISATAP:
        found.append(bits & _32_BITS)
    return tuple(map(IPv4Address, found))


def loopback_address(listen: str) -> tuple[str, int]:
    """Parse `host:port`. Raises ValueError for any other form, or if the host is not loopback."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not (port.isascii() and port.isdigit()) or not 0 <= int(port) < 1 << 16:
        raise ValueError("must have the form host:port")
    host = "127.0.0.1" if host == "localhost" else host
    if not is_loopback(host):
        raise ValueError("must be a loopback address, such as 127.0.0.1, because this port requires no key")
    return host, int(port)
