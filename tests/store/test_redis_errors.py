"""Tests of error messages for Redis failures, in the wording of several server versions."""

from __future__ import annotations

import pytest
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    SlotNotCoveredError,
)
from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import TimeoutError as LateAnswer

from unisono.store.redis.redis_errors import message_of

# Redis 6.2 reports an error of a script's command within another error.
INNER = "Error running script (call to f_2597e057): @user_script:1: @user_script: 31: -"

CASES: dict[str, tuple[Exception, str]] = {
    "full": (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "full"),
    "full, in a script of 6.2": (
        ResponseError(f"{INNER}OOM command not allowed when used memory > 'maxmemory'."),
        "full",
    ),
    "replica": (ReadOnlyError("You can't write against a read only replica."), "rejects writes"),
    "replica, in a script of 6.2": (
        ResponseError(f"{INNER}READONLY You can't write against a read only replica."),
        "rejects writes",
    ),
    "too few replicas": (ResponseError("NOREPLICAS Not enough good replicas to write."), "rejects writes"),
    "too few replicas, in a script of 6.2": (
        ResponseError(f"{INNER}NOREPLICAS Not enough good replicas."),
        "rejects writes",
    ),
    "disk failure": (ResponseError("MISCONF Errors writing to the AOF file: No space left"), "rejects writes"),
    "other script error": (ResponseError(f"{INNER}WRONGTYPE Operation against a key"), "with an error"),
    "value that resembles an error code": (ResponseError("value is not an integer: -OOM "), "with an error"),
    "wrong password": (AuthenticationError("WRONGPASS invalid username-password pair"), "credentials"),
    "loading server": (BusyLoadingError("Redis is loading the dataset in memory"), "loading its data"),
    "incomplete cluster": (ClusterDownError("CLUSTERDOWN Hash slot not served"), "serves this key"),
    "uncovered slot": (SlotNotCoveredError('Slot "7" is not covered by the cluster.'), "serves this key"),
    "socket timeout": (LateAnswer("Timeout reading from socket"), "within 0.25 s"),
    "exceeded deadline": (TimeoutError(), "within 0.25 s"),
    "connection refused": (Unreachable("Error 111 connecting"), "cannot be reached"),
}


@pytest.mark.parametrize("name", CASES)
def test_error_message_for_each_failure(name: str) -> None:
    error, expected = CASES[name]
    assert expected in message_of(error, 0.25)
