"""Approvals of server tools: which calls need one, by name or by property of the tool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.core.frozen import dataclass

if TYPE_CHECKING:
    from unisono.core.tool_host import HostedTool


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Subset of a server's tools.

    `names` and `read_only` select tools by their name and by the server's claim that they are read-only; None means no
    restriction. Tools with a name in `excluded` never match. With `unasked`, a tool matches only if this policy does
    not require an approval for it.
    """

    names: frozenset[str] | None = None
    read_only: bool | None = None
    excluded: frozenset[str] = frozenset()
    unasked: Approval | None = None

    def matches(self, tool: HostedTool) -> bool:
        named = (self.names is None or tool.name in self.names) and tool.name not in self.excluded
        matches_access = self.read_only is None or tool.read_only is self.read_only
        return named and matches_access and (self.unasked is None or not self.unasked.needed(tool))

    def __and__(self, other: ToolFilter) -> ToolFilter:
        """Return a filter for tools that match both filters; at most one may have `unasked`."""
        assert self.unasked is None or other.unasked is None
        named = [names for names in (self.names, other.names) if names is not None]
        values = {value for value in (self.read_only, other.read_only) if value is not None}
        # Requiring both read-only and not read-only matches nothing.
        names = frozenset() if len(values) > 1 else frozenset.intersection(*named) if named else None
        excluded = self.excluded | other.excluded
        return ToolFilter(names, values.pop() if values else None, excluded, self.unasked or other.unasked)


@dataclass(frozen=True, slots=True)
class Approval:
    """Policy that decides which calls need an approval.

    Tools that match `always` need an approval. Other tools that match `never` need no approval. For all remaining
    tools, `otherwise` decides. By default, all calls need an approval.
    """

    always: ToolFilter | None = None
    never: ToolFilter | None = None
    otherwise: bool = True
    # Second policy. A call needs an approval if either policy requires one.
    second: Approval | None = None

    def needed(self, tool: HostedTool) -> bool:
        if self.second is not None and self.second.needed(tool):
            return True
        if self.always is not None and self.always.matches(tool):
            return True
        if self.never is not None and self.never.matches(tool):
            return False
        return self.otherwise
