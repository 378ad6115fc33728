"""Messages for failed Redis operations."""

from __future__ import annotations

import re
from collections.abc import Mapping

from redis.exceptions import OutOfMemoryError, ReadOnlyError
from redis.exceptions import TimeoutError as LateAnswer

# Messages for callers; the first matching row applies. The error itself is logged as the cause.
TROUBLE: tuple[tuple[type[Exception], str], ...] = (
    (OutOfMemoryError, "the store is full"),
    (ReadOnlyError, "the store currently rejects writes"),
    (TimeoutError, "the store did not answer in time"),
    (LateAnswer, "the store did not answer in time"),
    (Exception, "the store cannot be reached"),
)

# Redis 6.2 wraps the rejection of a script's command in an error of its own. The library has no class for a primary
# with too few replicas, nor for one that cannot write to its disk.
REFUSAL = re.compile(r"(?:@user_script: \d+: -(OOM|READONLY|NOREPLICAS|MISCONF)|^(NOREPLICAS|MISCONF)) ")
REFUSED: Mapping[str, type[Exception]] = {
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
    "NOREPLICAS": ReadOnlyError,
    "MISCONF": ReadOnlyError,
}


def message_of(error: Exception) -> str:
    """Return the message for an error."""
    refusal = REFUSAL.search(str(error))
    failed = REFUSED[refusal[1] or refusal[2]] if refusal else type(error)
    return next(words for kind, words in TROUBLE if issubclass(failed, kind))
