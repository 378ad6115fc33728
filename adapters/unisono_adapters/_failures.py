"""What goes wrong out there, as data: HTTP statuses, exceptions of the client library, error objects under HTTP 200.

Promises: everything maps into the `BackendError` family or `ContextTooLong`. What a backend says about its own failure
reaches a client only where the request itself was at fault, cut and cleaned; otherwise it hangs on the error as its
cause, for the log. A backend's key never stands in either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, TypeAlias

import aiohttp

from unisono.core.context_window import read_counts
from unisono.core.secrecy import secret_spellings
from unisono.core.symptom import Symptom
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    ContextTooLong,
    is_permanent,
)
from unisono_adapters._ndjson import EventTooLong

LONGEST_DETAIL = 300
LONGEST_WAIT_S = 3600.0
"""Cap of a Retry-After."""

Statuses: TypeAlias = Mapping[int, tuple[type[BackendError], str]]

_CREDENTIALS = "the backend refuses the gateway's credentials; the operator should check api_key of this deployment"

STATUSES: dict[int, tuple[type[BackendError], str]] = {
    400: (BackendRejected, "the backend rejected the request"),
    401: (BackendUnavailable, _CREDENTIALS),
    403: (BackendUnavailable, _CREDENTIALS),
    404: (BackendError, "the backend does not know the model or path it is configured with"),
    408: (BackendTimeout, "the backend gave up waiting"),
    413: (BackendRejected, "the request is too large for the backend"),
    422: (BackendRejected, "the backend rejected the request"),
    429: (BackendOverloaded, "the backend is overloaded"),
    503: (BackendOverloaded, "the backend is overloaded or shutting down"),
    504: (BackendTimeout, "the backend timed out"),
}
"""What an HTTP status means. Other 5xx are BackendError, anything else BackendProtocolError."""

_LENGTHS = ("input_tokens", "max_tokens")
"""Parameters vLLM names for a prompt that is too long, or leaves no room: at least one token is always asked for."""

_TOO_LONG = re.compile(
    r"maximum context length|context (?:length|window|size)|exceeds? the (?:model|context)|longer than the maximum",
    re.IGNORECASE,
)

_BROKE = "the connection to the backend broke"

FAULTS: tuple[tuple[type[BaseException], type[BackendError], Symptom | None, str], ...] = (
    (
        aiohttp.ConnectionTimeoutError,
        BackendTimeout,
        Symptom.NO_CONNECTION,
        "the backend did not accept the connection in time",
    ),
    (aiohttp.ClientConnectorError, BackendUnavailable, Symptom.NO_CONNECTION, "the backend cannot be reached"),
    (
        aiohttp.ServerDisconnectedError,
        BackendUnavailable,
        Symptom.DISCONNECTED,
        "the backend closed the connection before it answered",
    ),
    (aiohttp.ClientPayloadError, BackendProtocolError, Symptom.DISCONNECTED, "the backend's answer broke off"),
    (aiohttp.ClientResponseError, BackendProtocolError, None, "the backend's answer is not HTTP"),
    (EventTooLong, BackendProtocolError, None, "the backend sent an event of more than 10 MB"),
    (aiohttp.ClientError, BackendUnavailable, Symptom.DISCONNECTED, _BROKE),
    (TimeoutError, BackendTimeout, None, "the backend took too long"),
    (OSError, BackendUnavailable, Symptom.DISCONNECTED, _BROKE),
    (RuntimeError, BackendUnavailable, Symptom.DISCONNECTED, _BROKE),
)
"""What an exception of the client library means; the first row that fits."""

CAUGHT = (aiohttp.ClientError, EventTooLong, OSError, RuntimeError)
"""What `fault` is for. TimeoutError is an OSError; RuntimeError is aiohttp's word for reading from a connection that
has been dropped."""


class IdsMissing(BackendProtocolError):
    """An engine that was asked for the ids it generates answered without them."""


class UpstreamSaid(Exception):
    """A backend's own words about its failure, cleaned; the cause of the error that is raised."""


def fault(error: BaseException) -> BackendError:
    """The error to raise for one the client library raised."""
    for kind, meaning, symptom, message in FAULTS:
        if isinstance(error, kind):
            return meaning(message, symptom=symptom)
    return BackendError("the backend failed")


