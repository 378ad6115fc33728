"""Conversion of declared tools to functions, and of calls back to the client's form.

The model knows only functions. A custom (free text) tool is a function whose argument is a string. A tool in a
namespace is named `namespace__tool`, also if the namespace is nested; `Toolbox.origins` maps these names back. The
legacy `functions` list declares tools whose calls are returned in the legacy form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from enum import Enum
from typing import Any, Final, Literal

import orjson
from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue

from unisono.api.field_types import MAX_TOOLS, OpenModel, Parameters, Text, ToolName
from unisono.core.conversation import AddedTools, FunctionTool, Item, Json, TextGrammar
from unisono.core.frozen import dataclass
from unisono.errors import InvalidRequest, UnsupportedValue
from unisono.schemas import OPENAI, BadGrammar, StrictRules, check, check_grammar

MAX_NAME = 128
# Limit for the schemas of all tools together. The time to render them on the event loop is proportional to their size.
MAX_SCHEMAS_BYTES = 1024 * 1024

# Note on a tool with `defer_loading`, which only a search could find.
NOT_DEFERRED: Final = "no effect, because the request has no search for tools"

# Default namespace of all tools. Its tools keep their names.
PLAIN_NAMESPACE = "functions"

# The content of a call is the input of the custom tool itself, as gpt-oss was trained for `apply_patch`.
CUSTOM_PARAMETERS: dict[str, Json] = {"type": "string"}

SEARCH_PARAMETERS: dict[str, Json] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool should do."}},
    "required": ["query"],
}


class FunctionSpec(OpenModel):
    name: ToolName
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class CustomSpec(OpenModel):
    name: ToolName
    description: Text | None = None
    defer_loading: bool | None = None
    # `to_toolbox` reads the format, and adds a note if the format has no effect.
    format: Any = None


# Name under which the model calls the client's tool search.
TOOL_SEARCH = "tool_search"


class SearchSpec(OpenModel):
    """Tool for tool search. If `execution` is `client`, the client searches, else the gateway."""

    execution: Literal["server", "client"] | None = None
    description: Text | None = None
    parameters: Parameters | None = None

    @property
    def function(self) -> FunctionSpec:
        """Declaration of the function that the model calls to search for tools."""
        description = self.description or "Search for more tools. Tools that are found can be called afterwards."
        return FunctionSpec(name=TOOL_SEARCH, description=description, parameters=self.parameters or SEARCH_PARAMETERS)


def described(
    tool: JsonSchemaValue, specs: Mapping[str, type[BaseModel]], handler: GetJsonSchemaHandler
) -> JsonSchemaValue:
    """Add the fields of each kind of tool to the schema of a tool in the OpenAPI document.

    A request has these fields directly in the tool, or in an object named after the kind.
    """
    forms: list[dict[str, Any]] = [{"properties": {"type": {"not": {"enum": [*specs]}}}}]
    for kind, spec in specs.items():
        fields = handler(spec.__pydantic_core_schema__)
        forms.append({"properties": {"type": {"const": kind}}, "allOf": [fields]})
        forms.append({"properties": {"type": {"const": kind}, kind: fields}, "required": [kind]})
    handler.resolve_ref_schema(tool)["anyOf"] = forms
    return tool


class CallForm(Enum):
    """Format in which an answer contains the calls of one of the client's tools."""

    FUNCTION = "function"
    CUSTOM = "custom"
    LEGACY = "function_call"
    # The remaining values are types of built-in tools that the client runs, as in `FunctionTool.kind`.
    SEARCH = "tool_search"
    SHELL = "shell"
    LOCAL_SHELL = "local_shell"
    APPLY_PATCH = "apply_patch"


