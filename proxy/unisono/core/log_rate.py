"""Rate limit for warnings that a client can cause at will: at most one line per interval."""

from __future__ import annotations

import logging
import time
from typing import Final

INTERVAL_S: Final = 60.0


class RateLimitedWarning:
    """Warning that is logged at most once per interval, with the number of omitted warnings."""

    def __init__(self, logger: logging.Logger, interval_s: float = INTERVAL_S) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._next_at = 0.0
        self._omitted = 0

    def warn(self, message: str, **extra: str) -> None:
        now = time.monotonic()
        if now < self._next_at:
            self._omitted += 1
            return
        self._logger.warning(message, extra={**extra, "omitted": self._omitted})
        self._next_at, self._omitted = now + self._interval_s, 0
