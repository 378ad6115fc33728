"""Distribution of new connections among processes."""

from __future__ import annotations

import asyncio
import socket
from tempfile import TemporaryFile

import pytest

from unisono.server import accept_balancer
from unisono.server.accept_balancer import Accepting, AcceptingProcess, Loads

LEFT_LYING_S = 0.2


async def test_a_process_with_more_connections_accepts_each_new_one_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accept_balancer, "LEFT_LYING_S", LEFT_LYING_S)
    now = asyncio.get_running_loop().time
    accepted: asyncio.Queue[float] = asyncio.Queue()

    async def connect(connection: socket.socket) -> None:
        connection.close()
        accepted.put_nowait(now())

    with socket.create_server(("127.0.0.1", 0)) as listener, TemporaryFile() as memory:
        address = listener.getsockname()
        process = AcceptingProcess(Loads(memory.fileno(), 2), 0, 100)
        accepting = Accepting(listener, process, connect, connections=[object()])
        accepting.start()
        with socket.create_connection(address):
            await asyncio.sleep(0.02)
            # Meanwhile, the process without connections accepts it.
            listener.accept()[0].close()
        await asyncio.sleep(1.5 * LEFT_LYING_S)
        assert accepted.empty()
        for _ in range(2):
            started = now()
            with socket.create_connection(address):
                async with asyncio.timeout(10):
                    assert await accepted.get() - started >= LEFT_LYING_S
        accepting.stop()


@pytest.mark.parametrize("other", [0, 1], ids=["another has room", "all are full"])
async def test_a_full_process_leaves_a_connection_to_one_with_room(monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    monkeypatch.setattr(accept_balancer, "FULL_LEFT_LYING_S", LEFT_LYING_S)
    now = asyncio.get_running_loop().time
    accepted: asyncio.Queue[float] = asyncio.Queue()

    async def connect(connection: socket.socket) -> None:
        connection.close()
        accepted.put_nowait(now())

    with socket.create_server(("127.0.0.1", 0)) as listener, TemporaryFile() as memory:
        loads = Loads(memory.fileno(), 2)
        loads.set_load(1, other)
        accepting = Accepting(listener, AcceptingProcess(loads, 0, 1), connect, connections=[object()])
        accepting.start()
        started = now()
        with socket.create_connection(listener.getsockname()):
            async with asyncio.timeout(10):
                waited_s = await accepted.get() - started
        accepting.stop()
    assert (waited_s >= LEFT_LYING_S) is (other == 0)
