"""Layer that identifies the caller of a request by its key, before any route receives it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.access.failed_authentications import FailedAuthentications
from unisono.api.caller_options import NO_RULES, RULES, RequestRules
from unisono.api.request_headers import RequestHeaders, request_headers
from unisono.api.route_table import REQUESTS
from unisono.core.access import Caller
from unisono.errors import NotAuthenticated

# Headers that may contain a key: `Authorization: Bearer KEY`, or the bare key in the headers of Anthropic's and Azure's
# clients.
KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"api-key"})
# Look up the caller of a bearer key. Raises NotAuthenticated for an unknown key.
Authenticate = Callable[[str | None], Awaitable[Caller]]
# Look up the caller of a connection again, with the current state of its key. Raises NotAuthenticated when the key is
# no longer valid.
LookUpCaller = Callable[[], Awaitable[Caller]]


class Authentication:
    """Layer that requires a valid key for all paths except `open_paths`.

    Stores the Caller in `scope["state"]["caller"]`, and the operator's `rules` for requests in the same state. A
    WebSocket may outlive its key. For a WebSocket, the layer therefore also stores a function that looks up the caller
    again, in `scope["state"]["caller_again"]`. `failures` counts invalid keys, and refuses addresses that have sent too
    many of them.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Authenticate,
        open_paths: Collection[str],
        rules: RequestRules = NO_RULES,
        failures: FailedAuthentications | None = None,
    ) -> None:
        self._app = app
        self._failures = failures
        self._authenticate = authenticate
        self._rules = rules
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in REQUESTS and scope["path"] not in self._open_paths:
            headers = request_headers(scope)
            presented = presented_key(headers)
            again: LookUpCaller = partial(self._authenticate, presented)
            state = scope.setdefault("state", {})
            state["caller"] = await (again() if presented is None else self._checked(scope, headers, presented))
            state[RULES] = self._rules
            if scope["type"] == "websocket":
                state["caller_again"] = again
        await self._app(scope, receive, send)

    async def _checked(self, scope: Scope, headers: RequestHeaders, presented: str) -> Caller:
        """Return the caller with the presented key.

        Raises NotAuthenticated for an invalid key, and TooManyFailures if the client's address has sent too many
        invalid keys.
        """
        if (failures := self._failures) is None:
            return await self._authenticate(presented)
        peer = (scope.get("client") or ("",))[0]
        client = failures.client(peer, ",".join(headers.get(b"x-forwarded-for", ())))
        failures.check(client, presented)
        try:
            caller = await self._authenticate(presented)
        except NotAuthenticated:
            failures.failed(client)
            raise
        failures.accepted(client, presented)
        return caller


def presented_key(headers: RequestHeaders) -> str | None:
    """Return the key of the request; None if it is missing or ambiguous."""
    # No client sends one of these headers twice. If a request has two different keys, the gateway must not choose
    # between them.
    keys: set[str] = set()
    for name in KEY_HEADERS & headers.keys():
        values = headers[name]
        if len(values) > 1:
            return None
        key = values[0].strip()
        if name == b"authorization":
            scheme, _, bearer = key.partition(" ")
            key = bearer.strip() if scheme.lower() == "bearer" else ""
        keys.add(key)
    keys.discard("")
    return keys.pop() if len(keys) == 1 else None
