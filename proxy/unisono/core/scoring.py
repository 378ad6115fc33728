"""Scores of given tokens: what a backend's model would have generated in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Final, Protocol, runtime_checkable

from unisono.core.frozen import dataclass
from unisono.core.generation import Prompt, Timeouts
from unisono.core.ports import Backend
from unisono.core.trace_context import TraceContext

# Alternatives per token that every scoring backend can report.
SCORED_ALTERNATIVES: Final = 10


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Tokens to score: the `targets` after a `prompt`.

    The model reads each target, whatever it would have generated in its place. `top` is the number of alternatives per
    token, from 1 to `SCORED_ALTERNATIVES`.
    """

    prompt: Prompt
    targets: Sequence[int]
    top: int = SCORED_ALTERNATIVES
    timeouts: Timeouts = field(default_factory=Timeouts)
    request_id: str = ""
    cache_salt: str = ""
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log probability of one target, and the most likely tokens at its place, best first.

    `logprob` is None if the backend does not report it because the token is not among the most likely ones.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]

    @property
    def best(self) -> int:
        """Token that the model considers most likely."""
        return self.top[0][0]

    @property
    def rank(self) -> int | None:
        """Place of the target among the alternatives, from 0; None if it is not among them."""
        return next((place for place, (token, _) in enumerate(self.top) if token == self.token), None)


@runtime_checkable
class ScoringBackend(Backend, Protocol):
    """Backend that scores given tokens, if its `Capabilities.scores` is true."""

    async def score(self, job: ScoreJob) -> Sequence[TokenScore | None]:
        """Return a score for each target; None where the backend reports nothing.

        Cancelling the task frees the backend. Raises the `BackendError` family and `ContextTooLong`.
        """
        ...
