"""Server tools: tools that the gateway runs, their questions, and the `ToolHost` protocol.

This module is independent of any wire protocol: the engine passes a tool's name and arguments to the host, which runs
the tool and returns text. If a tool or its server fails during a call, the error is an outcome: the model reads it and
continues. Exceptions are raised only for errors of the request itself, such as a forbidden server or an unavailable
tool list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from hashlib import sha256
from typing import Final, Protocol, TypeAlias

from unisono.core.conversation import FunctionTool, Json, Tokens
from unisono.core.frozen import dataclass
from unisono.core.server_tool_arguments import ToolArguments
from unisono.core.tool_approvals import Approval, ToolFilter


class UserAction(StrEnum):
    """Reaction of the user to a question of a tool: an answer, a refusal, or neither."""

    ACCEPT = "accept"
    DECLINE = "decline"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class ToolQuestion:
    """Question of a tool to the user.

    The answer must match the JSON Schema `schema`. If `url` is not empty, the user has to visit this page instead.
    `state` is sent back when the call is repeated with the answer; only the tool host interprets it.
    """

    message: str
    schema: Mapping[str, Json] = field(default_factory=dict)
    url: str = ""
    state: Json = None


@dataclass(frozen=True, slots=True)
class UserAnswer:
    """Answer of the user to a question.

    `content` is the content of the answer, which must match the schema of the question. `state` is the `state` of the
    question.
    """

    action: UserAction
    content: Json = None
    state: Json = None


# Names of server tools in prompts. A name may have at most 64 characters: letters, digits, `_` and `-`.
#
# The name of an ordinary tool on a server with an ordinary label is `label__tool`, from which label and tool can be
# derived. In all other cases, the name consists of a readable stem and a digest of label and tool. A name depends only
# on label and tool, so it stays the same in a continued conversation. The names of one request are unique.

MAX_NAME_LENGTH: Final = 64
SEPARATOR: Final = "__"
DIGITS: Final = 16

_PLAIN = re.compile(r"[a-zA-Z0-9_-]+")
_ODD = re.compile(r"[^a-zA-Z0-9-]+")


class ToolNames:
    """Unique names for a set of server tools; `tools` are pairs of server label and tool name.

    `reserved` are names that must not be assigned, such as the names of the client's tools.
    """

    def __init__(self, tools: Iterable[tuple[str, str]] = (), reserved: Iterable[str] = ()) -> None:
        self._taken = frozenset(reserved)
        self._names: dict[tuple[str, str], str] = {}
        self._tools: dict[str, tuple[str, str]] = {}
        for label, tool in tools:
            self.add(label, tool)

    def add(self, label: str, tool: str) -> str:
        """Return the name under which the model knows `tool` of the server `label`.

        The first call assigns a free name; further calls return the same name.
        """
        known = self._names.get((label, tool))
        if known is not None:
            return known
        name = next(name for name in _candidates(label, tool) if name not in self._tools and name not in self._taken)
        self._names[label, tool] = name
        self._tools[name] = (label, tool)
        return name

    def tool(self, name: str) -> tuple[str, str] | None:
        """Return the server label and the tool name for `name`; None if the name was not assigned."""
        return self._tools.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)


def _candidates(label: str, tool: str) -> Iterator[str]:
    plain = f"{label}{SEPARATOR}{tool}"
    # It must be possible to derive the same pair from the plain name. If a label contains the separator or ends with
    # half of the separator, two pairs could have the same plain name.
    if (
        len(plain) <= MAX_NAME_LENGTH
        and tool
        and _PLAIN.fullmatch(plain)
        and plain.split(SEPARATOR, 1) == [label, tool]
    ):
        yield plain
    # The stem contains only single underscores, so that this name never equals a plain name.
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

    `server` is the label of the server, and `schema` is the JSON Schema of the arguments. `annotations` are hints from
    the server that the gateway cannot verify, such as `readOnlyHint`.
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
class Command:
    """Tool server that runs as a local process.

    Its environment contains only `environment` and a few harmless variables.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    directory: str | None = None


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """OAuth client credentials.

    They are sent only to the authorization server `issuer`, even if a tool server names a different authorization
    server. The tool server determines the requested scope.
    """

    client_id: str
    issuer: str
    client_secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ToolTimeouts:
    """Time limits in seconds: to connect, to list tools, for one call, for an idle connection."""

    connect_s: float = 10.0
    list_s: float = 30.0
    call_s: float = 120.0
    idle_s: float = 300.0


# Separator in `ToolServer.owner`, between the owner of the connections and the name of one connection.
TALK = "\0"


