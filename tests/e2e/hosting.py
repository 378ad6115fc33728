"""A gateway with a real tool server behind it: what the model is to say to call its tools, and what came of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.e2e.responses import THOUGHT, Json, Line, line
from tests.e2e.wires import WIRES, Wire
from tests.mcp.conftest import Upstream

DOCS: Json = {"type": "mcp", "server_label": "docs"}
"""The operator's server, as a request names it."""


def calls(tool: str, thought: str = THOUGHT, **arguments: Any) -> str:
    """What the model says to call a tool of the server `docs`."""
    said = json.dumps(arguments, separators=(",", ":"))
    return f"{thought}<|channel|>commentary to=functions.docs__{tool} <|constrain|>json<|message|>{said}<|call|>"


def result(tool: str, output: str) -> str:
    """How what a tool said stands in a prompt."""
    return f"<|start|>functions.docs__{tool} to=assistant<|channel|>commentary<|message|>{output}<|end|>"


def hosts(upstream: Upstream, way: str = "modern", **entry: Any) -> Json:
    """The configuration that has the server as `docs`; nobody is asked unless the entry says so."""
    return {"mcp_servers": {"docs": {"url": upstream.urls[way], "require_approval": "never", **entry}}}


@asynccontextmanager
async def desk(
    upstream: Upstream, wire: Wire = WIRES["vllm"], *, entry: Json | None = None, **sections: Any
) -> AsyncIterator[Line]:
    """A running gateway with the server as `docs`, whose requests name it."""
    async with line(wire, **{**hosts(upstream, **(entry or {})), **sections}) as here:
        here.more = {"tools": [DOCS]}
        yield here


def made(response: Json, kind: str = "mcp_call") -> list[Json]:
    """The items of a kind that a response made."""
    return [item for item in response["output"] if item["type"] == kind]
