"""Errors of failed responses: short for the client, exact in the store.

The field `error` of a response has one of OpenAI's few codes. A client that waits for the response, or reads its events
again, must receive the exact error. The notes of the stored response therefore contain the status, type and code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.api.responses.items import Wire
from unisono.core.state_store import StoredResponse
from unisono.errors import BackendError, BackendOverloaded, ContextTooLong, InvalidRequest, UnisonoError

# Error codes of a failed response; agents act on them. The first matching row applies.
CODES: tuple[tuple[type[UnisonoError], str], ...] = (
    (ContextTooLong, "context_length_exceeded"),
    (InvalidRequest, "invalid_prompt"),
    (BackendOverloaded, "rate_limit_exceeded"),
    (UnisonoError, "server_error"),
)
# Error classes by these codes, for responses that earlier versions stored without `FAILURE_NOTE`. Any other code is a
# BackendError.
FAILURES: Mapping[str, type[UnisonoError]] = {
    "context_length_exceeded": ContextTooLong,
    "invalid_prompt": InvalidRequest,
    "rate_limit_exceeded": BackendOverloaded,
}
# Note with the properties of the error that the field `error` lacks.
FAILURE_NOTE = "failure"


def to_error(error: UnisonoError | None) -> Wire | None:
    """Return the field `error` of a response, with one of OpenAI's codes."""
    if error is None:
        return None
    code = next(code for kind, code in CODES if isinstance(error, kind))
    return {"code": code, "message": error.message}


def failure_note(error: UnisonoError | None) -> Wire:
    """Return the notes from which `failure_in` restores the error; {} without an error."""
    if error is None:
        return {}
    about = {"status": error.status, "type": error.type, "code": error.code}
    return {FAILURE_NOTE: {**about, "param": error.param, "retry_after_s": error.retry_after_s}}


def failure_in(stored: StoredResponse) -> UnisonoError:
    """Return the error of a failed response, to raise it for a client that waits."""
    error = stored.error or {}
    message = str(error.get("message") or "The response failed.")
    note: Any = stored.notes.get(FAILURE_NOTE)
    if note is None:
        return FAILURES.get(str(error.get("code")), BackendError)(message)
    # The class of the error may be unknown here: hooks define their own classes, and another process may have failed.
    kind = type("StoredFailure", (UnisonoError,), {name: note[name] for name in ("status", "type", "code")})
    failure: UnisonoError = kind(message, param=note["param"], retry_after_s=note["retry_after_s"])
    return failure


def error_fields(stored: StoredResponse) -> Wire:
    """Return the fields of the `error` event of a failed response."""
    note: Any = stored.notes.get(FAILURE_NOTE) or {}
    return {"param": None, **(stored.error or {}), **{name: note[name] for name in ("code", "param") if name in note}}
