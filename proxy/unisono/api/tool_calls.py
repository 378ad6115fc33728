"""Ids of tool calls, and their arguments as JSON values, in all APIs.

The gateway gives each call one id. Messages shows this id with a different prefix. A client may continue a session in a
different API, so every API accepts the call ids of all APIs.

A client sends arguments back with its next request. Therefore arguments that are emitted as a JSON value must satisfy
the limits of a request body, which are stricter than JSON. Other arguments remain text.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from unisono.api.body import MAX_DEPTH
from unisono.core.json_syntax import is_deeper

# Prefix of call ids inside the gateway, in Chat Completions and in Responses. The other prefixes are those of Messages.
GATEWAY_PREFIX: Final = "call_"
# Prefix of the id of a call that the client runs.
CLIENT_TOOL_PREFIX: Final = "toolu_"
# Prefix of the id of a call that the gateway runs with a tool of its own.
SERVER_TOOL_PREFIX: Final = "srvtoolu_"
# Prefix of the id of a call that the gateway runs on an MCP server from the request.
MCP_TOOL_PREFIX: Final = "mcptoolu_"


def to_messages_id(call_id: str, prefix: str = CLIENT_TOOL_PREFIX) -> str:
    """Convert a call id of the gateway to the call id that Messages shows."""
    return prefix + call_id.removeprefix(GATEWAY_PREFIX)


def to_gateway_id(client_id: str) -> str:
    """Convert a call id from a client to the call id of the gateway; other ids are unchanged."""
    for prefix in (CLIENT_TOOL_PREFIX, SERVER_TOOL_PREFIX, MCP_TOOL_PREFIX):
        if client_id.startswith(prefix):
            return GATEWAY_PREFIX + client_id.removeprefix(prefix)
    return client_id


# Nesting levels of a request body that surround the arguments of an earlier call, plus a margin.
SURROUNDING_LEVELS: Final = 10
# Maximum nesting depth of arguments that are emitted as a JSON value. orjson parses 1,024 levels, but writes only 254.
MAX_ARGUMENT_LEVELS: Final = MAX_DEPTH - SURROUNDING_LEVELS


def to_value(arguments: str) -> Any:
    """Parse arguments. Return {} for blank text.

    Returns the text itself if it is not valid JSON, or if no request may contain its value.
    """
    if not arguments.strip():
        return {}
    if is_deeper(arguments, MAX_ARGUMENT_LEVELS):
        return arguments
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
