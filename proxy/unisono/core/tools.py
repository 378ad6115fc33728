"""Hosted tools: tools the gateway runs itself, on servers of others, and the port they are reached through.

Free of any protocol: an engine sees what a tool is called and takes, asks for it to be run, and gets text back. What a
tool or its server does wrong in a call is an outcome, because the model is to read it and go on; only what concerns
the request itself (a server that may not be reached, a list that cannot be had) is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias

from unisono.core.conversation import Json
from unisono.core.tool_arguments import ToolArguments


class ToolTransport(StrEnum):
    """How a tool server is talked to; `SSE` is the older HTTP form with two endpoints."""

    STREAMABLE_HTTP = "streamable_http"
    SSE = "sse"
    STDIO = "stdio"


@dataclass(frozen=True, slots=True)
class HostedTool:
    """A tool as its server describes it. `server` is the server's label, `schema` the JSON Schema of the arguments;
    `annotations` are hints a server gives about itself (`readOnlyHint`, ...) and prove nothing."""

    server: str
    name: str
    description: str = ""
    schema: Mapping[str, Json] = field(default_factory=dict)
    annotations: Mapping[str, Json] = field(default_factory=dict)

    @property
    def read_only(self) -> bool:
        """Whether the server says that the tool changes nothing."""
        return self.annotations.get("readOnlyHint") is True


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Some of a server's tools: by name, by what the server says of them, or both; None leaves that open. Without the
    `excluded` ones, and with `unasked` only those that it lets run without approval."""

    names: frozenset[str] | None = None
    read_only: bool | None = None
    excluded: frozenset[str] = frozenset()
    unasked: Approval | None = None

    def matches(self, tool: HostedTool) -> bool:
        named = (self.names is None or tool.name in self.names) and tool.name not in self.excluded
        told = self.read_only is None or tool.read_only is self.read_only
        return named and told and (self.unasked is None or not self.unasked.needed(tool))

    def __and__(self, other: ToolFilter) -> ToolFilter:
        """The tools that both match; at most one of them may have `unasked`."""
        assert self.unasked is None or other.unasked is None
        named = [names for names in (self.names, other.names) if names is not None]
        told = {value for value in (self.read_only, other.read_only) if value is not None}
        # What is to be read-only and not read-only is nothing.
        names = frozenset() if len(told) > 1 else frozenset.intersection(*named) if named else None
        excluded = self.excluded | other.excluded
        return ToolFilter(names, told.pop() if told else None, excluded, self.unasked or other.unasked)


@dataclass(frozen=True, slots=True)
class Approval:
    """Which calls somebody has to approve first. `always` wins over `never`; a tool that neither names is decided by
    `otherwise`: where nobody said anything, approval is needed."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None
    otherwise: bool = True
    besides: Approval | None = None
    """Somebody else's word: what it wants approved needs approval, whatever this one says."""

    def needed(self, tool: HostedTool) -> bool:
        if self.besides is not None and self.besides.needed(tool):
            return True
        if self.always is not None and self.always.matches(tool):
            return True
        if self.never is not None and self.never.matches(tool):
            return False
        return self.otherwise


@dataclass(frozen=True, slots=True)
class Command:
    """A tool server as a process of ours. It sees `environment` and a handful of harmless variables, nothing else."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    directory: str | None = None


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """OAuth client credentials. They are shown to the authorization server `issuer` only, wherever a tool server
    points; what they are to allow is what the tool server asks for."""

    client_id: str
    issuer: str
    client_secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ToolTimeouts:
    """In seconds: until a connection stands, for a list, for one call, and how long an unused connection is kept."""

    connect_s: float = 10.0
    list_s: float = 30.0
    call_s: float = 120.0
    idle_s: float = 300.0


TALK = "\0"
"""In an owner, between whose connections they are and which of theirs."""


@dataclass(frozen=True, slots=True)
class ToolServer:
    """How to reach a tool server and what may be done there.

    `configured` says that the operator named it: only then may it be a command, and only then is its address taken as
    it is. `owner` is whose connection it is; connections are never shared between owners, since servers keep state per
    connection. Behind `TALK` an owner may say which of theirs. `headers` and `authorization` (the value behind
    `Bearer`) go to this server and nowhere else.
    `idempotent` are tools the operator knows to be safe to run twice.
    """

    label: str
    url: str = ""
    command: Command | None = None
    transport: ToolTransport = ToolTransport.STREAMABLE_HTTP
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    authorization: str | None = field(default=None, repr=False)
    oauth: ClientCredentials | None = None
    timeouts: ToolTimeouts = field(default_factory=ToolTimeouts)
    allowed: ToolFilter | None = None
    idempotent: frozenset[str] = frozenset()
    approval: Approval = field(default_factory=Approval)
    description: str = ""
    concurrent: int = 8
    """Calls at once, of all owners together; further ones wait, and the owners take turns."""
    configured: bool = False
    owner: str = ""
    builtin: str = ""
    """The tool gpt-oss was trained on that this server stands for: `browser`, `python` or `container`. The model then
    knows its tools by the trained names."""
    at: str = ""
    """The field of the request it stands in, for errors that name it; empty for one of the operator's."""


@dataclass(frozen=True, slots=True)
class LeftOutTool:
    """A listed tool that the model cannot be offered, and why."""

    tool: HostedTool
    reason: str


@dataclass(frozen=True, slots=True)
class ToolList:
    """A server's tools in its own order, those that may be used. `digest` is equal as long as they are: a caller that
    keeps it sees when a tool changed under a running response. `left_out` are tools whose names cannot be used."""

    tools: tuple[HostedTool, ...]
    digest: str
    left_out: tuple[LeftOutTool, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What came of a call, as text for the model. `structured` is the server's own JSON where it gave some.

    `outcome_unknown` says that the call was sent and no answer was understood: it may have been carried out, and is
    not to be repeated unless the tool is known to be idempotent.
    """

    text: str
    is_error: bool = False
    structured: Json = None
    outcome_unknown: bool = False


Progress: TypeAlias = Callable[[float, float | None, str], None]
"""Told how far a call is: done, of how much (None when unknown), and what is being done."""


class ToolHost(Protocol):
    """Runs hosted tools. Deadlines are times of the running event loop, in seconds."""

    async def start(self) -> None:
        """Load what it takes to talk to servers, so that no call waits for that; nobody is asked anything yet."""
        ...

    async def list_tools(self, server: ToolServer, *, deadline: float | None = None) -> ToolList:
        """The tools of `server` that may be used. Raises `ToolServerNotAllowed` or `InvalidRequest` for a server that
        is not to be reached like this, else the `ToolServerError` family."""
        ...

    async def call(
        self,
        server: ToolServer,
        tool: str,
        arguments: ToolArguments,
        *,
        deadline: float | None = None,
        progress: Progress | None = None,
    ) -> ToolOutcome:
        """Run a tool. Cancelling tells the server and frees the connection. What goes wrong at the tool, at its
        server or on the way is an outcome; raises only `ToolServerNotAllowed` and `InvalidRequest`."""
        ...

    async def aclose(self) -> None:
        """End every connection and every process; later calls find nobody."""
        ...
