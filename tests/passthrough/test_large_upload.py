"""Memory of the gateway process while it stores and forwards a form of a gigabyte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import gettempdir

import aiohttp
import pytest
from aiohttp import web

from tests.e2e.clients.stage import UNISONO, address_of, ended
from tests.e2e.processes import children
from tests.passthrough.test_other_modes import model
from tests.passthrough.test_transcriptions import MODE, USUAL, form

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MB = 1 << 20
UPLOAD_BYTES = 1 << 30
# Memory beyond that of a small upload. The gateway keeps pieces of the form, and the connections buffer some.
MEMORY_BYTES = 64 * MB


@asynccontextmanager
async def counting() -> AsyncIterator[tuple[str, list[int]]]:
    """Run a server that reads forms and forgets them; yield its address and the sizes of the forms."""
    sizes: list[int] = []

    async def transcribe(request: web.Request) -> web.Response:
        size = 0
        async for piece in request.content.iter_any():
            size += len(piece)
        sizes.append(size)
        return web.json_response({"text": "Said."})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "bge"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/audio/transcriptions", transcribe), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", sizes
    finally:
        await runner.cleanup()


def memory_bytes(pid: int, field: str = "VmHWM") -> int:
    """Return the memory of a process and its children; by default its peak."""
    texts = [Path(f"/proc/{each}/status").read_text() for each in (pid, *children(pid))]
    return sum(int(text.partition(f"{field}:")[2].split()[0]) * 1024 for text in texts)


async def pieces(size: int) -> AsyncIterator[bytes]:
    begin, end = form(*USUAL[:2], ("file", "a.wav", b"|")).split(b"|")
    yield begin
    for _ in range(size // MB):
        yield b"x" * MB
    yield end


async def send(url: str, size: int) -> int:
    headers = {"content-type": "multipart/form-data; boundary=limit"}
    async with aiohttp.ClientSession() as session:
        path = f"{url}/v1/audio/transcriptions"
        async with session.post(path, data=pieces(size), headers=headers) as response:
            assert response.status == 200, await response.text()
            return size


async def test_a_gigabyte_is_forwarded_in_bounded_memory_and_neighbours_are_served(tmp_path: Path) -> None:
    async with counting() as (server, sizes):
        config = {
            "model_list": [model(server, MODE)],
            "store": {"url": "memory://"},
            "unisono": {"max_upload_bytes": UPLOAD_BYTES + MB, "upload_timeout_s": 240},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        command = (UNISONO, "serve", "--config", tmp_path / "config.json", "--port", "0")
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
        try:
            url = await address_of(process, lambda: (tmp_path / "log").read_text())
            await send(url, 2 * MB)
            before = memory_bytes(process.pid, "VmRSS")
            large = asyncio.ensure_future(send(url, UPLOAD_BYTES))
            neighbours = 0
            while not large.done():
                await send(url, MB)
                neighbours += 1
                await asyncio.sleep(0.05)
            await large
            grown = memory_bytes(process.pid) - before
        finally:
            await ended(process)
    assert max(sizes) > UPLOAD_BYTES
    assert neighbours > 5
    assert grown < MEMORY_BYTES
    print(f"{grown / MB:.1f} MB for {UPLOAD_BYTES / MB:.0f} MB, {neighbours} other uploads; files in {gettempdir()}")
