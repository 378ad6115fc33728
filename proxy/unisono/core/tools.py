"""Server tools: tools that the gateway runs on tool servers, and the `ToolHost` protocol.

This module is independent of any wire protocol: an engine knows a tool's name and arguments, has it run, and gets text
back. An error of a tool or its server during a call is an outcome, because the model reads it and continues. Only
errors of the request itself (a forbidden server, an unavailable tool list) are raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from hashlib import sha256
from typing import Final, Protocol, TypeAlias

from unisono.core.conversation import FunctionTool, Json, Tokens
from unisono.core.elicitation import ToolQuestion, UserAnswer
from unisono.core.frozen import dataclass
from unisono.core.server_tool_arguments import ToolArguments

# Unique wire names for server tools; models allow 64 letters, digits, `_` and `-`.
#
# An ordinary tool name under an ordinary server label becomes `label__tool`, from which both can be read back. Any
# other pair gets a readable stem and a digest of both. A name depends on the pair alone, so it stays the same in a
# continued conversation. No two tools of one table share a name.

MAX_NAME_LENGTH: Final = 64
SEPARATOR: Final = "__"
DIGITS: Final = 16

_PLAIN = re.compile(r"[a-zA-Z0-9_-]+")
_ODD = re.compile(r"[^a-zA-Z0-9-]+")


class ToolNames:
    """Names of a set of server tools.

    `reserved` are names in other use, such as the client's tools.
    """

    def __init__(self, tools: Iterable[tuple[str, str]] = (), reserved: Iterable[str] = ()) -> None:
        self._taken = frozenset(reserved)
        self._names: dict[tuple[str, str], str] = {}
        self._tools: dict[str, tuple[str, str]] = {}
        for label, tool in tools:
            self.add(label, tool)

    def add(self, label: str, tool: str) -> str:
        """Return the name under which the model knows `tool` of the server `label`.

        The first call assigns a free name; further calls return the same one.
        """
        known = self._names.get((label, tool))
        if known is not None:
            return known
        name = next(name for name in _candidates(label, tool) if name not in self._tools and name not in self._taken)
        self._names[label, tool] = name
        self._tools[name] = (label, tool)
        return name

    def tool(self, name: str) -> tuple[str, str] | None:
        """Return the label and the tool for `name`; None if unknown."""
        return self._tools.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)


def _candidates(label: str, tool: str) -> Iterator[str]:
    plain = f"{label}{SEPARATOR}{tool}"
    # The plain name must be readable back to the same pair. A label that contains the separator, or ends in half of
    # it, could give two pairs one name.
    if (
        len(plain) <= MAX_NAME_LENGTH
        and tool
        and _PLAIN.fullmatch(plain)
        and plain.split(SEPARATOR, 1) == [label, tool]
    ):
        yield plain
    # Single underscores only, so that this name never equals a plain one.
    stem = _ODD.sub("_", f"{label}_{tool}").strip("_")
    attempt = 0
    while True:
        pair = f"{len(label)}:{label}{tool}{attempt or ''}"
        digest = sha256(pair.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]
        yield f"{stem[: MAX_NAME_LENGTH - DIGITS - 1].rstrip('_') or 'tool'}_{digest}"
        attempt += 1


class ToolTransport(StrEnum):
    """Transport to a tool server; `SSE` is the older HTTP transport with two endpoints."""

    STREAMABLE_HTTP = "streamable_http"
    SSE = "sse"
    STDIO = "stdio"


@dataclass(frozen=True, slots=True)
class HostedTool:
    """Tool as its server describes it.

    `server` is the server's label, `schema` the JSON Schema of the arguments. `annotations` are unverified hints of
    the server (`readOnlyHint`, ...).
    """

    server: str
    name: str
    description: str = ""
    schema: Mapping[str, Json] = field(default_factory=dict)
    annotations: Mapping[str, Json] = field(default_factory=dict)

    @property
    def read_only(self) -> bool:
        """True if the server claims that the tool changes nothing."""
        return self.annotations.get("readOnlyHint") is True


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Subset of a server's tools.

    Tools are selected by name, by the server's read-only claim, or both; None means no restriction. `excluded` tools
    never match. With `unasked`, only tools match that this approval lets run without asking.
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
        """Return the filter for tools that match both; at most one of them may have `unasked`."""
        assert self.unasked is None or other.unasked is None
        named = [names for names in (self.names, other.names) if names is not None]
        values = {value for value in (self.read_only, other.read_only) if value is not None}
        # Requiring both read-only and not read-only matches nothing.
        names = frozenset() if len(values) > 1 else frozenset.intersection(*named) if named else None
        excluded = self.excluded | other.excluded
        return ToolFilter(names, values.pop() if values else None, excluded, self.unasked or other.unasked)


@dataclass(frozen=True, slots=True)
class Approval:
    """Approval policy for calls.

    `always` wins over `never`; a tool in neither is decided by `otherwise`. By default, approval is required.
    """

    always: ToolFilter | None = None
    never: ToolFilter | None = None
    otherwise: bool = True
    # Second policy; a call that it wants approved needs approval in any case.
    second: Approval | None = None

    def needed(self, tool: HostedTool) -> bool:
        if self.second is not None and self.second.needed(tool):
            return True
        if self.always is not None and self.always.matches(tool):
            return True
        if self.never is not None and self.never.matches(tool):
            return False
        return self.otherwise


@dataclass(frozen=True, slots=True)
class Command:
    """Tool server as a local process; it sees `environment` and a few harmless variables only."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    directory: str | None = None


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """OAuth client credentials.

    They are sent only to the authorization server `issuer`, even if a tool server names another. The tool server
    determines the requested scope.
    """

    client_id: str
    issuer: str
    client_secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ToolTimeouts:
    """Time limits in seconds: connecting, listing, one call, and keeping an unused connection."""

    connect_s: float = 10.0
    list_s: float = 30.0
    call_s: float = 120.0
    idle_s: float = 300.0


