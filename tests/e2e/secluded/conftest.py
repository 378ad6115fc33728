"""A machine with only loopback, one public address and its own name server.

The tests run in their own network and mount namespaces (see `tests/e2e/test_secluded.py`).
"""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import cast

import pytest

from tests.listening import listening

OUTSIDE = "93.184.216.34"
INSIDE = ("127.0.0.1", "169.254.169.254", "10.0.0.7")
PORT = 8080


@pytest.fixture(scope="session", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    resolv = tmp_path_factory.mktemp("etc") / "resolv.conf"
    resolv.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
    commands = [["ip", "link", "set", "lo", "up"], ["mount", "--bind", str(resolv), "/etc/resolv.conf"]]
    commands += [["ip", "address", "add", f"{address}/32", "dev", "lo"] for address in (OUTSIDE, *INSIDE[1:])]
    for command in commands:
        subprocess.run(command, check=True)


@dataclass
class Names(asyncio.DatagramProtocol):
    """A name server. Each name has a list of answers; the last one is repeated."""

    known: dict[str, list[str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        labels, offset = [], 12
        while size := data[offset]:
            labels.append(data[offset + 1 : offset + 1 + size].decode())
            offset += 1 + size
        question, (kind,) = data[12 : offset + 5], struct.unpack("!H", data[offset + 1 : offset + 3])
        name = ".".join(labels)
        addresses = self.known.get(name)
        answers_found: list[str] = []
        if addresses and kind == 1:
            self.asked.append(name)
            answers_found = [addresses.pop(0) if len(addresses) > 1 else addresses[0]]
        head = data[:2] + struct.pack("!HHHHH", 0x8180 if addresses else 0x8183, 1, len(answers_found), 0, 0)
        answers = [
            b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + socket.inet_aton(address) for address in answers_found
        ]
        self._transport.sendto(head + question + b"".join(answers), addr)


@pytest.fixture
async def names() -> AsyncIterator[Names]:
    loop = asyncio.get_running_loop()
    transport, found = await loop.create_datagram_endpoint(Names, ("127.0.0.1", 53))
    yield found
    transport.close()


@pytest.fixture
async def canaries() -> AsyncIterator[list[str]]:
    """Listeners on internal addresses; yields the addresses that were reached."""
    reached: list[str] = []

    async def answer_secret(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(writer.get_extra_info("sockname")[0])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\nsecret")

    async with AsyncExitStack() as stack:
        for address in INSIDE:
            await stack.enter_async_context(listening(answer_secret, address, PORT))
        yield reached
