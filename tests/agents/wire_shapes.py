"""Shapes of request bodies, and their differences between versions of an agent.

A shape is a set of lines: the paths of a body with their types, the values of some fields, and the names of headers.
The kind of an object is part of its path, such as `input[]<function_call>.call_id: string`.

`python -m tests.agents.wire_shapes FOLDER` compares the sessions of a run with the shapes of the locked versions.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOCKED = Path(__file__).with_name("wire_shapes.json")
# File of a session in its temporary folder.
SESSION_FILE = "wire.json"

# Fields with one of a few values. `type` is part of the path instead.
VALUES = frozenset({"role", "phase", "effort", "include", "tool_choice", "detail", "syntax", "execution", "summary"})
# Objects whose keys are not names of the API: JSON schemas and arguments of calls.
OPAQUE = frozenset({"parameters", "input_schema", "schema", "output_schema"})
OPAQUE_PATH = re.compile(r"<\w*tool_use>\.input$")
PLAIN = re.compile(r"[\w.:-]{1,64}")
# Headers with a list of features.
FEATURE_HEADERS = frozenset({"anthropic-beta", "openai-beta"})
KIND_LINE = re.compile(r".*>: object")
# Field of a request in an error or a note.
FIELD = re.compile(r"\b(?:input|messages|system|tools)(?:\.\w+)+")
TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


@dataclass
class WireShape:
    """Lines of the requests of an agent, and its kinds of objects that the gateway reported.

    A report is a note, or an error with a status of 4xx.
    """

    lines: set[str] = field(default_factory=set)
    reported: dict[str, str] = field(default_factory=dict)

    def add(self, other: WireShape) -> None:
        self.lines |= other.lines
        self.reported |= other.reported


@dataclass(frozen=True)
class ShapeChange:
    """Difference between two versions of an agent. `unsupported` are added kinds with the gateway's report."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    unsupported: Mapping[str, str]


def body_lines(value: Any, path: str = "") -> Iterator[str]:
    """Yield the lines of a JSON value."""
    name = re.split(r"[.\[<]", path.removesuffix("[]"))[-1]
    kind = "" if name in OPAQUE else _kind(value)
    path += kind
    if isinstance(value, str) and name in VALUES and PLAIN.fullmatch(value):
        yield f"{path} = {value}"
        return
    if path:
        yield f"{path}: {TYPES[type(value)]}"
    if isinstance(value, list):
        for item in value:
            yield from body_lines(item, f"{path}[]")
    if isinstance(value, dict) and name not in OPAQUE and not OPAQUE_PATH.search(path):
        for key, item in value.items():
            if f"<{item}>" != kind:
                yield from body_lines(item, f"{path}.{key}" if path else key)


def _kind(value: Any) -> str:
    """Return the kind of an object for its path: its type, or the role of a message."""
    kind = value.get("type", value.get("role")) if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) and PLAIN.fullmatch(kind) else ""


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[str]:
    """Yield the lines of the headers of a request."""
    for name, value in headers:
        text = name.decode("latin-1").lower()
        yield f"header {text}"
        if text in FEATURE_HEADERS:
            yield from (f"header {text} = {feature.strip()}" for feature in value.decode("latin-1").split(","))


def reported_kind(body: Any, text: str, *, is_error: bool) -> str | None:
    """Return the line of the kind of object that a note or an error is about; None if it names none.

    A note on a field of an object is not about the object. An error is, because it refuses the whole request.
    """
    found = FIELD.search(text) if is_error else FIELD.match(text)
    if found is None:
        return None
    segments = found[0].split(".")
    path, kind, depth = "", None, 0
    for place, segment in enumerate(segments, 1):
        if segment in OPAQUE:
            break
        if isinstance(body, list) and segment.isdigit() and int(segment) < len(body):
            body, path = body[int(segment)], f"{path}[]"
        elif isinstance(body, dict) and segment in body:
            body, path = body[segment], f"{path}.{segment}" if path else segment
        else:
            break
        if label := _kind(body):
            path += label
            kind, depth = f"{path}: object", place
    is_about_field = segments[depth:] not in ([], ["type"])
    return None if is_about_field and not is_error else kind


def changes(locked: Iterable[str], current: WireShape) -> ShapeChange:
    """Return the difference between the locked lines of an agent and its current shape."""
    before = set(locked)
    added = sorted(current.lines - before)
    unsupported = {
        line: current.reported[_body_part(line)]
        for line in added
        if KIND_LINE.fullmatch(line) and _body_part(line) in current.reported
    }
    return ShapeChange(tuple(added), tuple(sorted(before - current.lines)), unsupported)


def request_lines(request: str, lines: Iterable[str]) -> set[str]:
    """Return the lines with their request, such as `POST /v1/messages`."""
    return {f"{request} {line}" for line in lines}


def _body_part(line: str) -> str:
    return line.split(" ", 2)[2]


def read_sessions(folder: Path) -> dict[str, WireShape]:
    """Return the shapes of all sessions in a folder, by agent."""
    found: dict[str, WireShape] = {}
    for file in sorted(folder.rglob(SESSION_FILE)):
        session = json.loads(file.read_text())
        found.setdefault(session["agent"], WireShape()).add(WireShape(set(session["lines"]), session["reported"]))
    return found


def write_session(file: Path, agent: str, shape: WireShape) -> None:
    file.write_text(json.dumps({"agent": agent, "lines": sorted(shape.lines), "reported": shape.reported}))


def report(agent: str, change: ShapeChange, *, is_partial: bool) -> Iterator[str]:
    """Yield the lines that are printed about an agent. A part of the sessions says nothing about removed lines."""
    removed = () if is_partial else change.removed
    if not change.added and not removed:
        yield f"{agent}: no changes of its requests"
        return
    yield f"{agent}: {len(change.added)} lines added, {len(removed)} removed"
    yield from (f"  + {line}" for line in change.added)
    yield from (f"  - {line}" for line in removed)
    yield from (f"  ! {line}: {reason}" for line, reason in change.unsupported.items())


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the requests of agents with those of the locked versions.")
    parser.add_argument("folder", type=Path, help="temporary folder of the test run")
    parser.add_argument("--record", action="store_true", help="keep the shapes as those of the locked versions")
    parser.add_argument("--partial", action="store_true", help="not all sessions were run")
    options = parser.parse_args()
    locked: dict[str, list[str]] = json.loads(LOCKED.read_text()) if LOCKED.exists() else {}
    sessions = read_sessions(options.folder)
    if options.record:
        kept = locked if options.partial else {}
        lines = {name: shape.lines | set(kept.get(name, ())) for name, shape in sessions.items()}
        shapes = kept | {name: sorted(each) for name, each in lines.items()}
        LOCKED.write_text(json.dumps(shapes, indent=1, sort_keys=True) + "\n")
        return 0
    has_failed = False
    for agent, shape in sessions.items():
        if agent not in locked:
            print(f"{agent}: no recorded requests; run tests/agents/run --record")
            continue
        change = changes(locked[agent], shape)
        has_failed = has_failed or bool(change.unsupported)
        print(*report(agent, change, is_partial=options.partial), sep="\n")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
