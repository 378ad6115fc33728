"""Five hundred clients that send a byte now and then, beside honest ones: these are all answered, those are cut off,
and nothing of either is left."""

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
GONE_S = 30.0
"""On an idle machine the last dribbler is gone a second behind its deadline."""
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


async def dribble(port: int, begun: bytes) -> None:
    """Until it is cut off."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(OSError):
            writer.write(begun)
            while not await ended(reader):
                if begun:
                    writer.write(b"x")
    finally:
        writer.transport.abort()


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the other side closed, after a pause in which it did not."""
    try:
        async with asyncio.timeout(PAUSE_S):
            while await reader.read(4096):
                pass
    except TimeoutError:
        return False
    return True


async def honest(session: aiohttp.ClientSession, url: str, done: asyncio.Event) -> int:
    """How many answers it got while there were dribblers. None is refused."""
    answers = 0
    while not done.is_set():
        stream = bool(answers % 2)
        async with session.post(f"{url}/v1/chat/completions", json={**BODY, "stream": stream}) as answer:
            said = await answer.read()
            assert answer.status == 200, said
            assert b"Done" in said
            assert not stream or said.endswith(b"data: [DONE]\n\n")
        answers += 1
        await asyncio.sleep(0.05)
    return answers


async def settled(running: Replica, before: Holdings) -> Holdings:
    async with asyncio.timeout(GONE_S):
        while (now := holdings(running.pid)).descriptors > before.descriptors:
            await asyncio.sleep(0.05)
    return now


async def round_of(running: Replica) -> list[int]:
    port, done = int(running.url.rpartition(":")[2]), asyncio.Event()
    kinds = cycle(KINDS.values())
    async with aiohttp.ClientSession() as session:
        served = [asyncio.create_task(honest(session, running.url, done)) for _ in range(HONEST)]
        dribbling = [asyncio.create_task(dribble(port, next(kinds))) for _ in range(DRIBBLERS)]
        try:
            async with asyncio.timeout(GONE_S):
                await asyncio.gather(*dribbling)
            done.set()
            return await asyncio.gather(*served)
        finally:
            for task in (*served, *dribbling):
                task.cancel()
            await asyncio.gather(*served, *dribbling, return_exceptions=True)


@pytest.mark.slow
async def test_clients_that_dribble_are_cut_off_and_nobody_else_notices(tmp_path: Path) -> None:
    done = load_encoding().encode_marked("<|channel|>final<|message|>Done.<|return|>")
    async with FakeVllm(tokens=done) as fake:
        entry = {"model_name": "gpt-oss", "litellm_params": {"model": "vllm/tiny", "api_base": fake.url}}
        times = {"header_timeout_s": HEADERS_S, "body_timeout_s": BODY_S}
        config = {"model_list": [entry], "store": {"url": "memory://"}, "unisono": times}
        async with replica(tmp_path, config) as running:
            before = holdings(running.pid)
            # The first round brings pools and the allocator to their size.
            await round_of(running)
            warm = await settled(running, before)
            for _ in range(2):
                assert min(await round_of(running)) > 0
            after = await settled(running, before)
            print(json.dumps({"memory": [one.memory // MB for one in (before, warm, after)]}))
            assert after.memory - warm.memory < 10 * MB
            assert after.threads <= warm.threads
            assert '"level": "error"' not in running.log
