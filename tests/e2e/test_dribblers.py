"""Five hundred clients that send single bytes, among honest clients.

The honest ones are answered, the others are disconnected, and no resources leak.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.processes import MB, Holdings, holdings
from tests.e2e.replicas import Replica, replica
from tests.fakes import FakeVllm
from unisono.harmony.encoding import load_encoding

DRIBBLERS = 500
HONEST = 50
HEADERS_S, BODY_S = 2.0, 3.0
PAUSE_S = 0.2
# On an idle machine, the last dribbler is disconnected one second after its deadline.
GONE_S = 30.0
BODY: dict[str, Any] = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
KINDS = {
    "silent": b"",
    "in the first line": b"GET /v1",
    "in a header": HEAD + b"x-a: ",
    "before the body": HEAD + b"content-length: 100000\r\n\r\n",
    "in the body": HEAD + b'content-length: 100000\r\n\r\n{"model": "',
    "in a chunk": HEAD + b'transfer-encoding: chunked\r\n\r\n20000\r\n{"model": "',
}


async def dribble(port: int, start: bytes) -> None:
    """Send single bytes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(OSError):
            writer.write(start)
            while not await ended(reader):
                if start:
                    writer.write(b"x")
    finally:
        writer.transport.abort()


async def ended(reader: asyncio.StreamReader) -> bool:
    """Read for `PAUSE_S` and return whether the server has closed the connection."""
    try:
        async with asyncio.timeout(PAUSE_S):
            while await reader.read(4096):
                pass
    except TimeoutError:
        return False
    return True


async def honest(session: aiohttp.ClientSession, url: str, done: asyncio.Event) -> int:
    """Send requests until `done`; return the number of answers, all of which must succeed."""
    answers = 0
    while not done.is_set():
        stream = bool(answers % 2)
        async with session.post(f"{url}/v1/chat/completions", json={**BODY, "stream": stream}) as answer:
            body = await answer.read()
            assert answer.status == 200, body
            assert b"Done" in body
            assert not stream or body.endswith(b"data: [DONE]\n\n")
        answers += 1
        await asyncio.sleep(0.05)
    return answers


async def settled(running: Replica, before: Holdings) -> Holdings:
    async with asyncio.timeout(GONE_S):
        while (current := holdings(running.pid)).descriptors > before.descriptors:
            await asyncio.sleep(0.05)
    return current


async def round_of(running: Replica) -> list[int]:
    port, done = int(running.url.rpartition(":")[2]), asyncio.Event()
    kinds = cycle(KINDS.values())
    async with aiohttp.ClientSession() as session:
        honest_clients = [asyncio.create_task(honest(session, running.url, done)) for _ in range(HONEST)]
        dribbling = [asyncio.create_task(dribble(port, next(kinds))) for _ in range(DRIBBLERS)]
        try:
            async with asyncio.timeout(GONE_S):
                await asyncio.gather(*dribbling)
            done.set()
            return await asyncio.gather(*honest_clients)
        finally:
            for task in (*honest_clients, *dribbling):
                task.cancel()
            await asyncio.gather(*honest_clients, *dribbling, return_exceptions=True)


@pytest.mark.slow
async def test_dribbling_clients_are_disconnected_without_harm_to_others(tmp_path: Path) -> None:
    done = load_encoding().encode_marked("<|channel|>final<|message|>Done.<|return|>")
    async with FakeVllm(tokens=done) as fake:
        entry = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": fake.url}}
        times = {"header_timeout_s": HEADERS_S, "body_timeout_s": BODY_S}
        config = {"model_list": [entry], "store": {"url": "memory://"}, "unisono": times}
        async with replica(tmp_path, config) as running:
            before = holdings(running.pid)
            # The first round grows pools and the allocator to their final size.
            await round_of(running)
            warm = await settled(running, before)
            for _ in range(2):
                assert min(await round_of(running)) > 0
            after = await settled(running, before)
            print(json.dumps({"memory": [usage.memory // MB for usage in (before, warm, after)]}))
            assert after.memory - warm.memory < 10 * MB
            assert after.threads <= warm.threads
            assert '"level": "error"' not in running.log
