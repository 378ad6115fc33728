"""Server tools of a request, and tools that are unavailable.

Anthropic's server tools are available if the operator configured a server for the corresponding tool that gpt-oss
was trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from unisono.api.builtin_tools import BROWSER, PYTHON, SETTING, builtin_notes, to_builtin_servers
from unisono.api.messages.client_tools import client_tool
from unisono.api.messages.deferred_tools import is_search, is_searched, server_search
from unisono.api.messages.schema import CUSTOM, ChoiceSpec, MessagesInput, MessagesTool
from unisono.api.tool_choice import FUNCTIONS, ChoiceMode, HostedTool, NamedTool, OfferedTools, ToolChoice, to_choice
from unisono.api.tool_search import with_search
from unisono.api.tools import DeclaredTool, FunctionSpec, Toolbox
from unisono.core.tools import ToolFilter, ToolServer
from unisono.engine.request import Choice, ServerTools
from unisono.errors import UnsupportedValue

# Types of server tools, with the corresponding builtin tool.
KINDS: Final = (
    (re.compile(r"web_(search|fetch)(_\d{8})?"), BROWSER),
    (re.compile(r"code_execution(_\d{8})?"), PYTHON),
)

MODES: Final[Mapping[str, ChoiceMode]] = {
    "auto": ChoiceMode.AUTO,
    "any": ChoiceMode.REQUIRED,
    "tool": ChoiceMode.REQUIRED,
    "none": ChoiceMode.NONE,
}
# Fields of server tools that need no note.
MEANT: Final = frozenset({"cache_control", "max_uses"})


def builtin_for(kind: str) -> str:
    """Return the builtin tool for a tool type, or ""."""
    return next((builtin for pattern, builtin in KINDS if pattern.fullmatch(kind)), "")


def to_servers(
    request: MessagesInput, trained: Mapping[str, ToolServer], *, owner: str, session: str
) -> tuple[ToolServer, ...]:
    """Return the servers for the request's server tools, if the operator has `trained` ones.

    This API has no approvals, so tools that require one are unavailable.
    """
    builtins = [builtin_for(tool.type) for tool in request.tools or ()]
    return tuple(
        replace(server, allowed=(server.allowed or ToolFilter()) & ToolFilter(unasked=server.approval))
        for server in to_builtin_servers(builtins, trained, owner=owner, session=session)
    )


def declared(request: MessagesInput, hosted: frozenset[str]) -> Iterator[DeclaredTool]:
    """Yield the tools that are functions for the model, and unavailable ones.

    Builtin tools in `hosted` and a search that finds tools are available without being functions, and are skipped.
    """
    has_search = is_searched(request)
    for position, tool in enumerate(request.tools or ()):
        at = f"tools.{position}"
        builtin = builtin_for(tool.type)
        if tool.type == CUSTOM:
            spec = FunctionSpec.model_construct(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            )
            yield DeclaredTool("function", at, at, spec, schema_field="input_schema")
        elif (client := client_tool(tool.type)) is not None:
            yield DeclaredTool("function", at, at, client.function(tool.name, tool.model_extra or {}))
        elif builtin not in hosted and not (has_search and is_search(tool.type)):
            yield DeclaredTool(tool.type, at, setting=SETTING + builtin if builtin else "")


def notes_on(tools: Sequence[MessagesTool], hosted: frozenset[str]) -> Iterator[str]:
    for position, tool in enumerate(tools):
        if builtin_for(tool.type) in hosted:
            fields = {name: value for name, value in (tool.model_extra or {}).items() if name not in MEANT}
            yield from builtin_notes(f"tools.{position}", fields)


def bounded(server_tools: ServerTools, tools: Sequence[MessagesTool]) -> ServerTools:
    """Limit the calls by the sum of `max_uses`.

    This applies if every server tool has one and no other server is used.
    """
    served = [tool for tool in tools if builtin_for(tool.type)]
    uses = [most for tool in served if isinstance(most := (tool.model_extra or {}).get("max_uses"), int) and most > 0]
    if len(uses) < len(served) or len(served) < len(server_tools.servers):
        return server_tools
    return replace(server_tools, max_calls=sum(uses))


def with_server_tools(
    server_tools: ServerTools | None,
    request: MessagesInput,
    toolbox: Toolbox,
    served: Sequence[ToolServer],
    pause_after: int | None,
) -> ServerTools | None:
    """Set the emitted servers and the limits.

    The answer may pause only if the client sees all calls, because only then can it be continued.
    """
    search = server_search(request, toolbox)
    if server_tools is None:
        return with_search(None, search)
    server_tools = bounded(server_tools, request.tools or ())
    labels = frozenset(server.label for server in served)
    seen = all(server.label in labels for server in server_tools.servers)
    return with_search(replace(server_tools, visible=labels, pause_after=pause_after if seen else None), search)


def requested_choice(spec: ChoiceSpec | None, tools: Sequence[MessagesTool]) -> ToolChoice | None:
    if spec is None:
        return None
    if spec.type != "tool":
        return ToolChoice(MODES[spec.type])
    others = (tool.type for tool in tools if tool.name == spec.name and client_tool(tool.type) is None)
    kind = next((kind for kind in others if kind != CUSTOM), FUNCTIONS[0])
    return ToolChoice(ChoiceMode.REQUIRED, (NamedTool(kind, spec.name or ""),), one=True)


def to_server_tool_choice(choice: ToolChoice | None, toolbox: Toolbox, servers: Sequence[ToolServer]) -> Choice | None:
    """Return the tool choice. Raises InvalidRequest and UnsupportedValue that name the field."""
    labels = {server.builtin: server.label for server in servers if server.builtin}

    def hosted(tool: NamedTool) -> HostedTool:
        builtin = builtin_for(tool.kind)
        if (label := labels.get(builtin)) is None:
            needs = f"; the operator can enable them with `{SETTING}{builtin}`" if builtin else ""
            raise UnsupportedValue(
                f"'tool_choice': tools of type '{tool.kind}' are not available{needs}.", param="tool_choice"
            )
        return label, None

    return to_choice(choice, OfferedTools(toolbox, hosts=bool(servers), hosted=hosted))
