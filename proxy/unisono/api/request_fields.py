"""Names of request fields that the engine's errors refer to."""

from __future__ import annotations

from unisono.engine.request import RequestFields


def request_fields(conversation: str, *, tool: str = "tools.{index}", tool_schema: str = "parameters") -> RequestFields:
    """Return the fields of a surface whose conversation is in the field `conversation`."""
    return RequestFields(conversation, "tools", tool, tool_schema, "logit_bias")
