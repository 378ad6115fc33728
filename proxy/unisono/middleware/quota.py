"""Quotas and usage: each generation reserves quota, and its usage is recorded in the ledger.

The usage is recorded before the last event of the answer, which reports the usage, is emitted. A request of a key with
a budget cannot generate more tokens than it has reserved, so the budget is never exceeded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from functools import partial
from os import urandom
from typing import Final

from unisono.access.prices import PriceList
from unisono.access.usage_ledger import UsageLedger
from unisono.core.access import Caller
from unisono.core.billed_units import NO_UNITS
from unisono.core.conversation import Conversation, Preamble, Tokens
from unisono.core.events import Finished
from unisono.core.generation import NO_USAGE, FinishReason, Usage
from unisono.core.observer import StepDone, has_begun
from unisono.core.quotas import (
    Account,
    KeyLimits,
    LedgerLine,
    QuotaReservation,
    QuotaStatus,
    TokenUsage,
    UsageRecord,
    charged_input,
    owner_of,
)
from unisono.engine.journal import generated_in
from unisono.engine.request import GenerationReport, GenerationRequest, GenerationService, RequestOrigin, Resumption
from unisono.errors import ShuttingDown, UnisonoError
from unisono.middleware.limit_errors import no_room, refused
from unisono.middleware.n_choices_usage import ChoiceUsage, answers_without_room, shared_usage
from unisono.middleware.pipeline import Gate
from unisono.middleware.token_estimates import estimated_tokens

# Expected number of tokens of an answer, unless the request limits it to fewer.
EXPECTED_TOKENS: Final = 1024
# Maximum number of tokens that are reserved for an answer.
MAX_TOKENS: Final = 131_072


class Metering:
    """Factory of gates that enforce quotas and record usage.

    `service` counts the tokens of prompts. `prices` contains the price of each deployment: a request reserves the
    highest price of the `eligible` deployments, and pays the price of the deployment that answered. With `lenient`,
    requests are unlimited while the store accepts no writes. `clock` gives seconds since 1970. `zone` is the time zone
    of budget periods.
    """

    def __init__(
        self,
        service: GenerationService,
        ledger: UsageLedger,
        prices: PriceList,
        eligible: Callable[[GenerationRequest], frozenset[str]],
        *,
        lenient: bool = False,
        clock: Callable[[], float] = time.time,
        zone: tzinfo = UTC,
    ) -> None:
        self.service = service
        self.ledger = ledger
        self.prices = prices
        self.eligible = eligible
        self.is_lenient = lenient
        self.clock = clock
        self.zone = zone

    def __call__(self, request: GenerationRequest) -> QuotaGate:
        return QuotaGate(self, request, shared_usage(request, "quotas"))

    async def claims(self, caller: Caller, *requests: GenerationRequest) -> tuple[QuotaReservation, ...]:
        """Return the reservations for a request: for its key, and for the key's team and user.

        `requests` are the generation requests of all choices. Raises InvalidRequest if the conversation or the tools
        are invalid.
        """
        limits = (caller.limits, *(shared.limits for shared in caller.shared_limits))
        return self._claims(
            caller, requests, await self.prompt_tokens(requests, any(each.has_budget for each in limits))
        )

    def _claims(
        self, caller: Caller, requests: Sequence[GenerationRequest], sent: Sequence[int]
    ) -> tuple[QuotaReservation, ...]:
        limited = [shared for shared in caller.shared_limits if shared.limits.limited]
        own, once = Account(requests[0].origin.tenant, caller.key), urandom(12).hex()
        may_answer = self.eligible(requests[0])
        claims = [self.claim_of(requests, own, caller.limits, sent, once, may_answer)] if caller.limits.limited else []
        claims += [self.claim_of(requests, one.account, one.limits, sent, once, may_answer) for one in limited]
        return tuple(claims)

    async def prompt_tokens(self, requests: Sequence[GenerationRequest], has_budget: bool) -> list[int]:
        """Return the prompt tokens of each choice: exact with a budget, otherwise estimated."""
        return [await self.service.count(each) if has_budget else estimated_tokens(each) for each in requests]

    def claim_of(
        self,
        requests: Sequence[GenerationRequest],
        account: Account,
        limits: KeyLimits,
        sent: Sequence[int],
        once: str,
        deployments: frozenset[str],
    ) -> QuotaReservation:
        """Return the reservation of an account for a request.

        `requests` are the generation requests of all choices, and `sent` the numbers of their prompt tokens. `once` is
        the id of the reservation. Only answers of `deployments` can be charged to the account.
        """
        request, choices, prompts = requests[0], len(requests), sum(sent)
        price = self.prices.highest(deployments)
        units = NO_UNITS if request.passthrough is None else request.passthrough.max_units
        most = sum(map(_max_output, requests))
        least = min(most, choices * EXPECTED_TOKENS)
        if limits.tpm is not None:
            # If the request could fit in the limit of a whole minute, the estimate of its output must not exceed this
            # limit.
            least = max(choices, min(least, limits.tpm - prompts))
        # The cost of the output is rounded up for each choice.
        rounding = choices - 1 if price.output else 0
        start, ends = limits.budget_period.window(self.clock(), limits.budget_since, self.zone)
        return QuotaReservation(
            account=account,
            once=once,
            limits=limits,
            input=prompts,
            expected_output=least + len(request.resumption.journal),
            max_output=most,
            for_s=self.ledger.reservation_s,
            input_cost=sum(map(price.input_cost, sent)) + price.unit_cost(units) + rounding,
            output_price=price.output,
            period=limits.budget_period.name(start),
            period_ends=ends,
            is_owed=was_admitted(request),
            is_resumed=bool(request.resumption.journal),
        )

    async def reserve(self, *claims: QuotaReservation) -> QuotaStatus | None:
        """Reserve quota; returns and raises what `UsageLedger.reserve_even_in_outage` does."""
        return await self.ledger.reserve_even_in_outage(*claims, is_lenient=self.is_lenient)

    async def journal_usage(self, request: GenerationRequest) -> Usage:
        """Return the usage of the earlier streams of a response that `request` continues."""
        if not request.resumption.journal:
            return NO_USAGE
        prompt = 0
        # The stream raises the same error.
        with suppress(UnisonoError):
            prompt = await self.service.count(request)
        return Usage(prompt_tokens=prompt, completion_tokens=generated_in(request.resumption.journal))

    def charge_journal(self, caller: Caller, model: str, response_id: str, journal: Tokens) -> TokenUsage:
        """Charge the tokens in the journal of a response that failed and that no stream continues.

        The budgets of the caller's team and user are charged too. Returns the charged usage.
        """
        request = GenerationRequest(
            model,
            Conversation(Preamble()),
            origin=RequestOrigin(tenant=caller.tenant, caller=caller),
            resumption=Resumption(seed=response_id, journal=journal),
        )
        # The store charges a budget only for usage with a reservation, even a reservation that has lapsed. These
        # reservations are therefore not made first.
        lapsed = self._claims(caller, (request,), [0])
        gate = QuotaGate(self, request, reservations=lapsed)
        gate.report = GenerationReport()
        return gate.charge(Usage(completion_tokens=generated_in(journal)))

    def settlement(
        self,
        request: GenerationRequest,
        usage: Usage,
        backend: str,
        served: str,
        errors: int,
        steps: Sequence[StepDone] = (),
    ) -> UsageRecord:
        """Return the usage record of a request, to which the caller may add a reservation.

        The id of the record is the request's seed, and `usage` is the total usage under this id. Processes that
        continue one response therefore charge each token only once. `served` is the model that answered; "" for the
        requested model. `errors` is 1 for a failed request. `steps` contain the billed units other than tokens.
        """
        price = self.prices.settled(request.model, backend)
        sent, generated = charged_input(usage), usage.completion_tokens
        used = TokenUsage(
            # The summary before this answer was already counted as the request.
            requests=0 if request.origin.is_admitted else 1,
            errors=errors,
            input=sent,
            cached=usage.cached_tokens,
            output=generated,
            reasoning=usage.reasoning_tokens,
            cost=price.input_cost(sent, usage.cached_tokens)
            + price.output_cost(generated)
            + self.prices.unit_cost(request.model, steps),
        )
        day = datetime.fromtimestamp(self.clock(), UTC).date().isoformat()
        key = request.origin.caller.key if request.origin.caller is not None else ""
        entry = LedgerLine(Account(request.origin.tenant, key), request.model, day, used, served)
        return UsageRecord(request.resumption.seed or urandom(12).hex(), entry)


def was_admitted(request: GenerationRequest) -> bool:
    """Return whether a request was admitted earlier, so that no limit may refuse it now."""
    return bool(request.resumption.journal) or request.resumption.is_taken_over or request.origin.is_admitted


class QuotaGate(Gate):
    """Gate that reserves quota for one generation and settles its usage.

    The gates of several choices share one reservation for all of them, which the last choice to end settles.
    """

    def __init__(
        self,
        metering: Metering,
        request: GenerationRequest,
        choices: ChoiceUsage | None = None,
        reservations: tuple[QuotaReservation, ...] = (),
    ) -> None:
        self._metering = metering
        self._request = request
        self._choices = choices
        self._reservations = reservations
        # True from the admission of the request until its usage is recorded.
        self._is_owed = False
        # True if the budget limits the length of the answer.
        self._is_capped = False
        # Usage of the earlier streams of the response that this stream continues.
        self._journal_usage = NO_USAGE

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        """Reserve quota, if the key has limits.

        Raises `LimitReached` if the request exceeds a limit, and `StoreUnavailable` if the store cannot be used.
        """
        self._request = request
        if request.origin.caller is not None and request.origin.caller.is_limited:
            request = await self._reserve(request, request.origin.caller)
        # A cancellation from here on settles the reservation.
        self._is_owed = True
        if request.resumption.journal:
            await self.read_journal()
        return request

    async def read_journal(self) -> None:
        """Count the usage of the earlier streams of the response that the request continues.

        The tokens of these streams are in the journal of the request.
        """
        self._journal_usage = await self._metering.journal_usage(self._request)

    async def finish(self, finished: Finished) -> None:
        if self._is_capped and finished.reason is FinishReason.LENGTH and not self.report.unmet:
            owners = [owner_of(claim.account)[0] for claim in self._reservations if claim.limits.has_budget]
            self.report.unmet = f"The budget of this {' or '.join(owners)} had no room for a longer answer."
        self._is_owed = False
        if settlements := self._leave(self.usage_record(finished.usage)):
            await self._metering.ledger.settle(*settlements)

    def end(self, error: BaseException | None) -> None:
        """Record the usage so far, if the end of the answer has not settled it.

        A refused request is recorded as an error without tokens.
        """
        record = self.unfinished_record(error) if self._is_owed else None
        self._is_owed = False
        for settlement in self._leave(record):
            self._metering.ledger.record(settlement)

    def charge(self, usage: Usage) -> TokenUsage:
        """Charge the usage of a failed response that has no stream; return the charge."""
        record = self.usage_record(usage, errors=1)
        for settlement in self._settlements(record):
            self._metering.ledger.record(settlement)
        return record.entry.used

    def release(self) -> None:
        if self._choices is not None:
            for settlement in self._leave(None):
                self._metering.ledger.record(settlement)
        elif self._is_owed:
            self._metering.ledger.release(*self._reservations)
        self._is_owed = False

    def _leave(self, record: UsageRecord | None) -> list[UsageRecord]:
        """Return the usage records to write at the end of this generation.

        `record` is the usage of the generation, if any. With several choices, the last choice to end returns the
        records of all choices.
        """
        settlements = [] if record is None else self._settlements(record)
        choices, self._choices = self._choices, None
        if choices is None:
            return settlements
        settlements, unused = choices.leave(settlements)
        self._metering.ledger.release(*unused)
        return settlements

    def _settlements(self, record: UsageRecord) -> list[UsageRecord]:
        """Return the usage records of the key, and of the team and the user with a reservation."""
        if not self._reservations:
            return [record, *self._counted_only(record)]
        own = record.entry.account
        mine = next((claim for claim in self._reservations if claim.account == own), None)
        others = [claim for claim in self._reservations if claim is not mine]
        shared = [replace(record, entry=replace(record.entry, account=claim.account), claim=claim) for claim in others]
        return [UsageRecord(record.once, record.entry, mine), *shared, *self._counted_only(record)]

    def _counted_only(self, record: UsageRecord) -> list[UsageRecord]:
        """Return the usage records of teams and users that count usage but have no reservation."""
        caller = self._request.origin.caller
        reserved = {claim.account for claim in self._reservations}
        return [
            replace(record, entry=replace(record.entry, account=shared.account), claim=None)
            for shared in (() if caller is None else caller.shared_limits)
            if shared.is_counted and shared.account not in reserved
        ]

    async def _reserve(self, request: GenerationRequest, caller: Caller) -> GenerationRequest:
        """Reserve quota, and return the request with the token limit that the reservation allows."""
        choices, claim = self._choices, partial(self._claim_for, caller)
        granted = await (claim(request) if choices is None else choices.admitted(request, claim))
        if granted is None:
            return request
        self._reservations, self.report.standing = granted
        if granted[1].output is None:
            return request
        # The choices divide the reserved tokens evenly.
        size = 1 if choices is None else choices.size
        room = granted[1].output // size
        self._is_capped = room < self._reservations[0].max_output // size
        # No context window is larger than MAX_TOKENS. A pass-through request must send its limit to the provider.
        is_limited = self._is_capped or request.passthrough is not None
        return replace(request, answer=replace(request.answer, max_tokens=room)) if is_limited else request

    async def _claim_for(
        self, caller: Caller, *requests: GenerationRequest
    ) -> tuple[tuple[QuotaReservation, ...], QuotaStatus] | None:
        """Reserve quota for all choices of a request; return None if no reservation is needed.

        Raises `LimitReached` if the request exceeds a limit.
        """
        claims = await self._metering.claims(caller, *requests)
        if (status := await self._metering.reserve(*claims)) is None:
            return None
        if status.refused is not None:
            self._metering.ledger.report_refusal(status)
            raise refused(status.refused, status)
        if answers := answers_without_room(requests, status.output):
            self._metering.ledger.release(*claims)
            raise no_room(answers)
        if self._choices is not None:
            self._choices.claims = claims
        return claims, status

    def usage_so_far(self) -> Usage:
        """Return the usage so far of the stream, including the journal that the stream continues."""
        facts, usage, before = self.report.facts, self.report.facts.usage, self._journal_usage
        # The prompt of a continued answer ends in its journal, which already counts as output.
        prompt = facts.prompt_tokens or before.prompt_tokens or usage.prompt_tokens
        generated = before.completion_tokens + usage.completion_tokens
        reasoning, cached = min(facts.reasoning_tokens, generated), min(usage.cached_tokens, prompt)
        return Usage(prompt, generated, reasoning, cached, usage.tool_output_tokens)

    def unfinished_record(self, error: BaseException | None) -> UsageRecord:
        """Return the usage record of an answer that ended without its last event."""
        # If the process shuts down, the request itself has not failed.
        has_failed = isinstance(error, Exception) and not isinstance(error, ShuttingDown)
        usage = self.usage_so_far()
        if isinstance(error, Exception) and not has_begun(usage, self.report.facts.steps):
            usage = NO_USAGE
        return self.usage_record(usage, errors=int(has_failed))

    def usage_record(self, usage: Usage, errors: int = 0) -> UsageRecord:
        """Return the usage record of the generation."""
        request, report = self._request, self.report
        served = "" if report.served_model == request.model else report.served_model
        record = self._metering.settlement(request, usage, report.backend, served, errors, report.facts.steps)
        report.facts.cost = record.entry.used.cost
        return record


def _max_output(request: GenerationRequest) -> int:
    # Clients may send any number, but no answer is longer than MAX_TOKENS. Stores and prices use the reserved number.
    return MAX_TOKENS if request.answer.max_tokens is None else min(request.answer.max_tokens, MAX_TOKENS)
