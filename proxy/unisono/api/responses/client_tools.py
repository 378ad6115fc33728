"""Conversion of calls to built-in tools that the client runs, such as `shell`.

The model sees each tool as a function. The client receives a call in OpenAI's form: the function's arguments become the
members of `action` or `operation`. Arguments that do not match the function's schema cannot be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import orjson

from unisono.api.client_toolbox import CallForm, FunctionSpec
from unisono.core.conversation import Json
from unisono.core.frozen import dataclass
from unisono.schemas import violation

Wire = dict[str, Any]

# Optional members may also be null, because OpenAI's own calls contain null for them.
_SHELL: Final[dict[str, Json]] = {
    "type": "object",
    "properties": {
        "commands": {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "description": "Shell commands. They may run at the same time.",
        },
        "timeout_ms": {"type": ["integer", "null"], "description": "Time limit of each command in milliseconds."},
        "max_output_length": {
            "type": ["integer", "null"],
            "description": "Maximum characters of output of each command.",
        },
    },
    "required": ["commands"],
}
_LOCAL_SHELL: Final[dict[str, Json]] = {
    "type": "object",
    "properties": {
        "command": {
            "type": "array",
            "items": {"type": "string"},
            "minItems": 1,
            "description": 'Program and its arguments, such as ["bash", "-lc", "ls | wc -l"].',
        },
        "working_directory": {"type": ["string", "null"]},
        "timeout_ms": {"type": ["integer", "null"], "description": "Time limit in milliseconds."},
        "env": {"type": ["object", "null"], "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
}
_APPLY_PATCH: Final[dict[str, Json]] = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        "path": {"type": "string", "description": "Path of the file, relative to the working directory."},
        "diff": {
            "type": "string",
            "description": "create_file: all lines of the file, each after '+'. update_file: hunks, each with a line "
            "'@@' (optionally followed by the class or function that it is in) and lines after ' ' (context), '-' "
            "(removed) or '+' (added); no line numbers. delete_file: empty.",
        },
    },
    "required": ["type", "path", "diff"],
}


def _to_shell(arguments: Wire) -> Wire:
    limits = {name: arguments.get(name) for name in ("timeout_ms", "max_output_length")}
    return {"action": {"commands": arguments["commands"], **limits}, "environment": {"type": "local"}}


def _to_local_shell(arguments: Wire) -> Wire:
    optional = {name: arguments.get(name) for name in ("timeout_ms", "user", "working_directory")}
    env = arguments.get("env") or {}
    return {"action": {"type": "exec", "command": arguments["command"], "env": env, **optional}}


def _to_patch(arguments: Wire) -> Wire:
    diff = {} if arguments["type"] == "delete_file" else {"diff": arguments["diff"]}
    return {"operation": {"type": arguments["type"], "path": arguments["path"], **diff}}


def _started_shell(fields: Wire) -> Wire:
    return {**fields, "action": {**fields["action"], "commands": []}}


def _started_patch(fields: Wire) -> Wire:
    operation = fields["operation"]
    return {"operation": {**operation, "diff": ""} if "diff" in operation else operation}


def _unchanged(fields: Wire) -> Wire:
    return fields


@dataclass(frozen=True, slots=True)
class ClientTool:
    """Built-in tool that the client runs.

    `to_fields` converts arguments that match `parameters` to the fields of the call's item. `started` returns these
    fields as they are when the item is added to the answer, before any deltas. A client may omit some arguments of a
    call that it sends back; `given` contains their defaults.
    """

    description: str
    parameters: dict[str, Json]
    to_fields: Callable[[Wire], Wire]
    started: Callable[[Wire], Wire] = _unchanged
    given: Mapping[str, Json] | None = None


TOOLS: Final[Mapping[CallForm, ClientTool]] = {
    CallForm.SHELL: ClientTool("Run commands in a shell.", _SHELL, _to_shell, _started_shell),
    CallForm.LOCAL_SHELL: ClientTool("Run a program on the user's computer.", _LOCAL_SHELL, _to_local_shell),
    CallForm.APPLY_PATCH: ClientTool(
        "Create, update or delete one file.", _APPLY_PATCH, _to_patch, _started_patch, {"diff": ""}
    ),
}
# Prefix of the events with a command of a shell call.
COMMAND: Final = "response.shell_call_command"
# Member of every action of `local_shell` that is not an argument of the function.
_EXEC: Final = ("type", "exec")
# Forms of calls by the type of the tool.
FORMS: Final = {form.value: form for form in TOOLS}


def function_of(kind: str, fields: Mapping[str, Any]) -> FunctionSpec | None:
    """Return the function that represents a built-in tool of the client.

    `kind` is the type of the tool, and `fields` are its other fields. Returns None for all other types of tools, and
    for a shell that runs in a container on the server.
    """
    if kind not in FORMS:
        return None
    environment = fields.get("environment")
    place = environment.get("type") if isinstance(environment, dict) else None
    if place not in (None, "local"):
        return None
    tool = TOOLS[FORMS[kind]]
    skills = environment.get("skills") if isinstance(environment, dict) else None
    description = "\n".join([tool.description, *_described(skills)])
    return FunctionSpec(name=kind, description=description, parameters=tool.parameters)


def _described(skills: Any) -> Iterator[str]:
    """Yield a description of each skill, with the path of the skill's instructions."""
    for skill in skills if isinstance(skills, list) else ():
        match skill:
            case {"name": str(name), "description": str(text), "path": str(path)}:
                yield f"Skill {name}: {' '.join(text.split())} Instructions: {path}/SKILL.md"


def call_fields(form: CallForm, arguments: str) -> Wire | None:
    """Convert the arguments of a call to the fields of its item.

    Returns None if `form` is not a built-in tool of the client, or if the arguments do not match its schema.
    """
    tool = TOOLS.get(form)
    if tool is None or violation(tool.parameters, arguments) is not None:
        return None
    try:
        return tool.to_fields(orjson.loads(arguments))
    except orjson.JSONDecodeError:
        return None  # numbers that JSON allows, and orjson cannot represent


def started_call(form: CallForm, call: Wire) -> Wire:
    """Return the item of a call as it is when the item is added, before any deltas."""
    return {**call, **TOOLS[form].started(call)}


def command_events(call: Wire) -> Iterator[tuple[str, Wire]]:
    """Yield names and fields of the command events for a `shell_call`; none for other calls."""
    if call["type"] != "shell_call":
        return
    for index, command in enumerate(call["action"]["commands"]):
        place = {"command_index": index}
        yield f"{COMMAND}.added", {**place, "command": ""}
        if command:
            yield f"{COMMAND}.delta", {**place, "delta": command}
        yield f"{COMMAND}.done", {**place, "command": command}


def shell_output(text: str) -> list[Wire]:
    """Convert a text to a `shell` result: the standard output of a successful command."""
    return [{"stdout": text, "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]


def arguments_of(form: CallForm, details: Any) -> str:
    """Return the function arguments of a call that the client sent back, as JSON.

    `details` is the client's `action` or `operation`.
    """
    if isinstance(details, dict):
        sent = {name: value for name, value in details.items() if value is not None and (name, value) != _EXEC}
        details = {**(TOOLS[form].given or {}), **sent}
    return orjson.dumps(details).decode()
