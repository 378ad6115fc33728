"""The failover policy: what follows a failed attempt. A pure table for every kind of generation.

Harmony generations, raw completions and pass-through requests use it alike. The caller says how the attempt failed, how
far the answer is, and what is possible; the table says what to do. It knows no clock, no deployment and no budget: the
route decides whether another attempt may be made, and says so in `Options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    BackendUnfit,
    CannotGoOn,
    ContextTooLong,
)

AttemptError: TypeAlias = BackendError | ContextTooLong
"""What an attempt can fail with and the policy decides on. Every other error ends the request."""


class FailureKind(Enum):
    """Why an attempt failed."""

    UNREACHABLE = auto()  # refused, reset or closed
    TIMEOUT = auto()  # a limit of the attempt passed
    OVERLOADED = auto()  # 429, 503 or a full queue
    PROTOCOL = auto()  # bytes that are no answer, or an answer without an end
    ERROR = auto()  # any other failure of the backend, such as a 500
    REJECTED = auto()  # the backend says that the request is invalid
    UNFIT = auto()  # a probe found that the backend's answers cannot be trusted
    CANNOT_CONTINUE = auto()  # the backend would not read the answer so far as the same tokens
    CONTEXT_TOO_LONG = auto()  # the prompt does not fit into this backend's context window


KINDS: Final[tuple[tuple[type[AttemptError], FailureKind], ...]] = (
    (ContextTooLong, FailureKind.CONTEXT_TOO_LONG),
    (CannotGoOn, FailureKind.CANNOT_CONTINUE),
    (BackendUnfit, FailureKind.UNFIT),
    (BackendRejected, FailureKind.REJECTED),
    (BackendUnavailable, FailureKind.UNREACHABLE),
    (BackendTimeout, FailureKind.TIMEOUT),
    (BackendOverloaded, FailureKind.OVERLOADED),
    (BackendProtocolError, FailureKind.PROTOCOL),
    (BackendError, FailureKind.ERROR),
)
"""The first row that fits."""


class Progress(Enum):
    """How far the answer is when an attempt fails."""

    NOTHING = auto()  # no token
    UNSEEN = auto()  # tokens that the client has not seen
    SEEN = auto()  # the client has seen some of it
    COMPLETE = auto()  # all of it; the attempt failed after the last token


class Action(Enum):
    """What follows."""

    RESUME = auto()  # continue after the last token, in another attempt
    RESTART = auto()  # discard what the client has not seen and generate it again
    RETRY = auto()  # begin the answer in another attempt
    WAIT = auto()  # pause, then ask a deployment that failed before
    STOP = auto()  # end the answer normally with what there is of it
    RAISE = auto()  # end the request with the error


@dataclass(frozen=True, slots=True)
class Options:
    """What is possible after a failed attempt.

    `available`: another deployment may be asked now. `later`: one that failed before may be asked again after a pause.
    `resumable`: another attempt can continue after the last token. `regenerable`: the deployment that cannot continue
    may generate what the client has not seen once more.
    """

    available: bool = False
    later: bool = False
    resumable: bool = True
    regenerable: bool = False


TRANSIENT_FAILURES: Final = frozenset(
    {
        FailureKind.UNREACHABLE,
        FailureKind.TIMEOUT,
        FailureKind.OVERLOADED,
        FailureKind.PROTOCOL,
        FailureKind.ERROR,
    }
)
"""Failures after which the same deployment may serve the same request."""

NO_ROOM: Final = frozenset({FailureKind.CANNOT_CONTINUE, FailureKind.CONTEXT_TOO_LONG})
"""Failures after which nothing can be added to the answer, although neither it nor the deployment is at fault."""

ONWARD: Final[Mapping[tuple[Progress, bool], Action]] = {
    (Progress.NOTHING, True): Action.RETRY,
    (Progress.NOTHING, False): Action.RETRY,
    (Progress.UNSEEN, True): Action.RESUME,
    (Progress.UNSEEN, False): Action.RESTART,
    (Progress.SEEN, True): Action.RESUME,
}
"""How another attempt goes on, by progress and whether the answer is resumable. There is no row for an answer that the
client has seen and nobody can resume: what was sent cannot be taken back."""

MAX_REGENERATIONS: Final = 3
"""How often text that no backend can continue is generated once more: without sampling it is the same every time."""
ENDS_EARLY: Final = "answer: ends early, since no backend can continue it"
"""What a client reads about an answer that the policy stopped before its end."""


def failure_kind(error: AttemptError) -> FailureKind:
    """The kind of an error that ended an attempt."""
    return next(kind for row, kind in KINDS if isinstance(error, row))


def decide(kind: FailureKind, progress: Progress, options: Options) -> Action:
    """What follows an attempt that failed in this way."""
    if progress is Progress.COMPLETE:
        return Action.STOP
    onward = ONWARD.get((progress, options.resumable))
    # Every other backend would reject the request too.
    if onward is not None and options.available and kind is not FailureKind.REJECTED:
        return onward
    if kind is FailureKind.CANNOT_CONTINUE and options.regenerable and progress is not Progress.NOTHING:
        return Action.RESTART
    if kind in NO_ROOM and progress is not Progress.NOTHING:
        return Action.STOP
    if onward is not None and options.later and kind in TRANSIENT_FAILURES:
        return Action.WAIT
    return Action.RAISE
