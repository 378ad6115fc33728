"""Anthropic's tools that the client runs, as functions with Anthropic's documented inputs.

A request contains only the types of these tools, because Anthropic's models know the names and inputs of the tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Final

from unisono.api.client_toolbox import FunctionSpec
from unisono.core.conversation import Json
from unisono.core.frozen import dataclass

Properties = dict[str, Json]
# Field of a tool that limits the length of a view in characters.
MAX_CHARACTERS: Final = "max_characters"


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


_BASH: Final[Properties] = {
    "command": _text("The command to run. Required unless `restart` is true."),
    "restart": {"type": "boolean", "description": "True restarts the shell."},
}
_FILES: Final[Properties] = {
    "path": _text("Absolute path of a file or a directory."),
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "view: first and last line of a file, from 1; -1 is its last line. Optional.",
    },
    "file_text": _text("create: content of the file."),
    "old_str": _text("str_replace: text to replace. It must occur exactly once in the file."),
    "insert_line": {"type": "integer", "description": "insert: line after which to insert; 0 is the beginning."},
}
_NEW: Final[Properties] = {"new_str": _text("str_replace: new text.")}
_NEW_OR_INSERTED: Final[Properties] = {"new_str": _text("str_replace: new text. insert: text to insert.")}
_INSERTED: Final[Properties] = {"insert_text": _text("insert: text to insert.")}
_RENAMED: Final[Properties] = {
    "old_path": _text("rename: current path."),
    "new_path": _text("rename: new path."),
}
_VIEW_AND_EDIT: Final = ("view", "create", "str_replace", "insert")


def _commands(*names: str) -> Properties:
    return {"command": {"type": "string", "enum": [*names]}}


@dataclass(frozen=True, slots=True)
class AnthropicTool:
    """Tool of Anthropic that the client runs.

    `settings` contains the names of those fields that a request may set in the tool, and that have an effect.
    """

    types: re.Pattern[str]
    name: str
    description: str
    properties: Properties = field(repr=False)
    required: tuple[str, ...] = ()
    settings: frozenset[str] = frozenset()

    def function(self, name: str | None, fields: Mapping[str, Any]) -> FunctionSpec:
        """Return the tool as a function; `fields` are the fields of the tool in the request.

        If `name` is None, the function has the tool's own name.
        """
        parameters: dict[str, Json] = {"type": "object", "properties": self.properties}
        if self.required:
            parameters["required"] = [*self.required]
        limit = fields.get(MAX_CHARACTERS)
        limited = f" A view shows at most {limit} characters of a file." if isinstance(limit, int) else ""
        return FunctionSpec(name=name or self.name, description=self.description + limited, parameters=parameters)


# The first row whose pattern matches the type applies. Unknown newer versions are treated like the newest known one.
TOOLS: Final = (
    AnthropicTool(re.compile(r"bash_\d{8}"), "bash", "Run a command in a bash shell that stays open.", _BASH),
    AnthropicTool(
        re.compile(r"text_editor_(2024\d{4}|20250124)"),
        "str_replace_editor",
        "View, create and edit files.",
        {**_commands(*_VIEW_AND_EDIT, "undo_edit"), **_FILES, **_NEW_OR_INSERTED},
        ("command", "path"),
    ),
    AnthropicTool(
        re.compile(r"text_editor_\d{8}"),
        "str_replace_based_edit_tool",
        "View, create and edit files.",
        {**_commands(*_VIEW_AND_EDIT), **_FILES, **_NEW, **_INSERTED},
        ("command", "path"),
        frozenset({MAX_CHARACTERS}),
    ),
    AnthropicTool(
        re.compile(r"memory_\d{8}"),
        "memory",
        "Files in the directory /memories, which outlive this conversation. View the directory before anything else, "
        "to find earlier progress. Record progress there: everything else may be lost at any time.",
        {**_commands(*_VIEW_AND_EDIT, "delete", "rename"), **_FILES, **_NEW, **_INSERTED, **_RENAMED},
        ("command",),
    ),
)


def client_tool(kind: str) -> AnthropicTool | None:
    """Return Anthropic's client tool with the type `kind`; None if there is no such tool."""
    return next((tool for tool in TOOLS if tool.types.fullmatch(kind)), None)
