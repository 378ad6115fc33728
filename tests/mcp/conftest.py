"""Real MCP servers on real sockets, and a host to reach them with that leaves nothing behind."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from unisono.core.tools import Command, ToolServer, ToolTransport
from unisono.mcp import McpHost

SCRIPT = Path(__file__).with_name("upstream.py")

WAYS = ("modern", "modern_json", "legacy", "legacy_json", "stateless", "sse", "stdio")
HTTP_WAYS = WAYS[:5]


@dataclass(frozen=True)
class Upstream:
    """One MCP server, and the ways to it. Every call that it begins is noted in a file."""

    urls: dict[str, str]
    notes: Path

    def server(self, way: str, **more: object) -> ToolServer:
        """Named by the operator, under a label of the way's name."""
        if way == "stdio":
            command = Command((sys.executable, str(SCRIPT), "stdio"), {"UPSTREAM_NOTES": str(self.notes.parent)})
            found = ToolServer(way, command=command, transport=ToolTransport.STDIO, configured=True)
        else:
            transport = ToolTransport.SSE if way == "sse" else ToolTransport.STREAMABLE_HTTP
            found = ToolServer(way, self.urls[way], transport=transport, configured=True)
        return replace(found, **more)  # type: ignore[arg-type]

    def noted(self, about: str) -> list[str]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line for line in lines if about in line]

    async def until_noted(self, line: str, within: float = 5.0) -> None:
        async with asyncio.timeout(within):
            while line not in self.noted(line):
                await asyncio.sleep(0.01)


@pytest.fixture(scope="session", autouse=True)
def _loaded() -> None:
    """The SDK takes its time, which is no test's own."""
    importlib.import_module("unisono.mcp.calls")


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    notes = tmp_path_factory.mktemp("upstream")
    with start_upstream(notes) as (_, found):
        yield found


class start_upstream:  # noqa: N801 - used like a function
    """The server as a process; `(process, upstream)` inside."""

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
        said = json.loads(self.process.stdout.readline())
        return self.process, Upstream(said, Path(said.pop("notes")))

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
    nobody_left()


def nobody_left() -> None:
    """After the end of everything no task is left but the one that looks."""
    assert not asyncio.all_tasks() - {asyncio.current_task()}
