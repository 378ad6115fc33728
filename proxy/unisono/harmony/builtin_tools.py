"""The tools gpt-oss was trained on: what they are called, and how they are declared in the system message.

`browser` and `python` are openai-harmony's own, to the letter. It has no `container`; that one is declared as the
library declares any namespace, with the arguments that servers of gpt-oss agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from openai_harmony import ToolDescription, ToolNamespaceConfig

from unisono.core.conversation import Builtin

FUNCTIONS_OF: Final[dict[str, frozenset[str]]] = {
    "browser": frozenset({"browser.search", "browser.open", "browser.find"}),
    "python": frozenset({"python"}),
    "container": frozenset({"container.exec"}),
}
"""The functions of each, as calls name them."""

LONGEST_DESCRIPTION: Final = 8_000
"""Characters."""


def namespace(recipient: str) -> str:
    """What stands before the first dot."""
    return recipient.partition(".")[0]


def is_builtin(name: str) -> bool:
    """Whether `name` is a function, or would be one, of a tool gpt-oss was trained on."""
    return namespace(name) in FUNCTIONS_OF


def namespaces(builtins: tuple[Builtin, ...], hide: Callable[[str], str]) -> dict[str, ToolNamespaceConfig]:
    """The library's own declarations; `hide` is for text that is not to be read by it."""
    declared: dict[str, ToolNamespaceConfig] = {}
    for builtin in builtins:
        config = _DECLARED[builtin.name]()
        if builtin.description:
            config.description = "\n".join(hide(line) for line in _lines(builtin.description))
        declared[builtin.name] = config
    return declared


def _lines(description: str) -> list[str]:
    """A description may fill lines, but not begin a section of the system message."""
    return [line.lstrip("# \t") for line in description[:LONGEST_DESCRIPTION].splitlines()]


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
