"""SSRF guard: special addresses, spellings of hosts, hosts with several addresses, and its users."""

from __future__ import annotations

import ast
import socket
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.lint.syntax import statements
from unisono.net.special_addresses import SPECIAL_IPV4, SPECIAL_IPV6
from unisono.net.ssrf_guard import (
    DestinationNotAllowed,
    checked_addresses,
    is_permitted,
    is_plain_host,
    is_public,
    public_target,
)

ROOT = Path(__file__).parents[2]

_NOT_PUBLIC = """
    0.0.0.0 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1 172.31.255.255
    192.0.0.1 192.0.0.9 192.0.0.10 192.0.0.170 192.0.0.192 192.0.2.1 192.31.196.1 192.52.193.1 192.88.99.1 192.88.99.2
    192.168.1.1 192.175.48.1 198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1
    255.255.255.255 168.63.129.16
    :: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:8.8.8.8 64:ff9b::7f00:1 64:ff9b::808:808 64:ff9b:1::1
    64:ff9b:1:7f00:0:100:: 100::1 100:0:0:1::1 2001::1 2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:1::1 2001:1::3
    2001:2::1 2001:3::1 2001:4:112::1 2001:10::1 2001:20::1 2001:30::1 2001:db8::1 2002:7f00:1:: 2002:a9fe:a9fe::1
    2002:808:808::1 2620:4f:8000::1 3fff::1 4000::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1
    2606:4700::5efe:7f00:1 2606:4700::200:5efe:808:808 2606:4700:4700::1111%eth0
"""
NOT_PUBLIC = _NOT_PUBLIC.split()
PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "172.32.0.1", "2606:4700:4700::1111", "2a00:1450:4001:81b::200e"]
_METADATA = """
    169.254.169.254 168.63.129.16 192.0.0.192 100.100.100.200 fd00:ec2::254 fd00:ec2::254%eth0 ::ffff:169.254.169.254
    ::169.254.169.254 64:ff9b::a9fe:a9fe 64:ff9b:1::a9fe:a9fe 64:ff9b:1:a9fe:a9:fe00:: 2002:a9fe:a9fe::1
    2001:0:a9fe:a9fe::1 2001::5601:5601 2606:4700::5efe:a9fe:a9fe fe80::200:5efe:a9fe:a9fe
    169.254.170.2 169.254.170.23 169.254.0.23 169.254.42.42 fd00:ec2::23 fd20:ce::254 fd00:c1::a9fe:a9fe fd00:42::42
    fe80::a9fe:a9fe fe80::a9fe:a9fe%eth0 ::ffff:169.254.170.2 64:ff9b::a9fe:aa02
"""
METADATA = _METADATA.split()


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_ordinary_addresses_are_public(address: str) -> None:
    assert is_public(ip_address(address))


def test_both_ends_of_every_special_block_are_refused() -> None:
    ends = [end for block in (*SPECIAL_IPV4, *SPECIAL_IPV6) for end in (block[0], block[-1])]
    assert [str(end) for end in ends if is_public(end)] == []


@pytest.mark.parametrize("address", METADATA)
def test_cloud_metadata_is_refused_when_private_addresses_are_allowed(address: str) -> None:
    assert not is_permitted(ip_address(address), private=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "::1", "fd12::1", "fe80::1%eth0", "8.8.8.8"])
def test_private_addresses_are_permitted_on_request(address: str) -> None:
    assert is_permitted(ip_address(address), private=True)
    assert is_permitted(ip_address(address)) is (address == "8.8.8.8")


# Each of these reaches 127.0.0.1 or ::1 through the system's resolver.
_ODD_SPELLINGS = """
    127.1 127.0.1 2130706433 0x7f000001 0x7f.0.0.1 0x7f.1 0X7F.1 0177.0.0.1 017700000001 0 0x0 127.0.0.01
    127.000.000.001 00000177.1 0x00000000007f000001 127.0x1 0.0.0.0 ::ffff:127.0.0.1 ::ffff:7f00:1 0:0:0:0:0:0:0:1
"""
ODD_SPELLINGS = _ODD_SPELLINGS.split()


@pytest.mark.parametrize("host", ODD_SPELLINGS)
async def test_odd_spellings_of_this_machine_are_refused(host: str) -> None:
    # The control: the resolver accepts the spelling.
    assert socket.getaddrinfo(host, 80, type=socket.SOCK_STREAM)
    with pytest.raises(DestinationNotAllowed):
        await checked_addresses(host.lower(), 80)


@pytest.mark.parametrize("host", ["", ".", "a..b", "a b", "a%00b", "127.0.0.1.", "1.2.3.4.5", "8.8.8.8.0x1", "-a", "A"])
def test_other_hosts_are_not_plain(host: str) -> None:
    assert not is_plain_host(host)


ANSWERS: dict[str, tuple[list[str], bool]] = {
    "one public address": (["93.184.216.34"], True),
    "several public addresses": (["93.184.216.34", "2606:4700:4700::1111"], True),
    "private address last": (["93.184.216.34", "2606:4700:4700::1111", "10.0.0.1"], False),
    "private address first": (["::1", "93.184.216.34"], False),
    "invalid address": (["93.184.216.34", "127.1"], False),
    "none": ([], False),
}


