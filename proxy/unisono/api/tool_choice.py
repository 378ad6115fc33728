"""Parser for every form of `tool_choice`, and its resolution against the declared tools.

Two choices are refused with an error that names the field: an undeclared tool, and a required call in a request without
tools.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

from pydantic import PlainValidator, WithJsonSchema

from unisono.api.client_toolbox import Toolbox
from unisono.api.field_types import MAX_TOOLS, invalid_field
from unisono.core.frozen import dataclass
from unisono.engine.request import AllowedTools, Choice, ForcedCalls
from unisono.errors import InvalidRequest

ALLOWED_TOOLS: Final = "allowed_tools"
SERVER: Final = "mcp"
# Kinds of tools that belong to the client.
FUNCTIONS: Final = ("function", "custom")
# Maximum characters of a tool name or server label.
MAX_NAME_LENGTH: Final = 256


class ChoiceMode(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


# Accepted spellings of the modes.
WORDS: Final = {**{mode.value: mode for mode in ChoiceMode}, "any": ChoiceMode.REQUIRED}


@dataclass(frozen=True, slots=True)
class NamedTool:
    """Tool named in a tool choice.

    `kind` is the tool's `type` in the request. `name` is the name of a client tool, or of a tool on the server with the
    label `server`. If a request can have only one tool of a kind, `kind` alone identifies the tool.
    """

    kind: str
    name: str = ""
    server: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.server, self.name)))

    def written(self) -> dict[str, str]:
        """Return the tool as it appears in the Responses API."""
        if self.kind == SERVER:
            return {"type": SERVER, "server_label": self.server, **({"name": self.name} if self.name else {})}
        return {"type": self.kind, **({"name": self.name} if self.name else {})}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Requested tool choice.

    If `tools` is None, the choice applies to all tools. `one` is True if the client named a single tool without a list.
    """

    mode: ChoiceMode = ChoiceMode.AUTO
    tools: tuple[NamedTool, ...] | None = None
    one: bool = False

    def written(self) -> Any:
        """Return the choice as it appears in the Responses API."""
        if self.tools is None:
            return self.mode.value
        if self.one:
            return self.tools[0].written()
        return {"type": ALLOWED_TOOLS, "mode": self.mode.value, "tools": [tool.written() for tool in self.tools]}


def to_tool_choice(value: Any) -> ToolChoice | None:
    """Parse any form of `tool_choice`.

    The name of a tool may be next to `type`, or in an object named after the type. Raises PydanticCustomError for an
    invalid value.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return ToolChoice(_mode(value))
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise invalid_field(f"must be one of {', '.join(WORDS)}, or an object with the field 'type'")
    kind = value["type"]
    if kind in WORDS:
        return ToolChoice(WORDS[kind])
    if kind != ALLOWED_TOOLS:
        return ToolChoice(ChoiceMode.REQUIRED, (_named(value),), one=True)
    # In Chat Completions, the list is in an object of this name. In the Responses API, the list is next to `type`.
    listed = value.get(ALLOWED_TOOLS)
    listed = listed if isinstance(listed, dict) else value
    tools = listed.get("tools")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise invalid_field(f"must contain a list 'tools' with 1 to {MAX_TOOLS} tools")
    return ToolChoice(_mode(listed.get("mode", ChoiceMode.AUTO)), tuple(map(_named, tools)))


def to_function_choice(value: Any) -> ToolChoice | None:
    """Parse the legacy `function_call`: a word, or an object with the function's name."""
    if not isinstance(value, dict):
        return to_tool_choice(value)
    return ToolChoice(ChoiceMode.REQUIRED, (NamedTool("function", _word(value, "name")),), one=True)


def _mode(value: Any) -> ChoiceMode:
    if not isinstance(value, str) or value not in WORDS:
        raise invalid_field(f"must be one of {', '.join(WORDS)}, or an object that names a tool")
    return WORDS[value]


