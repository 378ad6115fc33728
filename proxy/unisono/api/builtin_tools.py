"""Tools of OpenAI's own kinds (`web_search`, `code_interpreter`) that the gateway has where the operator named a server
for them: each is a tool gpt-oss was trained on, and run as one.

Such a server has a label that no request can write, so that it is never taken for one the request named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from unisono.api.notes import without_effect
from unisono.core.conversation import Item, ToolResult
from unisono.core.tools import Approval, ToolServer, ToolTransport

BROWSER: Final = "browser"
PYTHON: Final = "python"
CONTAINER: Final = "container"
BUILTINS: Final = (BROWSER, PYTHON, CONTAINER)

KINDS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"web_search(_preview)?(_\d{4}_\d{2}_\d{2})?"), BROWSER),
    (re.compile(r"code_interpreter"), PYTHON),
    (re.compile(r"container"), CONTAINER),
)
"""Types of tools in a request, and what they are to the model."""

LABEL: Final = "builtin:"
_BROWSED: Final = f"{BROWSER}."
SETTING: Final = "unisono.builtin_tools."

MEANT: Final = frozenset({"container"})
"""Fields of such tools that need no note, since nothing else could be meant."""


def builtin_for(kind: str) -> str:
    """What a tool of that type is to the model; "" for other kinds."""
    return next((builtin for pattern, builtin in KINDS if pattern.fullmatch(kind)), "")


def builtin_of(label: str) -> str:
    """What the server with that label stands for; "" for one that a request named."""
    return label.removeprefix(LABEL) if label.startswith(LABEL) else ""


def shown_label(label: str) -> str:
    """A label as clients see it."""
    return builtin_of(label) or label


def missing_setting(kind: str) -> str:
    """The setting without which tools of that type are not there; "" where there is none."""
    builtin = builtin_for(kind)
    return builtin and SETTING + builtin


def to_builtin_servers(
    builtins: Iterable[str], servers: Mapping[str, ToolServer], *, owner: str, talk: str
) -> tuple[ToolServer, ...]:
    """Servers for those tools, as far as there are `servers` for them, each once. What a browser has opened belongs to
    the `talk`; programs of this machine are the `owner`'s."""
    return tuple(
        replace(allowed(server, builtin), owner=owner if server.transport is ToolTransport.STDIO else talk)
        for builtin in dict.fromkeys(builtins)
        if (server := servers.get(builtin)) is not None
    )


def browsed_in(items: Iterable[Item]) -> tuple[str, ...]:
    """What the browser answered in a conversation, oldest first."""
    return tuple(item.output for item in items if isinstance(item, ToolResult) and item.name.startswith(_BROWSED))


def allowed(server: ToolServer, builtin: str) -> ToolServer:
    """The server as that builtin tool. The operator who named it lets it run, unless they say that somebody is to be
    asked."""
    approval = Approval(otherwise=False) if server.approval == Approval() else server.approval
    return replace(server, label=LABEL + builtin, builtin=builtin, approval=approval)


def builtin_notes(at: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """What of such a tool was accepted without effect."""
    told = {name: value for name, value in fields.items() if name not in MEANT}
    container = fields.get("container")
    if isinstance(container, dict):
        told |= {f"container.{name}": value for name, value in container.items() if name != "type"}
    yield from without_effect(f"{at}.", told)
