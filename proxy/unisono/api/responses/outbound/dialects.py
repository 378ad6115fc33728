"""Two ways to say the same: OpenAI's Responses and Open Responses. Everything is made in OpenAI's form; a dialect
renames it on the way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.api.error_responses import to_body
from unisono.api.responses.input_items import PREFIX
from unisono.api.responses.items import Wire
from unisono.errors import InvalidRequest, UnisonoError


def _codes(kind: type[UnisonoError]) -> frozenset[str]:
    return frozenset({kind.code}).union(*(_codes(inner) for inner in kind.__subclasses__()))


CLIENT_CODES = _codes(InvalidRequest)
"""Codes of errors that are the client's own."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """`events` are names that differ, and names that begin with one of `own` get our own prefix. `types` are the item
    types there are, None for any: others stand behind our own prefix. `nested_errors` puts an error into an object of
    its own in a stream."""

    name: str
    events: Mapping[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    types: frozenset[str] | None = None
    tools: frozenset[str] | None = None
    nested_errors: bool = False

    def event(self, name: str) -> str:
        if name.startswith(self.own):
            return PREFIX + name.removeprefix("response.")
        return self.events.get(name, name)

    def item(self, shown: Mapping[str, Any]) -> Wire:
        return _typed(shown, self.types)

    def tool(self, tool: Mapping[str, Any]) -> Wire:
        return _typed(tool, self.tools)

    def error(self, error: UnisonoError) -> Wire:
        """The fields of an `error` event but its number."""
        body = to_body(error)
        if self.nested_errors:
            return {"type": "error", **body}
        inner = body["error"]
        return {"type": "error", "code": inner["code"], "message": inner["message"], "param": inner["param"]}

    def translated(self, event: Wire) -> Wire:
        """An event in OpenAI's form in this one."""
        name = event["type"]
        if name == "error":
            if not self.nested_errors:
                return event
            inner = {key: value for key, value in event.items() if key not in ("type", "sequence_number")}
            kind = "invalid_request_error" if inner.get("code") in CLIENT_CODES else "server_error"
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


def _typed(value: Mapping[str, Any], known: frozenset[str] | None) -> Wire:
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
    own=("response.custom_tool_call_input.", "response.mcp_", "response.web_search_", "response.code_interpreter_"),
    types=frozenset({"message", "function_call", "function_call_output", "reasoning", "compaction"}),
    tools=frozenset({"function"}),
    nested_errors=True,
)
