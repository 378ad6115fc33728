"""Tool arguments in the form that the MCP host takes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from unisono.core.conversation import Json
from unisono.core.server_tool_arguments import ToolArguments, read_arguments


def sent(arguments: Mapping[str, Json]) -> ToolArguments:
    return read_arguments("", json.dumps(arguments))
