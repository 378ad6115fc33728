"""Operator's rules for the tool servers that requests name, on all API surfaces.

A request can only make the rules stricter. It may name a server that the operator configured, by label or exact URL, or
give the URL of a server on a host that the operator allowed. The credentials that a request gives for a server are sent
only to this server. The caller's API key is never sent to a tool server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from urllib.parse import urlsplit

from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.tool_host import ToolServer, ToolTransport
from unisono.errors import InvalidRequest, ToolServerNotAllowed

# Maximum number of tool servers in a request. The gateway lists the tools of all servers before generation.
MAX_SERVERS = 16

OWN_CREDENTIALS = frozenset({"authorization", "x-api-key"})


def _no_check(headers: Mapping[str, str], authorization: str | None) -> None:
    """Accept all headers. The component that connects to servers checks the headers later."""


@dataclass(frozen=True, slots=True)
class RequestedServer:
    """Tool server as a request names it.

    `fields` contains the path of the server's object in the request, followed by the names of this object's fields for
    the label, the URL, the headers and the authorization.
    """

    fields: tuple[str, str, str, str, str]
    label: str
    url: str | None
    headers: Mapping[str, str]
    authorization: str | None


@dataclass(frozen=True, slots=True)
class ServerRules:
    """The operator's rules for tool servers.

    `configured` holds the operator's servers by label. `builtins` maps the tools that gpt-oss was trained on to the
    labels of their servers. `may_name` takes the URL of a server that is not configured, and returns True if a request
    may use this server. `check_headers` raises InvalidRequest for headers that cannot be sent.
    """

    configured: Mapping[str, ToolServer] = field(default_factory=dict)
    builtins: Mapping[str, str] = field(default_factory=dict)
    may_name: Callable[[str], bool] = lambda _: False
    check_headers: Callable[[Mapping[str, str], str | None], None] = _no_check

    def for_model(self, labels: Collection[str] | None) -> ServerRules:
        """Return the rules of a model that may use only the servers in `labels`; None means all."""
        if labels is None:
            return self
        return replace(self, configured={label: self.configured[label] for label in labels})

    def for_caller(self, caller: Caller) -> ServerRules:
        """Return the rules of a caller.

        A caller that is restricted to certain servers cannot use other servers by giving their URLs.
        """
        if caller.mcp_servers is None:
            return self
        permitted = {label: server for label, server in self.configured.items() if label in caller.mcp_servers}
        return replace(self, configured=permitted, may_name=lambda _: False)

    @property
    def trained(self) -> dict[str, ToolServer]:
        """Configured servers for builtin tools, by the name of the tool."""
        named = {builtin: self.configured.get(label) for builtin, label in self.builtins.items()}
        return {builtin: server for builtin, server in named.items() if server is not None}

    def server_for(self, requested: RequestedServer) -> ToolServer:
        """Return the tool server that a request names, with the request's credentials.

        This is a server that the operator configured, or a server at the URL that the request gives. Raises
        InvalidRequest for an unknown label, and for credentials that are not accepted. Raises ToolServerNotAllowed if
        the gateway may not connect to the server.
        """
        return self._with_credentials(requested, self._configured(requested) or self._unconfigured(requested))

    def _configured(self, requested: RequestedServer) -> ToolServer | None:
        """Return the configured server with the requested label or exact URL, or None."""
        named = self.configured.get(requested.label)
        if requested.url is None or (named is not None and named.url == requested.url):
            return named
        return next((server for server in self.configured.values() if server.url == requested.url), None)

    def _unconfigured(self, requested: RequestedServer) -> ToolServer:
        """Return a server that is not configured, with the URL that the request gives.

        Raises InvalidRequest if the request gives no URL, and ToolServerNotAllowed if the URL is not allowed.
        """
        at, label_field, url_field, *_ = requested.fields
        if requested.url is None:
            known = ", ".join(sorted(self.configured)) or "none"
            raise InvalidRequest(
                f"'{at}.{label_field}': tool server '{requested.label}' not found. "
                f"Use one of the configured servers ({known}), or set '{url_field}'.",
                param=f"{at}.{label_field}",
            )
        if not self.may_name(requested.url):
            raise ToolServerNotAllowed(
                f"'{at}.{url_field}': the gateway may not connect to this tool server. "
                "The operator can add its host to `mcp_allowed_hosts`.",
                param=f"{at}.{url_field}",
            )
        older = urlsplit(requested.url).path.rstrip("/").endswith("/sse")
        transport = ToolTransport.SSE if older else ToolTransport.STREAMABLE_HTTP
        return ToolServer(requested.label, requested.url, transport=transport, at=f"{at}.{url_field}")

    def _with_credentials(self, requested: RequestedServer, server: ToolServer) -> ToolServer:
        """Return the server with the request's credentials.

        Raises InvalidRequest if these credentials would replace the operator's credentials, or if they cannot be sent.
        """
        at, _, _, headers_field, authorization_field = requested.fields
        headers, authorization = requested.headers, requested.authorization
        if not headers and authorization is None:
            return server
        if server.transport is ToolTransport.STDIO:
            raise InvalidRequest(
                f"'{at}': this tool server accepts neither '{headers_field}' nor '{authorization_field}'; omit them.",
                param=at,
            )
        configured = {name.lower() for name in server.headers}
        has_own = server.authorization is not None or server.oauth is not None or bool(configured & OWN_CREDENTIALS)
        for name in headers:
            if name.lower() in configured or (has_own and name.lower() in OWN_CREDENTIALS):
                raise InvalidRequest(
                    f"'{at}.{headers_field}': the operator sets '{name[:64]}' for this server; omit this header.",
                    param=f"{at}.{headers_field}",
                )
        if authorization is not None and has_own:
            raise InvalidRequest(
                f"'{at}.{authorization_field}': the operator sets the credentials for this server; omit this field.",
                param=f"{at}.{authorization_field}",
            )
        sent = {**server.headers, **headers}
        try:
            self.check_headers(sent, authorization or server.authorization)
        except InvalidRequest as error:
            where = f"{at}.{headers_field}" if headers else f"{at}.{authorization_field}"
            raise InvalidRequest(f"'{where}': {error.message}", param=where) from None
        return replace(server, headers=sent, authorization=authorization or server.authorization)
