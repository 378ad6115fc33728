"""Sections for the operator's tool servers, and for hosts that requests may name.

Structure and key names are LiteLLM's where LiteLLM has them. An entry states how to reach a server and which of its
tools are allowed. A request can restrict the allowed tools further, but cannot extend them.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from unisono.config.addresses import check_http_url
from unisono.config.section_base import Count, Name, Seconds, Section
from unisono.core.tool_approvals import Approval, ToolFilter
from unisono.core.tool_host import ClientCredentials, Command, ToolServer, ToolTimeouts, ToolTransport
from unisono.net.ssrf_guard import AllowedHost

ServerLabel = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
"""Name of a server in requests. For the model, it is the prefix of the server's tool names."""

# `http` is LiteLLM's name for the transport that the Model Context Protocol calls Streamable HTTP.
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
"""Functions that make the Authorization header from a token, by LiteLLM's `auth_type`."""
API_KEY_HEADER = "x-api-key"


def _bare(token: str, scheme: str) -> str:
    """Return a token without the scheme that some files include in it, such as `Bearer `."""
    first, _, rest = token.partition(" ")
    return rest if rest and first.lower() == scheme else token


class ToolFilterSettings(Section):
    """Selection of tools. If both keys are set, a tool must match both."""

    tool_names: tuple[Name, ...] | None = None
    """Names of the selected tools."""
    read_only: bool | None = None
    """True selects tools that the server declares as read-only, false all others."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> ToolFilterSettings:
        if self.tool_names is None and self.read_only is None:
            raise ValueError("the entry selects no tools; set `tool_names` or `read_only`")
        return self

    def filter(self) -> ToolFilter:
        return ToolFilter(None if self.tool_names is None else frozenset(self.tool_names), self.read_only)


class ApprovalSettings(Section):
    """Approval of tool calls. If a tool matches both `always` and `never`, `always` applies."""

    always: ToolFilterSettings | None = None
    """Tools whose calls need approval."""
    never: ToolFilterSettings | None = None
    """Tools whose calls need no approval."""
    otherwise: Literal["always", "never"] = "always"
    """Whether calls of all other tools need approval."""

    def approval(self) -> Approval:
        """Return the policy. It is never equal to `Approval()`, which means that no policy is set."""
        always = None if self.always is None else self.always.filter()
        never = None if self.never is None else self.never.filter()
        # `Approval()` means that the operator has set no policy, so that the request decides. A policy that requires
        # approval of every call must therefore differ from `Approval()`.
        approval = Approval(always, never, self.otherwise == "always")
        return Approval(always=ToolFilter()) if approval == Approval() else approval


def _to_approval(value: Any) -> Any:
    """Expand the short form: `always` or `never` for all tools."""
    if isinstance(value, str):
        if value not in ("always", "never"):
            raise ValueError("must be `always`, `never`, or a mapping with the keys `always`, `never` and `otherwise`")
        return {"otherwise": value}
    return value


def _check_url(url: SecretStr) -> SecretStr:
    check_http_url(url.get_secret_value(), "https://tools.example.com/mcp")
    return url


def _check_issuer(issuer: str) -> str:
    check_http_url(issuer, "https://login.example.com")
    return issuer


class McpServerSettings(Section):
    """Tool server: its address or command, its credentials, and the allowed tools."""

    url: Annotated[SecretStr, AfterValidator(_check_url)] | None = None
    """Address of the server. It is treated as secret, because some addresses contain a key."""
    transport: Literal["http", "streamable_http", "sse", "stdio"] = "http"
    """Transport of the Model Context Protocol. `stdio` starts a program on this machine."""
    command: Annotated[str, Field(min_length=1)] | None = None
    """Program to start. Required for the transport `stdio`."""
    args: tuple[str, ...] = ()
    """Arguments of the program."""
    env: dict[str, SecretStr] = Field(default_factory=dict)
    """Environment variables of the program.
    The program also gets a few variables of the gateway that contain no secrets."""
    auth_type: Literal["none", "api_key", "bearer_token", "basic", "authorization", "token", "oauth2"] = "none"
    """Form in which `authentication_token` is sent. `api_key` uses the header `x-api-key`."""
    authentication_token: SecretStr | None = None
    """Token for the server. Required for every `auth_type` except `none` and `oauth2`."""
    static_headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Headers to send with every request to this server."""
    client_id: str | None = None
    """Client ID for `oauth2`. The client credentials are sent only to `issuer`."""
    client_secret: SecretStr | None = None
    """Client secret for `oauth2`."""
    issuer: Annotated[str, AfterValidator(_check_issuer)] | None = None
    """Address of the authorization server for `oauth2`.
    The gateway reads the token endpoint from the metadata of this server."""
    allowed_tools: tuple[Name, ...] | ToolFilterSettings | None = None
    """Tools that may be used: a list of names, or a filter. By default all tools."""
    disallowed_tools: tuple[Name, ...] = ()
    """Tools that may not be used, even if `allowed_tools` includes them."""
    require_approval: Annotated[ApprovalSettings | None, BeforeValidator(_to_approval)] = None
    """Which tool calls need approval: `always`, `never`, or a section that names tools.
    By default the request decides. If the request does not decide either, every call needs approval."""
    elicitation: Literal["allow", "deny"] = "allow"
    """Whether the server may ask the user for input during a call.
    With `deny`, the gateway tells the server that it does not support such questions."""
    idempotent: tuple[Name, ...] = ()
    """Tools that the gateway may call again if it does not know whether a call has run."""
    description: str = ""
    """Description of the server for the model."""
    timeout: Seconds = ToolTimeouts().call_s
    """Time limit for one call, in seconds."""
    connect_timeout_s: Seconds = ToolTimeouts().connect_s
    """Time limit for connecting to the server, in seconds."""
    list_timeout_s: Seconds = ToolTimeouts().list_s
    """Time limit for listing the tools, in seconds.
    It includes connecting to the server, and all pages of the list."""
    max_concurrent_requests: Count = 8
    """Maximum number of concurrent calls, for all clients together.
    Further calls wait. The clients whose calls wait take turns."""

    @model_validator(mode="after")
    def _is_consistent(self) -> McpServerSettings:
        stdio = self.transport == "stdio"
        if stdio and (self.command is None or self.url is not None):
            raise ValueError("transport `stdio` requires `command`, and does not allow `url`")
        if not stdio and (self.url is None or self.command is not None or self.args or self.env):
            raise ValueError(
                f"transport `{self.transport}` requires `url`, and does not allow `command`, `args` or `env`"
            )
        if stdio and (self.auth_type != "none" or self.static_headers):
            raise ValueError("transport `stdio` has no headers; set the credentials in `env`")
        if self.auth_type == "oauth2" and not (self.client_id and self.issuer):
            raise ValueError(
                "auth_type `oauth2` requires `client_id` and `issuer`, because the gateway supports only OAuth's "
                "client credentials grant"
            )
        if self.auth_type not in ("none", "oauth2") and self.authentication_token is None:
            raise ValueError(f"auth_type `{self.auth_type}` requires `authentication_token`")
        return self

    def server(self, label: str) -> ToolServer:
        """Return the server that the MCP client connects to, with its credentials and permissions."""
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
    # A single colon separates a port. An IPv6 address has several colons.
    if value != value.lower() or "/" in value or (":" in value and "[" not in value and value.count(":") == 1):
        raise ValueError("must be only a host name in lower case, without scheme or path; set ports in `ports`")
    return value


class AllowedHostSettings(Section):
    """Host that may occur in URLs in requests."""

    host: Annotated[Name, AfterValidator(_plain_host)]
    """Host name in lower case, without scheme, path and port.
    `*.example.com` allows all subdomains, and `*` allows every host."""
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = (443,)
    """Allowed ports. An empty list allows all ports."""
    plain_http: bool = False
    """True also allows `http://`."""
    private: bool = False
    """True also allows private addresses. It cannot be used with `*`."""

    @model_validator(mode="after")
    def _check_private_hosts(self) -> AllowedHostSettings:
        if self.private and self.host == "*":
            raise ValueError("`private` requires a host name: with `*`, clients could reach the whole private network")
        return self

    def rule(self) -> AllowedHost:
        return AllowedHost(self.host, frozenset(self.ports), self.plain_http, self.private)


AllowedHostEntry: TypeAlias = Annotated[AllowedHostSettings, BeforeValidator(_to_host)]
