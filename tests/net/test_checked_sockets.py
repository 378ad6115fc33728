"""Sockets for checked addresses only."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp
import pytest

from tests.listening import Listener
from unisono.net.ssrf_guard import NotDialled, SocketFactory, checked_sockets, permitted_sockets

LISTED = checked_sockets({"127.0.0.1", "::1"}.__contains__, "not checked")
PUBLIC = permitted_sockets("not public")
PRIVATE = permitted_sockets("not permitted", private=True)

ADDRESSES: dict[str, tuple[SocketFactory, str, bool]] = {
    "listed": (LISTED, "127.0.0.1", True),
    "listed, IPv6": (LISTED, "::1", True),
    "not listed": (LISTED, "127.0.0.2", False),
    "public": (PUBLIC, "8.8.8.8", True),
    "private": (PUBLIC, "10.0.0.1", False),
    "private, permitted": (PRIVATE, "10.0.0.1", True),
    "metadata service": (PRIVATE, "169.254.169.254", False),
    "name": (PRIVATE, "localhost", False),
}


@pytest.mark.parametrize(("sockets", "address", "is_allowed"), ADDRESSES.values(), ids=ADDRESSES)
def test_only_permitted_addresses_get_a_socket(sockets: SocketFactory, address: str, is_allowed: bool) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    info = (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 80))
    if is_allowed:
        with sockets(info) as made:
            assert made.family == family
        return
    with pytest.raises(NotDialled):
        sockets(info)


async def test_a_refusal_is_the_cause_of_the_error_of_the_client_and_nothing_is_dialled() -> None:
    connections: list[Any] = []

    async def serve(*connection: Any) -> None:
        connections.append(connection)

    listener = Listener(serve)
    await listener.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=PUBLIC)) as session:
            with pytest.raises(aiohttp.ClientConnectorError) as failure:
                await session.get(listener.url)
    finally:
        await listener.aclose()
    assert isinstance(failure.value.os_error, NotDialled)
    assert connections == []
