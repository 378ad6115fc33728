"""Sections of the operator's tool servers, and of the hosts that requests may name.

Shape and key names are LiteLLM's where it has them. An entry states how to reach a server and which tools are allowed
there. A request can only restrict that further.
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
from unisono.net.ssrf_guard import AllowedHost

ServerLabel = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
"""Name of a server in requests, and prefix of its tool names for the model."""

# `http` is LiteLLM's name for the transport that the protocol calls Streamable HTTP.
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
"""Functions from a token to the Authorization header, by LiteLLM's `auth_type`."""
API_KEY_HEADER = "x-api-key"


def _bare(token: str, scheme: str) -> str:
    """Return a token without the scheme that some files repeat in it."""
    first, _, rest = token.partition(" ")
    return rest if rest and first.lower() == scheme else token


class ToolFilterSettings(Section):
    """Selection of tools. A tool must match both keys if both are set."""

    tool_names: tuple[Name, ...] | None = None
    """Names of tools."""
    read_only: bool | None = None
    """True selects tools that the server declares as read-only, false all others."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> ToolFilterSettings:
        if self.tool_names is None and self.read_only is None:
            raise ValueError("the entry permits no tools: set `tool_names` or `read_only`")
        return self

    def filter(self) -> ToolFilter:
        return ToolFilter(None if self.tool_names is None else frozenset(self.tool_names), self.read_only)


class ApprovalSettings(Section):
    """Approval of tool calls. `always` wins over `never`; `otherwise` applies to all others."""

    always: ToolFilterSettings | None = None
    """Tools that need approval."""
    never: ToolFilterSettings | None = None
    """Tools that need no approval."""
    otherwise: Literal["always", "never"] = "always"
    """Approval of all other tools."""

    def approval(self) -> Approval:
        """Return the policy, never `Approval()`, which stands for no setting."""
        always = None if self.always is None else self.always.filter()
        never = None if self.never is None else self.never.filter()
        # `Approval()` means that the operator has set no policy and the request decides. A policy that requires
        # approval of every call must differ from it.
        approval = Approval(always, never, self.otherwise == "always")
        return Approval(always=ToolFilter()) if approval == Approval() else approval


def _to_approval(value: Any) -> Any:
    """Expand the short form, a word for all tools."""
    if isinstance(value, str):
        if value not in ("always", "never"):
            raise ValueError("must be `always`, `never`, or a mapping with the keys `always`, `never` and `otherwise`")
        return {"otherwise": value}
    return value


class McpServerSettings(Section):
    """Tool server: its address or command, its credentials, and the allowed tools."""

    url: SecretStr | None = None
    """Address of the server. It is secret because some addresses contain a key."""
    transport: Literal["http", "streamable_http", "sse", "stdio"] = "http"
    """Transport of the Model Context Protocol. `stdio` starts a program on this machine."""
    command: Annotated[str, Field(min_length=1)] | None = None
    """Program to start for `stdio`."""
    args: tuple[str, ...] = ()
    """Arguments of the program."""
    env: dict[str, SecretStr] = Field(default_factory=dict)
    """Environment of the program, in addition to a few harmless variables of the gateway."""
    auth_type: Literal["none", "api_key", "bearer_token", "basic", "authorization", "token", "oauth2"] = "none"
    """Form in which `authentication_token` is sent. `api_key` uses the header `x-api-key`."""
    authentication_token: SecretStr | None = None
    """Token for the server. Every `auth_type` except `none` and `oauth2` needs one."""
    static_headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Headers of every request to this server."""
    client_id: str | None = None
    """Client ID for `oauth2`. The client credentials are sent only to `issuer`."""
    client_secret: SecretStr | None = None
    """Client secret for `oauth2`."""
    issuer: str | None = None
    """Authorization server for `oauth2`. Its metadata names the token endpoint."""
    allowed_tools: tuple[Name, ...] | ToolFilterSettings | None = None
    """Tools that may be used: a list of names or a filter. By default all."""
    disallowed_tools: tuple[Name, ...] = ()
    """Tools that may not be used, even if `allowed_tools` includes them."""
    require_approval: Annotated[ApprovalSettings | None, BeforeValidator(_to_approval)] = None
    """Approval of tool calls: `always`, `never`, or a section with tools.
    By default the request decides; without a setting in the request, every call needs approval."""
    elicitation: Literal["allow", "deny"] = "allow"
    """Whether tools may ask the user during a call.
    `deny` tells the server that nobody can answer."""
    idempotent: tuple[Name, ...] = ()
    """Tools that may run again if the outcome of a call is unknown."""
    description: str = ""
    """Description of the server for the model."""
    timeout: Seconds = ToolTimeouts().call_s
    """Limit for one call, in seconds."""
    connect_timeout_s: Seconds = ToolTimeouts().connect_s
    """Limit for connecting, in seconds."""
    list_timeout_s: Seconds = ToolTimeouts().list_s
    """Limit for listing the tools, in seconds. It includes the connection and all pages."""
    max_concurrent_requests: Count = 8
    """Maximum concurrent calls of all clients. Further calls wait, and clients alternate."""

    @model_validator(mode="after")
    def _is_consistent(self) -> McpServerSettings:
        stdio = self.transport == "stdio"
        if stdio and (self.command is None or self.url is not None):
            raise ValueError("transport `stdio` needs `command` and no `url`")
        if not stdio and (self.url is None or self.command is not None or self.args or self.env):
            raise ValueError(f"transport `{self.transport}` needs `url`, and no `command`, `args` or `env`")
        if stdio and (self.auth_type != "none" or self.static_headers):
            raise ValueError("transport `stdio` has no headers; set the credentials in `env`")
        if self.auth_type == "oauth2" and not (self.client_id and self.issuer):
            raise ValueError(
                "auth_type `oauth2` needs `client_id` and `issuer`: the gateway supports only OAuth's client "
                "credentials grant"
            )
        if self.auth_type not in ("none", "oauth2") and self.authentication_token is None:
            raise ValueError(f"auth_type `{self.auth_type}` needs `authentication_token`")
        return self

    def server(self, label: str) -> ToolServer:
        """Return the server with its address, credentials and permissions."""
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
            may_ask=self.elicitation == "allow",
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
    # A single colon precedes a port. An IPv6 address has several.
    if value != value.lower() or "/" in value or (":" in value and "[" not in value and value.count(":") == 1):
        raise ValueError("must be only a host name in lower case, without scheme or path; set ports in `ports`")
    return value


class AllowedHostSettings(Section):
    """Host that requests may name by URL."""

    host: Annotated[Name, AfterValidator(_plain_host)]
    """Host in lower case without scheme, path and port.
    `*.example.com` allows all subdomains, `*` every host."""
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = (443,)
    """Allowed ports. An empty list allows all ports."""
    plain_http: bool = False
    """True also allows `http://`."""
    private: bool = False
    """True also allows private addresses. It cannot be used with `*`."""

    @model_validator(mode="after")
    def _check_private_hosts(self) -> AllowedHostSettings:
        if self.private and self.host == "*":
            raise ValueError("`private` needs a host name, because `*` would open the whole private network to clients")
        return self

    def rule(self) -> AllowedHost:
        return AllowedHost(self.host, frozenset(self.ports), self.plain_http, self.private)


AllowedHostEntry: TypeAlias = Annotated[AllowedHostSettings, BeforeValidator(_to_host)]
