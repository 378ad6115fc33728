"""One reservation, and one record of the usage, for all choices of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from unisono.core.quotas import Account, QuotaReservation, TokenUsage, UsageRecord
from unisono.engine.request import GenerationRequest

T = TypeVar("T")


class ChoiceUsage:
    """Reservation and usage of the choices of one request.

    `claims` are the reservations that were granted for all choices.
    """

    # The requests and the gates refer to this object. It keeps no reference to them after the admission, so that all of
    # them are freed without the garbage collector.

    def __init__(self, size: int) -> None:
        self.size = size
        self.claims: Sequence[QuotaReservation] = ()
        self._requests: list[GenerationRequest] = []
        self._is_decided = asyncio.Event()
        self._granted: Any = None
        self._refusal: Exception | None = None
        self._ended = 0  # number of choices that have ended
        self._records: dict[Account, UsageRecord] = {}

    async def admitted(self, request: GenerationRequest, admit: Callable[..., Awaitable[T]]) -> T:
        """Call `admit` once for all choices, as soon as all have arrived, and return its result.

        `admit` receives the requests of all choices. If `admit` raises an error, all choices raise it.
        """
        self._requests.append(request)
        if len(self._requests) < self.size:
            # If the choice that calls `admit` is cancelled, its request ends all other choices.
            await self._is_decided.wait()
        else:
            try:
                self._granted = await admit(*self._requests)
            except Exception as error:
                self._refusal = error
            self._requests.clear()
            self._is_decided.set()
        if self._refusal is not None:
            raise self._refusal
        granted: T = self._granted
        return granted

    def leave(self, records: Sequence[UsageRecord]) -> tuple[list[UsageRecord], list[QuotaReservation]]:
        """Add the usage of a choice that ends. Each choice must call this once.

        For the last choice, returns the usage of all choices by account, and the reservations of the accounts without
        usage. For other choices, returns nothing.
        """
        self._ended += 1
        for record in records:
            account = record.entry.account
            before = self._records.get(account)
            self._records[account] = record if before is None else _joined(before, record)
        if self._ended < self.size:
            return [], []
        return [*self._records.values()], [claim for claim in self.claims if claim.account not in self._records]


def answers_without_room(requests: Sequence[GenerationRequest], room: int | None) -> int:
    """Return the number of answers of a request if `room` tokens are too few for them; else 0.

    Each of several answers needs a token, unless the client requested answers without tokens.
    """
    if requests[0].answer.max_tokens == 0:
        return 0
    passthrough = requests[0].passthrough
    answers = len(requests) if passthrough is None else max(len(requests), passthrough.sequences)
    return answers if room is not None and answers > 1 and room < answers else 0


def shared_usage(request: GenerationRequest, name: str) -> ChoiceUsage | None:
    """Return the usage with this name that all choices of a request share.

    None for a request with one choice.
    """
    choices = request.origin.choices
    return None if choices is None else choices.shared.setdefault(name, ChoiceUsage(choices.size))


def _joined(first: UsageRecord, second: UsageRecord) -> UsageRecord:
    """Return the usage of two choices as one request.

    The usage counts for the model that answered the choice of `first`.
    """
    used: TokenUsage = first.entry.used + second.entry.used
    used = replace(used, requests=1, errors=min(used.errors, 1))
    return replace(first, entry=replace(first.entry, used=used))
