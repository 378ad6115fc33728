"""ASGI layers that refuse clients on other machines, or with addresses not in `allowed_ips`."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Container
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.api.request_headers import header_values
from unisono.api.route_table import REQUESTS
from unisono.errors import NotAllowed
from unisono.net.client_addresses import client_address
from unisono.net.special_addresses import is_loopback


class LocalOnly:
    """Layer that restricts a gateway without keys to this machine.

    The Host header must name a loopback host. If there is an Origin header, it must contain the gateway's own origin or
    one of `origins`.
    """

    def __init__(self, app: ASGIApp, *, origins: Collection[str] = ()) -> None:
        self._app = app
        self._allowed_origins = frozenset(origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] in REQUESTS:
            # Any web page can make the browser send requests to localhost. After DNS rebinding, the Host header names
            # the page's domain; otherwise the browser adds an Origin header with the page's origin.
            hosts = header_values(scope, b"host")
            if len(hosts) != 1 or not is_local_host_header(hosts[0]):
                raise NotAllowed(
                    "This gateway has no API key and accepts only requests to localhost: "
                    "set a master key to allow other hosts."
                )
            # A page from a different port of this machine has a different origin. Any local program may serve it.
            own = {f"{scheme}://{hosts[0].lower()}" for scheme in ("http", "https")}
            for origin in header_values(scope, b"origin"):
                if origin not in self._allowed_origins and origin not in own:
                    raise NotAllowed(
                        "This gateway has no API key and refuses requests from other origins: "
                        "set a master key, or list the origin in 'unisono.cors_origins'."
                    )
        return self._app(scope, receive, send)


class AllowedAddresses:
    """Layer that accepts only clients with addresses in `networks`, except for `open_paths`.

    If the connection comes from one of `proxies`, the client's address is read from `X-Forwarded-For`.
    """

    def __init__(
        self, app: ASGIApp, *, networks: Container[str], proxies: Container[str], open_paths: Collection[str]
    ) -> None:
        self._app = app
        self._networks = networks
        self._proxies = proxies
        self._open_paths = frozenset(open_paths)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] in REQUESTS and scope["path"] not in self._open_paths and not self._is_allowed(scope):
            raise NotAllowed(
                "This IP address may not use the gateway. The operator can add the address to `allowed_ips`."
            )
        return self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if (client := scope.get("client")) is None:
            return False
        forwarded = header_values(scope, b"x-forwarded-for")
        return client_address(client[0], forwarded, self._proxies) in self._networks


def is_local_host_header(value: str) -> bool:
    """Return True if a Host header names this machine.

    This check prevents DNS rebinding: such requests of a web page reach this machine, but their Host header names the
    domain of the page.
    """
    try:
        parts = urlsplit(f"//{value}")
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    has_only_host = parts.username is None and not (parts.path or parts.query or parts.fragment)
    return host is not None and has_only_host and is_loopback(host)
