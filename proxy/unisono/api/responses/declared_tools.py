"""Tools of a Responses request, declared in `tools` or by an item of `input`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Final, TypeAlias, assert_never

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import CoreSchema

from unisono.api.client_toolbox import (
    TOOL_SEARCH,
    CallForm,
    CustomSpec,
    DeclaredTool,
    FunctionSpec,
    SearchSpec,
    described,
)
from unisono.api.field_types import OpenModel, Text
from unisono.api.gateway_tools import builtin_for, missing_setting
from unisono.api.responses.client_tools import FORMS, function_of
from unisono.api.responses.server_tools.mcp_spec import MCP, McpSpec
from unisono.api.responses.server_tools.mcp_spec import to_echo as to_mcp_echo
from unisono.api.responses.server_tools.requested_approvals import MAX_NAMES

ToolSpec: TypeAlias = FunctionSpec | CustomSpec | McpSpec | SearchSpec


class ResponsesTool(OpenModel):
    """Tool declaration of any type, in the flat form of the Responses API.

    The nested form of Chat Completions is also accepted.
    """

    FLATTENED = frozenset({"spec"})

    type: Annotated[str, Field(min_length=1, max_length=64)]
    name: Text | None = None
    spec: SkipJsonSchema[ToolSpec | None] = None
    tools: list[ResponsesTool] | None = None

    def unused(self) -> Mapping[str, Any]:
        # `spec` contains the other fields. An unavailable tool gets one note instead of a note for each field.
        used = USED_FIELDS.get(self.type)
        if self.spec is not None or used is None:
            return {}
        return {name: value for name, value in (self.model_extra or {}).items() if name not in used}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return described(handler(schema), SPECS, handler)

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        if isinstance(value, dict):
            kind = value.get("type")
            if isinstance(kind, str) and kind in SPECS and isinstance(value.get(kind), dict) and "name" not in value:
                return {"type": kind, **value[kind]}
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _with_spec(cls, value: Any, handler: Any) -> Any:
        """Validate the fields specific to the tool's type, so that an error names the field's path."""
        if isinstance(value, ResponsesTool):
            return value
        if isinstance(value, dict):
            value = {key: inner for key, inner in value.items() if key != "spec"}
        tool = handler(value)
        spec = SPECS.get(tool.type)
        if spec is None:
            return tool
        fields = {"name": tool.name, **(tool.model_extra or {})}
        if tool.name is None:
            del fields["name"]
        return tool.model_copy(update={"spec": spec.model_validate(fields)})


SPECS: dict[str, type[ToolSpec]] = {
    "function": FunctionSpec,
    "custom": CustomSpec,
    MCP: McpSpec,
    TOOL_SEARCH: SearchSpec,
}


# Fields that have an effect, for tool types without a spec.
USED_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(FORMS, frozenset({"environment"})),
    "namespace": frozenset({"description"}),
}


def is_client_search(tool: ResponsesTool) -> bool:
    """Return whether a tool is a tool search that the client runs."""
    return isinstance(tool.spec, SearchSpec) and tool.spec.execution == "client"


class Searcher(Enum):
    """Component that searches for deferred tools."""

    CLIENT = "client"
    GATEWAY = "server"


def searcher_of(tools: Sequence[ResponsesTool]) -> Searcher | None:
    """Return the searcher of the deferred tools; None if `tools` contains no usable search tool."""
    if any(map(is_client_search, tools)):
        return Searcher.CLIENT
    # If the client declares a function with the name of the search, the gateway does not search.
    is_taken = any(tool.name == TOOL_SEARCH and tool.spec is not None for tool in tools)
    has_search = any(isinstance(tool.spec, SearchSpec) for tool in tools)
    return Searcher.GATEWAY if has_search and not is_taken else None


def notes_on_searches(tools: Iterable[tuple[str, ResponsesTool]]) -> Iterator[str]:
    """Yield a note for each tool search of the gateway in a request without deferred tools.

    `tools` are pairs of a field path and the tool.
    """
    for path, tool in tools:
        if isinstance(tool.spec, SearchSpec) and not is_client_search(tool):
            yield f"{path}: no effect, because the model sees all tools from the start"


def without_servers(tools: Any) -> Any:
    """Reduce each MCP server in a list of tools to its label and the names of its tools."""
    # An MCP server in an item has no effect, except that a search may have found some of its tools. The other fields
    # are not validated, so that no history is rejected. They are not stored, because they may contain secrets.
    if not isinstance(tools, list):
        return tools
    return [_server(tool) if isinstance(tool, dict) and tool.get("type") == MCP else tool for tool in tools]


def _server(tool: dict[str, Any]) -> ResponsesTool:
    names = tool.get("allowed_tools")
    names = [name for name in names if isinstance(name, str)][:MAX_NAMES] if isinstance(names, list) else None
    named: dict[str, Any] = {} if names is None else {"allowed_tools": names}
    return ResponsesTool.model_construct(type=MCP, server_label=str(tool.get("server_label") or ""), **named)


def tools_on_server(tool: ResponsesTool) -> tuple[tuple[str, str], ...]:
    """Return server label and tool name for each tool that a search has found on an MCP server."""
    # These fields were validated only for MCP servers.
    if tool.type != MCP:
        return ()
    fields = tool.model_extra or {}
    label = fields.get("server_label")
    return tuple((label, name) for name in fields.get("allowed_tools") or () if label and name)


def tool_echo(tool: ResponsesTool) -> dict[str, Any]:
    """Return a tool in the form in which clients declare tools, without secrets."""
    more = tool.model_extra or {}
    match tool.spec:
        case FunctionSpec() as spec:
            return more | {
                "type": "function",
                "name": spec.name,
                "description": spec.description,
                "parameters": spec.parameters,
                "strict": bool(spec.strict),
            }
        case CustomSpec() as spec:
            return (
                {"format": {"type": "text"}}
                | more
                | {
                    "type": "custom",
                    "name": spec.name,
                    "description": spec.description or "",
                }
            )
        case McpSpec() as spec:
            return to_mcp_echo(spec, more)
        case SearchSpec() as spec:
            return more | {"type": tool.type} | spec.model_dump(exclude_none=True)
        case None:
            named = {} if tool.name is None else {"name": tool.name}
            inner = {} if tool.tools is None else {"tools": [tool_echo(each) for each in tool.tools]}
            return more | {"type": tool.type} | named | inner
        case _:
            assert_never(tool.spec)


def declared(
    tools: Sequence[ResponsesTool], path: str, builtins: frozenset[str] = frozenset()
) -> Iterator[DeclaredTool]:
    """Yield the tools that the model can call as functions, and the unavailable tools.

    `path` is the field that contains `tools`. `builtins` holds the names of the builtin tools that a tool server
    provides. If `path` is `tools`, the function skips these builtin tools and the entries that declare MCP servers,
    because the gateway runs their calls.
    """
    for position, tool in enumerate(tools):
        at = f"{path}.{position}"
        # A namespace may contain a function that has the name of a builtin type.
        if path == "tools" and (tool.type == MCP or builtin_for(tool.type) in builtins):
            continue
        spec = tool.spec
        match spec:
            case SearchSpec():
                # The gateway's own search is a server tool.
                if is_client_search(tool):
                    yield DeclaredTool(tool.type, at, at, spec.function, form=CallForm.SEARCH)
            case FunctionSpec() | CustomSpec():
                form = CallForm.CUSTOM if isinstance(spec, CustomSpec) else CallForm.FUNCTION
                yield DeclaredTool(tool.type, at, at, spec, form=form)
            case None if (function := function_of(tool.type, tool.model_extra or {})) is not None:
                yield DeclaredTool(tool.type, at, at, function, form=FORMS[tool.type])
            case _:
                inner = tuple(declared(tool.tools or (), f"{at}.tools"))
                setting = missing_setting(tool.type)
                about = str((tool.model_extra or {}).get("description") or "")
                yield DeclaredTool(tool.type, at, at, None, tool.name or "", inner, setting=setting, description=about)
