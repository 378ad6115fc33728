"""Tree of all client-visible errors; class attributes give HTTP status, type and code.

Model output never raises these. `ConfigError` is separate: it is for operators, at start.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from unisono.core.quotas import QuotaStatus


class Symptom(StrEnum):
    """Kind of failure of a backend, where its adapter knows it."""

    NO_CONNECTION = "no_connection"  # refused, name not resolved, or request not accepted in time
    DISCONNECTED = "disconnected"  # broken after the request was sent
    SERVER_ERROR = "server_error"  # HTTP 5xx, or an error object


def well_formed(text: str) -> str:
    """Return the text with each lone surrogate, which UTF-8 cannot carry, replaced by U+FFFD."""
    return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)


class UnisonoError(Exception):
    """Base of all client-visible errors; `param` names the request field."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        self.message = well_formed(message)  # without lone surrogates, so that it can be sent
        super().__init__(self.message)
        self.param = None if param is None else well_formed(param)  # dotted form: messages.0.role
        self.retry_after_s = retry_after_s
        # Deployments that were tried, each with the code of its error; only the operator may read them.
        self.attempts: tuple[tuple[str, str], ...] = ()


class InternalError(UnisonoError):
    """Fault of the gateway itself."""


class InvalidRequest(UnisonoError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


class UnsupportedValue(InvalidRequest):
    """Field or value that the gateway understands but refuses."""

    code = "unsupported_value"


class ThreadsUnsupported(UnsupportedValue):
    """Conversation stored on Anthropic's servers; on this code, clients send the whole of it."""

    code = "thread_unsupported_request"


class ApprovalUsed(InvalidRequest):
    """Approval that another response has used or is using; it is valid for one call."""

    status, code = 409, "approval_used"


class Refused(InvalidRequest):
    """Refusal by a hook; hooks may raise subclasses with their own code and status (400 to 499)."""

    code = "refused_by_hook"


class UnknownModel(InvalidRequest):
    status, code = 404, "model_not_found"


class NotFound(InvalidRequest):
    status, code = 404, "not_found"


class PreviousResponseNotFound(NotFound):
    """The continued response does not exist; agents start over on this code."""

    code = "previous_response_not_found"


class MethodNotAllowed(InvalidRequest):
    status, code = 405, "method_not_allowed"


class MalformedRequest(InvalidRequest):
    """Not HTTP, or ambiguous HTTP."""

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
    """Prompt too long for the context window; `tokens` and `limit` are 0 if unknown."""

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
    """Connection at its maximum age; clients open another one on this code."""

    code = "websocket_connection_limit_reached"


class LimitReached(UnisonoError):
    """Limit of a key exceeded; `quota` is the key's status, if known."""

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
    """Budget used up until its next period."""

    type, code = "insufficient_quota", "insufficient_quota"


class NotAuthenticated(UnisonoError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class TooManyFailures(UnisonoError):
    """Too many requests with invalid keys from one address."""

    status, type, code = 429, "requests", "too_many_failed_authentications"


class NotAllowed(UnisonoError):
    status, type, code = 403, "invalid_request_error", "permission_denied"


class ModelNotAllowed(NotAllowed):
    """Model that a key may not use; the message is the same if no such model exists."""

    code = "model_not_allowed"


class ToolServerNotAllowed(NotAllowed):
    """Forbidden tool server; all reasons read alike, to reveal nothing about the network."""

    code = "tool_server_not_allowed"


class BackendError(UnisonoError):
    """Failure of a backend; adapters set `symptom` where they know it."""

    status, type, code = 502, "server_error", "backend_error"
    permanent = False  # True if the same backend would fail again, e.g. if it refuses the credentials

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
    """Backend not reachable, shutting down, or dead."""

    status, code = 503, "backend_unavailable"


class BackendUnfit(BackendError):
    """Backend that failed its examination; its answers could not be trusted."""

    status, code = 503, "backend_unfit"


class CannotGoOn(BackendUnfit):
    """Usable backend that cannot represent the answer so far exactly, so it cannot continue it."""

    code = "backend_cannot_go_on"


class BackendOverloaded(BackendError):
    status, code = 503, "backend_overloaded"


class ShareExceeded(BackendOverloaded):
    """Requests of one key exceed its share of a model that other keys wait for too."""

    status, type, code = 429, "requests", "rate_limit_exceeded"


class BackendTimeout(BackendError):
    status, code = 504, "backend_timeout"


class BackendProtocolError(BackendError):
    """Response outside the backend's protocol: garbage, an error under HTTP 200, a missing end."""

    code = "backend_protocol_error"


class BackendRejected(BackendError):
    """Request that the backend called invalid; another backend would too.

    `backend_field` is the field of the backend's request that it names. It is one of the client's request only if that
    was forwarded.
    """

    status, type, code = 400, "invalid_request_error", "backend_rejected_request"
    backend_field: str | None = None


class ConstraintRefused(BackendRejected):
    """Constraint rejected, or failed on before the first token (`symptom`); try without it."""

    code = "constraint_refused"


class StoreError(UnisonoError):
    """State could not be stored or read; nothing is half-written."""

    code = "store_error"


class StoreUnavailable(StoreError):
    """Store unreachable, too slow, full or read-only.

    The outcome of a failed write is unknown. The same write may be repeated and takes effect once.
    """

    status, code = 503, "store_unavailable"


class StoreConflict(StoreError):
    """Unexpected state: changed or leased by another writer, or finished."""

    status, type, code = 409, "invalid_request_error", "state_conflict"


class KeyReused(StoreConflict):
    """Idempotency key reused with another body."""

    code = "idempotency_key_reused"


class StoreTooLarge(StoreError):
    """Item, response or conversation above the size limit."""

    status, type, code = 413, "invalid_request_error", "state_too_large"


class StoreUnreadable(StoreError):
    """Record written by a newer version, or damaged."""

    code = "state_unreadable"


class ToolServerError(UnisonoError):
    """Tools of a server are unavailable. Errors during a call are outcomes of the call instead."""

    status, type, code = 502, "server_error", "tool_server_error"


class ToolServerUnavailable(ToolServerError):
    """Tool server not reachable, not startable, or dead."""

    status, code = 503, "tool_server_unavailable"


class ToolServerTimeout(ToolServerError):
    status, code = 504, "tool_server_timeout"


class ToolServerProtocolError(ToolServerError):
    """Response outside the tool server's protocol, or larger than accepted."""

    code = "tool_server_protocol_error"


class ToolServerUnauthorized(ToolServerError):
    """Tool server requires other credentials."""

    code = "tool_server_unauthorized"


class HookFailed(UnisonoError):
    """Mandatory hook raised an error or took too long."""

    status, code = 503, "hook_failed"


class FilesBusy(UnisonoError):
    """Too many files wait for the extraction of their texts."""

    status, code = 503, "files_busy"


class TooManyConnections(UnisonoError):
    status, code = 503, "too_many_connections"


class ShuttingDown(UnisonoError):
    """This gateway or process ends before finishing the request; another one answers."""

    status, code = 503, "shutting_down"


class PullError(Exception):
    """Model cannot be downloaded or used; the message states the reason and a remedy."""


class ConfigError(Exception):
    """Configuration cannot be used; each message begins with the path of the key."""

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
