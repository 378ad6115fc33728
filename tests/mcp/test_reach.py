"""Tests of the SSRF guard: servers of requests never reach private addresses.

The connection uses the checked address. Listeners on loopback addresses serve as canaries: they must see no connection.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.fakes.wire import Seen, Step, WireServer, Write
from tests.listening import listening
from tests.mcp.arguments import sent
from tests.mcp.conftest import Upstream
from unisono.core.tool_host import ToolServer, ToolTransport
from unisono.errors import ToolServerNotAllowed, ToolServerUnavailable
from unisono.mcp import McpHost
from unisono.mcp.admission import NOT_ALLOWED
from unisono.net.ssrf_guard import AllowedHost, DestinationNotAllowed, SsrfGuard, resolve

ANYWHERE = AllowedHost("*", frozenset(), plain_http=True)

NAMES: dict[str, tuple[str, ...]] = {
    "inside.example": ("127.0.0.1",),
    "inside6.example": ("::1",),
    "mapped.example": ("::ffff:127.0.0.1",),
    "both.example": ("93.184.216.34", "127.0.0.1"),
    "scoped.example": ("fe80::1%lo",),
    "odd.example": ("127.1",),
    "empty.example": (),
    "metadata.example": ("169.254.169.254",),
}


async def scripted_resolver(host: str, port: int) -> Sequence[str]:
    """Resolve a few scripted names; the system resolves all others, and numbers in any notation."""
    return NAMES[host] if host in NAMES else await resolve(host, port)


SPELLINGS = (
    # valid and invalid addresses
    "http://127.0.0.1:{port}/", "http://127.0.0.2:{port}/", "http://0.0.0.0:{port}/", "http://[::1]:{port}/",
    "http://[::]:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://[::ffff:7f00:1]:{port}/",
    "http://[::127.0.0.1]:{port}/", "http://[0:0:0:0:0:0:0:1]:{port}/", "http://[64:ff9b::7f00:1]:{port}/",
    "http://[2002:7f00:1::]:{port}/", "http://[fe80::1]:{port}/", "http://[fe80::1%25lo]:{port}/",
    "http://[::1%lo]:{port}/", "http://169.254.169.254:{port}/latest/meta-data/",
    # numbers that other parsers take for addresses
    "http://127.1:{port}/", "http://127.0.1:{port}/", "http://2130706433:{port}/", "http://0x7f000001:{port}/",
    "http://0x7f.0.0.1:{port}/", "http://0x7f.1:{port}/", "http://0177.0.0.1:{port}/", "http://017700000001:{port}/",
    "http://0:{port}/", "http://127.0.0.1.:{port}/", "http://127.0.0.01:{port}/", "http://127.000.000.001:{port}/",
    "http://127.0.0.256:{port}/", "http://1.127.0.0.1:{port}/", "http://foo.0x7f:{port}/", "http://0x:{port}/",
    "http://①②⑦.0.0.1:{port}/", "http://127。0。0。1:{port}/", "http://１２７.0.0.1:{port}/",
    "http://127%2e0%2e0%2e1:{port}/", "http://%31%32%37.0.0.1:{port}/",
    # names
    "http://localhost:{port}/", "http://LOCALHOST:{port}/", "http://localhost.:{port}/", "http://ⓛocalhost:{port}/",
    "http://loc\u00adalhost:{port}/", "http://localhost\u3002:{port}/", "http://inside.example:{port}/",
    "http://INSIDE.example:{port}/", "http://inside6.example:{port}/", "http://mapped.example:{port}/",
    "http://both.example:{port}/", "http://scoped.example:{port}/", "http://odd.example:{port}/",
    "http://empty.example:{port}/", "http://metadata.example:{port}/", "http://nobody.invalid:{port}/",
    # URLs that confuse other parsers
    "http://8.8.8.8@127.0.0.1:{port}/", "http://127.0.0.1:{port}@8.8.8.8/", "http://a:b@localhost:{port}/",
    "http://8.8.8.8:80@localhost:{port}/", "http://8.8.8.8\\@localhost:{port}/", "http://8.8.8.8#@localhost:{port}/",
    "http://localhost:{port}#.example.com/", "http:\\\\localhost:{port}\\", "http:/localhost:{port}/",
    "http:localhost:{port}/", "http:///localhost:{port}/", "//localhost:{port}/", "localhost:{port}",
    " http://localhost:{port}/", "http://localhost:{port}/ ", "http://local\thost:{port}/",
    "http://localhost\n:{port}/", "http://localhost\0:{port}/", "http://8.8.8.8\r\nHost: localhost:{port}/",
    "http://localhost:{port}\u2044", "http://localhost:+{port}/", "http://localhost:0{port}0/", "http://:{port}/",
    "http://[127.0.0.1]:{port}/", "http://[::1:{port}/", "http://::1:{port}/", "HTTP://localhost:{port}/",
    # other schemes
    "file:///etc/passwd", "ftp://localhost:{port}/", "gopher://localhost:{port}/", "unix:///tmp/socket",
    "ws://localhost:{port}/", "data:text/plain,a", "stdio:/bin/sh", "{port}",
)  # fmt: skip


@dataclass
class Canaries:
    """Listeners on one port of every loopback address.

    `seen` lists the addresses that got a connection.
    """

    port: int
    seen: list[str] = field(default_factory=list)


@asynccontextmanager
async def canaries() -> AsyncIterator[Canaries]:
    opened = Canaries(0)

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.seen.append(str(writer.get_extra_info("sockname")))

    async with listening(record, "0.0.0.0") as first, AsyncExitStack() as more:
        opened.port = first.port
        with suppress(OSError):  # a machine without IPv6
            await more.enter_async_context(listening(record, "::1", opened.port))
        yield opened


async def test_no_notation_of_a_private_address_is_reached() -> None:
    host = McpHost(guard=SsrfGuard([ANYWHERE], scripted_resolver))
    async with canaries() as listeners:
        for spelling in SPELLINGS:
            for transport in (ToolTransport.STREAMABLE_HTTP, ToolTransport.SSE):
                server = ToolServer("a", spelling.replace("{port}", str(listeners.port)), transport=transport)
                with pytest.raises(ToolServerNotAllowed) as refused:
                    await host.list_tools(server)
                assert refused.value.message == NOT_ALLOWED, spelling
                with pytest.raises(ToolServerNotAllowed):
                    await host.call(server, "echo", sent({}))
        assert listeners.seen == []
    await host.aclose()
    assert len(SPELLINGS) > 60


async def test_canaries_record_a_connection() -> None:
    host = McpHost()
    async with canaries() as listeners:
        with pytest.raises(ToolServerUnavailable):
            await host.list_tools(ToolServer("a", f"http://localhost:{listeners.port}/", configured=True))
        assert listeners.seen
    await host.aclose()


RULES: dict[str, tuple[AllowedHost, list[str], list[str]]] = {
    "one host": (
        AllowedHost("a.example"),
        ["https://a.example/mcp", "https://A.example:443/", "https://a.example?x=1"],
        ["http://a.example/", "https://a.example:8443/", "https://b.a.example/", "https://xa.example/"],
    ),
    "subdomains": (
        AllowedHost("*.example"),
        ["https://a.example/", "https://b.a.example/"],
        ["https://example/", "https://aexample/", "https://a.example.org/"],
    ),
    "plain http and a port": (
        AllowedHost("a.example", frozenset({80, 8080}), plain_http=True),
        ["http://a.example/", "http://a.example:8080/", "https://a.example:8080/"],
        ["https://a.example/", "http://a.example:8081/"],
    ),
    "empty": (AllowedHost(""), [], ["https://a.example/", "https:///"]),
}


async def resolve_public(host: str, port: int) -> Sequence[str]:
    return ("93.184.216.34",)


@pytest.mark.parametrize(("rule", "allowed", "refused"), RULES.values(), ids=RULES)
async def test_only_allowed_hosts_are_resolved(rule: AllowedHost, allowed: list[str], refused: list[str]) -> None:
    resolved: list[str] = []

    async def resolver(host: str, port: int) -> Sequence[str]:
        resolved.append(host)
        return await resolve_public(host, port)

    guard = SsrfGuard([rule], resolver)
    for url in refused:
        with pytest.raises(DestinationNotAllowed):
            await guard.check(url)
    assert resolved == []
    for url in allowed:
        assert (await guard.check(url)).addresses == ("93.184.216.34",)


async def test_no_host_is_allowed_without_rules() -> None:
    with pytest.raises(DestinationNotAllowed):
        await SsrfGuard(resolver=resolve_public).check("https://a.example/")


async def test_every_address_of_a_name_must_be_public() -> None:
    async def mixed(host: str, port: int) -> Sequence[str]:
        return ("93.184.216.34", "2606:4700:4700::1111", "10.0.0.1")

    with pytest.raises(DestinationNotAllowed):
        await SsrfGuard([ANYWHERE], mixed).check("https://a.example/")


async def test_connection_uses_the_checked_address_of_a_changing_name(upstream: Upstream) -> None:
    """Resolve the name once per connection.

    A second result, which would lead elsewhere, is never used.
    """
    port = upstream.urls["modern"].split(":")[2].split("/")[0]
    answers = [["127.0.0.1"]]

    async def changing(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    rule = AllowedHost("rebind.example", frozenset(), plain_http=True, private=True)
    host = McpHost(guard=SsrfGuard([rule], changing))
    server = ToolServer("a", f"http://rebind.example:{port}/mcp")
    # The SDK's server checks the Host header and refuses this one; its response shows that the original name was sent.
    with pytest.raises(ToolServerUnavailable, match="421"):
        await host.list_tools(server)
    assert answers == []
    await host.aclose()


@asynccontextmanager
async def with_tls(tmp_path: Path, name: str) -> AsyncIterator[tuple[int, ssl.SSLContext, list[str | None], list[str]]]:
    """Listen with a TLS certificate for `name`.

    Yields the port, a context that trusts the certificate, the requested server names and the Host headers.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "server.pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(pem)
    server_names: list[str | None] = []
    hosts: list[str] = []
    server_context.sni_callback = lambda socket, name_requested, context: server_names.append(name_requested)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        hosts.extend(line[6:] for line in head.split("\r\n") if line.lower().startswith("host: "))
        writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    client_context = ssl.create_default_context(cadata=certificate.public_bytes(serialization.Encoding.PEM).decode())
    async with listening(answer, ssl=server_context) as listener:
        yield listener.port, client_context, server_names, hosts


