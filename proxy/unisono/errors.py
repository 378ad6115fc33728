"""Every failure a client can see, as one tree; class attributes carry its HTTP status, type and code.

    UnisonoError
      InvalidRequest                400 invalid_request_error
        UnsupportedValue            400 unsupported_value
          ThreadsUnsupported        400 thread_unsupported_request
        ApprovalUsed                409 approval_used
        Refused                     400 refused_by_hook
        UnknownModel                404 model_not_found
        NotFound                    404 not_found
          PreviousResponseNotFound  404 previous_response_not_found
        MethodNotAllowed            405 method_not_allowed
        MalformedRequest            400 malformed_request
        HeadersTimeout              408 headers_timeout
        HeadersTooLarge             431 headers_too_large
        BodyTimeout                 408 body_timeout
        BodyTooLarge                413 body_too_large
        UnsupportedMediaType        415 unsupported_media_type
        ContextTooLong              400 context_length_exceeded
        InvalidStreamId             400 invalid_stream_id
        TooManyStreams              400 websocket_stream_limit_reached
        ConnectionTooOld            400 websocket_connection_limit_reached
      LimitReached                  429 rate_limit_exceeded
        TokensLimited               429 rate_limit_exceeded
        QuotaExceeded               429 insufficient_quota
      NotAuthenticated              401 invalid_api_key
      NotAllowed                    403 permission_denied
        ModelNotAllowed             403 model_not_allowed
        ToolServerNotAllowed        403 tool_server_not_allowed
      BackendError                  502 backend_error
        BackendUnavailable          503 backend_unavailable
        BackendUnfit                503 backend_unfit
          CannotGoOn                503 backend_cannot_go_on
        BackendOverloaded           503 backend_overloaded
          ShareExceeded             429 rate_limit_exceeded
        BackendTimeout              504 backend_timeout
        BackendProtocolError        502 backend_protocol_error
        BackendRejected             400 backend_rejected_request
          ConstraintRefused         400 constraint_refused
      StoreError                    500 store_error
        StoreUnavailable            503 store_unavailable
        StoreConflict               409 state_conflict
          KeyReused                 409 idempotency_key_reused
        StoreTooLarge               413 state_too_large
        StoreUnreadable             500 state_unreadable
      ToolServerError               502 tool_server_error
        ToolServerUnavailable       503 tool_server_unavailable
        ToolServerTimeout           504 tool_server_timeout
        ToolServerProtocolError     502 tool_server_protocol_error
        ToolServerUnauthorized      502 tool_server_unauthorized
      HookFailed                    503 hook_failed
      TooManyConnections            503 too_many_connections
      ShuttingDown                  503 shutting_down
      InternalError                 500 internal_error

What the model writes is never on this tree. `ConfigError` stands apart: it is for operators, at start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from unisono.core.surrogates import well_formed
from unisono.core.symptom import Symptom


class UnisonoError(Exception):
    """`message` is for the client; `param` names the request field, in OpenAI's dotted form (`messages.0.role`).
    Whoever wrote what they say, both can be sent."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        self.message = well_formed(message)
        super().__init__(self.message)
        self.param = None if param is None else well_formed(param)
        self.retry_after_s = retry_after_s


class InternalError(UnisonoError):
    """A fault of the gateway itself."""


