"""Rebuild a response from its stream events, with the checks of a strict client.

Deltas must add up to their done events, done events to their items, and items to the final response.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from unisono.api.responses.outbound.serializer import WireEvent

FIRST = ("response.created", "response.queued", "response.in_progress")
TERMINAL = ("response.completed", "response.incomplete", "response.failed")

Event = dict[str, Any]

# Item types of server tools, and the fields of each that are known only at its end.
SERVER_TOOL_FIELDS = {
    "mcp_call": frozenset({"status", "output", "error"}),
    "mcp_list_tools": frozenset({"tools", "error"}),
    "mcp_approval_request": frozenset[str](),
    "mcp_elicitation_request": frozenset[str](),
    "web_search_call": frozenset({"status", "action"}),
    "code_interpreter_call": frozenset({"status", "outputs"}),
    "tool_search_output": frozenset[str](),
}

# Fields of other items that have no deltas and are known only at the end.
LATE_FIELDS = {"tool_search_call": ("arguments",), "apply_patch_call": ("operation",)}
# Fields of the events with a command of a shell call.
COMMAND_FIELDS = {"added": ("command",), "delta": ("delta",), "done": ("command",)}


def parsed(events: Iterable[WireEvent]) -> list[Event]:
    """Parse the events, and check that each is one complete server-sent event."""
    bodies = []
    for event in events:
        head, data, *rest = event.sse().split(b"\n")
        assert rest == [b"", b""]
        body = orjson.loads(data.removeprefix(b"data: "))
        assert head == f"event: {body['type']}".encode()
        assert (body["type"], body["sequence_number"]) == (event.type, event.number)
        bodies.append(body)
    return bodies


class Folded:
    """Response as rebuilt by a client from the events so far."""

    def __init__(self) -> None:
        self.response: Event = {}
        self.output: list[Event] = []
        self.error: Event | None = None
        self.ended = False
        self._open: Event | None = None
        self._done: set[str] = set()
        self._steps: list[str] = []

    def take(self, number: int, event: Event) -> None:
        kind = event["type"]
        assert event["sequence_number"] == number
        assert not self.ended, f"{kind} after the terminal event"
        if kind in FIRST or kind in TERMINAL:
            self._frame(kind, event["response"])
        elif kind == "error":
            self.error = event
        elif kind == "response.output_item.added":
            assert self._open is None, "an item starts before the previous one is done"
            assert event["output_index"] == len(self.output)
            self._open = dict(event["item"])
            self._open["content"] = list(self._open["content"]) if "content" in self._open else None
            if "summary" in self._open:
                assert self._open["summary"] == []
                self._open["summary"] = []
            self._done = set()
            self._steps = []
        else:
            assert self._open is not None, f"{kind} outside of an item"
            assert event["output_index"] == len(self.output)
            self._in_item(kind.partition(":")[2] or kind.removeprefix("response."), event)

    def _frame(self, kind: str, response: Event) -> None:
        if kind in FIRST:
            assert response["output"] == []
            assert response["status"] == ("queued" if kind == "response.queued" else self._status(response))
        else:
            assert self._open is None, "the terminal event is inside an item"
            assert response["output"] == self.output
            self.ended = True
        assert self.response.get("id") in (None, response["id"])
        self.response = response

    @staticmethod
    def _status(response: Event) -> str:
        assert response["status"] in ("queued", "in_progress")
        return str(response["status"])

    def _in_item(self, kind: str, event: Event) -> None:
        item = self._open
        assert item is not None
        name, _, step = kind.rpartition(".")
        if kind == "output_item.done":
            self._finish(item, event["item"])
            return
        if name == "shell_call_command":
            self._command(item["action"]["commands"], step, event)
            return
        assert event["item_id"] == item["id"]
        if kind == "compaction.compacting":
            assert kind_of(item) == "compaction"
            return
        if name in SERVER_TOOL_FIELDS:
            assert kind_of(item) == name
            self._steps.append(step)
            return
        if name.startswith("reasoning_summary"):
            self._summarize(item["summary"], kind, event)
            return
        if kind == "content_part.added":
            assert event["content_index"] == len(item["content"])
            item["content"].append(dict(event["part"]))
        elif kind == "content_part.done":
            assert self._done, "a part is done before its text"
            assert item["content"][event["content_index"]] == event["part"]
        elif name == "output_text.annotation":
            annotations = item["content"][event["content_index"]]["annotations"]
            assert event["annotation_index"] == len(annotations)
            item["content"][event["content_index"]]["annotations"] = [*annotations, event["annotation"]]
        elif name == "code_interpreter_call_code":
            self._grow(item, "code", step, event)
        elif name in ("function_call_arguments", "custom_tool_call_input", "mcp_call_arguments"):
            self._grow(item, name.rpartition("_")[2], step, event)
        else:
            field = {"output_text": "text", "refusal": "refusal", "reasoning_text": "text", "reasoning": "text"}[name]
            self._grow(item["content"][event["content_index"]], field, step, event)

    def _summarize(self, parts: list[Event], kind: str, event: Event) -> None:
        if kind == "reasoning_summary_part.added":
            assert event["summary_index"] == len(parts)
            assert event["part"] == {"type": "summary_text", "text": ""}
            parts.append(dict(event["part"]))
        elif kind == "reasoning_summary_text.delta":
            assert event["delta"], "an empty delta"
            parts[event["summary_index"]]["text"] += event["delta"]
        elif kind == "reasoning_summary_text.done":
            assert event["text"] == parts[event["summary_index"]]["text"]
        else:
            assert kind == "reasoning_summary_part.done"
            assert event["part"] == parts[event["summary_index"]]
            assert event.get("status") in (None, "incomplete")

    def _command(self, commands: list[str], step: str, event: Event) -> None:
        assert event.keys() == {"type", "sequence_number", "output_index", "command_index", *COMMAND_FIELDS[step]}
        index = event["command_index"]
        if step == "added":
            assert index == len(commands)
            commands.append(event["command"])
        elif step == "delta":
            assert event["delta"], "an empty delta"
            commands[index] += event["delta"]
        else:
            assert commands[index] == event["command"], "the deltas do not add up to the command"
            self._done.add("commands")

    def _grow(self, target: Event, field: str, step: str, event: Event) -> None:
        assert field not in self._done, f"{field} has a delta after it was done"
        if step == "delta":
            assert event["delta"], "an empty delta"
            target[field] += event["delta"]
        else:
            assert event[field] == target[field], "the deltas do not add up to the done event"
            self._done.add(field)

    def _finish(self, item: Event, done: Event) -> None:
        if kind_of(item) in SERVER_TOOL_FIELDS:
            self._finish_hosted(item, done)
            return
        if kind_of(item) == "compaction":
            # It has no status and is complete from the start.
            assert {key: value for key, value in item.items() if key != "content"} == done
            self.output.append(done)
            self._open = None
            return
        assert item["status"] == "in_progress"
        assert done["status"] in ("completed", "incomplete")
        assert kind_of(item) != "shell_call" or "commands" in self._done, "a call is done before its commands"
        late_fields = ("encrypted_content", *LATE_FIELDS.get(kind_of(item), ()))
        late_values = {"status": done["status"]} | {key: done[key] for key in late_fields if key in done}
        content = {"content": item["content"]} if item["content"] is not None else {}
        assert {**{key: value for key, value in item.items() if key != "content"}, **content, **late_values} == done
        self.output.append(done)
        self._open = None

    def _finish_hosted(self, item: Event, done: Event) -> None:
        kind = kind_of(item)
        late_fields = SERVER_TOOL_FIELDS[kind]
        assert item.keys() - {"content"} == done.keys()
        assert all(item[key] == done[key] for key in done.keys() - late_fields)
        if kind in ("mcp_approval_request", "mcp_elicitation_request", "tool_search_output"):
            assert self._steps == []
        elif kind == "web_search_call":
            assert self._steps == ["in_progress", "searching", "completed"]
            assert item["action"]["type"] == done["action"]["type"]
        elif kind == "code_interpreter_call":
            assert self._steps == ["in_progress", "interpreting", "completed"]
            assert "code" in self._done, "a run is done before its code"
            assert item["outputs"] is None
        else:
            failed = done["error"] is not None or done.get("status") == "incomplete"
            assert self._steps == ["in_progress", "failed" if failed else "completed"]
        if kind == "mcp_call":
            assert "arguments" in self._done, "a call is done before its arguments"
            assert (item["status"], item["output"], item["error"]) == ("in_progress", None, None)
            assert done["status"] in ("completed", "failed", "incomplete")
            assert (done["output"] is not None) == (done["status"] == "completed")
        self.output.append(done)
        self._open = None


def kind_of(item: Event) -> str:
    """Return the type of an item without the prefix of a dialect."""
    return str(item["type"]).removeprefix("unisono:")


def fold(events: list[Event]) -> Folded:
    """Rebuild the response of a complete stream.

    The stream starts with `created` and ends with exactly one terminal event.
    """
    folded = Folded()
    assert events[0]["type"] == "response.created"
    for number, event in enumerate(events):
        folded.take(number, event)
    assert folded.ended, "no terminal event"
    return folded
