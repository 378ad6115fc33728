"""Scores of given tokens: their log probabilities, and the tokens that are most likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Final, Protocol, runtime_checkable

from unisono.core.frozen import dataclass
from unisono.core.generation import Prompt, Timeouts
from unisono.core.ports import Backend
from unisono.core.trace_context import TraceContext

# Number of alternatives per token that every scoring backend can report.
SCORED_ALTERNATIVES: Final = 10


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Tokens to score: the `targets`, which follow `prompt`.

    Each target is scored after the prompt and all earlier targets, even if the model would have generated different
    tokens. `top` is the number of alternatives to report per token, from 1 to `SCORED_ALTERNATIVES`.
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
    """Log probability of one target, and the most likely tokens at its position, best first.

    `top` are pairs of a token id and its log probability. `logprob` is None if the backend reports only the most likely
    tokens, and the target is not among them.
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
        """0-based position of the target in `top`; None if `top` does not contain the target."""
        return next((place for place, (token, _) in enumerate(self.top) if token == self.token), None)


@runtime_checkable
class ScoringBackend(Backend, Protocol):
    """Backend that scores given tokens, if its `Capabilities.scores` is true."""

    async def score(self, job: ScoreJob) -> Sequence[TokenScore | None]:
        """Return a score for each target; None for targets about which the backend reports nothing.

        Cancelling the task ends the work of the backend. Raises `BackendError` or a subclass if the backend fails, and
        `ContextTooLong` if prompt and targets exceed its context window.
        """
        ...
