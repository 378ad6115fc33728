"""Error bodies in Anthropic's format.

Every process needs these formats, even if it never serves the Messages API. The module therefore imports no other
module of this API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from time import time
from typing import Any, Final

from unisono.api.answer_report import limit_headers
from unisono.api.error_responses import FailureFormat, Formats
from unisono.core.error_texts import ANTHROPIC_PROMPT_TOO_LONG
from unisono.core.quotas import QuotaStatus
from unisono.errors import ContextTooLong, UnisonoError

# Error types by status. `to_type` returns the types of all other statuses.
TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def to_type(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def to_body(error: UnisonoError, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's format, for response bodies and for events of a stream.

    The message names the invalid field. The details contain the error code, which is the same in all APIs.
    """
    error_object = {"type": to_type(error.status), "message": to_message(error), "details": {"error_code": error.code}}
    return {"type": "error", "error": error_object} | ({"request_id": request_id} if request_id else {})


def to_message(error: UnisonoError) -> str:
    """Return the error text. It names the invalid field, except in texts that clients match."""
    if isinstance(error, ContextTooLong) and 0 < error.limit <= error.tokens:
        # A prompt that fills the window exactly leaves no room for the first output token.
        maximum = min(error.limit, error.tokens - 1)
        return ANTHROPIC_PROMPT_TOO_LONG.template.format(tokens=error.tokens, limit=maximum)
    if error.param is not None and f"'{error.param}'" not in error.message:
        return f"{error.param}: {error.message}"
    return error.message


def anthropic_limits(status: QuotaStatus, now: float) -> dict[str, str]:
    """Return Anthropic's rate limit headers: limits per minute, remainders, and reset times."""
    headers: dict[str, str] = {}
    for name, limit, remaining, reset_s in status.windows():
        at = datetime.fromtimestamp(now + reset_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        headers[f"anthropic-ratelimit-{name}-limit"] = str(limit)
        headers[f"anthropic-ratelimit-{name}-remaining"] = str(remaining)
        headers[f"anthropic-ratelimit-{name}-reset"] = at
    return headers


def _all_limits(status: QuotaStatus) -> dict[str, str]:
    return {**limit_headers(status), **anthropic_limits(status, time())}


ANTHROPIC: Final = FailureFormat(to_body, b"event: error\ndata: %b\n\n", "request-id", limits=_all_limits)
# Error formats by path. The list of models is for OpenAI's clients too, and only Anthropic's clients send the header
# `anthropic-version`.
ERROR_FORMATS: Final[Formats] = {
    **dict.fromkeys(("/v1/messages", "/messages"), ANTHROPIC),
    **dict.fromkeys(("/v1/models", "/models"), replace(ANTHROPIC, sign=b"anthropic-version")),
}
