"""Tool of type `mcp` in a request, and its echo in the response without secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import orjson
from pydantic import BeforeValidator, Field, SecretStr, field_validator

from unisono.api.compaction_summary import ItemSealing
from unisono.api.field_types import FieldInput, OpenModel, Text, refused
from unisono.api.responses.server_tools.requested_approvals import (
    ApprovalSpec,
    FilterSpec,
    ToolNames,
    to_approval,
    to_filter,
)
from unisono.core.conversation import UserMessage
from unisono.errors import StoreUnreadable

# Type of an MCP tool.
MCP = "mcp"

ServerLabel = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


class McpSpec(OpenModel):
    """An MCP server. `headers` and `authorization` are sent only to this server."""

    server_label: ServerLabel
    server_url: Annotated[Text, Field(min_length=1, max_length=2048)] | None = None
    server_description: Text | None = None
    authorization: SecretStr | None = None
    headers: dict[Text, SecretStr] | None = None
    allowed_tools: Annotated[
        FilterSpec | None, BeforeValidator(to_filter), FieldInput(FilterSpec | ToolNames | None)
    ] = None
    require_approval: Annotated[
        ApprovalSpec | None,
        BeforeValidator(to_approval),
        FieldInput(ApprovalSpec | Literal["always", "never"] | None),
    ] = None
    defer_loading: bool | None = None
    connector_id: Any = Field(None, json_schema_extra={"type": "null"})
    tunnel_id: Any = Field(None, json_schema_extra={"type": "null"})

    @field_validator("connector_id", "tunnel_id")
    @classmethod
    def _reject_unsupported(cls, value: Any) -> Any:
        if value is not None:
            raise refused("connectors and tunnels are not supported; set 'server_label' or 'server_url'")
        return value


def to_echo(spec: McpSpec, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the echo of the tool; `written` is the tool in the request.

    The address is reduced to its host, because some addresses contain a key.
    """
    deferred = {} if spec.defer_loading is None else {"defer_loading": spec.defer_loading}
    return deferred | {
        "type": MCP,
        "server_label": spec.server_label,
        "server_url": None if spec.server_url is None else _without_path(spec.server_url),
        "server_description": spec.server_description,
        "allowed_tools": written.get("allowed_tools"),
        "require_approval": written.get("require_approval"),
        "headers": None,
        "authorization": None,
    }


def _without_path(url: str) -> str:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        return "<redacted>"
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}/<redacted>"


# Fields with secrets of tool servers. These fields are encrypted in stored background requests.

SECRET = frozenset({"authorization", "headers", "server_url"})
SEALED = "sealed"


def has_secrets(body: Mapping[str, Any]) -> bool:
    """Return True if an MCP tool in the body contains a secret or a field `sealed`."""
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
        raise StoreUnreadable(
            "The MCP server secrets in the stored request cannot be decrypted: they are damaged, or this gateway has a "
            "different key."
        )
    rest = {name: value for name, value in tool.items() if name != SEALED}
    return rest | orjson.loads(opened[0].text)
