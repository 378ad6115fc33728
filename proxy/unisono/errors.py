"""All errors that clients can see.

Class attributes are the HTTP status, the type and the code of an error. Model output never causes these errors.
ConfigError and PullError are separate: they are for operators.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from unisono.core.quotas import QuotaStatus


class Symptom(StrEnum):
    """Kind of failure of a backend, as far as its adapter knows the kind."""

    NO_CONNECTION = "no_connection"  # connection refused or too slow, or host name not resolved
    DISCONNECTED = "disconnected"  # connection lost after the request was sent
    SERVER_ERROR = "server_error"  # HTTP 5xx, or an error object in the answer


def well_formed(text: str) -> str:
    """Return the text with U+FFFD instead of each lone surrogate, which UTF-8 cannot encode."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


class UnisonoError(Exception):
    """Base class of errors that clients can see; `param` is the request field with the error."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        self.message = well_formed(message)  # without lone surrogates, so that it can be sent
        super().__init__(self.message)
        self.param = None if param is None else well_formed(param)  # dotted form: messages.0.role
        self.retry_after_s = retry_after_s
        # Deployments that were tried, each with its error code. Only the operator may see them.
        self.attempts: tuple[tuple[str, str], ...] = ()


class InternalError(UnisonoError):
    """Fault of the gateway itself."""


class InvalidRequest(UnisonoError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


class UnsupportedValue(InvalidRequest):
    """Request contains a field or value that the gateway knows but does not support."""

    code = "unsupported_value"


class ThreadsUnsupported(UnsupportedValue):
    """Request refers to a conversation at Anthropic. Clients react by sending it completely."""

    code = "thread_unsupported_request"


class AlreadyExists(InvalidRequest):  # another object has a property that must be unique
    status, code = 409, "already_exists"


class ApprovalUsed(InvalidRequest):
    """Approval has been used, or is being used, by another response; it is valid for one call."""

    status, code = 409, "approval_used"


class Refused(InvalidRequest):
    """A hook refused the request; hooks may raise subclasses with their own code and 4xx status."""

    code = "refused_by_hook"


class UnknownModel(InvalidRequest):
    status, code = 404, "model_not_found"


class NotFound(InvalidRequest):
    status, code = 404, "not_found"


class PreviousResponseNotFound(NotFound):
    """Response to continue does not exist. Agents react by sending the whole conversation."""

    code = "previous_response_not_found"


class MethodNotAllowed(InvalidRequest):
    status, code = 405, "method_not_allowed"


class MalformedRequest(InvalidRequest):
    """Received data is not HTTP, or is ambiguous HTTP."""

    code = "malformed_request"


class HeadersTimeout(InvalidRequest):
    status, code = 408, "headers_timeout"


class HeadersTooLarge(InvalidRequest):
    status, code = 431, "headers_too_large"


class BodyTimeout(InvalidRequest):
    status, code = 408, "body_timeout"


class BodyTooLarge(InvalidRequest):
    status, code = 413, "body_too_large"


class UnsupportedMediaType(InvalidRequest):
    status, code = 415, "unsupported_media_type"


class ContextTooLong(InvalidRequest):
    """Prompt is too long for the context window. `tokens` and `limit` are 0 if unknown."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = None, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class InvalidStreamId(InvalidRequest):
    code = "invalid_stream_id"


class TooManyStreams(InvalidRequest):
    code = "websocket_stream_limit_reached"


class ConnectionTooOld(InvalidRequest):
    """Connection has reached its maximum age. Clients that get this code open a new connection."""

    code = "websocket_connection_limit_reached"


class LimitReached(UnisonoError):
    """Request would exceed a limit of its key; `quota` is the state of the limits, if known."""

    status, type, code = 429, "requests", "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        quota: QuotaStatus | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.quota = quota


class TokensLimited(LimitReached):
    type = "tokens"


class QuotaExceeded(LimitReached):
    """Budget is used up until its next period begins."""

    type, code = "insufficient_quota", "insufficient_quota"