# Separator in an owner name: the owner of the connections, then one of its connections.
TALK = "\0"


@dataclass(frozen=True, slots=True)
class ToolServer:
    """Address and permissions of a tool server.

    `configured` marks a server from the operator's configuration. Only such a server may be a command, and only its
    address is used without a check. `owner` owns the connection. Connections are never shared between owners, since
    servers store state per connection. The part of `owner` that follows `TALK` names one of the owner's connections.
    `headers` and `authorization` (the value that follows `Bearer`) are sent to this server only. `idempotent` names
    tools that the operator declares safe to run twice.
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
    # Simultaneous calls of all owners together; further calls wait, and owners alternate.
    concurrent: int = 8
    configured: bool = False
    owner: str = ""
    # Builtin tool that this server implements: `browser`, `python` or `container`. The model then sees the server's
    # tools under their trained names.
    builtin: str = ""
    # Request field with the server's address, for errors; empty for a configured server.
    at: str = ""
    # Whether the model knows the server's tools only after a search. Without a search, it knows them from the start.
    deferred: bool = False
    # Whether its tools may ask the user.
    may_ask: bool = True


@dataclass(frozen=True, slots=True)
class LeftOutTool:
    """Listed tool that cannot be offered to the model, and the reason."""

    tool: HostedTool
    reason: str


@dataclass(frozen=True, slots=True)
class ToolList:
    """Permitted tools of a server, in the server's order.

    `digest` stays equal as long as the tools do, so a caller can detect a change during a response. `left_out` are
    tools whose names cannot be used.
    """

    tools: tuple[HostedTool, ...]
    digest: str
    left_out: tuple[LeftOutTool, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerToolCall:
    """A call of a server tool as the model wrote it; `arguments` is its unparsed text.

    `approval` is the id of the granted approval, for a call that is in the conversation already. Such a call has no
    new tokens; `earlier_tokens` are those in the conversation. A call with a `question` repeats one whose tool asked
    the user. It waits for the client, and is made with the `answer`.
    """

    call_id: str
    name: str
    arguments: str
    tokens: Tokens = ()
    approval: str = ""
    earlier_tokens: Tokens = ()
    question: ToolQuestion | None = None
    answer: UserAnswer | None = None


# Label of the server that stands for the gateway's own search for tools. No request can name it.
SEARCH_LABEL = "builtin:tool_search"
# Keys in the structured outcome of a search: the names of the found tools, and the server label and own name of those
# that a server runs.
FOUND = "found"
FOUND_ON = "found_on"


@dataclass(frozen=True, slots=True)
class ToolSearch:
    """Search for deferred tools, which the gateway runs without a server.

    `tool` is what the model calls, under the tool's own name. `run` takes the arguments and the deferred tools of
    servers. Its outcome has the names of the found tools under `FOUND`.
    """

    tool: HostedTool
    run: Callable[[Mapping[str, Json], Sequence[FunctionTool]], ToolOutcome]

    @property
    def server(self) -> ToolServer:
        """Server that stands for the search. It may run twice, and needs no approval."""
        idempotent = frozenset({self.tool.name})
        return ToolServer(SEARCH_LABEL, approval=Approval(otherwise=False), idempotent=idempotent)


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """Outcome of a call, as text for the model; `structured` is the server's own JSON, if any.

    `outcome_unknown` means that the call was sent but no valid answer arrived. It may have been carried out, and must
    not be repeated unless the tool is known to be idempotent. With a `question`, the tool has no result yet: the call
    is made again with the answer of the user.
    """

    text: str
    is_error: bool = False
    structured: Json = None
    outcome_unknown: bool = False
    question: ToolQuestion | None = None


def found_names(outcome: ToolOutcome) -> list[str]:
    """Return the names of the tools that a search found; none for the outcome of another call."""
    structured = outcome.structured
    names = structured.get(FOUND) if isinstance(structured, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


# Progress callback: amount done, total amount (None if unknown), description.
Progress: TypeAlias = Callable[[float, float | None, str], None]


class ToolHost(Protocol):
    """Runner of server tools. Deadlines are times of the running event loop, in seconds."""

    async def start(self) -> None:
        """Load the client libraries, so that no call waits for them; no server is contacted yet."""
        ...

    async def list_tools(self, server: ToolServer, *, deadline: float | None = None) -> ToolList:
        """Return the permitted tools of `server`.

        Raises `ToolServerNotAllowed` or `InvalidRequest` for a server that must not be contacted like this, else the
        `ToolServerError` family.
        """
        ...

    async def call(
        self,
        server: ToolServer,
        tool: str,
        arguments: ToolArguments,
        *,
        deadline: float | None = None,
        progress: Progress | None = None,
        answer: UserAnswer | None = None,
        can_ask: bool = False,
    ) -> ToolOutcome:
        """Run a tool. Cancelling notifies the server and frees the connection.

        With `can_ask`, the outcome may be a question, and `answer` is the user's to the last one of the same call.
        Errors of the tool, its server or the network are outcomes; raises only `ToolServerNotAllowed` and
        `InvalidRequest`.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection and end every process; later calls fail."""
        ...
