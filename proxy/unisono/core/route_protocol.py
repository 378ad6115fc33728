"""Routing protocol between engine and pool, and the routing that a client requests.

Every request has one route. Whenever the request has to generate, the route gives it a slot. The slot is on a healthy
deployment with free capacity, if possible on one that has the prompt in its cache. After a failure is reported, the
next slot is on a different deployment.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import field
from hashlib import blake2b
from itertools import pairwise
from types import TracebackType
from typing import Final, Protocol, Self

from unisono.core.frozen import dataclass
from unisono.core.generation import Capabilities, Timeouts
from unisono.core.ports import Deployment
from unisono.errors import UnisonoError

# Request header with which the operator selects the deployment of a request.
DEPLOYMENT_HEADER: Final = "x-unisono-deployment"


@dataclass(frozen=True, slots=True)
class RequestedRouting:
    """Fallbacks, retries, tags and deployment of one request.

    `fallbacks` are model groups that replace the configured fallbacks; None keeps the configured fallbacks. The creator
    of this object has checked that these groups exist and that the caller may use them. With `no_fallbacks`, only the
    requested model may answer, even if the prompt is too long for it. `num_retries` is the number of attempts after the
    first attempt in each group; None for the configured number. `tags` select deployments. `deployment` is the name of
    the only deployment that may answer; empty for no restriction. `model` is the model name that the client sent;
    only error messages use this name.
    """

    fallbacks: tuple[str, ...] | None = None
    no_fallbacks: bool = False
    num_retries: int | None = None
    tags: tuple[str, ...] = ()
    deployment: str = ""
    model: str = field(default="", compare=False)


def count_failovers(tries: Sequence[Attempt]) -> int:
    """Return the number of attempts that moved to another deployment after a failure.

    A retry on the same deployment is not a failover, and neither is a move after an attempt that succeeded.
    """
    return sum(before.failure != "" and before.deployment != after.deployment for before, after in pairwise(tries))


NO_ROUTING: Final = RequestedRouting()


# A prompt is divided into blocks. The hash of a block covers all tokens of the prompt up to the end of the block. The
# number of hashes that two prompts share is therefore the number of whole blocks with which both begin. A backend that
# has one of the prompts in its prefix cache can reuse these blocks for the other prompt. All processes compute the same
# hashes.

# Block size in tokens, which is larger than the block size of any engine. The incomplete block at the end is ignored;
# it is a small part of any prompt that is long enough for routing by prefix.
BLOCK_TOKENS: Final = 128


def blocks_of(tokens: Sequence[int], salt: str = "") -> tuple[int, ...]:
    """Return 64-bit hashes of all whole blocks; prompts with different `salt` share no hashes."""
    if len(tokens) < BLOCK_TOKENS:
        return ()
    digest = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8)
    data = memoryview(array("I", tokens).tobytes())
    size = BLOCK_TOKENS * array("I").itemsize
    numbers = []
    for end in range(size, len(data) + 1, size):
        digest.update(data[end - size : end])
        numbers.append(int.from_bytes(digest.copy().digest(), "big"))
    return tuple(numbers)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """Request for a route.

    The queue serves owners in turn: a request waits for earlier requests of the same `owner`, but not for all requests
    of a different owner. Requests with the same `sticky` value go to one deployment, to use its prefix cache, while
    this deployment is healthy and no busier than others. An empty `sticky` allows any deployment. If `is_passthrough`
    is True, only pass-through deployments are used; otherwise, only Harmony deployments. Deployments with a name in
    `excluded` are not used. `identity` returns the name of the requester to which failures are attributed, or an empty
    text; it is called only after a failure. `requested` is the routing that the client chose. `has_both_kinds`: the
    model also has deployments of the other kind, which a second route uses. `is_taken_over`: another process accepted
    the request, so a drained deployment may answer it if no other deployment works.
    """

    model: str
    owner: str = ""
    sticky: str = ""
    is_passthrough: bool = False
    excluded: frozenset[str] = frozenset()
    identity: Callable[[], str] = field(default=str, compare=False)
    requested: RequestedRouting = NO_ROUTING
    has_both_kinds: bool = False
    is_taken_over: bool = False


@dataclass(frozen=True, slots=True)
class RouteRequirements:
    """Requirements of the next generation.

    `prompt_tokens` is the number of tokens of its prompt, and `blocks` are the hashes of the prompt (`blocks_of`).
    `max_tokens` is the largest number of tokens to generate; None for the rest of the context window.
    `preferred_abilities` are names of abilities in `Capabilities`, such as constraint kinds and `logit_bias`.
    `resumes`: the generation continues an answer that the client is receiving, so it does not wait for requests whose
    answers have not begun.
    """

    prompt_tokens: int
    blocks: Sequence[int] = ()
    max_tokens: int | None = None
    preferred_abilities: frozenset[str] = frozenset()
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt on a deployment; `failure` is its error code, empty if it did not fail.

    `model` is the model name under which the deployment is configured.
    """

    deployment: str
    failure: str = ""
    model: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Prospects:
    """Possibilities for another attempt after a failed attempt.

    `available`: another deployment may be tried now. `later_s` is the number of seconds after which a deployment that
    failed before may be tried again; None if no failed deployment may be tried again.
    """

    available: bool = False
    later_s: float | None = None


