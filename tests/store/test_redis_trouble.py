"""What a caller is told when Redis fails, whichever of its versions says so."""

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

from unisono.store.redis.trouble import message_of

# Redis 6.2 speaks of a script's own command in the middle of another error.
INNER = "Error running script (call to f_2597e057): @user_script:1: @user_script: 31: -"

CASES: dict[str, tuple[Exception, str]] = {
    "full": (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "full"),
    "full, in a script of 6.2": (
        ResponseError(f"{INNER}OOM command not allowed when used memory > 'maxmemory'."),
        "full",
    ),
    "a replica": (ReadOnlyError("You can't write against a read only replica."), "rejects writes"),
    "a replica, in a script of 6.2": (
        ResponseError(f"{INNER}READONLY You can't write against a read only replica."),
        "rejects writes",
    ),
    "too few replicas": (ResponseError("NOREPLICAS Not enough good replicas to write."), "rejects writes"),
    "too few replicas, in a script of 6.2": (
        ResponseError(f"{INNER}NOREPLICAS Not enough good replicas."),
        "rejects writes",
    ),
    "a disk that fails": (ResponseError("MISCONF Errors writing to the AOF file: No space left"), "rejects writes"),
    "anything else in a script": (ResponseError(f"{INNER}WRONGTYPE Operation against a key"), "with an error"),
    "a value that looks like it": (ResponseError("value is not an integer: -OOM "), "with an error"),
    "a wrong password": (AuthenticationError("WRONGPASS invalid username-password pair"), "credentials"),
    "a restarted server": (BusyLoadingError("Redis is loading the dataset in memory"), "loading its data"),
    "a cluster without a part of its nodes": (ClusterDownError("CLUSTERDOWN Hash slot not served"), "serves this key"),
    "a slot without a node": (SlotNotCoveredError('Slot "7" is not covered by the cluster.'), "serves this key"),
    "a late answer": (LateAnswer("Timeout reading from socket"), "in time"),
    "a deadline": (TimeoutError(), "in time"),
    "nobody there": (Unreachable("Error 111 connecting"), "cannot be reached"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_failure_has_its_words(name: str) -> None:
    error, words = CASES[name]
    assert words in message_of(error)