class InvalidRequest(UnisonoError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


class UnsupportedValue(InvalidRequest):
    """A field or value this gateway understands and refuses."""

    code = "unsupported_value"


class ThreadsUnsupported(UnsupportedValue):
    """A conversation that Anthropic's servers would keep: its clients send all of it when they see this code."""

    code = "thread_unsupported_request"


class ApprovalUsed(InvalidRequest):
    """An approval is for one call: another response makes it, or has made it."""

    status, code = 409, "approval_used"


class Refused(InvalidRequest):
    """A hook of the operator's does not want this. Hooks raise it, or a kind of their own with another code and status
    (of 400 to 499)."""

    code = "refused_by_hook"


class UnknownModel(InvalidRequest):
    status, code = 404, "model_not_found"


class NotFound(InvalidRequest):
    status, code = 404, "not_found"


class PreviousResponseNotFound(NotFound):
    """The response a request continues is not there: agents start over when they see this code."""

    code = "previous_response_not_found"


class MethodNotAllowed(InvalidRequest):
    status, code = 405, "method_not_allowed"


class MalformedRequest(InvalidRequest):
    """No HTTP, or HTTP that could be read in more than one way."""

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
    """The prompt does not fit into the context window. `tokens` and `limit` are 0 where they are not known."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = None, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.limit = limit


class InvalidStreamId(InvalidRequest):
    """A name that a stream of responses on one connection cannot have."""

    code = "invalid_stream_id"


class TooManyStreams(InvalidRequest):
    """One connection carries only so many streams of responses."""

    code = "websocket_stream_limit_reached"


class ConnectionTooOld(InvalidRequest):
    """A connection has an end; clients open another one when they see this code."""

    code = "websocket_connection_limit_reached"


class LimitReached(UnisonoError):
    """A key asked for more than it may use now. `headers` tell what it may."""

    status, type, code = 429, "requests", "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.headers = headers or {}


class TokensLimited(LimitReached):
    type = "tokens"


class QuotaExceeded(LimitReached):
    """A budget is spent until its next period."""

    type, code = "insufficient_quota", "insufficient_quota"


class NotAuthenticated(UnisonoError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class NotAllowed(UnisonoError):
    status, type, code = 403, "invalid_request_error", "permission_denied"


class ModelNotAllowed(NotAllowed):
    """A model that a key may not use. It reads the same whether there is such a model or not."""

    code = "model_not_allowed"


class ToolServerNotAllowed(NotAllowed):
    """A tool server that is not to be reached from here. Every reason reads the same: the answer must not tell what
    there is behind the gateway."""

    code = "tool_server_not_allowed"


TRANSIENT_STATUSES: Final = frozenset({408, 409, 425, 429})
"""Statuses of a backend below 500 after which the same request may succeed."""


def is_permanent(status: int) -> bool:
    """Whether a backend that answered with this HTTP status would answer so again."""
    return 400 <= status < 500 and status not in TRANSIENT_STATUSES


class BackendError(UnisonoError):
    """A backend failed. `symptom` is set by adapters where they know it. `permanent` says that the same backend would
    fail in the same way if it were asked again, such as one that refuses the gateway's credentials."""

    status, type, code = 502, "server_error", "backend_error"
    permanent = False

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
    """Not reachable, shutting down, or dead."""

    status, code = 503, "backend_unavailable"


class BackendUnfit(BackendError):
    """Examined and found wrong: what it would answer could not be trusted."""

    status, code = 503, "backend_unfit"


class CannotGoOn(BackendUnfit):
    """Nothing is wrong with it, but it would not see what was said so far as it was said."""

    code = "backend_cannot_go_on"


class BackendOverloaded(BackendError):
    status, code = 503, "backend_overloaded"


class ShareExceeded(BackendOverloaded):
    """What one key asked for is more than its share of a model that others are waiting for too."""

    status, type, code = 429, "requests", "rate_limit_exceeded"


class BackendTimeout(BackendError):
    status, code = 504, "backend_timeout"


class BackendProtocolError(BackendError):
    """It answered, but not in its own protocol: garbage, an error under HTTP 200, an end without an end."""

    code = "backend_protocol_error"


class BackendRejected(BackendError):
    """The backend called the request itself wrong; another one would too."""

    status, type, code = 400, "invalid_request_error", "backend_rejected_request"


class ConstraintRefused(BackendRejected):
    """The backend rejected the constraint it was given, or failed on it before the first token (`symptom`); without it
    the same request may be fine."""

    code = "constraint_refused"


class StoreError(UnisonoError):
    """State could not be kept or found again. Nothing is half-written when one of these is raised."""

    code = "store_error"


class StoreUnavailable(StoreError):
    """The store cannot be reached, is too slow, is full, or takes no writes. Whether a write that failed like this
    was done is unknown; the same write may be repeated, and then it is done once."""

    status, code = 503, "store_unavailable"


class StoreConflict(StoreError):
    """The state is not what the writer took it for: somebody else wrote, or holds it, or it is finished."""

    status, type, code = 409, "invalid_request_error", "state_conflict"


class KeyReused(StoreConflict):
    """An idempotency key came again with another body."""

    code = "idempotency_key_reused"


class StoreTooLarge(StoreError):
    """An item, a response or a conversation would be larger than state may be."""

    status, type, code = 413, "invalid_request_error", "state_too_large"


class StoreUnreadable(StoreError):
    """A record that this version cannot read: written by a newer one, or damaged."""

    code = "state_unreadable"


class ToolServerError(UnisonoError):
    """A tool server's tools cannot be had. What goes wrong in a call is no error but the outcome of the call."""

    status, type, code = 502, "server_error", "tool_server_error"


class ToolServerUnavailable(ToolServerError):
    """Not reachable, not to be started, or dead."""

    status, code = 503, "tool_server_unavailable"


class ToolServerTimeout(ToolServerError):
    status, code = 504, "tool_server_timeout"


class ToolServerProtocolError(ToolServerError):
    """It answered, but not in its own protocol, or more than is taken from it."""

    code = "tool_server_protocol_error"


class ToolServerUnauthorized(ToolServerError):
    """It wants other credentials than the ones it was shown."""

    code = "tool_server_unauthorized"


class HookFailed(UnisonoError):
    """A hook that has to be asked raised something, or took too long."""

    status, code = 503, "hook_failed"


class TooManyConnections(UnisonoError):
    status, code = 503, "too_many_connections"


class ShuttingDown(UnisonoError):
    """The gateway ends, or this process of it, and cannot finish what it began. Another one answers."""

    status, code = 503, "shutting_down"


class PullError(Exception):
    """A model cannot be downloaded or used. The message is for the operator: the reason and what to do."""


class ConfigError(Exception):
    """The configuration cannot be used; the message begins with the path of the key."""