class FailureTable:
    """How one backend kind's failures are read: the common table, with the rows it means differently."""

    def __init__(self, statuses: Statuses | None = None, secrets: Iterable[str] = ()) -> None:
        self._statuses = {**STATUSES, **(statuses or {})}
        self._secrets = secret_spellings(secrets)

    def refusal(
        self, status: int, body: object, headers: Mapping[str, str] | None = None
    ) -> BackendError | ContextTooLong:
        """The error for an HTTP status (or the `code` of an error object) and its body, decoded JSON or text."""
        param, said = self._said(body)
        detail = f": {said}" if said else ""
        failure: BackendError | ContextTooLong
        if status in (400, 413, 422) and (param in _LENGTHS or _TOO_LONG.search(said)):
            tokens, limit = read_counts(said)
            failure = ContextTooLong(
                f"the request is longer than the model's context{detail}", tokens=tokens, limit=limit
            )
        else:
            kind, message = self._statuses.get(status) or _unlisted(status)
            if kind is BackendRejected:
                message += detail
            failure = kind(
                message,
                retry_after_s=retry_after(headers) if kind is BackendOverloaded else None,
                symptom=Symptom.SERVER_ERROR if status >= 500 else None,
            )
            failure.permanent = is_permanent(status)
        failure.__cause__ = UpstreamSaid(f"HTTP {status}{detail}")
        return failure

    def error_object(self, data: dict[str, Any]) -> BackendError | ContextTooLong:
        """The error for an error object under HTTP 200; its `code` (Ollama: `status`) decides where it is a status."""
        error = data.get("error")
        code = error.get("code") if isinstance(error, dict) else data.get("code", data.get("status"))
        if isinstance(code, int) and 400 <= code < 600:
            return self.refusal(code, data)
        failure = BackendProtocolError("the backend reported an error in its answer", symptom=Symptom.SERVER_ERROR)
        failure.__cause__ = UpstreamSaid(self._said(data)[1])
        return failure

    def not_events(self, content_type: str, body: object) -> BackendError | ContextTooLong:
        """The error for an answer under HTTP 200 that is no event stream."""
        if isinstance(body, dict) and is_error(body):
            return self.error_object(body)
        failure = BackendProtocolError(f"the backend answered with {clean(content_type)}, not with a stream")
        failure.__cause__ = UpstreamSaid(self._said(body)[1])
        return failure

    def _said(self, body: object) -> tuple[str | None, str]:
        """The `param` and the message of an error body in any of the shapes servers use."""
        param: object = None
        message: object = body
        if isinstance(body, dict):
            message = body.get("error") or body
            if isinstance(message, dict):
                param = message.get("param")
                message = message.get("message") or message.get("detail") or ""
        text = "" if message is None else clean(str(message), self._secrets)
        return (param if isinstance(param, str) else None), text


def _unlisted(status: int) -> tuple[type[BackendError], str]:
    if status >= 500:
        return BackendError, f"the backend failed (HTTP {status})"
    return BackendProtocolError, f"the backend answered HTTP {status}"


def is_error(data: dict[str, Any]) -> bool:
    """Whether an event or document is an error object."""
    return bool(data.get("error")) or data.get("object") == "error"


def clean(text: str, secrets: Sequence[str] = ()) -> str:
    """`text` on one line, printable, without `secrets`, cut to `LONGEST_DETAIL` characters."""
    # The first cut is far behind what is shown, so that it shows no part of a secret.
    text = text[: LONGEST_DETAIL * 200]
    for secret in secrets:
        text = text.replace(secret, "[key]")
    text = text[: LONGEST_DETAIL * 8]
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= LONGEST_DETAIL else text[: LONGEST_DETAIL - 1] + "…"


def retry_after(headers: Mapping[str, str] | None) -> float | None:
    """Seconds to wait by a Retry-After header, a number or a date, at most `LONGEST_WAIT_S`; None without one."""
    value = headers.get("Retry-After") if headers is not None else None
    if not value:
        return None
    try:
        wait = float(value)
    except ValueError:
        try:
            wait = parsedate_to_datetime(value).timestamp() - time()
        except (ValueError, OverflowError):
            return None
    return min(max(wait, 0.0), LONGEST_WAIT_S) if wait == wait else None