class Slot(Protocol):
    """Right to generate on one deployment; a context manager that releases the slot on exit."""

    @property
    def deployment(self) -> Deployment: ...

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities from the last successful probe."""
        ...

    def attempt_timeouts(
        self, timeouts: Timeouts, *, retries_left: int, elsewhere: bool, other_kind: bool = False
    ) -> Timeouts:
        """Begin an attempt and return its time limits.

        `timeouts` are the configured time limits, but their `total_s` is the time that is left for the answer.
        `elsewhere`: another deployment can be tried if the attempt fails. `retries_left` is the number of further
        attempts. `other_kind`: deployments outside this route can take over if all attempts fail.
        """
        ...

    def record_attempt(
        self, first_token_s: float, largest_gap_s: float | None = None, read_tokens: int | None = None
    ) -> None:
        """Record the times of an attempt that answered; call this before `record_usage`.

        `first_token_s` is the time until the first token, and `largest_gap_s` the longest time between two tokens, in
        seconds. `read_tokens` is the number of prompt tokens that were not cached; None if not reported.
        """
        ...

    def first_token_limit(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager for an attempt, which limits the wait for the first token.

        The context raises BackendTimeout if, for longer than the learned limit, no first token arrived and the
        deployment generated no token for other requests either. `record_first_token` ends the limit.
        """
        ...

    def on_failed_probe(self, callback: Callable[[float], None] | None) -> None:
        """Set a callback for failed probes of the deployment during the wait for the first token.

        The callback receives the number of seconds that the attempt may still take. None removes the callback. It is
        never called if no other deployment can take over.
        """
        ...

    def record_first_token(self) -> None:
        """Report that the first token has arrived. Repeated calls change nothing."""
        ...

    def failed(self, error: UnisonoError) -> None:
        """Report that the generation failed with `error`.

        The pool decides whether the deployment is at fault.
        """
        ...

    def record_usage(self, tokens: int) -> None:
        """Report the end of a generation, successful or not, and its number of tokens.

        `tokens` is the sum of prompt and output tokens.
        """
        ...

    def succeeded(self) -> None:
        """Report that a generation completed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class FailoverRoute(Protocol):
    """Route of one request through the deployments of its model and of its fallback models."""

    @property
    def tries(self) -> Sequence[Attempt]:
        """One attempt for each slot that the route has given so far, in order."""
        ...

    @property
    def retries_left(self) -> int:
        """Number of retries that the configuration still allows after the attempt on this slot."""
        ...

    @property
    def elsewhere(self) -> bool:
        """True if another deployment can answer the request if the current one fails."""
        ...

    def prospects(self, error: UnisonoError, *, resumes: bool, held: bool) -> Prospects:
        """Return the possibilities for another attempt after an attempt that failed with `error`.

        Call this before `Slot.failed`. `resumes` is as in `RouteRequirements`. `held` is False if the attempt failed
        because it got no slot.
        """
        ...

    def retry_failed(self) -> None:
        """Make failed deployments available again; call this after waiting `Prospects.later_s`."""
        ...

    async def next_slot(self, demand: RouteRequirements) -> Slot:
        """Wait in the queue for the next slot, and return it.

        If nothing failed since the last slot, the next slot is on the same deployment, provided that this deployment
        has a free slot. A cancelled call leaves the queue.

        Raises `BackendOverloaded` if the queue is full or the wait is too long. Raises `BackendUnavailable` or a
        similar error if no deployment works. Raises the error of the last attempt if no deployment is left to try.
        """
        ...


class DeploymentPool(Protocol):
    """Live deployments by model name."""

    def route(self, request: RouteRequest) -> FailoverRoute:
        """Return a route for one request. Raises `UnknownModel` if no deployment has the model name."""
        ...
