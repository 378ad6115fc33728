"""Order of the ASGI layers that check a request before any route receives it.

Each layer raises a `UnisonoError`; `ErrorResponses`, outside of them, answers. `asgi_layers` returns the layers in
order. Decisions use the raw `scope["path"]` and raw headers, never a URL built from a Host header. A layer adds no cost
per streamed event, except for the request id header on the first. A layer that waits for nothing is a plain function
that returns the awaitable of the next layer, which saves a frame whenever the request continues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from types import MappingProxyType

from starlette.middleware import Middleware

from unisono.access.failed_authentications import FailedAuthentications
from unisono.api.allowed_clients import AllowedAddresses, LocalOnly
from unisono.api.authentication import Authenticate, Authentication
from unisono.api.body_limits import BODY_DEADLINE_S, MAX_BODY_BYTES, BodyLimits
from unisono.api.caller_options import NO_RULES, RequestRules
from unisono.api.cors import Cors
from unisono.api.error_responses import ErrorResponses, Formats
from unisono.api.request_ids import RequestIds
from unisono.core.request_record import RecordSink

HEALTH_PATHS = frozenset({"/health/liveliness", "/health/liveness", "/health/readiness", "/ping"})


def asgi_layers(
    *,
    authenticate: Authenticate,
    keyless: bool,
    new_id: Callable[[], str],
    origins: Iterable[str] = (),
    open_paths: Collection[str] = HEALTH_PATHS,
    max_body_bytes: int = MAX_BODY_BYTES,
    body_deadline_s: float = BODY_DEADLINE_S,
    max_upload_bytes: int = MAX_BODY_BYTES,
    upload_deadline_s: float = BODY_DEADLINE_S,
    sinks: Sequence[RecordSink] = (),
    formats: Formats = MappingProxyType({}),
    networks: Container[str] | None = None,
    proxies: Container[str] = (),
    rules: RequestRules = NO_RULES,
    failures: FailedAuthentications | None = None,
) -> list[Middleware]:
    """Return every layer in order, outermost first, for `LayeredApp`.

    `keyless` adds the check that a request originates from this machine and names it. `origins` are the web origins
    that CORS allows. `formats` are the error formats of other APIs than OpenAI's. `networks` contains the addresses of
    permitted clients; None for all. `proxies` contains the addresses of trusted proxies. `rules` are the operator's
    rules for requests of models. `sinks` receive the record of each request. `failures` limits requests with invalid
    keys.
    """
    listed = frozenset(origins)
    local = [Middleware(LocalOnly, origins=listed)] if keyless else []
    if networks is not None:
        local.insert(0, Middleware(AllowedAddresses, networks=networks, proxies=proxies, open_paths=open_paths))
    # CORS is outside of the error responses, so that a page can read errors. It precedes the key, because a preflight
    # carries none. No byte of a body is read without a valid key.
    return [
        Middleware(RequestIds, new_id=new_id, sinks=sinks, formats=formats),
        *([Middleware(Cors, origins=listed)] if listed else []),
        Middleware(ErrorResponses),
        *local,
        Middleware(Authentication, authenticate=authenticate, open_paths=open_paths, rules=rules, failures=failures),
        Middleware(
            BodyLimits,
            max_bytes=max_body_bytes,
            deadline_s=body_deadline_s,
            max_upload_bytes=max_upload_bytes,
            upload_deadline_s=upload_deadline_s,
        ),
    ]
