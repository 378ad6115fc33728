"""Rate limit of a deployment over a sliding minute. Pure: the clock is an argument.

A request counts from the moment it gets its slot, with the number of tokens that it may use. When the request has
finished, this number is corrected to the number of tokens that the request used. If the request used more tokens than
were counted, the additional tokens count from the end of the request. Times are grouped into grains, so that memory
does not grow with the rate. No grain is dropped before its minute is over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Final

MINUTE_S: Final = 60.0
# Number of grains in a minute.
GRAINS: Final = 240


@dataclass(eq=False, slots=True)
class Grain:
    """Requests and tokens counted in one interval of a quarter second, which ends at `end`.

    They stop counting a minute after `end`.
    """

    end: float
    requests: int = 0
    tokens: int = 0
    # True once the grain's minute is over.
    is_expired: bool = False


class Rate:
    """Rate of one deployment, with its limits.

    `now` is monotonic seconds. `requests` and `tokens` are the counts at the time of the last `move`.
    """

    def __init__(self, requests: int | None = None, tokens: int | None = None) -> None:
        self.max_requests = requests
        self.max_tokens = tokens
        self.requests = 0
        self.tokens = 0
        self._minute_s = MINUTE_S
        self._grains: deque[Grain] = deque()

    def move(self, now: float) -> None:
        """Drop the grains that are more than a minute old."""
        grains = self._grains
        while grains and grains[0].end + self._minute_s <= now:
            gone = grains.popleft()
            gone.is_expired = True
            self.requests -= gone.requests
            self.tokens -= gone.tokens

    def has_room(self, tokens: int) -> bool:
        """Return whether a request that may use `tokens` tokens can begin now.

        A request that alone exceeds the limit of a minute can begin when no other request is counted.
        """
        return self._allow(self.requests, self.tokens, tokens)

    def _allow(self, requests: int, had: int, tokens: int) -> bool:
        if self.max_requests is not None and requests >= self.max_requests:
            return False
        return self.max_tokens is None or had <= 0 or had + tokens <= self.max_tokens

    def frees_at(self, tokens: int) -> float:
        """Return when a request of `tokens` tokens can begin, if no other request begins before.

        Return minus infinity if the request can begin now.
        """
        requests, had, at = self.requests, self.tokens, -inf
        for grain in self._grains:
            if self._allow(requests, had, tokens):
                break
            requests, had, at = requests - grain.requests, had - grain.tokens, grain.end + self._minute_s
        return at

    def add_request(self, tokens: int, now: float) -> Grain:
        """Count a request that may use `tokens` tokens, and return its grain for `settle`."""
        return self._add(1, tokens, now)

    def settle(self, grain: Grain, taken: int, used: int | None, now: float) -> None:
        """Correct the count of a finished request in `grain` from `taken` tokens to `used` tokens.

        If `used` is None, the deployment was never called, and the request is no longer counted.
        """
        if used is not None and used > taken:
            self._add(0, used - taken, now)
        elif not grain.is_expired:
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
    """Return a rate with these limits per minute, or None if there is no limit.

    Requests that began under the rate `before` are still counted.
    """
    if requests is None and tokens is None:
        return None
    rate = before or Rate()
    rate.max_requests, rate.max_tokens = requests, tokens
    return rate
