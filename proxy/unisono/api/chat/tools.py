"""Declared tools of every kind to functions, and back: how each call is to look on the client's wire.

The model knows functions only. A custom (free text) tool is a function with one string `input`; a namespace is
flattened to `namespace__tool`; the old `functions` list is tools whose call comes back in the old form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import orjson

from unisono.api.chat.schema import MAX_TOOLS, CustomSpec, FunctionSpec, ToolSpec
from unisono.core.conversation import FunctionTool, Json
from unisono.errors import InvalidRequest, UnsupportedValue

MAX_NAME = 128
MAX_SCHEMAS_BYTES = 1024 * 1024
"""All tools' schemas together: rendering them takes time in proportion, on the event loop."""

PLAIN_NAMESPACE = "functions"
"""The namespace every tool is in anyway: its tools keep their names."""

CUSTOM_PARAMETERS: dict[str, Json] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class CallForm(Enum):
    """How a call of a tool is shown to the client."""

    FUNCTION = "function"
    CUSTOM = "custom"
    LEGACY = "function_call"


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools a request declared. `forms` says how calls look by the tool's name; a name not in it is a function."""

    tools: tuple[FunctionTool, ...] = ()
    forms: Mapping[str, CallForm] | None = None
    notes: tuple[str, ...] = ()

    def form_of(self, name: str) -> CallForm:
        return (self.forms or {}).get(name, CallForm.FUNCTION)


class _Collected:
    """Tools while they are gathered: names once only, sizes bounded."""

    def __init__(self) -> None:
        self.tools: list[FunctionTool] = []
        self.forms: dict[str, CallForm] = {}
        self.notes: list[str] = []
        self._schema_bytes = 0
        self._names: set[str] = set()

    def add(self, tool: FunctionTool, form: CallForm, path: str) -> None:
        if tool.name in self._names:
            raise InvalidRequest(f"'{path}.name': there is another tool named '{tool.name}'.", param=f"{path}.name")
        if len(self.tools) >= MAX_TOOLS:
            raise InvalidRequest(f"'tools': there are more than {MAX_TOOLS} tools.", param="tools")
        self._schema_bytes += len(orjson.dumps(tool.parameters))
        if self._schema_bytes > MAX_SCHEMAS_BYTES:
            raise InvalidRequest(
                f"'tools': the schemas are more than {MAX_SCHEMAS_BYTES:,} bytes together.", param="tools"
            )
        self._names.add(tool.name)
        self.tools.append(tool)
        if form is not CallForm.FUNCTION:
            self.forms[tool.name] = form


def to_toolbox(tools: Sequence[ToolSpec], functions: Sequence[FunctionSpec]) -> Toolbox:
    """Everything declared, in the client's order. Raises InvalidRequest for names that clash and UnsupportedValue when
    only kinds of tools were given that this gateway does not have."""
    found = _Collected()
    skipped: list[tuple[str, str]] = []
    for position, spec in enumerate(tools):
        _add_spec(found, skipped, spec, f"tools.{position}", "")
    for position, function in enumerate(functions):
        found.add(_function(function), CallForm.LEGACY, f"functions.{position}")
    if skipped and not found.tools:
        path, kind = skipped[0]
        raise UnsupportedValue(f"'{path}': tools of type '{kind}' are not available here.", param=path)
    found.notes += [f"{path}: skipped, tools of type '{kind}' are not available here" for path, kind in skipped]
    return Toolbox(tuple(found.tools), found.forms, tuple(found.notes))


def _add_spec(found: _Collected, skipped: list[tuple[str, str]], spec: ToolSpec, path: str, prefix: str) -> None:
    match spec.type:
        case "function" if spec.function is not None:
            tool = _function(spec.function, prefix)
            found.add(_checked(tool, f"{path}.function"), CallForm.FUNCTION, f"{path}.function")
        case "custom" if spec.custom is not None:
            tool = _custom(spec.custom, prefix)
            found.add(_checked(tool, f"{path}.custom"), CallForm.CUSTOM, f"{path}.custom")
            if (spec.custom.model_extra or {}).get("format") not in (None, {"type": "text"}):
                found.notes.append(f"{path}.custom.format: no effect")
        case "namespace" if not prefix:
            inner_prefix = "" if spec.name in (None, "", PLAIN_NAMESPACE) else f"{spec.name}__"
            for position, inner in enumerate(spec.tools or ()):
                if inner.type == "namespace":
                    skipped.append((f"{path}.tools.{position}.type", "namespace in a namespace"))
                else:
                    _add_spec(found, skipped, inner, f"{path}.tools.{position}", inner_prefix)
            if not spec.tools:
                skipped.append((f"{path}.tools", "namespace without tools"))
        case _:
            skipped.append((f"{path}.type", spec.type))


def _checked(tool: FunctionTool, path: str) -> FunctionTool:
    if len(tool.name) > MAX_NAME or not _is_name(tool.name):
        raise InvalidRequest(
            f"'{path}.name': with its namespace the name must be 1 to {MAX_NAME} of A-Z a-z 0-9 . _ -",
            param=f"{path}.name",
        )
    return tool


def _is_name(name: str) -> bool:
    return name.isascii() and all(letter.isalnum() or letter in "._-" for letter in name)


def _function(spec: FunctionSpec, prefix: str = "") -> FunctionTool:
    return FunctionTool(prefix + spec.name, spec.description or "", spec.parameters, bool(spec.strict))


def _custom(spec: CustomSpec, prefix: str) -> FunctionTool:
    return FunctionTool(prefix + spec.name, spec.description or "", CUSTOM_PARAMETERS)


def wrap_input(text: str) -> str:
    """A custom call's free text as the arguments of the function it is for the model."""
    return orjson.dumps({"input": text}).decode()


def unwrap_input(arguments: str) -> str:
    """The free text in a custom call's arguments; the arguments themselves where the model wrote no such object."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        return str(value["input"])
    return arguments
