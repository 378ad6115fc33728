"""The failover policy: a pure table of the actions after a failed attempt.

Harmony generations, raw completions and pass-through requests use the same table. Its input is the kind of failure, the
progress of the answer and the available options. The table does not depend on a clock, a deployment or a budget. The
route decides which further attempts are possible, and the caller passes this as `Options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum, auto
from hashlib import blake2b
from typing import Final, TypeAlias

from unisono.core.conversation import UserMessage
from unisono.core.frozen import dataclass
from unisono.core.generation import Sampling
from unisono.engine.request import GenerationRequest
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

# Errors of an attempt after which the policy decides on the next action. Every other error ends the request.
AttemptError: TypeAlias = BackendError | ContextTooLong


class FailureKind(Enum):
    """Kind of failure of an attempt."""

    UNREACHABLE = auto()  # the connection was refused, reset or closed
    TIMEOUT = auto()  # a time limit of the attempt expired
    OVERLOADED = auto()  # 429, 503 or a full queue
    PROTOCOL = auto()  # invalid bytes, or a stream that stopped before the end of the answer
    ERROR = auto()  # any other failure of the backend, such as a 500
    REJECTED = auto()  # the backend says that the request is invalid
    UNFIT = auto()  # a probe found that the backend's answers cannot be trusted
    CANNOT_CONTINUE = auto()  # the backend would tokenize the answer so far differently, or cannot continue there
    CONTEXT_TOO_LONG = auto()  # the prompt does not fit into this backend's context window


# The first matching row applies.
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


class Progress(Enum):
    """Progress of the answer at the time of the failure."""

    NOTHING = auto()  # no token was generated
    UNSEEN = auto()  # tokens were generated, but the client has seen none of them
    SEEN = auto()  # the client has seen a part of the answer
    COMPLETE = auto()  # the answer is complete; the attempt failed after the last token


class Action(Enum):
    """Action after a failed attempt."""

    RESUME = auto()  # continue after the last token, in another attempt
    RESTART = auto()  # discard the output that the client has not seen, and generate it again
    RETRY = auto()  # generate the answer from its beginning, in another attempt
    WAIT = auto()  # pause, then retry a deployment that failed before
    STOP = auto()  # end the answer without an error, with the content generated so far
    RAISE = auto()  # end the request with the error


@dataclass(frozen=True, slots=True)
class Options:
    """Options after a failed attempt.

    `available`: another deployment may be used now. `later`: a deployment that failed before may be retried after a
    pause. `resumable`: another attempt can continue after the last token. `regenerable`: a deployment that cannot
    continue the answer may regenerate the part of the output that the client has not seen.
    """

    available: bool = False
    later: bool = False
    resumable: bool = True
    regenerable: bool = False


# Failures after which the same deployment may serve the same request.
TRANSIENT_FAILURES: Final = frozenset(
    {
        FailureKind.UNREACHABLE,
        FailureKind.TIMEOUT,
        FailureKind.OVERLOADED,
        FailureKind.PROTOCOL,
        FailureKind.ERROR,
    }
)

# Failures after which this deployment cannot add to the answer, although neither answer nor deployment is at fault.
NO_ROOM: Final = frozenset({FailureKind.CANNOT_CONTINUE, FailureKind.CONTEXT_TOO_LONG})

# Action that continues the answer, by progress and `Options.resumable`. An answer that the client has seen and that is
# not resumable has no row, because output that was sent cannot be withdrawn.
ONWARD: Final[Mapping[tuple[Progress, bool], Action]] = {
    (Progress.NOTHING, True): Action.RETRY,
    (Progress.NOTHING, False): Action.RETRY,
    (Progress.UNSEEN, True): Action.RESUME,
    (Progress.UNSEEN, False): Action.RESTART,
    (Progress.SEEN, True): Action.RESUME,
}

# Largest number of times that one answer generates text again which no backend can continue. The number is small,
# because without sampling the text is the same every time.
MAX_REGENERATIONS: Final = 3
# note in the report about an answer that the policy stopped before its end
ENDS_EARLY: Final = "answer: ends early, because no backend can continue it"


def failure_kind(error: AttemptError) -> FailureKind:
    """Return the kind of an error that ended an attempt."""
    return next(kind for row, kind in KINDS if isinstance(error, row))


def decide(kind: FailureKind, progress: Progress, options: Options) -> Action:
    """Return the action after an attempt that failed with this kind of failure."""
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


USUAL: Final = Sampling()
# The seed is excluded, because a client may send a different seed each time it repeats a request.
SAMPLING_OPTIONS: Final = tuple(field.name for field in fields(Sampling) if field.name != "seed")
# body fields of pass-through requests that may cause a backend to fail
UNUSUAL_FIELDS: Final = (
    "logit_bias",
    "stop",
    "tools",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


# Number of characters that each text contributes to an identity. The next attempt waits while the identity is computed,
# so the time must not grow with the prompt.
IDENTITY_CHARS: Final = 1_000


def identity_of(request: GenerationRequest) -> str:
    """Return the identity of the requester: its key's public id, or a digest of the request.

    If only the requests of a single identity fail, routing keeps the deployment available to other requesters. The
    digest is computed from the options that differ from the defaults. If all options have defaults, the digest is
    computed from the beginning of the conversation. The identity therefore stays the same if a client repeats or
    continues a request.
    """
    if request.origin.caller is not None and request.origin.caller.key:
        return request.origin.caller.key
    identity = repr(_options(request) or _beginning(request))
    return f"request {blake2b(identity.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def _options(request: GenerationRequest) -> Mapping[str, object]:
    """Return the request's options that differ from the defaults, keyed by name."""
    if request.passthrough is not None:
        return {
            name: request.passthrough.body[name]
            for name in UNUSUAL_FIELDS
            if request.passthrough.body.get(name) is not None
        }
    options: dict[str, object] = {
        name: value
        for name in SAMPLING_OPTIONS
        if (value := getattr(request.answer.sampling, name)) != getattr(USUAL, name)
    }
    if request.answer.stop:
        options["stop"] = request.answer.stop
    if tools := request.conversation.tools:
        options["tools"] = [tool.name for tool in tools]
    return options


def _beginning(request: GenerationRequest) -> object:
    raw, conversation = request.raw, request.conversation
    if raw is not None:
        return raw.tokens[:IDENTITY_CHARS] if raw.text is None else raw.text[:IDENTITY_CHARS]
    first = next((item.text for item in conversation.items if isinstance(item, UserMessage)), "")
    return conversation.preamble.instructions[:IDENTITY_CHARS], first[:IDENTITY_CHARS]
