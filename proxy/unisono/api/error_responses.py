"""Conversion of exceptions to HTTP statuses and error bodies, for all API surfaces.

The body has OpenAI's format, unless the request's path belongs to a different API. The outermost layer stores the
format (`FailureFormat`) in the scope before anything can fail, so all layers use the same format.

`failure_of` converts every caught exception. An exception that is not a `UnisonoError` and not raised by Pydantic or
Starlette for an invalid request is a fault of the gateway: it is logged with its traceback, and the client receives no
detail. `ErrorResponses` is the outermost layer that answers exceptions. The handlers in `fastapi_app` answer FastAPI's
own exceptions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, Final

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from unisono.api.answer_report import limit_headers
from unisono.api.json_response import BODY_WRITER, BodyWriter, to_whole
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.quotas import QuotaStatus
from unisono.engine.request import GenerationReport
from unisono.errors import (
    BodyTimeout,
    BodyTooLarge,
    InternalError,
    InvalidRequest,
    LimitReached,
    MethodNotAllowed,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    QuotaExceeded,
    UnisonoError,
    UnsupportedMediaType,
    UnsupportedValue,
)

log = logging.getLogger("unisono.api")

# Error classes by the status of an HTTPException from Starlette or FastAPI. Any other status is a fault of the gateway.
BY_STATUS: dict[int, type[UnisonoError]] = {
    400: InvalidRequest,
    401: NotAuthenticated,
    403: NotAllowed,
    404: NotFound,
    405: MethodNotAllowed,
    408: BodyTimeout,
    413: BodyTooLarge,
    415: UnsupportedMediaType,
}

# Statuses whose responses always have a `retry-after` header, unless a retry would do harm.
BUSY = frozenset({429, 503})
# Value of `retry-after`, in seconds, for errors that specify no value themselves.
DEFAULT_RETRY_AFTER_S = 1.0

# Statuses after which the same request would fail again. The vendors' SDKs retry some of them unless a header forbids
# retries.
FINAL_STATUSES: Final = frozenset({400, 401, 403, 404, 405, 409, 413, 415, 422})
# Header that keeps OpenAI's and Anthropic's SDKs from retrying.
NO_RETRY_HEADER: Final = ("x-should-retry", "false")

# Key in the request's state for the reports of the request's generations.
REPORTS: Final = "reports"
# Key in the request's state for the code of the error with which the request failed.
ERROR_CODE: Final = "error_code"

# ASGI extension of servers that can answer a WebSocket handshake with any HTTP response.
WEBSOCKET_HTTP_RESPONSE = "websocket.http.response"
# WebSocket close codes for a fault of the client, and for a fault of the gateway.
POLICY_VIOLATION, INTERNAL_ERROR = 1008, 1011

# Maximum characters of each key in the path of a field. Clients choose keys, which may be of any length.
MAX_STEP_LENGTH = 64


def to_body(error: UnisonoError) -> dict[str, Any]:
    """Return an error in OpenAI's format, for response bodies and for events of a stream."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


@dataclass(frozen=True, slots=True)
class FailureFormat:
    """Error format of an API.

    `body` makes the error body from the error and the request id. `event` is the template of the event that reports the
    error in a stream. `id_header` is the name of a second response header for the request id, besides `x-request-id`.
    `sign` is the name of a request header in lower case. If `sign` is not empty, the format applies only to requests
    with this header. `limits` makes the rate limit headers of an error.
    """

    body: Callable[[UnisonoError, str], Mapping[str, Any]]
    event: bytes = b"data: %b\n\n"
    id_header: str = ""
    sign: bytes = b""
    limits: Callable[[QuotaStatus], Mapping[str, str]] = limit_headers


OPENAI: Final = FailureFormat(lambda error, _: to_body(error))

# Error formats by path; each applies to its path and all paths below.
Formats = Mapping[str, FailureFormat]

# Key in the request's state for the request's error format.
FORMAT: Final = "failure_format"


def format_at(path: str, formats: Formats, headers: Collection[bytes] = ()) -> FailureFormat:
    """Return the error format of a request. `headers` are the names of its headers."""
    # Nearly all paths have OpenAI's format.
    if not path.startswith(tuple(formats)):
        return OPENAI
    for at, each in formats.items():
        if (path == at or path.startswith(f"{at}/")) and (not each.sign or each.sign in headers):
            return each
    return OPENAI


def body_for(error: UnisonoError, scope: Scope | None) -> Mapping[str, Any]:
    """Return the body of `error` in the format of the request."""
    state = {} if scope is None else scope.get("state", {})
    failure_format: FailureFormat = state.get(FORMAT, OPENAI)
    state[ERROR_CODE] = error.code
    return failure_format.body(with_attempts(error, state.get("caller")), state.get("request_id", ""))


def with_attempts(error: UnisonoError, caller: Caller | None) -> UnisonoError:
    """Return the error. For admins and viewers, the error's message lists the failed attempts."""
    # Other keys belong to clients, who may not know the deployments.
    if not error.attempts or error.status < 500 or caller is None or not caller.sees_all:
        return error
    tried = ", ".join(f"{deployment} ({failure})" for deployment, failure in error.attempts)
    detailed = copy(error)
    detailed.message = f"{error.message.rstrip('.')}. Tried: {tried}."
    return detailed


def to_event(error: UnisonoError, scope: Scope) -> bytes:
    """Return the event that reports `error` in a stream, in the error format of the request."""
    failure_format: FailureFormat = scope.get("state", {}).get(FORMAT, OPENAI)
    return failure_format.event % orjson.dumps(body_for(error, scope))


