"""Tool servers of the operator: `mcp_servers` in LiteLLM's shape, and which hosts requests may name besides.

What LiteLLM has a key for keeps its spelling; approval and what may be repeated are ours. An entry says how a server is
reached and what may be done there; a request can only ask for less.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from unisono.config.section import Count, Name, Seconds, Section
from unisono.core.tools import (
    Approval,
    ClientCredentials,
    Command,
    ToolFilter,
    ToolServer,
    ToolTimeouts,
    ToolTransport,
)

ServerLabel = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
"""How requests name a server, and how its tools begin for the model."""

TRANSPORTS = {
    "http": ToolTransport.STREAMABLE_HTTP,
    "streamable_http": ToolTransport.STREAMABLE_HTTP,
    "sse": ToolTransport.SSE,
    "stdio": ToolTransport.STDIO,
}

SCHEMES: Mapping[str, Callable[[str], str]] = {
    "authorization": lambda token: token,
    "bearer_token": lambda token: f"Bearer {_bare(token, 'bearer')}",
    "basic": lambda token: f"Basic {b64encode(token.encode()).decode() if ':' in token else _bare(token, 'basic')}",
    "token": lambda token: f"token {_bare(token, 'token')}",
}
"""The Authorization header that a token becomes, by LiteLLM's names of the ways."""
API_KEY_HEADER = "x-api-key"


def _bare(token: str, scheme: str) -> str:
    """A token without the scheme that some files repeat in it."""
    first, _, rest = token.partition(" ")
    return rest if rest and first.lower() == scheme else token


class ToolFilterSettings(Section):
    tool_names: tuple[Name, ...] | None = None
    """Tools by name."""
    read_only: bool | None = None
    """True for tools that say they change nothing, false for all others."""

    @model_validator(mode="after")
    def _says_something(self) -> ToolFilterSettings:
        if self.tool_names is None and self.read_only is None:
            raise ValueError("names no tools; give tool_names or read_only")
        return self

    def filter(self) -> ToolFilter:
        return ToolFilter(None if self.tool_names is None else frozenset(self.tool_names), self.read_only)


class ApprovalSettings(Section):
    """Which tools need approval: `always` wins over `never`, and `otherwise` decides about those that neither names."""

    always: ToolFilterSettings | None = None
    """Tools that need approval."""
    never: ToolFilterSettings | None = None
    """Tools that need none."""
    otherwise: Literal["always", "never"] = "always"
    """What holds for all others."""

    def approval(self) -> Approval:
        """Never `Approval()`, which stands for no word at all."""
        always = None if self.always is None else self.always.filter()
        never = None if self.never is None else self.never.filter()
        said = Approval(always, never, self.otherwise == "always")
        return Approval(always=ToolFilter()) if said == Approval() else said


def _to_approval(value: Any) -> Any:
    """One word stands for all tools."""
    if isinstance(value, str):
        if value not in ("always", "never"):
            raise ValueError("must be always, never, or say for which tools")
        return {"otherwise": value}
    return value


