"""Tool servers on real sockets, with the MCP client of the SDK, and a scripted web site."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import uvicorn
from aiohttp import web
from mcp.client.client import Client
from mcp_types import CallToolResult, TextContent

from unisono.toolservers.transports import ToolServer, application

Answer = Callable[[web.Request], Any]
# Address in the line that a tool server prints.
ADDRESS = re.compile(r" at (http://\S+)")


@asynccontextmanager
async def served(server: ToolServer, *, remembers: bool = False, key: str | None = None) -> AsyncIterator[str]:
    """Run a server and yield its URL."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    app = application(server, "127.0.0.1", key=key, remembers=remembers)
    running = uvicorn.Server(
        uvicorn.Config(app, log_config=None, log_level="error", ws="none", timeout_graceful_shutdown=1)
    )
    running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(running.serve(sockets=[listener]))
    while not running.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    finally:
        running.should_exit = True
        await task
        listener.close()


async def called(client: Client, tool: str, **arguments: Any) -> CallToolResult:
    result = await client.call_tool(tool, arguments)
    assert isinstance(result, CallToolResult)
    return result


def text_of(result: CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


def page(body: str, content_type: str = "text/html; charset=utf-8", **headers: str) -> Answer:
    return lambda _: web.Response(body=body.encode(), headers={"content-type": content_type, **headers})


def moved(target: str) -> Answer:
    return lambda _: web.Response(status=302, headers={"location": target})


async def endless(request: web.Request) -> web.StreamResponse:
    """Send words until the client disconnects."""
    response = web.StreamResponse(headers={"content-type": "text/plain"})
    await response.prepare(request)
    with suppress(ConnectionError):
        while True:
            await response.write(b"more and more " * 1000)
    return response


async def silent(request: web.Request) -> web.StreamResponse:
    """Start a response and never continue it."""
    response = web.StreamResponse(headers={"content-type": "text/plain"})
    await response.prepare(request)
    await asyncio.sleep(60)
    return response


def bomb(_: web.Request) -> web.Response:
    """Send a few kilobytes that decompress to many megabytes."""
    body = gzip.compress(b"a" * (64 * 1024 * 1024))
    return web.Response(body=body, headers={"content-type": "text/plain", "content-encoding": "gzip"})


@asynccontextmanager
async def website(pages: dict[str, Answer], found: Any = None) -> AsyncIterator[str]:
    """Run a web server with these pages; `/search` is a search engine with constant results."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/search" and found is not None:
            assert request.query["format"] == "json"
            return web.Response(text=found if isinstance(found, str) else json.dumps(found))
        script = pages.get(request.path)
        if script is None:
            return web.Response(status=404)
        result = script(request)
        response: web.StreamResponse = await result if asyncio.iscoroutine(result) else result
        return response

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


# The command line, started from the root of the project.
UNISONO = (sys.executable, "-m", "tests.toolservers.running")


@asynccontextmanager
async def command(*arguments: str, **environment: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """Run `unisono` with these arguments; yield the process and its output up to readiness."""
    process = await asyncio.create_subprocess_exec(
        *UNISONO, *arguments, stdout=asyncio.subprocess.PIPE, env={**os.environ, **environment}
    )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or " at http://" not in lines[-1]:
            line = await asyncio.wait_for(process.stdout.readline(), 30)
            assert line, lines
            lines.append(line.decode().strip())
        yield process, lines
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 30)


@contextmanager
def started(*arguments: str) -> Iterator[str]:
    """Run a tool server and yield its address."""
    command = [*UNISONO, "mcp", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(found[1] for line in process.stdout if (found := ADDRESS.search(line)))
    finally:
        process.terminate()
        process.communicate(timeout=30)


if __name__ == "__main__":
    from unisono.cli import main

    main()
