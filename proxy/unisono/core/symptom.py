"""How far a request got before its backend failed. It helps to tell a bad request from a bad backend."""

from __future__ import annotations

from enum import StrEnum


class Symptom(StrEnum):
    """Set by adapters on `BackendError`, where they know it."""

    NO_CONNECTION = "no_connection"
    """The backend never got the request: connection refused, name not resolved, or not accepted in time."""
    DISCONNECTED = "disconnected"
    """The connection broke after the request was sent."""
    SERVER_ERROR = "server_error"
    """The backend answered with a failure of its own: HTTP 5xx, or an error object."""
