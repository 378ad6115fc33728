"""Mapping of a backend's failures to exceptions.

Failures are HTTP statuses, connection faults and error objects. Every failure maps to `BackendError`, a subclass of it,
or `ContextTooLong`. A client sees the backend's own message, shortened and cleaned, only if the client's request caused
the failure. In all other cases the message is only the `__cause__` of the exception, which is logged. A backend's key
never appears in either text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, TypeAlias

from unisono.core.error_texts import read_counts
from unisono.core.probe import is_permanent
from unisono.core.secrecy import secret_spellings
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    ContextTooLong,
    Symptom,
)
from unisono.net.connection_faults import (
    ClosedBeforeResponse,
    ConnectFailed,
    ConnectionFault,
    ConnectTimeout,
    InvalidResponse,
    PoolClosed,
    ResponseCutShort,
)
from unisono_adapters._framing import EventTooLong

MAX_DETAIL_LENGTH = 300
# A longer `Retry-After` is shortened to this number of seconds.
MAX_RETRY_AFTER_S = 3600.0

Statuses: TypeAlias = Mapping[int, tuple[type[BackendError], str]]

_CREDENTIALS = "the backend rejected the gateway's credentials; the operator should check api_key of this deployment"

# Exception and message for an HTTP status. A status that is not listed maps to BackendError from 500 on, and otherwise
# to BackendProtocolError.
STATUSES: dict[int, tuple[type[BackendError], str]] = {
    400: (BackendRejected, "the backend rejected the request"),
    401: (BackendUnavailable, _CREDENTIALS),
    403: (BackendUnavailable, _CREDENTIALS),
    404: (BackendError, "the backend does not have the configured model or path"),
    408: (BackendTimeout, "the backend timed out while it waited for the request"),
    413: (BackendRejected, "the request is too large for the backend"),
    422: (BackendRejected, "the backend rejected the request"),
    429: (BackendOverloaded, "the backend is overloaded"),
    503: (BackendOverloaded, "the backend is overloaded or shutting down"),
    504: (BackendTimeout, "the backend timed out"),
}

# Values of `param` in vLLM's error for a prompt that leaves no room in the context for a single new token.
_LENGTHS = ("input_tokens", "max_tokens")

_TOO_LONG = re.compile(
    r"maximum context length|context (?:length|window|size)|exceeds? the (?:model|context)|longer than the maximum",
    re.IGNORECASE,
)

_BROKE = "the connection to the backend was lost"

# Mapping of connection faults: fault, exception, symptom and message. The first row that matches is used.
FAULTS: tuple[tuple[type[BaseException], type[BackendError], Symptom | None, str], ...] = (
    (
        ConnectTimeout,
        BackendTimeout,
        Symptom.NO_CONNECTION,
        "the backend cannot be reached: {error}; check its address, or raise `connect_timeout_s` of the model",
    ),
    (ConnectFailed, BackendUnavailable, Symptom.NO_CONNECTION, "the backend cannot be reached"),
    (PoolClosed, BackendUnavailable, None, "the backend is being removed"),
    (
        ClosedBeforeResponse,
        BackendUnavailable,
        Symptom.DISCONNECTED,
        "the backend closed the connection before it answered",
    ),
    (ResponseCutShort, BackendProtocolError, Symptom.DISCONNECTED, "the backend's answer ended early"),
    (InvalidResponse, BackendProtocolError, None, "the backend's answer is not valid HTTP"),
    (EventTooLong, BackendProtocolError, None, "the backend sent an event larger than 10 MB"),
    (ConnectionFault, BackendUnavailable, Symptom.DISCONNECTED, _BROKE),
    (TimeoutError, BackendTimeout, None, "the connection to the backend timed out"),
    (OSError, BackendUnavailable, Symptom.DISCONNECTED, _BROKE),
)

# Exceptions for which `fault` has a row. They include TimeoutError, which is a subclass of OSError.
CAUGHT = (ConnectionFault, EventTooLong, OSError)


class IdsMissing(BackendProtocolError):
    """Backend did not send the token ids that the request asked for."""


class UpstreamSaid(Exception):
    """Cleaned message of a backend, used as the `__cause__` of an exception."""


def fault(error: BaseException) -> BackendError:
    """Return the exception to raise for a connection fault."""
    for kind, meaning, symptom, message in FAULTS:
        if isinstance(error, kind):
            return meaning(message.format(error=error), symptom=symptom)
    return BackendError("the backend failed")


class FailureTable:
    """Mapping of the failures of one backend.

    `statuses` replace entries of `STATUSES` for this kind of backend. `secrets` are removed from all messages.
    """

    def __init__(self, statuses: Statuses | None = None, secrets: Iterable[str] = ()) -> None:
        self._statuses = {**STATUSES, **(statuses or {})}
        self._secrets = secret_spellings(secrets)

    def refusal(
        self, status: int, body: object, headers: Mapping[str, str] | None = None
    ) -> BackendError | ContextTooLong:
        """Return the exception for an HTTP status of 400 or more.

        `status` may also be the `code` of an error object. `body` is decoded JSON, or text if it is not JSON.
        """
        param, text = self._param_and_message(body)
        detail = f": {text}" if text else ""
        failure: BackendError | ContextTooLong
        if status in (400, 413, 422) and (param in _LENGTHS or _TOO_LONG.search(text)):
            tokens, limit = _context_counts(body) or read_counts(text)
            failure = ContextTooLong(
                f"the request is longer than the model's context{detail}", tokens=tokens, limit=limit
            )
        else:
            kind, message = self._statuses.get(status) or _default_error(status)
            if kind is BackendRejected:
                message += detail
            failure = kind(
                message,
                retry_after_s=retry_after(headers) if kind is BackendOverloaded else None,
                symptom=Symptom.SERVER_ERROR if status >= 500 else None,
            )
            failure.permanent = is_permanent(status)
            if isinstance(failure, BackendRejected):
                failure.backend_field = None if param is None else clean(param)
        failure.__cause__ = UpstreamSaid(f"HTTP {status}{detail}")
        return failure

    def error_object(self, data: dict[str, Any], *, has_output: bool = False) -> BackendError | ContextTooLong:
        """Return the exception for an error object that arrived with HTTP status 200.

        If the object contains an HTTP status in `code` (Ollama: `status`), the result is the same as for a response
        with that status. There is one exception: if `has_output` is True, because the backend has sent a part of its
        answer before the error, a rejection of the request becomes a failure of the backend.
        """
        error = data.get("error")
        code = error.get("code") if isinstance(error, dict) else data.get("code", data.get("status"))
        if isinstance(code, int) and 400 <= code < 600:
            failure = self.refusal(code, data)
            # vLLM and SGLang report any failure during an answer with the code 400 by default. A backend that has begun
            # its answer has accepted the request.
            is_blaming = isinstance(failure, BackendError) and (
                isinstance(failure, BackendRejected) or failure.permanent
            )
            if has_output and is_blaming:
                cause = failure.__cause__
                failure = BackendError("the backend failed during its answer", symptom=Symptom.SERVER_ERROR)
                failure.__cause__ = cause
            return failure
        failure = BackendProtocolError("the backend reported an error in its answer", symptom=Symptom.SERVER_ERROR)
        failure.__cause__ = UpstreamSaid(self._param_and_message(data)[1])
        return failure

    def not_events(self, content_type: str, body: object) -> BackendError | ContextTooLong:
        """Return the exception for a body with HTTP status 200 that is not an event stream."""
        if isinstance(body, dict) and is_error(body):
            return self.error_object(body)
        failure = BackendProtocolError(f"the backend answered with {clean(content_type)} instead of an event stream")
        failure.__cause__ = UpstreamSaid(self._param_and_message(body)[1])
        return failure

    def _param_and_message(self, body: object) -> tuple[str | None, str]:
        """Return the `param` of an error body, or None, and its message, which may be empty."""
        param: object = None
        message: object = body
        if isinstance(body, dict):
            message = body.get("error") or body
            if isinstance(message, dict):
                param = message.get("param")
                message = message.get("message") or message.get("detail") or ""
        if isinstance(message, list):
            message = "; ".join(map(_problem, message))
        text = "" if message is None else clean(str(message), self._secrets)
        return (param if isinstance(param, str) else None), text


def _context_counts(body: object) -> tuple[int, int] | None:
    """Return the prompt's tokens and their limit, as llama-server's context error reports them.

    Returns None if the error has no such fields.
    """
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None
    tokens, limit = error.get("n_prompt_tokens"), error.get("n_ctx")
    return (tokens, limit) if type(tokens) is int and type(limit) is int and tokens >= limit > 0 else None


def _problem(entry: object) -> str:
    """Return one entry of FastAPI's `detail` as text: the path of the field, then the message."""
    if not isinstance(entry, dict) or not isinstance(entry.get("loc"), list):
        return str(entry)
    path = [str(name) for name in entry["loc"]]
    return f"{'.'.join(path[1:] if path[:1] == ['body'] else path)}: {entry.get('msg', '')}"


