"""Server tools in `tool_choice`: named by server label, or by kind for builtin tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unisono.api.builtin_tools import builtin_for, missing_setting
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.tool_choice import SERVER, HostedTool, NamedTool, OfferedTools, not_declared
from unisono.api.tools import Toolbox
from unisono.core.tools import ToolServer
from unisono.errors import UnsupportedValue

CHOICE: Final = "tool_choice"


def on_offer(request: ResponsesRequest, toolbox: Toolbox, servers: Sequence[ToolServer]) -> OfferedTools:
    """Return the tools that the request's `tool_choice` can name."""
    labels = {server.label for server in servers if not server.builtin}
    builtins = {server.builtin: server.label for server in servers if server.builtin}
    declared = {builtin_for(tool.type) or tool.type for tool in request.tools or ()}

    def hosted(tool: NamedTool) -> HostedTool | None:
        if tool.kind == SERVER:
            if tool.server not in labels:
                raise not_declared(tool, CHOICE)
            return tool.server, tool.name or None
        builtin = builtin_for(tool.kind)
        if (builtin or tool.kind) not in declared:
            raise not_declared(tool, CHOICE)
        label = builtins.get(builtin)
        if label is None and request.tool_choice is not None and request.tool_choice.one:
            setting = missing_setting(tool.kind)
            needs = f"; the operator can enable them with `{setting}`" if setting else ""
            raise UnsupportedValue(f"'{CHOICE}': tools of type '{tool.kind}' are not available{needs}.", param=CHOICE)
        return None if label is None else (label, None)

    return OfferedTools(toolbox, hosts=bool(servers), hosted=hosted)
