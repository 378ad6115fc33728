"""The operator's tools, run by the gateway on request (`unisono: {run_tools: true}`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from unisono.api.field_types import OpenModel
from unisono.api.unused_fields import without_effect
from unisono.core.conversation import Item, ToolResult
from unisono.core.frozen import dataclass
from unisono.core.tool_approvals import Approval
from unisono.core.tool_host import ToolServer, ToolTransport
from unisono.engine.request import ServerTools
from unisono.errors import UnsupportedValue

# OpenAI's builtin tools, run by the gateway as the tools that gpt-oss was trained on.
#
# A builtin tool (`web_search`, `code_interpreter`) is available if the operator configured a server for it. The
# server's label cannot occur in a request, so it is never confused with a server of the request.

BROWSER: Final = "browser"
PYTHON: Final = "python"
CONTAINER: Final = "container"
# The gateway's own search for tools, which needs no server.
SEARCH: Final = "tool_search"

# Types of tools in a request, with the corresponding builtin tool.
KINDS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"web_search(_preview)?(_\d{4}_\d{2}_\d{2})?"), BROWSER),
    (re.compile(r"code_interpreter"), PYTHON),
    (re.compile(r"container"), CONTAINER),
)

LABEL: Final = "builtin:"
_BROWSED: Final = f"{BROWSER}."
SETTING: Final = "unisono.builtin_tools."

# Fields of builtin tools that cause no note about a missing effect, because the gateway always does what they request.
MEANT: Final = frozenset({"container"})


def builtin_for(kind: str) -> str:
    """Return the builtin tool that a tool type selects, or "" if it selects none."""
    return next((builtin for pattern, builtin in KINDS if pattern.fullmatch(kind)), "")


def builtin_of(label: str) -> str:
    """Return the builtin tool that the server with a label runs, or "" for any other server."""
    return label.removeprefix(LABEL) if label.startswith(LABEL) else ""


def public_label(label: str) -> str:
    """Return the label that clients see: for a server of a builtin tool, the tool's name."""
    return builtin_of(label) or label


def missing_setting(kind: str) -> str:
    """Return the setting that enables a tool type, or "" if the type selects no builtin tool."""
    builtin = builtin_for(kind)
    return builtin and SETTING + builtin


def to_builtin_servers(
    builtins: Iterable[str], servers: Mapping[str, ToolServer], *, owner: str, session: str
) -> tuple[ToolServer, ...]:
    """Return the servers in `servers` that run the tools in `builtins`, each once.

    All requests of the same `owner` share the local programs. For a server at a URL, each `session` has its own state,
    such as the pages that a browser has opened.
    """
    return tuple(
        replace(allowed(server, builtin), owner=owner if server.transport is ToolTransport.STDIO else session)
        for builtin in dict.fromkeys(builtins)
        if (server := servers.get(builtin)) is not None
    )


def browser_results(items: Iterable[Item], pages: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the results of browser calls, oldest first, each with the address of its page.

    `pages` maps ids of calls to the addresses of their pages. The address is "" if it is unknown.
    """
    results = (item for item in items if isinstance(item, ToolResult) and item.name.startswith(_BROWSED))
    return tuple((result.output, pages.get(result.call_id, "")) for result in results)


def allowed(server: ToolServer, builtin: str) -> ToolServer:
    """Return the server with the label and the approval rules of a builtin tool.

    Calls to the tool need no approval, unless the operator requires approval for this server.
    """
    approval = Approval(otherwise=False) if server.approval == Approval() else server.approval
    return replace(server, label=LABEL + builtin, builtin=builtin, approval=approval)


def builtin_notes(at: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on fields of a builtin tool that were accepted without effect."""
    ignored = {name: value for name, value in fields.items() if name not in MEANT}
    container = fields.get("container")
    if isinstance(container, dict):
        ignored |= {f"container.{name}": value for name, value in container.items() if name != "type"}
    yield from without_effect(f"{at}.", ignored)


class GatewayOptions(OpenModel):
    """Options of this gateway. With `run_tools` the gateway runs the operator's tools itself."""

    run_tools: bool | None = None


@dataclass(frozen=True, slots=True)
class RunnableTools:
    """Servers whose tools the gateway runs without asking the client.

    If `by_default` is True, the tools are also available to requests that do not set `run_tools`. `browser` is the
    server for web searches, which a request can enable separately; None if there is no such server.
    """

    servers: tuple[ToolServer, ...] = ()
    by_default: bool = False
    browser: ToolServer | None = None

    def servers_for(self, requested: bool | None, tenant: str) -> tuple[ToolServer, ...]:
        """Return the servers for a request; `requested` is its `run_tools`, None if not set."""
        should_run = self.by_default if requested is None else requested
        return tuple(replace(server, owner=tenant) for server in self.servers) if should_run else ()

    def browser_for(self, at: str, tenant: str) -> tuple[ToolServer, ...]:
        """Return the server for web searches; `at` is the request field that enables it.

        Raises UnsupportedValue if the operator configured no such server.
        """
        if self.browser is None:
            setting = missing_setting("web_search")
            raise UnsupportedValue(
                f"'{at}': this gateway has no web search; its operator can enable it with '{setting}'.", param=at
            )
        return (replace(self.browser, owner=tenant),)


NOTHING_TO_RUN = RunnableTools()


def server_tools_of(servers: Sequence[ToolServer]) -> ServerTools | None:
    """Return ServerTools for the servers; None if there are no servers.

    The answer does not tell the client which tools these servers have.
    """
    return ServerTools(tuple(servers), announced=frozenset(server.label for server in servers)) if servers else None