def _default_error(status: int) -> tuple[type[BackendError], str]:
    if status >= 500:
        return BackendError, f"the backend failed (HTTP {status})"
    return BackendProtocolError, f"the backend answered with HTTP {status}"


def is_error(data: dict[str, Any]) -> bool:
    """Return whether an event or document is an error object."""
    return bool(data.get("error")) or data.get("object") == "error"


def clean(text: str, secrets: Sequence[str] = ()) -> str:
    """Return `text` as one line of at most `MAX_DETAIL_LENGTH` printable characters.

    `secrets` are replaced with "[key]". A longer text is truncated.
    """
    # First truncate far beyond the final length. A secret that this splits is then removed by the later truncations.
    text = text[: MAX_DETAIL_LENGTH * 200]
    for secret in secrets:
        text = text.replace(secret, "[key]")
    text = text[: MAX_DETAIL_LENGTH * 8]
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= MAX_DETAIL_LENGTH else text[: MAX_DETAIL_LENGTH - 1] + "…"


def retry_after(headers: Mapping[str, str] | None) -> float | None:
    """Return the seconds in the `Retry-After` header, at most `MAX_RETRY_AFTER_S`.

    The header may contain a number or a date. Returns None if the header is missing or invalid.
    """
    value = headers.get("retry-after") if headers is not None else None
    if not value:
        return None
    try:
        wait = float(value)
    except ValueError:
        try:
            wait = parsedate_to_datetime(value).timestamp() - time()
        except (ValueError, OverflowError):
            return None
    return min(max(wait, 0.0), MAX_RETRY_AFTER_S) if wait == wait else None
