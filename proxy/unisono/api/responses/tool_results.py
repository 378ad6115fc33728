"""Results of tools in the input, and comparison of returned calls with stored ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from unisono.core.conversation import ToolResult
from unisono.core.state_store import StoredItem


def output_texts(output: Any) -> Iterator[str]:
    """Yield the texts of a result: one for each command of `shell`, and one for any other tool."""
    yield from map(_text, output if isinstance(output, list) else [output])


def _text(part: Any) -> str:
    match part:
        case None:
            return ""
        case str():
            return part
        case {"stdout": stdout, "stderr": stderr}:
            return "\n".join(str(text) for text in (stdout, stderr, _ending(part.get("outcome"))) if text)
        case _:
            return orjson.dumps(part).decode()


def _ending(outcome: Any) -> str:
    """Describe the failure of a command; return "" if the command succeeded."""
    match outcome:
        case {"type": "exit", "exit_code": int(code)} if code:
            return f"exit code {code}"
        case {"type": "timeout"}:
            return "The command exceeded its time limit."
        case _:
            return ""


def error_text(error: object) -> str:
    """Return the text of an MCP error, which may be a string, an object or other JSON."""
    match error:
        # The pattern `{}` would match every object.
        case empty if not empty:
            return ""
        case str():
            return error
        case {"content": [{"text": str(text)}]} | {"message": str(text)}:
            return text
        case _:
            return orjson.dumps(error).decode()


def is_same_mcp_call(stored: StoredItem, arguments: str, output: str) -> bool:
    """Return True if an MCP call that the client sent back matches the stored call.

    An empty output and reformatted arguments match too, because Pydantic AI sends calls in this form.
    """
    results = [item.output for item in stored.meaning if isinstance(item, ToolResult)]
    return same_json(str(stored.wire.get("arguments")), arguments) and (results == [output] or not output)


def is_same_call(stored: StoredItem, call_id: str | None, details: Any) -> bool:
    """Return whether a returned call of a client's built-in tool matches the stored one."""
    wire = stored.wire
    return wire.get("call_id") == call_id and details in (wire.get("action"), wire.get("operation"))


def same_json(one: str, other: str) -> bool:
    """Return whether two texts are equal, or contain equal JSON."""
    if one == other:
        return True
    try:
        return bool(orjson.loads(one) == orjson.loads(other))
    except orjson.JSONDecodeError:
        return False
