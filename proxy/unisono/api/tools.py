"""Declared tools of every kind to functions, and back: how each call is to look on the client's wire.

The model knows functions only. A custom (free text) tool is a function with one string `input`; a namespace is
flattened to `namespace__tool`, and `Toolbox.origins` knows the way back; the old `functions` list is tools whose call
comes back in the old form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson
from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue

from unisono.api.field_types import MAX_TOOLS, OpenModel, Parameters, Text, ToolName
from unisono.core.conversation import FunctionTool, Json
from unisono.errors import InvalidRequest, UnsupportedValue
from unisono.schemas import check

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


class FunctionSpec(OpenModel):
    name: ToolName
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class CustomSpec(OpenModel):
    name: ToolName
    description: Text | None = None


def described(
    tool: JsonSchemaValue, specs: Mapping[str, type[BaseModel]], handler: GetJsonSchemaHandler
) -> JsonSchemaValue:
    """What the document says of a `tool` of any kind: with the fields of its spec, flat or in an object of its kind."""
    forms: list[dict[str, Any]] = [{"properties": {"type": {"not": {"enum": [*specs]}}}}]
    for kind, spec in specs.items():
        fields = handler(spec.__pydantic_core_schema__)
        forms.append({"properties": {"type": {"const": kind}}, "allOf": [fields]})
        forms.append({"properties": {"type": {"const": kind}, kind: fields}, "required": [kind]})
    handler.resolve_ref_schema(tool)["anyOf"] = forms
    return tool


class CallForm(Enum):
    """How a call of a tool is shown to the client."""

    FUNCTION = "function"
    CUSTOM = "custom"
    LEGACY = "function_call"


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A tool as a surface read it. `path` is where it stands in the request, `at` where its name does, and its schema
    under `schema_field`. A kind that is
    no `spec` and no `inner` tools of a namespace is one this gateway does not have; with the `setting` it would."""

    kind: str
    path: str
    at: str = ""
    spec: FunctionSpec | CustomSpec | None = None
    name: str = ""
    inner: tuple[DeclaredTool, ...] = ()
    form: CallForm = CallForm.FUNCTION
    setting: str = ""
    schema_field: str = "parameters"


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools a request declared. `forms` says how calls look by the tool's name; a name not in it is a function.
    `origins` has the namespace, and the name in it, of every tool that came in one."""

    tools: tuple[FunctionTool, ...] = ()
    forms: Mapping[str, CallForm] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    origins: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def form_of(self, name: str) -> CallForm:
        return self.forms.get(name, CallForm.FUNCTION)


class _Collected:
    """Tools while they are gathered: names once only, sizes bounded."""

    def __init__(self) -> None:
        self.tools: list[FunctionTool] = []
        self.forms: dict[str, CallForm] = {}
        self.origins: dict[str, tuple[str, str]] = {}
        self.notes: list[str] = []
        self.skipped: list[tuple[str, str]] = []
        """Where each stands, and what is the matter with it."""
        self._schema_bytes = 0
        self._names: set[str] = set()

    def add(self, tool: FunctionTool, form: CallForm, path: str) -> None:
        if len(tool.name) > MAX_NAME or not _is_name(tool.name):
            raise InvalidRequest(
                f"'{path}.name': with its namespace the name must be 1 to {MAX_NAME} of A-Z a-z 0-9 . _ -",
                param=f"{path}.name",
            )
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


def to_toolbox(tools: Iterable[DeclaredTool], *, others: bool = False) -> Toolbox:
    """Everything declared, in the client's order. Raises InvalidRequest for names that clash and UnsupportedValue when
    only kinds of tools were given that this gateway does not have, and there are no `others`."""
    found = _Collected()
    for declared in tools:
        _add(found, declared, None)
    if found.skipped and not found.tools and not others:
        path, reason = found.skipped[0]
        raise UnsupportedValue(f"'{path}': {reason}.", param=path)
    found.notes += [f"{path}: skipped, {reason}" for path, reason in found.skipped]
    return Toolbox(tuple(found.tools), found.forms, tuple(found.notes), found.origins)


def _add(found: _Collected, declared: DeclaredTool, namespace: str | None) -> None:
    spec = declared.spec
    if spec is not None:
        name = in_namespace(namespace, spec.name)
        found.add(_to_tool(name, spec, f"{declared.at}.{declared.schema_field}"), declared.form, declared.at)
        if namespace is not None:
            found.origins[name] = (namespace, spec.name)
        if isinstance(spec, CustomSpec) and (spec.model_extra or {}).get("format") not in (None, {"type": "text"}):
            found.notes.append(f"{declared.at}.format: no effect")
    elif declared.kind != "namespace":
        found.skipped.append((f"{declared.path}.type", _not_here(declared.kind, declared.setting)))
    elif namespace is not None:
        found.skipped.append((f"{declared.path}.type", _not_here("namespace in a namespace")))
    else:
        for inner in declared.inner:
            _add(found, inner, declared.name)
        if not declared.inner:
            found.skipped.append((f"{declared.path}.tools", _not_here("namespace without tools")))


def _not_here(kind: str, setting: str = "") -> str:
    needs = f"; the operator has to set {setting}" if setting else ""
    return f"tools of type '{kind}' are not available here{needs}"


def in_namespace(namespace: str | None, name: str) -> str:
    """The one name the model knows a namespace's tool by."""
    return name if namespace in (None, "", PLAIN_NAMESPACE) else f"{namespace}__{name}"


def _is_name(name: str) -> bool:
    return name.isascii() and all(letter.isalnum() or letter in "._-" for letter in name)


def _to_tool(name: str, spec: FunctionSpec | CustomSpec, at: str) -> FunctionTool:
    """The tool, with its schema at `at`. Raises InvalidRequest for a strict schema that cannot be honoured."""
    if isinstance(spec, CustomSpec):
        return FunctionTool(name, spec.description or "", CUSTOM_PARAMETERS, free_text=True)
    if spec.strict and spec.parameters is not None:
        check(spec.parameters, at, strict=True)
    return FunctionTool(name, spec.description or "", spec.parameters, bool(spec.strict))


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
