"""Time limits of one response.

When a limit expires, the connection is closed, so that the backend stops generating.
"""

from __future__ import annotations

import asyncio

from unisono.core.error_texts import incomplete, no_first_token, silent
from unisono.core.generation import Timeouts
from unisono.net.http_response import HttpResponse

BACKEND = "the backend"  # subject of messages about expired limits
LATE_READ_S = 0.05  # extra time to read bytes that arrived before the limit, while the event loop was busy


class AbortTimer:
    """Time limits for the first token, for silence between tokens, and for the whole answer.

    The limits until the first token and between tokens run only while the reader waits for the backend. The limit for
    the whole answer always runs. When a limit expires, `expired` is set to the error message and the connection is
    closed, which wakes the reader. All three limits share one timer, which is rescheduled only when it fires.
    """

    __slots__ = (
        "_first",
        "_is_late",
        "_loop",
        "_response",
        "_silence_s",
        "_timeouts",
        "_timer",
        "_total_at",
        "due_at",
        "expired",
    )

    def __init__(self, started: float, timeouts: Timeouts, response: HttpResponse) -> None:
        self._loop = asyncio.get_running_loop()
        self._response = response
        self._timeouts = timeouts
        self._silence_s = timeouts.silence_s
        self._total_at = started + timeouts.total_s
        # Time of the event loop at which the backend must have sent something; None while the reader handles data.
        self.due_at: float | None = started + timeouts.first_token_s
        self._first = True
        self._is_late = False
        self.expired: str | None = None
        self._timer = self._loop.call_at(min(self.due_at, self._total_at), self._on_timer)

    def start_silence(self) -> None:
        """Start the limit between tokens, because the reader now waits for data."""
        self.due_at = self._loop.time() + self._silence_s

    def delivered(self) -> None:
        """Stop the limit until `start_silence` is called again: the backend has sent tokens."""
        self.due_at = None
        self._is_late = False
        if self._first:
            self._first = False
            self._timer.cancel()
            self._timer = self._loop.call_at(min(self._loop.time() + self._silence_s, self._total_at), self._on_timer)

    def stop(self) -> None:
        self._timer.cancel()

    def _on_timer(self) -> None:
        now = self._loop.time()
        # While no reader waits, use the end of a silence that would begin now.
        due = now + self._silence_s if self.due_at is None else self.due_at
        if now >= self._total_at:
            self.expired = incomplete(self._timeouts)
        elif now >= due and not self._is_late:
            self._is_late = True
            self._timer = self._loop.call_at(min(now + LATE_READ_S, self._total_at), self._on_timer)
            return
        elif now >= due:
            text = no_first_token if self._first else silent
            self.expired = text(BACKEND, self._timeouts)
        else:
            self._timer = self._loop.call_at(min(due, self._total_at), self._on_timer)
            return
        self._response.close()