@pytest.mark.parametrize(("answers", "allowed"), ANSWERS.values(), ids=ANSWERS)
async def test_all_resolved_addresses_of_a_host_must_be_public(answers: list[str], allowed: bool) -> None:
    async def resolver(host: str, port: int) -> Sequence[str]:
        return answers

    if allowed:
        target = await public_target("http://a.example/x", resolver)
        assert (target.url, target.addresses) == ("http://a.example:80/x", tuple(answers))
        return
    with pytest.raises(DestinationNotAllowed):
        await public_target("http://a.example/x", resolver)


# Packages that open connections, and the modules that use them only for addresses of the configuration.
CONNECTING_PACKAGES = {"huggingface_hub", "litellm", "redis", "requests", "urllib3"}
CONFIGURED = {
    "adapters/unisono_adapters/mlx/engine.py",
    "adapters/unisono_adapters/huggingface_download.py",
    "proxy/unisono/integrations/litellm_provider.py",
    "proxy/unisono/store/redis/",
}

# Modules that open connections. "guard": to addresses of requests or pages, checked by the guard. "target": to the
# checked target that they are given. "configured": only to addresses of the configuration or the command line.
CONNECTING = {
    "adapters/unisono_adapters/_http.py": "configured",
    "proxy/unisono/net/connection_pool.py": "configured",
    "proxy/unisono/alerts/webhook.py": "guard",
    "proxy/unisono/bootstrap/waking.py": "configured",
    "proxy/unisono/cli/agents.py": "configured",
    "proxy/unisono/cli/evaluation.py": "configured",
    "proxy/unisono/cli/discover.py": "configured",
    "proxy/unisono/cli/remote_keys.py": "configured",
    "proxy/unisono/evaluation/runner.py": "configured",
    "proxy/unisono/documents/download.py": "guard",
    "proxy/unisono/mcp/http_dispatcher.py": "target",
    "proxy/unisono/mcp/http_transport.py": "guard",
    "proxy/unisono/mcp/session.py": "target",
    "proxy/unisono/store/redis/clients.py": "configured",
    "proxy/unisono/toolservers/browser/searxng.py": "configured",
    "proxy/unisono/hooks/presidio.py": "configured",
    "proxy/unisono/toolservers/browser/web.py": "guard",
}
CONNECTORS = {
    "ClientSession", "AsyncClient", "AsyncHTTPTransport", "HTTPConnection", "HTTPSConnection", "urlopen",
    "open_connection", "create_connection", "create_datagram_endpoint", "sock_connect", "urlretrieve", "TCPConnector",
    "ConnectionPool",
}  # fmt: skip
CLASSIFIERS = {
    "is_private", "is_global", "is_link_local", "is_reserved", "is_multicast", "is_unspecified", "ipv4_mapped",
    "sixtofour", "teredo", "getaddrinfo", "gethostbyname", "gethostbyname_ex", "inet_aton", "inet_pton", "ip_network",
    "IPv4Network", "IPv6Network",
}  # fmt: skip
# Modules with the rules for addresses.
ADDRESS_RULES = {f"proxy/unisono/net/{name}.py" for name in ("client_addresses", "special_addresses", "ssrf_guard")}
# Modules that resolve addresses of the configuration: those of backends, and the listen address.
RESOLVING = {"proxy/unisono/net/connection_pool.py", "proxy/unisono/cli/serve.py"}


def _users_of(names: set[str], found: Callable[[Path], set[str]]) -> set[str]:
    """Return the modules in which `found` finds one of the names. Only those that contain a name are parsed."""
    return {
        module
        for module, path in SOURCES.items()
        if any(name in path.read_text() for name in names) and names & found(path)
    }


def _used(path: Path) -> set[str]:
    """Return the names and attributes that a module uses, except in annotations."""
    every = list(ast.walk(ast.parse(path.read_text())))
    annotations = {id(inner) for node in every for inner in _annotation(node)}
    nodes = [node for node in every if id(node) not in annotations]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.id for node in nodes if isinstance(node, ast.Name)
    }


def _annotation(node: ast.AST) -> list[ast.AST]:
    hints = [getattr(node, field, None) for field in ("annotation", "returns")]
    return [inner for hint in hints if isinstance(hint, ast.AST) for inner in ast.walk(hint)]


SOURCES = {
    str(path.relative_to(ROOT)): path
    for folder in ("proxy/unisono", "adapters/unisono_adapters")
    for path in (ROOT / folder).rglob("*.py")
}


def test_only_the_guard_resolves_and_classifies_addresses() -> None:
    found = _users_of(CLASSIFIERS, _used)
    assert found - ADDRESS_RULES == RESOLVING


def test_every_module_that_connects_is_configured_or_guarded() -> None:
    connecting = _users_of(CONNECTORS, _used)
    assert connecting == CONNECTING.keys()
    for name, why in CONNECTING.items():
        source = SOURCES[name].read_text()
        is_guarded = "unisono.net.ssrf_guard" in source
        assert is_guarded is (why == "guard"), name
        # The sockets of all guarded clients of aiohttp are checked in the same way.
        assert ("TCPConnector" in source and is_guarded) is ("_sockets(" in source), name
        assert not is_guarded or "socket.socket(" not in source, name
        assert why != "target" or "path.target" in source, name


def _imported(path: Path) -> set[str]:
    """Return the top-level packages that a module imports, also inside functions."""
    nodes = list(statements(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in names}


def test_packages_that_connect_are_used_by_known_modules_only() -> None:
    using = _users_of(CONNECTING_PACKAGES, _imported)
    assert {name for name in using if not name.startswith(tuple(CONFIGURED))} == set()
    assert all(any(name.startswith(known) for name in using) for known in CONFIGURED)
