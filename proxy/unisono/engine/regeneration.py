"""Rejected attempts at one message, and the sampling of the next attempt.

Everything follows from the rejected texts. Equal requests therefore have equal retries, and so has the replay of a
journal on another replica. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from unisono.core.generation import Sampling
from unisono.harmony.gate import Stopped
from unisono.harmony.header import Header

MIN_REDRAW_TEMPERATURE: Final = 0.6  # lowest temperature of an attempt that repeats a rejected one
SEED_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class RejectedAttempts:
    """Rejected attempts at one message.

    `constrained` counts those that ran under a constraint. `first` is the first attempt; None for a tool's name.
    `last_text` is the text of the last attempt.
    """

    count: int = 0
    constrained: int = 0
    first: Stopped | None = None
    last_text: str = ""

    def reject(self, text: str, *, constrained: bool, at: Stopped | None = None) -> RejectedAttempts:
        """Return these attempts and one more."""
        return RejectedAttempts(self.count + 1, self.constrained + constrained, self.first or at, text)

    def is_first(self, header: Header, text: str) -> bool:
        """Return whether an attempt equals the first one."""
        return self.first is not None and (self.first.header, self.first.text) == (header, text)

    def sampling(self, wanted: Sampling, *, constrained: bool) -> Sampling:
        """Return the sampling of the next attempt, where the client wants `wanted`."""
        # A constraint that the rejected attempts did not have changes the outcome by itself. Under equal conditions the
        # same sampling would repeat the rejected text, at temperature 0 every time.
        repeated = self.constrained if constrained else self.count - self.constrained
        if not repeated:
            return wanted
        temperature = max(wanted.temperature, MIN_REDRAW_TEMPERATURE)
        return replace(wanted, seed=self._seed(wanted.seed), temperature=temperature)

    def _seed(self, wanted: int | None) -> int:
        source = f"{wanted}\0{self.count}\0{self.last_text}".encode("utf-8", "surrogatepass")
        # Some backends accept 31 bits only.
        return int.from_bytes(sha256(source, usedforsecurity=False).digest()[:SEED_BYTES]) >> 1


NONE_REJECTED: Final = RejectedAttempts()