# Forms of built-in tools that the client runs.
CLIENT_FORMS = frozenset({CallForm.SEARCH, CallForm.SHELL, CallForm.LOCAL_SHELL, CallForm.APPLY_PATCH})


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """Tool declared in a request.

    `path` is the path of the tool in the request, `at` the path of the object with the tool's name and schema, and
    `schema_field` the field of the schema in this object. A namespace has `inner` tools and a `description`. If any
    other tool has no `spec`, the tool is unavailable. The operator can make such a tool available with `setting`,
    unless `setting` is "". The schema of a strict tool must conform to `strict_rules`.
    """

    kind: str
    path: str
    at: str = ""
    spec: FunctionSpec | CustomSpec | None = None
    name: str = ""
    inner: tuple[DeclaredTool, ...] = ()
    form: CallForm = CallForm.FUNCTION
    setting: str = ""
    schema_field: str = "parameters"
    description: str = ""
    strict_rules: StrictRules = OPENAI


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Tools declared in a request.

    `forms` maps the names of tools to the forms of their calls; a missing tool has the form of a function. `origins`
    maps the name of a tool in a namespace, as the model knows it, to the namespace and the client's name of the tool.
    """

    tools: tuple[FunctionTool, ...] = ()
    forms: Mapping[str, CallForm] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    origins: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def with_added(self, items: Iterable[Item]) -> Toolbox:
        """Return the toolbox with the tools that `items` add. The last definition of a name applies."""
        tools_of_items = (tool for item in items if isinstance(item, AddedTools) for tool in item.tools)
        added = {tool.name: tool for tool in tools_of_items if not tool.server}
        if not added:
            return self
        tools = {tool.name: tool for tool in self.tools} | added
        # A new definition replaces the old one completely.
        forms = {name: form for name, form in self.forms.items() if name not in added}
        origins = {name: origin for name, origin in self.origins.items() if name not in added}
        forms |= {tool.name: CallForm.CUSTOM for tool in added.values() if tool.free_text}
        forms |= {tool.name: CallForm(tool.kind) for tool in added.values() if tool.kind}
        origins |= {
            tool.name: (tool.namespace, tool.name.removeprefix(in_namespace(tool.namespace, "")))
            for tool in added.values()
            if tool.namespace
        }
        return Toolbox(tuple(tools.values()), forms, self.notes, origins)

    def name_of(self, kind: str) -> str:
        """Return the name of the declared built-in tool of type `kind`, or "" if there is none."""
        return next((tool.name for tool in self.tools if tool.kind == kind), "")

    def form_of(self, name: str) -> CallForm:
        return self.forms.get(name, CallForm.FUNCTION)


class _Collected:
    """Accumulator of tools, which checks that names are unique and sizes within the limits.

    `at`, `are_sent_again` and `can_defer` are the parameters of `to_toolbox`.
    """

    def __init__(self, *, at: str, are_sent_again: bool, can_defer: bool) -> None:
        self.at = at
        self.are_sent_again = are_sent_again
        self.can_defer = can_defer
        self.tools: list[FunctionTool] = []
        self.forms: dict[str, CallForm] = {}
        self.origins: dict[str, tuple[str, str]] = {}
        self.notes: list[str] = []
        # Position of each skipped tool, and the reason.
        self.skipped: list[tuple[str, str]] = []
        self._schema_bytes = 0
        self._names: set[str] = set()

    def add(self, tool: FunctionTool, form: CallForm, path: str) -> None:
        if len(tool.name) > MAX_NAME or not _is_name(tool.name):
            raise InvalidRequest(
                f"'{path}.name': the name, including its namespace, must consist of 1 to {MAX_NAME} characters from "
                "A-Z a-z 0-9 . _ -",
                param=f"{path}.name",
            )
        if tool.name in self._names:
            raise InvalidRequest(
                f"'{path}.name': another tool has the same name '{tool.name}'; rename one of them.",
                param=f"{path}.name",
            )
        if len(self.tools) >= MAX_TOOLS:
            raise InvalidRequest(f"'{self.at}' contains more than {MAX_TOOLS} tools.", param=self.at)
        self._schema_bytes += len(orjson.dumps(tool.parameters))
        if self._schema_bytes > MAX_SCHEMAS_BYTES:
            raise InvalidRequest(
                f"'{self.at}': the schemas have more than {MAX_SCHEMAS_BYTES:,} bytes in total; shorten them.",
                param=self.at,
            )
        self._names.add(tool.name)
        self.tools.append(tool)
        if form is not CallForm.FUNCTION:
            self.forms[tool.name] = form


def to_toolbox(
    tools: Iterable[DeclaredTool],
    *,
    at: str = "tools",
    others: bool = False,
    are_sent_again: bool = False,
    can_defer: bool = True,
) -> Toolbox:
    """Convert all declared tools, in the client's order.

    `at` is the path of the list of tools in the request. `are_sent_again` is True if clients send the tools again with
    every later request. A strict schema that cannot be enforced then causes a note instead of an error. If `can_defer`
    is False, the model sees deferred tools from the start, and a note reports this. `others` is True if the request
    also has tools that are not in `tools`. Raises InvalidRequest for invalid or duplicate names, for too many tools,
    and for too large schemas. Raises UnsupportedValue if all tools are unavailable and `others` is False.
    """
    found = _Collected(at=at, are_sent_again=are_sent_again, can_defer=can_defer)
    for declared in tools:
        _add(found, declared, None)
    # An agent can still work if one of its tools is unavailable. If all tools are unavailable, the request would fail
    # to do what it is for.
    if found.skipped and not found.tools and not others:
        path, reason = found.skipped[0]
        raise UnsupportedValue(f"'{path}': {reason}.", param=path)
    found.notes += [f"{path}: skipped, {reason}" for path, reason in found.skipped]
    return Toolbox(tuple(found.tools), found.forms, tuple(found.notes), found.origins)


def _add(found: _Collected, declared: DeclaredTool, namespace: str | None, about: str = "") -> None:
    """Add a declared tool, or the tools of a declared namespace.

    `namespace` is the namespace that contains the tool, and `about` the description of this namespace.
    """
    spec = declared.spec
    if spec is not None:
        name = in_namespace(namespace, spec.name)
        tool = _to_enforceable_tool(found, name, spec, declared)
        tool = replace(
            tool,
            namespace=namespace or "",
            namespace_description=about,
            kind=declared.form.value if declared.form in CLIENT_FORMS else "",
            deferred=bool(spec.defer_loading),
            path=declared.at,
        )
        # Calls of built-in tools have fields of their own, which can be filled only from arguments that fit the schema.
        tool = replace(tool, strict=tool.strict or declared.form in CLIENT_FORMS - {CallForm.SEARCH})
        found.add(tool, declared.form, declared.at)
        if namespace is not None:
            found.origins[name] = (namespace, spec.name)
        if isinstance(spec, CustomSpec):
            found.notes += _format_notes(spec, declared.at)
        if spec.defer_loading and not found.can_defer:
            found.notes.append(f"{declared.at}.defer_loading: {NOT_DEFERRED}")
    elif declared.kind != "namespace":
        found.skipped.append((f"{declared.path}.type", _unsupported(declared.kind, declared.setting)))
    else:
        for inner in declared.inner:
            _add(found, inner, in_namespace(namespace, declared.name), declared.description)
        if not declared.inner:
            found.skipped.append((f"{declared.path}.tools", "the namespace contains no tools"))


def _to_enforceable_tool(
    found: _Collected, name: str, spec: FunctionSpec | CustomSpec, declared: DeclaredTool
) -> FunctionTool:
    """Convert one tool.

    Raises InvalidRequest for a strict schema that cannot be enforced. If `found.are_sent_again` is True, the function
    does not raise for such a schema, because every later request of the client would fail. Instead, the tool is not
    strict, and a note reports this.
    """
    at = f"{declared.at}.{declared.schema_field}"
    try:
        return _to_tool(name, spec, at, declared.strict_rules)
    except InvalidRequest as error:
        if not found.are_sent_again:
            raise
        found.notes.append(f"{declared.at}.strict: no effect, because {error.message.removesuffix('.')}")
        return _to_tool(name, spec.model_copy(update={"strict": None}), at, declared.strict_rules)


def _unsupported(kind: str, setting: str = "") -> str:
    needs = f"; the operator can enable them with `{setting}`" if setting else ""
    return f"tools of type '{kind}' are not available{needs}"


def in_namespace(namespace: str | None, name: str) -> str:
    """Return the model's name for a tool in a namespace."""
    return name if namespace in (None, "", PLAIN_NAMESPACE) else f"{namespace}__{name}"


