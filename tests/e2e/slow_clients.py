"""Clients on raw sockets that read slowly: a receive buffer of 4 KiB, and no other buffer."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

RECEIVE_BUFFER = 4096
# Pause between two bytes of a client that drips.
PAUSE_S = 0.1


@dataclass
class SlowClient:
    """A connection with a sent request. `drips` reads 10 bytes per second."""

    sock: socket.socket
    _task: asyncio.Task[None] | None = None

    def drips(self) -> SlowClient:
        self._task = asyncio.create_task(self._drip())
        return self

    async def _drip(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while await loop.sock_recv(self.sock, 1):
                await asyncio.sleep(PAUSE_S)

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.sock.close()

    async def cut_off(self, within_s: float) -> None:
        """Wait, without reading, until the server has closed the connection."""
        async with asyncio.timeout(within_s):
            while _established(self.sock):
                await asyncio.sleep(0.02)


def _established(sock: socket.socket) -> bool:
    # TCP_INFO's first byte is the state; 1 is ESTABLISHED.
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01"


async def connected(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


def request(method: str, path: str, body: Any = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def frame(body: Any) -> bytes:
    """Return a text frame of a client; its mask of zeros changes nothing."""
    data = json.dumps(body).encode()
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    return b"\x81" + size + bytes(4) + data


async def over_http(url: str, sent: bytes) -> SlowClient:
    sock = await connected(url)
    await asyncio.get_running_loop().sock_sendall(sock, sent)
    return SlowClient(sock)


async def over_websocket(url: str, path: str, fields: Any) -> SlowClient:
    loop = asyncio.get_running_loop()
    sock = await connected(url)
    key = base64.b64encode(os.urandom(16)).decode()
    await loop.sock_sendall(
        sock,
        f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        f"sec-websocket-version: 13\r\nsec-websocket-key: {key}\r\n\r\n".encode(),
    )
    received = b""
    while b"\r\n\r\n" not in received:
        received += await loop.sock_recv(sock, 1024)
    assert received.startswith(b"HTTP/1.1 101 "), received
    await loop.sock_sendall(sock, frame({"type": "response.create", **fields}))
    return SlowClient(sock)


async def chat(url: str, **fields: Any) -> SlowClient:
    body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}
    return await over_http(url, request("POST", "/v1/chat/completions", body))


async def responses(url: str, **fields: Any) -> SlowClient:
    body = {"model": "gpt-oss", "input": "Hi", "stream": True, "store": False, **fields}
    return await over_http(url, request("POST", "/v1/responses", body))


async def messages(url: str, **fields: Any) -> SlowClient:
    # The flood in a test is all reasoning or all text, so both must be visible.
    body = {"model": "gpt-oss", "max_tokens": 100_000, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    body |= {"thinking": {"type": "adaptive"}, **fields}
    return await over_http(url, request("POST", "/v1/messages", body))


async def websocket(url: str, **fields: Any) -> SlowClient:
    return await over_websocket(url, "/v1/responses", {"model": "gpt-oss", "input": "Hi", "store": False, **fields})


SURFACES: dict[str, Callable[..., Any]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "websocket": websocket,
}
