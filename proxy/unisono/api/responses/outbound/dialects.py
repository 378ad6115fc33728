"""Dialects of the wire form: OpenAI's Responses and Open Responses.

All objects are built in OpenAI's form; a dialect translates them on output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from unisono.api.error_responses import to_body
from unisono.api.responses.input_items import PREFIX
from unisono.api.responses.items import Wire
from unisono.core.frozen import dataclass
from unisono.errors import UnisonoError


def _types(kind: type[UnisonoError] = UnisonoError) -> dict[str, str]:
    """Return the type of each error code of a class and its subclasses."""
    types = {kind.code: kind.type}
    for inner in kind.__subclasses__():
        types = _types(inner) | types
    return types


@dataclass(frozen=True, slots=True)
class Dialect:
    """Translation rules of a dialect.

    `events` maps OpenAI's event names to names that differ in the dialect. `undefined_events` are prefixes of event
    names that the dialect does not define; such events get this gateway's prefix. Item types that are not in `types`,
    and tool types that are not in `tools`, get the prefix too; None allows all types. If `nested_errors` is True, an
    error event has the fields of the error in an object `error`.
    """

    name: str
    events: Mapping[str, str] = field(default_factory=dict)
    undefined_events: tuple[str, ...] = ()
    types: frozenset[str] | None = None
    tools: frozenset[str] | None = None
    nested_errors: bool = False

    def event(self, name: str) -> str:
        if name.startswith(self.undefined_events):
            return PREFIX + name.removeprefix("response.")
        return self.events.get(name, name)

    def item(self, wire: Mapping[str, Any]) -> Wire:
        return _known_type(wire, self.types)

    def tool(self, tool: Mapping[str, Any]) -> Wire:
        return _known_type(tool, self.tools)

    def error(self, error: UnisonoError) -> Wire:
        """Return the fields of an `error` event without its number."""
        body = to_body(error)
        if self.nested_errors:
            return {"type": "error", **body}
        inner = body["error"]
        return {"type": "error", "code": inner["code"], "message": inner["message"], "param": inner["param"]}

    def translated(self, event: Wire) -> Wire:
        """Return an event in this dialect; `event` has OpenAI's names and types."""
        name = event["type"]
        if name == "error":
            if not self.nested_errors:
                return event
            inner = {key: value for key, value in event.items() if key not in ("type", "sequence_number")}
            # Looked up for each error, because hooks define further classes of errors.
            kind = _types().get(str(inner.get("code")), UnisonoError.type)
            return {"type": "error", "sequence_number": event["sequence_number"], "error": {"type": kind, **inner}}
        event = {**event, "type": self.event(name)}
        if "item" in event:
            event["item"] = self.item(event["item"])
        if "response" in event:
            response = event["response"]
            event["response"] = {
                **response,
                "output": [self.item(item) for item in response["output"]],
                "tools": [self.tool(tool) for tool in response["tools"]],
            }
        return event


def _known_type(value: Mapping[str, Any], known: frozenset[str] | None) -> Wire:
    if known is None or value["type"] in known:
        return dict(value)
    return {**value, "type": f"{PREFIX}{value['type']}"}


OPENAI = Dialect("openai")
OPEN_RESPONSES = Dialect(
    "open-responses",
    events={
        "response.reasoning_text.delta": "response.reasoning.delta",
        "response.reasoning_text.done": "response.reasoning.done",
    },
    undefined_events=(
        *("response.custom_tool_call_input.", "response.shell_call_", "response.mcp_"),
        *("response.web_search_", "response.code_interpreter_"),
    ),
    types=frozenset({"message", "function_call", "function_call_output", "reasoning", "compaction"}),
    tools=frozenset({"function"}),
    nested_errors=True,
)
