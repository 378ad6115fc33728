"""Check of the limits per minute and on parallel requests, from the usage per second."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.frozen import dataclass
from unisono.core.quotas import WINDOW_S, QuotaKind, QuotaReservation, QuotaStatus


@dataclass(frozen=True, slots=True)
class Minute:
    """Usage in the current window, oldest first.

    `seconds` are triples: a second of the store's clock, and the requests and tokens counted in that second. `now` is
    the current time of this clock.
    """

    seconds: Sequence[tuple[int, int, int]]
    now: float

    @property
    def requests(self) -> int:
        return sum(second[1] for second in self.seconds)

    @property
    def tokens(self) -> int:
        return sum(second[2] for second in self.seconds)

    def free_after(self, kind: int, much: int) -> tuple[float, float]:
        """Return the seconds until `much` is available again, and until all usage has expired.

        `much` is a number of requests if `kind` is 1, and a number of tokens if `kind` is 2.
        """
        again = every = 0.0
        for second in self.seconds:
            if second[kind] > 0:
                every = second[0] + WINDOW_S + 1 - self.now
                again = every if much > 0 else again
                much -= second[kind]
        return again, every

    def refusal(self, claim: QuotaReservation, running: int) -> QuotaStatus | None:
        """Return the status of a refused claim; None if the limits allow the claim.

        `running` is the number of requests in progress.
        """
        limits = claim.limits
        if claim.is_owed:
            return None
        if limits.rpm is not None and self.requests + 1 > limits.rpm:
            again = self.free_after(1, self.requests + 1 - limits.rpm)[0] if limits.rpm > 0 else None
            return self.status(claim, QuotaKind.REQUESTS, again)
        if limits.tpm is not None and self.tokens + claim.tokens > limits.tpm:
            again = self.free_after(2, self.tokens + claim.tokens - limits.tpm)[0]
            return self.status(claim, QuotaKind.TOKENS, again if claim.tokens <= limits.tpm else None)
        if limits.max_parallel is not None and running >= limits.max_parallel:
            return self.status(claim, QuotaKind.PARALLEL)
        return None

    def status(
        self,
        claim: QuotaReservation,
        refused: QuotaKind | None = None,
        again_s: float | None = None,
        output: int | None = None,
    ) -> QuotaStatus:
        rpm, tpm = claim.limits.rpm, claim.limits.tpm
        return QuotaStatus(
            refused,
            again_s,
            output,
            None if rpm is None else max(0, rpm - self.requests),
            self.free_after(1, 0)[1],
            None if tpm is None else max(0, tpm - self.tokens),
            self.free_after(2, 0)[1],
            claim.limits,
            claim.account,
        )
