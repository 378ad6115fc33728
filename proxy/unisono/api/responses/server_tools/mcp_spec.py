"""Tool of type `mcp` in a request, and its echo in the response without secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from unisono.api.field_types import FieldInput, OpenModel, Text, invalid_field, refused
from unisono.core.tools import Approval, ToolFilter

# Type of an MCP tool.
MCP = "mcp"
MAX_NAMES = 1024

ServerLabel = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
ToolNames = Annotated[list[Text], Field(max_length=MAX_NAMES)]


class FilterSpec(OpenModel):
    tool_names: ToolNames | None = None
    read_only: bool | None = None

    @model_validator(mode="after")
    def _is_not_empty(self) -> FilterSpec:
        # An empty filter matches everything. As `never` it would disable approval for all tools by accident.
        if self.tool_names is None and self.read_only is None:
            raise invalid_field("must contain 'tool_names' or 'read_only'")
        return self

    def filter(self) -> ToolFilter:
        return ToolFilter(None if self.tool_names is None else frozenset(self.tool_names), self.read_only)


class ApprovalSpec(OpenModel):
    """Filters for tools that need approval. A single word applies to all tools."""

    always: FilterSpec | None = None
    never: FilterSpec | None = None
    word: SkipJsonSchema[str | None] = None

    def approval(self) -> Approval:
        if self.word is not None:
            return Approval(always=ToolFilter()) if self.word == "always" else Approval(otherwise=False)
        always = None if self.always is None else self.always.filter()
        never = None if self.never is None else self.never.filter()
        approval = Approval(always, never)
        return Approval(always=ToolFilter()) if approval == Approval() else approval


def _to_approval(value: Any) -> Any:
    if isinstance(value, str):
        if value not in ("always", "never"):
            raise invalid_field("must be 'always', 'never' or an object with tool filters")
        return {"word": value}
    if isinstance(value, dict):
        return {name: inner for name, inner in value.items() if name != "word"}
    return value


def _to_filter(value: Any) -> Any:
    return {"tool_names": value} if isinstance(value, list) else value


class McpSpec(OpenModel):
    """An MCP server. `headers` and `authorization` are sent only to this server."""

    server_label: ServerLabel
    server_url: Annotated[Text, Field(min_length=1, max_length=2048)] | None = None
    server_description: Text | None = None
    authorization: SecretStr | None = None
    headers: dict[Text, SecretStr] | None = None
    allowed_tools: Annotated[
        FilterSpec | None, BeforeValidator(_to_filter), FieldInput(FilterSpec | ToolNames | None)
    ] = None
    require_approval: Annotated[
        ApprovalSpec | None,
        BeforeValidator(_to_approval),
        FieldInput(ApprovalSpec | Literal["always", "never"] | None),
    ] = None
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
    return {
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
