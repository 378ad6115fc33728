"""Failed Redis operations: messages of `StoreUnavailable`, and errors among answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    SlotNotCoveredError,
)
from redis.exceptions import TimeoutError as LateAnswer

NO_NODE: Final = "no node of the store cluster serves this key; check the state of the cluster"

LATE: Final = "the store did not answer within {deadline_s:g} s; check its load, or raise `store.deadline_s`"

# Messages for callers; the first matching row applies. The error itself is logged as the cause.
TROUBLE: tuple[tuple[type[Exception], str], ...] = (
    (OutOfMemoryError, "the store is full"),
    (ReadOnlyError, "the store currently rejects writes"),
    (TimeoutError, LATE),
    (LateAnswer, LATE),
    (AuthenticationError, "the store rejected the gateway's credentials; check `store.url`"),
    (BusyLoadingError, "the store has just started and is still loading its data"),
    (MasterDownError, "the store's server is a replica that has lost its primary"),
    (ClusterDownError, NO_NODE),
    (SlotNotCoveredError, NO_NODE),
    (NoPermissionError, "the store denies a command to the gateway's user; check the access control list of the store"),
    (ResponseError, "the store answered a command with an error"),
    (Exception, "the store cannot be reached"),
)

# If a command in a script is rejected, Redis 6.2 wraps the error in a different one. The library has no exception class
# for a primary with too few replicas, nor for a primary that cannot write to its disk.
REFUSAL = re.compile(r"(?:@user_script: \d+: -(OOM|READONLY|NOREPLICAS|MISCONF)|^(NOREPLICAS|MISCONF)) ")
REFUSED: Mapping[str, type[Exception]] = {
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
    "NOREPLICAS": ReadOnlyError,
    "MISCONF": ReadOnlyError,
}


# Text of a denial in a script: first that of Redis 7.2 and newer, then that of older servers.
DENIAL: Final = re.compile("ACL failure in script|The user executing the script can't ")

log = logging.getLogger("unisono.store")


def is_denial(error: Exception) -> bool:
    """Return whether the server's access control list has denied a command."""
    return isinstance(error, NoPermissionError) or DENIAL.search(str(error)) is not None


class DenialLog:
    """Log of denied commands, which logs each error once.

    The log includes commands that the checks of the store do not use.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def add(self, error: Exception) -> None:
        """Log an error of the Redis library if it is a denial."""
        if is_denial(error) and (text := str(error)) not in self._logged:
            self._logged.add(text)
            log.error("the store denies a command to the gateway's user", extra={"cause": text})


def message_of(error: Exception, deadline_s: float) -> str:
    """Return the message for an error of the Redis library.

    The message of a timeout contains the deadline of the operation, `deadline_s` in seconds.
    """
    refusal = REFUSAL.search(str(error))
    failed = REFUSED[refusal[1] or refusal[2]] if refusal else type(error)
    failed = NoPermissionError if is_denial(error) else failed
    words = next(words for kind, words in TROUBLE if issubclass(failed, kind))
    return words.format(deadline_s=deadline_s)


def raise_first(answers: Sequence[Any]) -> None:
    """Raise the first error in the answers, ignoring errors about missing scripts.

    Commands without their script have not run, so they can be sent again.
    """
    for answer in answers:
        if isinstance(answer, Exception) and not isinstance(answer, NoScriptError):
            raise answer


def is_failure_of_node(answer: Any) -> bool:
    """Return True if an answer reports a failed node. Other errors concern the command."""
    return isinstance(answer, ClusterDownError) or (
        isinstance(answer, Exception) and not isinstance(answer, ResponseError)
    )
