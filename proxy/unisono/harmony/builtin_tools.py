"""Tools that gpt-oss was trained on: their names and their system message declarations.

`browser` and `python` are declared exactly as openai-harmony does. It has no `container`, which is declared
like any other namespace, with the arguments that gpt-oss servers agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from openai_harmony import ToolDescription, ToolNamespaceConfig

from unisono.core.conversation import Builtin

# Function names in calls, by tool.
FUNCTIONS_OF: Final[dict[str, frozenset[str]]] = {
    "browser": frozenset({"browser.search", "browser.open", "browser.find"}),
    "python": frozenset({"python"}),
    "container": frozenset({"container.exec"}),
}

# In characters.
MAX_DESCRIPTION_LENGTH: Final = 8_000


def namespace(recipient: str) -> str:
    """Return the part before the first dot."""
    return recipient.partition(".")[0]


def is_builtin(name: str) -> bool:
    """Return whether `name` belongs to the namespace of a tool gpt-oss was trained on."""
    return namespace(name) in FUNCTIONS_OF


def namespaces(builtins: tuple[Builtin, ...], hide: Callable[[str], str]) -> dict[str, ToolNamespaceConfig]:
    """Return the library's declarations; `hide` masks text that the library must not read."""
    declared: dict[str, ToolNamespaceConfig] = {}
    for builtin in builtins:
        config = _DECLARED[builtin.name]()
        if builtin.description:
            config.description = "\n".join(hide(line) for line in _lines(builtin.description))
        declared[builtin.name] = config
    return declared


def _lines(description: str) -> list[str]:
    """Split a description into lines that cannot begin a section of the system message."""
    return [line.lstrip("# \t") for line in description[:MAX_DESCRIPTION_LENGTH].splitlines()]


def _container() -> ToolNamespaceConfig:
    strings = {"type": "array", "items": {"type": "string"}}
    execute = ToolDescription.new(
        "exec",
        "Runs the command `cmd` in the container and returns what it printed.",
        parameters={
            "type": "object",
            "properties": {
                "cmd": strings,
                "session_name": {"type": "string"},
                "workdir": {"type": "string"},
                "timeout": {"type": "number"},
                "env": {"type": "object"},
                "user": {"type": "string"},
            },
            "required": ["cmd"],
        },
    )
    return ToolNamespaceConfig(name="container", description="A container with a command line.", tools=[execute])


_DECLARED: Final[dict[str, Callable[[], ToolNamespaceConfig]]] = {
    "browser": ToolNamespaceConfig.browser,
    "python": ToolNamespaceConfig.python,
    "container": _container,
}
