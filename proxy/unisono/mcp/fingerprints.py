"""Keys and digests that identify servers and tool lists, and the check of tool names. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

from unisono.core.tool_host import HostedTool, LeftOutTool, ToolServer

MAX_NAME_LENGTH: Final = 256


def key_of(server: ToolServer) -> str:
    """Return a key that is equal for servers that may share a connection.

    Such servers have the same address, credentials and owner. The key contains no secrets.
    """
    command, oauth = server.command, server.oauth
    facts = (
        server.owner, server.configured, server.transport, server.url, sorted(server.headers.items()),
        server.authorization, server.may_ask,
        command and (command.argv, sorted(command.environment.items()), command.directory),
        oauth and (oauth.client_id, oauth.issuer, oauth.client_secret),
    )  # fmt: skip
    return sha256(json.dumps(facts).encode()).hexdigest()


def server_key(server: ToolServer) -> str:
    """Return a key for the server itself, independent of caller and credentials.

    The key contains no secrets.
    """
    command = server.command
    facts = (
        server.configured, server.transport, server.url,
        command and (command.argv, sorted(command.environment.items()), command.directory),
    )  # fmt: skip
    return sha256(json.dumps(facts).encode()).hexdigest()


def digest_of(tools: Sequence[HostedTool]) -> str:
    """Return a digest that is equal for equal lists: same tools, same texts, same order."""
    digest = sha256()
    for tool in tools:
        digest.update(_encoded(tool))
        digest.update(b"\n")
    return digest.hexdigest()


def size_of(tool: HostedTool) -> int:
    """Return the size of a tool as JSON, in bytes."""
    return len(_encoded(tool))


def split_by_name(tools: Iterable[HostedTool]) -> tuple[tuple[HostedTool, ...], tuple[LeftOutTool, ...]]:
    """Split the tools into those with usable names and those left out."""
    named: dict[str, HostedTool] = {}
    left_out: list[LeftOutTool] = []
    for tool in tools:
        if not 0 < len(tool.name) <= MAX_NAME_LENGTH:
            left_out.append(LeftOutTool(tool, f"A tool name must have 1 to {MAX_NAME_LENGTH} characters."))
        elif not tool.name.isprintable():
            left_out.append(LeftOutTool(tool, "A tool name must contain printable characters only."))
        elif named.setdefault(tool.name, tool) is not tool:
            left_out.append(LeftOutTool(tool, "Another tool of the server has the same name."))
    return tuple(named.values()), tuple(left_out)


def _encoded(tool: HostedTool) -> bytes:
    facts = (tool.server, tool.name, tool.description, tool.schema, tool.annotations)
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