@pytest.mark.parametrize("trusted", [True, False])
async def test_tls_verifies_the_name_while_the_checked_address_is_used(tmp_path: Path, trusted: bool) -> None:
    async def resolve_private(host: str, port: int) -> Sequence[str]:
        return ("127.0.0.1",)

    name = "tools.example" if trusted else "other.example"
    async with with_tls(tmp_path, "tools.example") as (port, client_context, server_names, hosts):
        guard = SsrfGuard([AllowedHost("*.example", frozenset(), private=True)], resolve_private)
        host = McpHost(guard=guard, tls=client_context)
        with pytest.raises(ToolServerUnavailable) as raised:
            await host.list_tools(ToolServer("a", f"https://{name}:{port}/mcp"))
        await host.aclose()
    assert set(server_names) == {name}
    assert set(hosts) == ({f"{name}:{port}"} if trusted else set())
    assert ("HTTP 503" in raised.value.message) is trusted


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("configured", [True, False])
async def test_redirect_to_another_origin_is_not_followed(status: int, configured: bool) -> None:
    async with canaries() as listeners:

        def redirect(seen: Seen) -> list[Step]:
            target = f"http://127.0.0.1:{listeners.port}/"
            return [Write(f"HTTP/1.1 {status} Go\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode())]

        async with WireServer(redirect) as server:
            rule = AllowedHost("127.0.0.1", frozenset(), plain_http=True, private=True)
            host = McpHost(guard=SsrfGuard([rule]))
            with pytest.raises(ToolServerUnavailable):
                await host.list_tools(ToolServer("a", f"{server.url}/mcp", configured=configured))
            await host.aclose()
            assert server.requests
        assert listeners.seen == []


@pytest.mark.parametrize(("configured", "is_followed"), [(True, True), (False, False)])
async def test_redirect_within_the_origin_is_followed_only_for_configured_servers(
    configured: bool, is_followed: bool
) -> None:
    def redirect(seen: Seen) -> list[Step]:
        if seen.path == "/mcp":
            return [Write(b"HTTP/1.1 307 Go\r\nLocation: /mcp/\r\nContent-Length: 0\r\n\r\n")]
        return [Write(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")]

    async with WireServer(redirect) as server:
        rule = AllowedHost("127.0.0.1", frozenset(), plain_http=True, private=True)
        host = McpHost(guard=SsrfGuard([rule]))
        with pytest.raises(ToolServerUnavailable):
            await host.list_tools(ToolServer("a", f"{server.url}/mcp", configured=configured))
        await host.aclose()
        assert ("/mcp/" in [seen.path for seen in server.requests]) is is_followed


async def test_guarded_server_that_is_allowed_works(upstream: Upstream) -> None:
    rule = AllowedHost("127.0.0.1", frozenset(), plain_http=True, private=True)
    host = McpHost(guard=SsrfGuard([rule]))
    for name in ("modern", "legacy", "sse"):
        transport = ToolTransport.SSE if name == "sse" else ToolTransport.STREAMABLE_HTTP
        server = ToolServer(name, upstream.urls[name], transport=transport)
        assert (await host.call(server, "echo", sent({"text": "hi"}))).text == "hi"
    assert "host" in json.loads((await host.call(ToolServer("b", upstream.urls["modern"]), "headers", sent({}))).text)
    await host.aclose()