class McpServerSettings(Section):
    """One tool server: an address or a command, its credentials, and what may be done there."""

    url: SecretStr | None = None
    """Its address. A secret, for some have a key in it."""
    transport: Literal["http", "streamable_http", "sse", "stdio"] = "http"
    """How it is spoken to; `stdio` is a program of this machine."""
    command: Annotated[str, Field(min_length=1)] | None = None
    """For `stdio`: the program that is run, with `args` behind it and `env` around it."""
    args: tuple[str, ...] = ()
    """What stands behind the command."""
    env: dict[str, SecretStr] = Field(default_factory=dict)
    """All that the program sees of an environment."""
    auth_type: Literal["none", "api_key", "bearer_token", "basic", "authorization", "token", "oauth2"] = "none"
    """How the token is sent."""
    authentication_token: SecretStr | None = None
    """The token, for every way but `none` and `oauth2`."""
    static_headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Sent with every request to this server."""
    client_id: str | None = None
    """For `oauth2`: client credentials, shown to `issuer` alone."""
    client_secret: SecretStr | None = None
    """For `oauth2`."""
    issuer: str | None = None
    """For `oauth2`: whose metadata say where tokens are had."""
    allowed_tools: tuple[Name, ...] | ToolFilterSettings | None = None
    """What may be used at all; by default everything."""
    disallowed_tools: tuple[Name, ...] = ()
    """What may not be used, even if `allowed_tools` has it."""
    require_approval: Annotated[ApprovalSettings | None, BeforeValidator(_to_approval)] = None
    """`always`, `never`, or which tools; by default a request says it, and where it does not, always."""
    idempotent: tuple[Name, ...] = ()
    """Tools that may be run twice where it is not known whether they were run."""
    description: str = ""
    """What the model is told about the server, beside its tools."""
    timeout: Seconds = ToolTimeouts().call_s
    """One call, in seconds."""
    connect_timeout_s: Seconds = ToolTimeouts().connect_s
    """Until a connection stands, in seconds."""
    list_timeout_s: Seconds = ToolTimeouts().list_s
    """Until its tools are listed, connection and all pages included, in seconds."""
    max_concurrent_requests: Count = 8
    """Calls at once, of all clients together; further ones wait, and the clients take turns."""

    @model_validator(mode="after")
    def _fits_together(self) -> McpServerSettings:
        stdio = self.transport == "stdio"
        if stdio and (self.command is None or self.url is not None):
            raise ValueError("transport stdio needs a command and no url")
        if not stdio and (self.url is None or self.command is not None or self.args or self.env):
            raise ValueError("transport http or sse needs a url, and no command, args or env")
        if stdio and (self.auth_type != "none" or self.static_headers):
            raise ValueError("transport stdio has no headers; give credentials in env")
        if self.auth_type == "oauth2" and not (self.client_id and self.issuer):
            raise ValueError("auth_type oauth2 needs client_id and issuer: client credentials are the one way here")
        if self.auth_type not in ("none", "oauth2") and self.authentication_token is None:
            raise ValueError(f"auth_type {self.auth_type} needs an authentication_token")
        return self

    def server(self, label: str) -> ToolServer:
        """How the server is reached and what may be done there."""
        command = None
        if self.command is not None:
            environment = {name: value.get_secret_value() for name, value in self.env.items()}
            command = Command((self.command, *self.args), environment)
        return ToolServer(
            label=label,
            url="" if self.url is None else self.url.get_secret_value(),
            command=command,
            transport=TRANSPORTS[self.transport],
            headers=self._headers(),
            authorization=self._authorization(),
            oauth=self._oauth(),
            timeouts=ToolTimeouts(self.connect_timeout_s, self.list_timeout_s, self.timeout),
            allowed=self._allowed(),
            idempotent=frozenset(self.idempotent),
            approval=Approval() if self.require_approval is None else self.require_approval.approval(),
            description=self.description,
            concurrent=self.max_concurrent_requests,
            configured=True,
        )

    def _token(self) -> str:
        return "" if self.authentication_token is None else self.authentication_token.get_secret_value()

    def _headers(self) -> dict[str, str]:
        headers = {name: value.get_secret_value() for name, value in self.static_headers.items()}
        return headers | {API_KEY_HEADER: self._token()} if self.auth_type == "api_key" else headers

    def _authorization(self) -> str | None:
        scheme = SCHEMES.get(self.auth_type)
        return None if scheme is None else scheme(self._token())

    def _oauth(self) -> ClientCredentials | None:
        if self.auth_type != "oauth2" or self.client_id is None or self.issuer is None:
            return None
        secret = "" if self.client_secret is None else self.client_secret.get_secret_value()
        return ClientCredentials(self.client_id, self.issuer, secret)

    def _allowed(self) -> ToolFilter | None:
        match self.allowed_tools:
            case None:
                allowed = ToolFilter()
            case ToolFilterSettings():
                allowed = self.allowed_tools.filter()
            case names:
                allowed = ToolFilter(frozenset(names))
        allowed &= ToolFilter(excluded=frozenset(self.disallowed_tools))
        return None if allowed == ToolFilter() else allowed


def _to_host(value: Any) -> Any:
    return {"host": value} if isinstance(value, str) else value


def _plain_host(value: str) -> str:
    if value != value.lower() or "/" in value or (":" in value and "[" not in value and value.count(":") == 1):
        raise ValueError("must be a host alone, in lower case: no scheme, no path, ports go into `ports`")
    return value


class AllowedHostSettings(Section):
    """A host that requests may name tool servers at: `mcp.example.com`, `*.example.com` or `*`."""

    host: Annotated[Name, AfterValidator(_plain_host)]
    """In lower case: no scheme, no path, no port."""
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = (443,)
    """None listed means any."""
    plain_http: bool = False
    """Whether `http://` will do."""
    private: bool = False
    """Whether its addresses may be inside: never for `*`."""

    @model_validator(mode="after")
    def _private_ones_are_named(self) -> AllowedHostSettings:
        if self.private and self.host == "*":
            raise ValueError("private needs a host by name: with `*` clients could reach everything inside")
        return self


AllowedHostEntry: TypeAlias = Annotated[AllowedHostSettings, BeforeValidator(_to_host)]
