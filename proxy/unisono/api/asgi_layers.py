"""Order of the ASGI layers that check a request before any route receives it.

A layer that refuses a request raises a `UnisonoError`. The layer `ErrorResponses` encloses it and converts the error to
a response. Decisions use the raw `scope["path"]` and raw headers, never a URL built from a Host header. The layers may
change the head of a response, but do no work for the later events of a stream. The `__call__` of a layer that awaits
nothing itself is a plain function. It returns the awaitable of the next layer, which saves a stack frame whenever the
request resumes.
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

    `keyless` adds the layer `LocalOnly`, for a gateway without API keys. `origins` are the web origins that CORS
    allows. `formats` are the error formats of APIs other than OpenAI's, by path. `networks` contains the addresses of
    permitted clients; None permits all clients. `proxies` contains the addresses of trusted proxies. `rules` are the
    operator's rules for requests to models. `sinks` receive the record of each request. `failures` counts invalid keys,
    and refuses addresses that have sent too many of them.
    """
    listed = frozenset(origins)
    local = [Middleware(LocalOnly, origins=listed)] if keyless else []
    if networks is not None:
        local.insert(0, Middleware(AllowedAddresses, networks=networks, proxies=proxies, open_paths=open_paths))
    # The CORS layer encloses the error responses, so that a web page can read errors. It precedes authentication,
    # because a preflight request has no key. No byte of a body is read before authentication.
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
