"""Tools of the operator's that the gateway runs where a client hands the loop over (`unisono: {run_tools: true}`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.api.field_types import OpenModel
from unisono.core.tools import ToolServer
from unisono.engine.turn import ServerTools


class GatewayOptions(OpenModel):
    """What is ours alone. `run_tools` has the gateway run the operator's tools itself."""

    run_tools: bool | None = None


@dataclass(frozen=True, slots=True)
class RunnableTools:
    """Servers whose tools the gateway may run without asking anybody, and whether it does when a request says nothing
    about it."""

    servers: tuple[ToolServer, ...] = ()
    by_default: bool = False

    def wanted(self, asked: bool | None, tenant: str) -> tuple[ToolServer, ...]:
        """The servers to run tools of, where the request says `asked`."""
        run = self.by_default if asked is None else asked
        return tuple(replace(server, owner=tenant) for server in self.servers) if run else ()


NOTHING_TO_RUN = RunnableTools()


def hosting_of(servers: Sequence[ToolServer]) -> ServerTools | None:
    """Those servers hosted for a client that is not told which tools there are; None for none."""
    return ServerTools(tuple(servers), announced=frozenset(server.label for server in servers)) if servers else None