class NotAuthenticated(UnisonoError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class TooManyFailures(UnisonoError):
    """An address has sent too many requests with invalid keys."""

    status, type, code = 429, "requests", "too_many_failed_authentications"


class NotAllowed(UnisonoError):
    status, type, code = 403, "invalid_request_error", "permission_denied"


class ModelNotAllowed(NotAllowed):
    """Key or end user may not use the model. The text is the same if the model does not exist."""

    code = "model_not_allowed"


class ToolServerNotAllowed(NotAllowed):
    """Tool server is not allowed. The message is the same for all reasons, to reveal nothing."""

    code = "tool_server_not_allowed"


class BackendError(UnisonoError):
    """A backend failed. Adapters set `symptom` if they know the kind of failure."""

    status, type, code = 502, "server_error", "backend_error"
    permanent = False  # True if a retry on the same backend would fail too, e.g. if it refuses the credentials

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        symptom: Symptom | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.symptom = symptom


class BackendUnavailable(BackendError):
    """Backend cannot be reached, is shutting down, or has crashed."""

    status, code = 503, "backend_unavailable"


class BackendUnfit(BackendError):
    """Backend failed its probe, so its answers could not be trusted."""

    status, code = 503, "backend_unfit"


class CannotGoOn(BackendUnfit):
    """Backend works, but cannot continue an answer whose beginning it cannot read exactly."""

    code = "backend_cannot_go_on"


class BackendOverloaded(BackendError):
    status, code = 503, "backend_overloaded"


class ShareExceeded(BackendOverloaded):
    """A key uses more than its share of a model for which other keys wait too."""

    status, type, code = 429, "requests", "rate_limit_exceeded"


class BackendTimeout(BackendError):
    status, code = 504, "backend_timeout"


class BackendProtocolError(BackendError):
    """Response is malformed or incomplete, or reports an error although its status is HTTP 200."""

    code = "backend_protocol_error"


class BackendRejected(BackendError):
    """Backend rejected the request as invalid; other backends would reject it too.

    `backend_field` is the field that the backend names, in the request that the backend received. The client's request
    may not have this field.
    """

    status, type, code = 400, "invalid_request_error", "backend_rejected_request"
    backend_field: str | None = None


class ConstraintRefused(BackendRejected):
    """Backend rejected a constraint, or failed because of it before the first token."""

    code = "constraint_refused"


class StoreError(UnisonoError):
    """State could not be stored or read. A write is never applied partially."""

    code = "store_error"


class StoreUnavailable(StoreError):
    """Store cannot be reached, is too slow, full or read-only.

    The outcome of a failed write is unknown. The write may be repeated: it takes effect only once.
    """

    status, code = 503, "store_unavailable"


class StoreConflict(StoreError):
    """State is not as expected: another writer has changed or leased it, or it is finished."""

    status, type, code = 409, "invalid_request_error", "state_conflict"


class KeyReused(StoreConflict):
    """Idempotency key was used before, with a different body."""

    code = "idempotency_key_reused"


class StoreTooLarge(StoreError):
    """Item, response or conversation exceeds the size limit."""

    status, type, code = 413, "invalid_request_error", "state_too_large"


class StoreUnreadable(StoreError):
    """Record is damaged, or was written by a newer version of the gateway."""

    code = "state_unreadable"


class ToolServerError(UnisonoError):
    """Tools of a server are unavailable. Not raised if a call fails: the model gets the error."""

    status, type, code = 502, "server_error", "tool_server_error"


class ToolServerUnavailable(ToolServerError):
    """Tool server cannot be reached, cannot be started, or has crashed."""

    status, code = 503, "tool_server_unavailable"


class ToolServerTimeout(ToolServerError):
    status, code = 504, "tool_server_timeout"


class ToolServerProtocolError(ToolServerError):
    """Response violates the tool server's protocol, or is too large."""

    code = "tool_server_protocol_error"


class ToolServerUnauthorized(ToolServerError):
    """Tool server rejected the credentials, or requires credentials."""

    code = "tool_server_unauthorized"


class HookFailed(UnisonoError):
    """A hook with `fail: closed` raised an error or took too long."""

    status, code = 503, "hook_failed"


class FilesBusy(UnisonoError):  # too many files wait to have their text read
    status, code = 503, "files_busy"


class TooManyConnections(UnisonoError):
    status, code = 503, "too_many_connections"


class ShuttingDown(UnisonoError):
    """This process ends before the request is finished; another process can answer it."""

    status, code = 503, "shutting_down"


class PullError(Exception):
    """Model cannot be downloaded or used. The message states the reason and what to do."""


class ConfigError(Exception):
    """Configuration cannot be used. Each message begins with the path of a key."""

    def __init__(self, *messages: str) -> None:
        super().__init__(*messages)
        self.messages = messages

    def __str__(self) -> str:
        if len(self.messages) == 1:
            return self.messages[0]
        lines = (f"  {message}" for message in self.messages)
        return "\n".join((f"the configuration has {len(self.messages)} errors:", *lines))


class ConfigErrors:
    """Collector of configuration errors, so that one run reports all of them."""

    def __init__(self) -> None:
        self._messages: dict[str, None] = {}

    def __enter__(self) -> None:
        """Collect the messages of a ConfigError in the block instead of raising it."""

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self._messages |= dict.fromkeys(error.messages)
        return True

    def raise_all(self) -> None:
        """Raise ConfigError with all messages if there are any."""
        if self._messages:
            raise ConfigError(*self._messages)