def _named(value: Any) -> NamedTool:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise invalid_field("must name each tool by an object with the field 'type'")
    kind = value["type"]
    if kind in FUNCTIONS:
        inner = value.get(kind)
        return NamedTool(kind, _word(inner if isinstance(inner, dict) else value, "name"))
    if kind == SERVER:
        name = _word(value, "name") if value.get("name") is not None else ""
        return NamedTool(kind, name, _word(value, "server_label"))
    return NamedTool(_word(value, "type"))


def _word(value: dict[str, Any], field_name: str) -> str:
    word = value.get(field_name)
    if not isinstance(word, str) or not 0 < len(word) <= MAX_NAME_LENGTH or not word.isprintable():
        raise invalid_field(f"must contain the field '{field_name}' with 1 to {MAX_NAME_LENGTH} printable characters")
    return word


_WORD: Final[dict[str, Any]] = {"enum": [*WORDS, None]}
_NAME: Final[dict[str, Any]] = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_LENGTH}
_TOOL: Final[dict[str, Any]] = {"type": "object", "properties": {"type": _NAME}, "required": ["type"]}
_FUNCTION: Final[dict[str, Any]] = {"type": "object", "properties": {"name": _NAME}, "required": ["name"]}

ChosenTools: TypeAlias = Annotated[
    ToolChoice | None, PlainValidator(to_tool_choice), WithJsonSchema({"anyOf": [_WORD, _TOOL]})
]
ChosenFunction: TypeAlias = Annotated[
    ToolChoice | None, PlainValidator(to_function_choice), WithJsonSchema({"anyOf": [_WORD, _FUNCTION]})
]

# Server label and tool name. If the name is None, any tool of the server may be called.
HostedTool: TypeAlias = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools that a choice can name: client tools and, if `hosts` is true, server tools.

    `hosted` finds a server tool. It returns None for a declared tool that is unavailable, and raises InvalidRequest
    for an undeclared tool.
    """

    toolbox: Toolbox
    hosts: bool
    hosted: Callable[[NamedTool], HostedTool | None]


def to_choice(choice: ToolChoice | None, offer: OfferedTools, param: str = "tool_choice") -> Choice | None:
    """Return the engine's constraint on calls.

    Returns None if the model decides whether to call tools, or if calls are disabled. Raises InvalidRequest if a call
    is required but no tool is available, and for an undeclared tool. The error names the field `param`.
    """
    if choice is None or choice.mode is ChoiceMode.NONE or (choice.mode is ChoiceMode.AUTO and choice.tools is None):
        return None
    if choice.mode is ChoiceMode.REQUIRED and not (offer.toolbox.tools or offer.hosts):
        raise InvalidRequest(f"'{param}' requires a call, but the request has no tools.", param=param)
    if choice.tools is None:
        return ForcedCalls()
    own: set[str] = set()
    hosted: set[HostedTool] = set()
    for tool in choice.tools:
        if tool.kind in FUNCTIONS:
            if not (own_name := client_tool_name(tool, offer.toolbox)):
                raise not_declared(tool, param)
            own.add(own_name)
        elif name := offer.toolbox.name_of(tool.kind):
            own.add(name)
        elif (found := offer.hosted(tool)) is not None:
            hosted.add(found)
    if choice.mode is ChoiceMode.AUTO:
        # With `auto` and a list, the model may call only these tools, but need not call any.
        return AllowedTools(frozenset(own), frozenset(hosted))
    if not (own or hosted):
        raise InvalidRequest(f"'{param}': none of the named tools is available.", param=param)
    return ForcedCalls(frozenset(own), frozenset(hosted), exclusive=not choice.one)


def client_tool_name(tool: NamedTool, toolbox: Toolbox) -> str:
    """Return the model's name for a client tool, or "" if the request does not declare the tool.

    A tool in a namespace may be named without its namespace.
    """
    if any(each.name == tool.name for each in toolbox.tools):
        return tool.name
    # Without its namespace, the name must occur in one namespace only.
    inside = [name for name, (_, own) in toolbox.origins.items() if own == tool.name]
    return inside[0] if len(inside) == 1 else ""


def not_declared(tool: NamedTool, param: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}': the request has no tool '{tool}'.", param=param)