def checked_name(namespace: str | None, name: str, param: str) -> str:
    """Return the name by which the model calls a tool: its namespace, if any, and its name.

    Raises InvalidRequest for more than `MAX_NAME` characters.
    """
    full = in_namespace(namespace, name)
    if len(full) > MAX_NAME:
        raise InvalidRequest(
            f"'{param}.name': the name with its namespace has more than {MAX_NAME} characters.", param=f"{param}.name"
        )
    return full


def _is_name(name: str) -> bool:
    return name.isascii() and all(letter.isalnum() or letter in "._-" for letter in name)


def _to_tool(name: str, spec: FunctionSpec | CustomSpec, at: str, rules: StrictRules) -> FunctionTool:
    """Convert one tool; `at` is the path of its schema in the request.

    Raises InvalidRequest for a strict schema that cannot be enforced.
    """
    if isinstance(spec, CustomSpec):
        grammar = _grammar(spec)
        texts = [spec.description or ""]
        if grammar is not None:
            texts.append(f"The input must match this grammar ({grammar.syntax}):\n{grammar.definition}")
        description = "\n\n".join(filter(None, texts))
        if grammar is not None and _refusal(grammar):
            grammar = None
        return FunctionTool(
            name, description, CUSTOM_PARAMETERS, strict=grammar is not None, free_text=True, grammar=grammar
        )
    # Without `strict`, a schema is a description for the model. With `strict`, the arguments must match, so the gateway
    # must be able to enforce the schema.
    if spec.strict and spec.parameters is not None:
        check(spec.parameters, at, strict=rules)
    return FunctionTool(name, spec.description or "", spec.parameters, bool(spec.strict))


def _grammar(spec: CustomSpec) -> TextGrammar | None:
    """Return the grammar of a custom tool's input, or None."""
    # Chat Completions nests the definition, Responses does not.
    match spec.format:
        case {"type": "grammar", "grammar": {"definition": str(definition), "syntax": "regex" | "lark" as syntax}}:
            return TextGrammar(syntax, definition)
        case {"type": "grammar", "definition": str(definition), "syntax": "regex" | "lark" as syntax}:
            return TextGrammar(syntax, definition)
        case _:
            return None


def _format_notes(spec: CustomSpec, at: str) -> Iterator[str]:
    grammar = _grammar(spec)
    if grammar is not None:
        if refusal := _refusal(grammar):
            yield f"{at}.format: shown to the model, but not enforced: {refusal}"
    elif spec.format not in (None, {"type": "text"}):
        yield f"{at}.format: no effect"


def _refusal(grammar: TextGrammar) -> str:
    """Return the reason why a grammar cannot be enforced, or "" if it can be enforced."""
    try:
        check_grammar(grammar)
    except BadGrammar as error:
        return str(error)
    return ""
