"""Routing protocol between engine and pool: route requests, slots, reports on attempts.

Every request has one route. For each stretch of generating it gets a slot: on a healthy deployment with capacity that
probably has the prompt cached. After a failure is reported, the next slot is on another deployment.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import field
from hashlib import blake2b
from types import TracebackType
from typing import Final, Protocol, Self

from unisono.core.frozen import dataclass
from unisono.core.generation import Capabilities, Timeouts
from unisono.core.ports import Deployment
from unisono.core.requested_routing import NO_ROUTING, RequestedRouting
from unisono.errors import UnisonoError

# Prompt prefixes as blocks; a block's hash covers all tokens up to its end.
#
# Two prompts share as many hashes as they share whole blocks from the beginning. That is the part of one that a
# backend's prefix cache can reuse for the other. No randomness: every process computes the same hashes.

# Block size in tokens, coarser than any engine's own. The loss from cutting at a block end is a small part of any
# prompt worth routing by prefix.
BLOCK_TOKENS: Final = 128


def blocks_of(tokens: Sequence[int], salt: str = "") -> tuple[int, ...]:
    """Return 64-bit hashes of all whole blocks; prompts with different `salt` share none."""
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

    Requests of one `owner` wait for each other; no other owner waits for all of them. Requests with the same `sticky`
    value go to one deployment while it is healthy and no busier than others, to use its prefix cache. An empty
    `sticky` allows any deployment. `passing` selects deployments that answer in the OpenAI API, and only those;
    without it, Harmony deployments. Deployments with a name in `excluded` are not used. `identity` returns the name of
    the requester, to which failures are attributed; empty for none. It is called only after a failure. `requested` is
    the routing that the client chose. With `has_both_kinds`, another route leads to the deployments of the other kind.
    """

    model: str
    owner: str = ""
    sticky: str = ""
    passing: bool = False
    excluded: frozenset[str] = frozenset()
    identity: Callable[[], str] = field(default=str, compare=False)
    requested: RequestedRouting = NO_ROUTING
    has_both_kinds: bool = False


@dataclass(frozen=True, slots=True)
class RouteRequirements:
    """Requirements of the next generation.

    `prompt_tokens` counts the tokens of its prompt, `blocks` are their hashes (`core.prefix_blocks`). `max_tokens` is
    the most that may be generated, None for what the context holds. `preferred_abilities` are from
    `Capabilities.constrain` and `logit_bias`. A generation with `resumes` continues an answer that the client already
    receives; it never waits for one that has not begun.
    """

    prompt_tokens: int
    blocks: Sequence[int] = ()
    max_tokens: int | None = None
    preferred_abilities: frozenset[str] = frozenset()
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt on a deployment; `failure` is the code of its error, empty for none.

    `model` is the name under which the deployment is configured.
    """

    deployment: str
    failure: str = ""
    model: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Prospects:
    """Possibilities for another attempt after a failed one.

    `available`: another deployment may be tried now. `later_s` is the pause, in seconds, after which a deployment that
    failed before may be tried again; None if none may.
    """

    available: bool = False
    later_s: float | None = None


class Slot(Protocol):
    """Right to generate on one deployment, as a context; leaving it always releases the slot."""

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

        `timeouts` are the configured ones; their `total_s` is the remaining time for the answer. `elsewhere`: whether
        another deployment can be tried; `retries_left`: how often. `other_kind`: whether a deployment outside this
        route takes over.
        """
        ...

    def record_attempt(
        self, first_token_s: float, largest_gap_s: float | None = None, read_tokens: int | None = None
    ) -> None:
        """Record the timing of an attempt that answered, before `record_usage` ends it.

        `read_tokens` counts the tokens of the prompt that were not cached, None if the backend does not report it.
        """
        ...

    def first_token_limit(self) -> AbstractAsyncContextManager[None]:
        """Return a context for reading an attempt, which limits the wait for the first token.

        Raises BackendTimeout if no first token arrived and the deployment generated nothing for other requests either,
        for longer than the learned limit. `record_first_token` ends the limit.
        """
        ...

    def on_failed_probe(self, callback: Callable[[float], None] | None) -> None:
        """Set a callback for failed probes of the deployment during the wait for the first token.

        The callback receives the seconds that the attempt may still take. None removes it. It is never called if no
        other deployment can take over.
        """
        ...

    def record_first_token(self) -> None:
        """Report the first token: the prompt has been read. Repeated calls change nothing."""
        ...

    def failed(self, error: UnisonoError) -> None:
        """Report that the generation ended in `error`.

        The pool decides if the deployment is at fault.
        """
        ...

    def record_usage(self, tokens: int) -> None:
        """Report the end of a generation, for any reason, and its tokens (prompt and output)."""
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
        """Attempts on all slots given so far, in order."""
        ...

    @property
    def retries_left(self) -> int:
        """Retries that the configuration still allows after the attempt on the current slot."""
        ...

    @property
    def elsewhere(self) -> bool:
        """True if another deployment can answer the request if the current one fails."""
        ...

    def prospects(self, error: UnisonoError, *, resumes: bool, held: bool) -> Prospects:
        """Return the possibilities after an attempt that ended in `error`.

        Call before `Slot.failed`. `resumes` is as in `RouteRequirements`. `held` is False if the attempt got no slot;
        such an attempt counts as failed too.
        """
        ...

    def retry_failed(self) -> None:
        """Make failed deployments available again, once the pause of `Prospects.later_s` is over."""
        ...

    async def next_slot(self, demand: RouteRequirements) -> Slot:
        """Wait in the queue for the next slot, and return it.

        If nothing failed since the last slot, the next one is at the same deployment, provided that a slot is free
        there. A cancelled call leaves the queue.

        Raises `BackendOverloaded` if the queue is full or the wait is too long. If no deployment works, it raises
        `BackendUnavailable` or a similar error. If none is left to try, it raises the error of the last attempt.
        """
        ...


class DeploymentPool(Protocol):
    """Live deployments by model name."""

    def route(self, request: RouteRequest) -> FailoverRoute:
        """Return a route for one request. Raises `UnknownModel`."""
        ...
