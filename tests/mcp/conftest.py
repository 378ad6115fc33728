"""Fixtures with real MCP servers on real sockets, and an MCP host that must leave no tasks."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from unisono.core.tool_host import Command, ToolServer, ToolTransport
from unisono.mcp import McpHost

SCRIPT = Path(__file__).with_name("upstream.py")

TRANSPORTS = ("modern", "modern_json", "legacy", "legacy_json", "stateless", "sse", "stdio")
HTTP_TRANSPORTS = TRANSPORTS[:5]
# Each test over stdio starts a process that imports the SDK, two seconds of processor time.
SLOW_STDIO = pytest.param("stdio", marks=pytest.mark.slow)


@dataclass(frozen=True)
class Upstream:
    """MCP server with several transports; it notes each call that it starts in a file."""

    urls: dict[str, str]
    notes: Path

    def server(self, name: str, **fields: object) -> ToolServer:
        """Return a server entry of the operator, labelled like the transport."""
        if name == "stdio":
            command = Command((sys.executable, str(SCRIPT), "stdio"), {"UPSTREAM_NOTES": str(self.notes.parent)})
            entry = ToolServer(name, command=command, transport=ToolTransport.STDIO, configured=True)
        else:
            transport = ToolTransport.SSE if name == "sse" else ToolTransport.STREAMABLE_HTTP
            entry = ToolServer(name, self.urls[name], transport=transport, configured=True)
        return replace(entry, **fields)  # type: ignore[arg-type]

    def noted(self, about: str) -> list[str]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line for line in lines if about in line]

    async def until_noted(self, line: str, within: float = 5.0) -> None:
        async with asyncio.timeout(within):
            while line not in self.noted(line):
                await asyncio.sleep(0.01)


@pytest.fixture(scope="session", autouse=True)
def _import_sdk() -> None:
    """Import the SDK once, so that no test is timed with it."""
    importlib.import_module("unisono.mcp.calls")


class start_upstream:  # noqa: N801 - used like a function
    """Start the server as a process; a context manager with the value `(process, upstream)`."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def __enter__(self) -> tuple[subprocess.Popen[str], Upstream]:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "http"],
            env={"UPSTREAM_NOTES": str(self._notes), "PATH": "/usr/bin:/bin"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        addresses = json.loads(self.process.stdout.readline())
        return self.process, Upstream(addresses, Path(addresses.pop("notes")))

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
async def host() -> AsyncIterator[McpHost]:
    host = McpHost()
    yield host
    await host.aclose()
    assert_no_tasks_left()


def assert_no_tasks_left() -> None:
    """Assert that the current task is the only one left."""
    assert not asyncio.all_tasks() - {asyncio.current_task()}
