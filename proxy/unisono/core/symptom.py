"""Progress of a request before its backend failed.

Helps to distinguish bad requests from bad backends.
"""

from __future__ import annotations

from enum import StrEnum


class Symptom(StrEnum):
    """Kind of failure, set by adapters on `BackendError` where they know it."""

    NO_CONNECTION = "no_connection"
    """The backend never got the request.

    The connection was refused, the name not resolved, or the request not accepted in time.
    """
    DISCONNECTED = "disconnected"
    """The connection broke after the request was sent."""
    SERVER_ERROR = "server_error"
    """The backend answered with a failure of its own: HTTP 5xx, or an error object."""
