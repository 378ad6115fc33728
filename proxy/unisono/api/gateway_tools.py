"""The operator's tools, run by the gateway on request (`unisono: {run_tools: true}`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.api.field_types import OpenModel
from unisono.core.tools import ToolServer
from unisono.engine.request import ServerTools


class GatewayOptions(OpenModel):
    """Options of this gateway. With `run_tools` the gateway runs the operator's tools itself."""

    run_tools: bool | None = None


@dataclass(frozen=True, slots=True)
class RunnableTools:
    """Servers whose tools run without approval, and the default for requests without the option."""

    servers: tuple[ToolServer, ...] = ()
    by_default: bool = False

    def servers_for(self, requested: bool | None, tenant: str) -> tuple[ToolServer, ...]:
        """Return the servers to use; `requested` is the request's option."""
        should_run = self.by_default if requested is None else requested
        return tuple(replace(server, owner=tenant) for server in self.servers) if should_run else ()


NOTHING_TO_RUN = RunnableTools()


def server_tools_of(servers: Sequence[ToolServer]) -> ServerTools | None:
    """Return the servers as server tools without a tool listing for the client, or None."""
    return ServerTools(tuple(servers), announced=frozenset(server.label for server in servers)) if servers else None