@dataclass(frozen=True, slots=True)
class ToolServer:
    """Address and permissions of a tool server.

    `configured` marks a server from the operator's configuration. Only a configured server may be a command, and only
    its address is used without a check. Connections are never shared between owners, because servers store state per
    connection. If an owner has several connections, `owner` consists of the owner, the separator `TALK` and the name of
    the connection. `headers` and `authorization` (the value that follows `Bearer`) are sent only to this server.
    `idempotent` are the names of tools that may run twice, according to the operator.
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
    # Maximum number of simultaneous calls of all owners together. Further calls wait, and owners take turns.
    concurrent: int = 8
    configured: bool = False
    owner: str = ""
    # Built-in tool that this server implements: `browser`, `python` or `container`. The prompt then declares the
    # server's tools under the names on which the model was trained.
    builtin: str = ""
    # Request field that contains the server's address, for error messages; empty for a configured server.
    at: str = ""
    # True if the prompt declares the server's tools only after a search has found them. Requests without a search
    # ignore this field.
    deferred: bool = False
    # True if the server's tools may ask the user questions.
    may_ask: bool = True


@dataclass(frozen=True, slots=True)
class LeftOutTool:
    """Listed tool that cannot be offered to the model, and the reason."""

    tool: HostedTool
    reason: str


@dataclass(frozen=True, slots=True)
class ToolList:
    """Permitted tools of a server, in the server's order.

    `digest` changes if the tools change, so a caller can detect a change during a response. `left_out` are tools that
    cannot be offered because of their names.
    """

    tools: tuple[HostedTool, ...]
    digest: str
    left_out: tuple[LeftOutTool, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerToolCall:
    """A call to a server tool as the model wrote it; `arguments` is its unparsed text.

    A call with an `approval` was approved by the client: it is in the conversation already, and `approval` is the id of
    the approval. Such a call has no new `tokens`; `earlier_tokens` are its tokens in the conversation. A call with a
    `question` repeats a call whose tool asked the user. It runs after the client has sent the `answer`.
    """

    call_id: str
    name: str
    arguments: str
    tokens: Tokens = ()
    approval: str = ""
    earlier_tokens: Tokens = ()
    question: ToolQuestion | None = None
    answer: UserAnswer | None = None


# Server label under which the gateway's own search for tools appears. No request can use this label.
SEARCH_LABEL = "builtin:tool_search"
# Keys in the structured outcome of a search: the names of the found tools; and for found tools of servers, the server
# label and the server's name for the tool, by tool name.
FOUND = "found"
FOUND_ON = "found_on"


@dataclass(frozen=True, slots=True)
class ToolSearch:
    """Search for deferred tools; the gateway itself runs the search, without a tool server.

    `tool` is the declaration of the search; the model calls it by its own name, without a server label. `run` takes the
    arguments of a call and the deferred tools of servers. The structured outcome contains the names of the found tools
    under `FOUND`.
    """

    tool: HostedTool
    run: Callable[[Mapping[str, Json], Sequence[FunctionTool]], ToolOutcome]

    @property
    def server(self) -> ToolServer:
        """Server entry under which the search appears; it is idempotent and needs no approval."""
        idempotent = frozenset({self.tool.name})
        return ToolServer(SEARCH_LABEL, approval=Approval(otherwise=False), idempotent=idempotent)


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """Outcome of a call, as text for the model; `structured` is the server's own JSON, if any.

    `outcome_unknown`: the call was sent, but no valid answer arrived. The call may have been carried out, and must not
    be repeated unless the tool is idempotent. With a `question`, the tool has no result yet; the call is repeated with
    the answer of the user.
    """

    text: str
    is_error: bool = False
    structured: Json = None
    outcome_unknown: bool = False
    question: ToolQuestion | None = None


def found_names(outcome: ToolOutcome) -> list[str]:
    """Return the names of the tools that a search found; empty for any other call."""
    structured = outcome.structured
    names = structured.get(FOUND) if isinstance(structured, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


# Progress callback: amount done, total amount (None if unknown), description.
Progress: TypeAlias = Callable[[float, float | None, str], None]


class ToolHost(Protocol):
    """Runner of server tools. Deadlines are times of the running event loop, in seconds."""

    async def start(self) -> None:
        """Load the client libraries, so that no later call has to wait; contacts no server."""
        ...

    async def list_tools(self, server: ToolServer, *, deadline: float | None = None) -> ToolList:
        """Return the permitted tools of `server`.

        Raises `ToolServerNotAllowed` or `InvalidRequest` if the server must not be contacted or its settings are
        invalid. Raises `ToolServerError` or a subclass if the server fails.
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

        With `can_ask`, the outcome may be a question. `answer` is the user's answer to the last question of the same
        call. If the tool, its server or the network fails, the error is an outcome. Raises only `ToolServerNotAllowed`
        and `InvalidRequest`, as `list_tools`.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection and end every process; later calls fail."""
        ...
