"""How a request finds its way to a backend: what the engine asks of the pool, and what it tells of how it went.

A request has one route. For each stretch of generating it takes a place on it: a deployment that is well, has room and
is likely to hold the prompt already. A place that failed is told so, and the next one is somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from unisono.core.generation import Capabilities, Timeouts
from unisono.core.ports import Deployment
from unisono.errors import UnisonoError


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a route is asked for with. Requests of one `owner` wait for each other, and no other owner waits for all of
    them. Those of one `sticky` value go to one deployment while it is well and no busier than others, so that its
    prefix cache is of use; empty for any. `passing` asks for deployments that answer in OpenAI's own API, and for no
    others; without it for those that speak Harmony. `identity` returns the name of who is asking, to which failures
    are attributed; empty for nobody. It is called only after a failure."""

    model: str
    owner: str = ""
    sticky: str = ""
    passing: bool = False
    identity: Callable[[], str] = field(default=str, compare=False)


@dataclass(frozen=True, slots=True)
class RouteRequirements:
    """What the generation that comes takes. `prompt_tokens` are those that it begins behind, `blocks` their numbers
    (`core.blocks`), `max_tokens` the most that may be generated, None for what the context holds. `wants` are names
    from `Capabilities.constrain`, and `logit_bias`, that a deployment had better be able to do. What `resumes` has
    begun for a client: it waits behind nobody who has not."""

    prompt_tokens: int
    blocks: Sequence[int] = ()
    max_tokens: int | None = None
    wants: frozenset[str] = frozenset()
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One deployment that a request was given, and the code of the error it ended in; empty for none. `model` is the
    name under which the deployment is configured."""

    deployment: str
    failure: str = ""
    model: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Prospects:
    """Whether another attempt can be made after a failed one.

    `available`: another deployment may be asked now. `later_s` is the pause, in seconds, after which a deployment that
    failed before may be asked again; None when none may.
    """

    available: bool = False
    later_s: float | None = None


class Slot(Protocol):
    """The right to generate on one deployment, as a context: leaving it gives the place back, whatever happened."""

    @property
    def deployment(self) -> Deployment: ...

    @property
    def capabilities(self) -> Capabilities:
        """By the last good probe."""
        ...

    def attempt_limits(
        self, timeouts: Timeouts, *, retries_left: int, elsewhere: bool, other_kind: bool = False
    ) -> Timeouts:
        """Begin an attempt and return its time limits. `timeouts` are the configured ones, `total_s` what is left of
        the time for the answer. `elsewhere`: whether another deployment can be tried, `retries_left` how often.
        `other_kind`: whether a deployment outside of this route takes over."""
        ...

    def record_attempt(
        self, first_token_s: float, largest_gap_s: float | None = None, read_tokens: int | None = None
    ) -> None:
        """Learn from an attempt that answered, before `took` ends it. `read_tokens` are the tokens of the prompt that
        were not cached, None if the backend does not say."""
        ...

    def first_token_limit(self) -> AbstractAsyncContextManager[None]:
        """Around the reading of an attempt. Raises BackendTimeout if no first token came and the deployment generated
        nothing for others either, for longer than the learned limit; `began` ends it."""
        ...

    def on_failed_probe(self, callback: Callable[[float], None] | None) -> None:
        """While this attempt waits for its first token, call `callback` whenever the deployment fails a probe, with the
        seconds that the attempt may still take. None removes it. Never called if no other deployment can take over."""
        ...

    def began(self) -> None:
        """The first token came: the prompt is read, and what is left to be done is the answer. Told again it changes
        nothing."""
        ...

    def failed(self, error: UnisonoError) -> None:
        """The generation ended in `error`; whether that speaks against the deployment is the pool's to judge."""
        ...

    def took(self, tokens: int) -> None:
        """A generation is over, in whatever way, which took so many tokens of prompt and answer."""
        ...

    def succeeded(self) -> None:
        """A generation came to its end."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class FailoverRoute(Protocol):
    """One request's way through the deployments of its model, and of those that stand in for it."""

    @property
    def tries(self) -> Sequence[Attempt]:
        """Every place that was given, in order."""
        ...

    @property
    def retries_left(self) -> int:
        """Retries that the configuration still allows after the attempt on the current place."""
        ...

    @property
    def elsewhere(self) -> bool:
        """Whether there is another deployment to try should the one that was given last fail."""
        ...

    def prospects(self, error: UnisonoError, *, resumes: bool, held: bool) -> Prospects:
        """What is possible after an attempt that ended in `error`. Call it before `Slot.failed`. `resumes` as in
        `RouteRequirements`. `held` is False if the attempt got no place; it counts as failed all the same."""
        ...

    def retry_failed(self) -> None:
        """The pause of `Prospects.later_s` is over: deployments that failed before may be given again."""
        ...

    async def place(self, demand: RouteRequirements) -> Slot:
        """The next place; without a failure since, the same deployment if it has one free. Waits in line for it.
        Raises the error that the last place failed with when there is nowhere else to go, `BackendOverloaded` when the
        line is full or took too long, `BackendUnavailable` or its relatives when nothing works. Cancelled cleanly."""
        ...


class DeploymentPool(Protocol):
    """Live deployments by model name."""

    def route(self, ask: RouteRequest) -> FailoverRoute:
        """Raises `UnknownModel`."""
        ...