def to_response(error: UnisonoError, scope: Scope | None = None) -> Response:
    """Return the HTTP response for `error`, in the format of the API in `scope`."""
    quota = error.quota if isinstance(error, LimitReached) else None
    failure_format: FailureFormat = OPENAI if scope is None else scope.get("state", {}).get(FORMAT, OPENAI)
    headers = {} if quota is None else dict(failure_format.limits(quota))
    # If the request has run tools, a retry would run them a second time.
    is_final = is_permanent(error) or _has_run_tools(scope)
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status in BUSY:
        retry_after_s = DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None and not _has_run_tools(scope):
        headers["retry-after"] = str(max(0, math.ceil(retry_after_s)))
    if is_final:
        headers.update((NO_RETRY_HEADER,))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTooLarge | BodyTimeout):
        # The rest of the body is never read, so the connection cannot be used again.
        headers["connection"] = "close"
    return to_whole(body_for(error, scope), headers, error.status)


def is_permanent(error: UnisonoError) -> bool:
    """Return whether the same request would fail again if the client retried it."""
    # A spent budget may take days to renew, and some SDKs wait as long as `retry-after` says.
    return error.status in FINAL_STATUSES or isinstance(error, QuotaExceeded)


def failure_of(error: Exception) -> UnisonoError:
    """Return the client-visible error for `error`.

    A fault of the gateway is logged with its traceback.
    """
    if isinstance(error, UnisonoError):
        return error
    if isinstance(error, ValidationError):
        return invalid(error.errors(include_url=False, include_input=False, include_context=False))
    if isinstance(error, HTTPException):
        kind = BY_STATUS.get(error.status_code, InternalError)
        return kind(str(error.detail))
    log.error("unexpected exception: %s", type(error).__name__, exc_info=error)
    return InternalError("The gateway failed to process this request; its log contains the cause.")


def invalid(errors: Sequence[Any]) -> InvalidRequest:
    """Convert the first of Pydantic's errors to an error with the dotted path of the field.

    An error of type `unsupported_value` becomes `UnsupportedValue`. The message does not repeat the client's value.
    """
    if not errors:
        return InvalidRequest("The request is invalid.")
    first = errors[0]
    # If a key itself is invalid, Pydantic appends the step "[key]" to the path.
    param = ".".join(str(step)[:MAX_STEP_LENGTH] for step in first["loc"] if step != "[key]") or None
    kind = UnsupportedValue if first["type"] == UnsupportedValue.code else InvalidRequest
    if first["type"] == "missing":
        return kind(f"Missing required field '{param}'.", param=param)
    where = f"Invalid value for '{param}': " if param else ""
    # Pydantic's text names a class of the gateway.
    reason = "must be an object" if first["type"] == "model_type" else first["msg"]
    return kind(f"{where}{reason}", param=param)


async def outcome(work: Awaitable[None]) -> UnisonoError | None:
    """Await `work`. Return None if it succeeds, else the client-visible error.

    Does not catch ClientGone.
    """
    try:
        await work
    except ClientGone:
        raise
    except Exception as error:
        return failure_of(error)
    return None


# Status that is recorded for a request whose client disconnected before the response. No client receives it.
CLIENT_CLOSED_REQUEST = 499


class ClientGone(Exception):
    """The client closed its connection before the response was complete."""


def _has_run_tools(scope: Scope | None) -> bool:
    reports: Sequence[GenerationReport] = () if scope is None else scope.get("state", {}).get(REPORTS, ())
    return any(report.facts.tools for report in reports)


class ErrorResponses:
    """ASGI layer that converts exceptions of the inner layers to responses.

    If an exception occurs after the response has started, the connection is closed, so that the client cannot mistake a
    partial response for a complete one. A failed write is not logged if the client has disconnected. If a WebSocket is
    not accepted yet, it is refused with the HTTP error response of the exception. An open WebSocket is closed with the
    error code as the reason.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = is_client_gone = False

        async def watched(message: Message) -> None:
            nonlocal has_started, is_client_gone
            has_started = True
            try:
                await send(message)
            except OSError:
                # A server may raise this for a client that has disconnected.
                is_client_gone = True
                raise ClientGone from None

        try:
            await self._app(scope, receive, watched)
        except ClientGone:
            if not has_started:
                await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
        except Exception as error:
            if is_client_gone:
                # After the start of a response, FastAPI raises a different exception instead of ClientGone.
                return
            failure = failure_of(error)
            if not has_started:
                await to_response(failure, scope)(scope, receive, send)
                return
            state = scope.get("state", {})
            writer: BodyWriter | None = state.get(BODY_WRITER)
            if writer is None or failure is not error:
                raise
            # The layer that failed has logged the failure. For a raised exception, the server would log a traceback.
            state[ERROR_CODE] = failure.code
            writer.abort()

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        last, is_client_gone = "", False

        async def watched(message: Message) -> None:
            nonlocal last, is_client_gone
            last = message["type"]
            try:
                await send(message)
            except OSError:
                # Starlette converts an OSError of an open WebSocket. Before the acceptance, the OSError reaches this
                # layer.
                is_client_gone = True
                raise

        try:
            await self._app(scope, receive, watched)
        except WebSocketDisconnect:
            # The client disconnected, which is the usual end of a WebSocket.
            return
        except Exception as error:
            if is_client_gone:
                return
            failure = failure_of(error)
            if not last and WEBSOCKET_HTTP_RESPONSE in scope.get("extensions", {}):
                await to_response(failure, scope)(scope, receive, send)
            elif last in {"", "websocket.accept", "websocket.send"}:
                code = POLICY_VIOLATION if not last or failure.status < 500 else INTERNAL_ERROR
                with suppress(OSError):
                    await send({"type": "websocket.close", "code": code, "reason": failure.code})
