"""Invalid tools in the list of a server, replaced so that the other tools remain usable."""

from __future__ import annotations

from typing import Any, Final

# Member of the metadata of a tool that states why it cannot be used.
INVALID: Final = "unisono/invalid"
_NO_SCHEMA: Final = "Its `inputSchema` is not a JSON schema with the type `object`."


def replace_invalid_tools(result: dict[str, Any]) -> None:
    """Replace each invalid tool in a list by a stub with the same name and with the reason.

    Of the other tools, only the members that the gateway uses are retained, so that no other member can be invalid.
    """
    tools = result.get("tools")
    if isinstance(tools, list):
        result["tools"] = [_checked(tool if isinstance(tool, dict) else {}) for tool in tools]


def _checked(tool: dict[str, Any]) -> dict[str, Any]:
    name, schema = tool.get("name"), tool.get("inputSchema")
    checked: dict[str, Any] = {"name": name if isinstance(name, str) else "", "inputSchema": schema}
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return {**checked, "inputSchema": {"type": "object"}, "_meta": {INVALID: _NO_SCHEMA}}
    if isinstance(description := tool.get("description"), str):
        checked["description"] = description
    if isinstance(hints := tool.get("annotations"), dict):
        checked["annotations"] = {
            key: value for key, value in hints.items() if isinstance(value, str if key == "title" else bool)
        }
    return checked
