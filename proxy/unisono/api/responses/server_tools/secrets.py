"""Encryption of tool server secrets in stored background requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from unisono.api.responses.server_tools.mcp_spec import MCP
from unisono.api.summary import ItemSealing
from unisono.core.conversation import UserMessage
from unisono.errors import StoreUnreadable

SECRET = frozenset({"authorization", "headers", "server_url"})
SEALED = "sealed"


def has_secrets(body: Mapping[str, Any]) -> bool:
    """Return True if the body has secrets, or fields in the gateway's sealed form."""
    return any(_secrets(tool) or _is_sealed(tool) for tool in body.get("tools") or ())


def concealed(body: Mapping[str, Any], seals: ItemSealing, tenant: str) -> dict[str, Any]:
    """Return a request body with the secrets of its MCP tools encrypted, for the store."""
    return {**body, "tools": [_encrypted_tool(tool, seals, tenant) for tool in body.get("tools") or ()]}


def decrypted(body: Mapping[str, Any], seals: ItemSealing, tenant: str) -> dict[str, Any]:
    """Return a stored request body with the secrets of its MCP tools decrypted.

    Raises StoreUnreadable if the gateway's key has changed.
    """
    return {**body, "tools": [_decrypted_tool(tool, seals, tenant) for tool in body.get("tools") or ()]}


def is_concealed(body: Mapping[str, Any]) -> bool:
    return any(_is_sealed(tool) for tool in body.get("tools") or ())


def _is_sealed(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == MCP and SEALED in tool


def _secrets(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != MCP:
        return {}
    return {name: value for name, value in tool.items() if name in SECRET and value is not None}


def _encrypted_tool(tool: Any, seals: ItemSealing, tenant: str) -> Any:
    secrets = _secrets(tool)
    if not secrets and not _is_sealed(tool):
        return tool
    rest = {name: value for name, value in tool.items() if name not in secrets and name != SEALED}
    if not secrets:
        return rest
    return rest | {SEALED: seals.seal(tenant, [UserMessage(orjson.dumps(secrets).decode())])}


def _decrypted_tool(tool: Any, seals: ItemSealing, tenant: str) -> Any:
    if not _is_sealed(tool):
        return tool
    opened = seals.open(tenant, str(tool[SEALED]))
    if not opened or not isinstance(opened[0], UserMessage):
        raise StoreUnreadable("The tool server secrets in the stored request cannot be decrypted.")
    rest = {name: value for name, value in tool.items() if name != SEALED}
    return rest | orjson.loads(opened[0].text)
