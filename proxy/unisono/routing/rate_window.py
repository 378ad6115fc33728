"""What a deployment may be given in a running minute: pure, the clock comes in as an argument.

A request counts from when it gets its place, with the tokens it may take; what it took replaces these when it is over,
and what was more counts from then on. Times are gathered in grains, so that what is remembered does not grow with the
rate; none is forgotten before its minute is over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Final

MINUTE_S: Final = 60.0
GRAINS: Final = 240
"""Of a minute."""


@dataclass(eq=False, slots=True)
class Grain:
    """What was begun until its `end`, at most a grain's time before."""

    end: float
    requests: int = 0
    tokens: int = 0
    gone: bool = False
    """Whether its minute is over."""


class Rate:
    """Of one deployment. `now` is monotonic seconds; what is read is true for the moment of the last `move`."""

    def __init__(self, requests: int | None = None, tokens: int | None = None) -> None:
        self.most_requests = requests
        self.most_tokens = tokens
        self.requests = 0
        self.tokens = 0
        self._minute_s = MINUTE_S
        self._grains: deque[Grain] = deque()

    def move(self, now: float) -> None:
        """Forget what is a minute ago."""
        grains = self._grains
        while grains and grains[0].end + self._minute_s <= now:
            gone = grains.popleft()
            gone.gone = True
            self.requests -= gone.requests
            self.tokens -= gone.tokens

    def has_room(self, tokens: int) -> bool:
        """Whether a request of so many tokens may begin. One that is larger than what a minute allows has one alone."""
        return self._allow(self.requests, self.tokens, tokens)

    def _allow(self, requests: int, had: int, tokens: int) -> bool:
        if self.most_requests is not None and requests >= self.most_requests:
            return False
        return self.most_tokens is None or had <= 0 or had + tokens <= self.most_tokens

    def frees_at(self, tokens: int) -> float:
        """When a request of so many tokens may begin, if no other does before; long ago where it may now."""
        requests, had, at = self.requests, self.tokens, -inf
        for grain in self._grains:
            if self._allow(requests, had, tokens):
                break
            requests, had, at = requests - grain.requests, had - grain.tokens, grain.end + self._minute_s
        return at

    def take(self, tokens: int, now: float) -> Grain:
        """A request begins."""
        return self._add(1, tokens, now)

    def settle(self, grain: Grain, taken: int, used: int | None, now: float) -> None:
        """A request is over: of what was `taken` for it in `grain` so much was used; None where nothing was asked of
        the deployment, and it does not count."""
        if used is not None and used > taken:
            self._add(0, used - taken, now)
        elif not grain.gone:
            back = (1, taken) if used is None else (0, taken - used)
            grain.requests -= back[0]
            grain.tokens -= back[1]
            self.requests -= back[0]
            self.tokens -= back[1]

    def _add(self, requests: int, tokens: int, now: float) -> Grain:
        self.move(now)
        if not self._grains or self._grains[-1].end < now:
            self._grains.append(Grain(now + self._minute_s / GRAINS))
        grain = self._grains[-1]
        grain.requests += requests
        grain.tokens += tokens
        self.requests += requests
        self.tokens += tokens
        return grain


def rate_of(requests: int | None, tokens: int | None, before: Rate | None = None) -> Rate | None:
    """What allows so much in a minute, None where that is anything. What was begun under the rate `before` counts."""
    if requests is None and tokens is None:
        return None
    rate = before or Rate()
    rate.most_requests, rate.most_tokens = requests, tokens
    return rate
