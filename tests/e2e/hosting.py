"""A gateway with a real tool server: scripts that call its tools, and checks of the results."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.e2e.responses import THOUGHT, Json, Line, line
from tests.e2e.wires import WIRES, Wire
from tests.mcp.conftest import Upstream

# The tool of a request for the configured server.
DOCS: Json = {"type": "mcp", "server_label": "docs"}


def calls(tool: str, thought: str = THOUGHT, **arguments: Any) -> str:
    """Return model output that calls a tool of the server `docs`."""
    body = json.dumps(arguments, separators=(",", ":"))
    return f"{thought}<|channel|>commentary to=functions.docs__{tool} <|constrain|>json<|message|>{body}<|call|>"


def result(tool: str, output: str) -> str:
    """Return the rendering of a tool's output in a prompt."""
    return f"<|start|>functions.docs__{tool} to=assistant<|channel|>commentary<|message|>{output}<|end|>"


def hosts(upstream: Upstream, way: str = "modern", **entry: Any) -> Json:
    """Return a configuration with the server as `docs`, without approval unless `entry` says so."""
    return {"mcp_servers": {"docs": {"url": upstream.urls[way], "require_approval": "never", **entry}}}


@asynccontextmanager
async def desk(
    upstream: Upstream, wire: Wire = WIRES["vllm"], *, entry: Json | None = None, **sections: Any
) -> AsyncIterator[Line]:
    """Run a gateway with the server as `docs`. Every request names that server."""
    async with line(wire, **{**hosts(upstream, **(entry or {})), **sections}) as harness:
        harness.more = {"tools": [DOCS]}
        yield harness


def made(response: Json, kind: str = "mcp_call") -> list[Json]:
    """Return the items of one type in a response."""
    return [item for item in response["output"] if item["type"] == kind]
