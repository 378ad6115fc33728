"""Budgets that several keys share: one for the whole gateway, and one for each provider.

In each budget, a request reserves the highest amount that its answer may cost there. When the answer has
ended, its actual price is charged to the budgets of the deployment that answered. Deployments whose budget is spent are
excluded from routing. `EligibleDeployments` determines the deployments that may answer a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from secrets import token_hex
from typing import Final

from unisono.core.events import Finished
from unisono.core.fallback_models import NO_FALLBACK_MODELS, FallbackModels
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason
from unisono.core.observer import StepDone
from unisono.core.quotas import (
    SHARED_TENANT,
    Account,
    KeyLimits,
    QuotaKind,
    QuotaReservation,
    QuotaStatus,
    UsageRecord,
)
from unisono.core.route_protocol import NO_ROUTING, RequestedRouting
from unisono.engine.request import GenerationRequest
from unisono.errors import LimitReached, QuotaExceeded
from unisono.middleware.limit_errors import NEVER_S, no_room
from unisono.middleware.n_choices_usage import ChoiceUsage, answers_without_room, shared_usage
from unisono.middleware.pipeline import Gate
from unisono.middleware.quota import MAX_TOKENS, Metering, QuotaGate, was_admitted


@dataclass(frozen=True, slots=True)
class SharedBudget:
    """Budget to which all answers of `deployments` are charged.

    `name` is its id in the store, and `owner` is its owner in messages.
    """

    name: str
    owner: str
    limits: KeyLimits
    deployments: frozenset[str]

    @property
    def account(self) -> Account:
        return Account(SHARED_TENANT, self.name)


class SharedBudgets:
    """Factory of gates that enforce shared budgets."""

    def __init__(self, metering: Metering, budgets: Sequence[SharedBudget]) -> None:
        self.metering = metering
        self._budgets = tuple(budgets)

    def __call__(self, request: GenerationRequest) -> BudgetGate | None:
        eligible = self.metering.eligible(request)
        budgets = [budget for budget in self._budgets if budget.deployments & eligible]
        return BudgetGate(self.metering, budgets, eligible, shared_usage(request, "budgets")) if budgets else None


# Retry delay in seconds that a client gets while running requests have reserved the rest of a budget.
RESERVED_AGAIN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Granted:
    """Reservations in budgets.

    `spent` are the deployments whose budget is spent. `room` is the largest number of tokens that may be generated,
    None for no maximum. `narrowest` is the owner of the budget that determines `room`.
    """

    reserved: tuple[tuple[SharedBudget, QuotaReservation], ...]
    spent: frozenset[str]
    room: int | None
    narrowest: str


class BudgetGate(Gate):
    """Gate that reserves in the budgets of all deployments that may answer the request.

    The gates of several choices share the reservations, which the last choice to end settles.
    """

    def __init__(
        self,
        metering: Metering,
        budgets: Sequence[SharedBudget],
        eligible: frozenset[str],
        choices: ChoiceUsage | None = None,
    ) -> None:
        self._metering = metering
        self._budgets = tuple(budgets)
        self._eligible = eligible
        self._choices = choices
        self._reserved: Sequence[tuple[SharedBudget, QuotaReservation]] = ()
        self._quota: QuotaGate | None = None
        # Owner of the budget that limits the length of the answer; empty if no budget does.
        self._capped_by = ""

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        """Reserve in each budget, and exclude the deployments whose budget is spent.

        Raises `LimitReached` if no deployment is left, and `StoreUnavailable` if the store cannot be used.
        """
        choices = self._choices
        granted = await (self._reserve(request) if choices is None else choices.admitted(request, self._reserve))
        self._reserved, spent = granted.reserved, granted.spent
        # This gate is used only to compute the usage of the answer.
        self._quota = QuotaGate(self._metering, request)
        self._quota.report = self.report
        await self._quota.read_journal()
        if spent:
            request = replace(request, routing=replace(request.routing, excluded=request.routing.excluded | spent))
        limit = request.answer.max_tokens
        if granted.room is None:
            return request
        # The choices divide the reserved tokens evenly.
        room = granted.room if choices is None else granted.room // choices.size
        is_capped = room < (MAX_TOKENS if limit is None else limit)
        self._capped_by = granted.narrowest if is_capped else ""
        # A pass-through request must contain the limit, because it may request several answers.
        is_limited = is_capped or (request.passthrough is not None and limit is None)
        return replace(request, answer=replace(request.answer, max_tokens=room)) if is_limited else request

    async def _reserve(self, *requests: GenerationRequest) -> Granted:
        """Reserve in each budget for all choices of a request. Raises the errors of `admit`."""
        try:
            return await self._reserve_once(requests)
        except LimitReached:
            # An answer that was admitted earlier prefers providers with budget left. It is not refused if none has any.
            if not was_admitted(requests[0]):
                raise
            return await self._reserve_once(requests, is_owed=True)

    async def _reserve_once(self, requests: Sequence[GenerationRequest], *, is_owed: bool = False) -> Granted:
        """Reserve in each budget; with `is_owed`, also in spent budgets."""
        sent = await self._metering.prompt_tokens(requests, has_budget=True)
        reserved: list[tuple[SharedBudget, QuotaReservation]] = []
        rooms: list[tuple[int, str]] = []
        spent: frozenset[str] = frozenset()
        refusals: list[tuple[SharedBudget, QuotaStatus]] = []
        try:
            for budget in self._budgets:
                account, may_pay = budget.account, budget.deployments & self._eligible
                claim = self._metering.claim_of(requests, account, budget.limits, sent, token_hex(12), may_pay)
                claim = replace(claim, is_owed=is_owed)
                status = await self._metering.reserve(claim)
                if status is not None and status.refused is not None:
                    spent |= budget.deployments
                    refusals.append((budget, status))
                elif status is not None:
                    reserved.append((budget, claim))
                    rooms += [] if status.output is None else [(status.output, budget.owner)]
        except BaseException:
            self._metering.ledger.release(*(claim for _, claim in reserved))
            raise
        room, narrowest = min(rooms, default=(None, ""))
        error: LimitReached | None = None
        if refusals and self._eligible <= spent:
            error = _refused(refusals)
            # An answer that was admitted earlier is not refused (see `_reserve`).
            if not was_admitted(requests[0]):
                self._metering.ledger.report_refusal(refusals[0][1])
        elif answers := answers_without_room(requests, room):
            error = no_room(answers)
        if error is not None:
            self._metering.ledger.release(*(claim for _, claim in reserved))
            raise error
        if self._choices is not None:
            self._choices.claims = [claim for _, claim in reserved]
        return Granted(tuple(reserved), spent, room, narrowest)

    async def finish(self, finished: Finished) -> None:
        if self._capped_by and finished.reason is FinishReason.LENGTH and not self.report.unmet:
            self.report.unmet = f"The remaining budget of {self._capped_by} was too small for a longer answer."
        assert self._quota is not None
        ledger = self._metering.ledger
        await asyncio.gather(*(ledger.settle(part) for part in self._leave(self._quota.usage_record(finished.usage))))

    def end(self, error: BaseException | None) -> None:
        """Record the usage of an answer that ended before its last event, such as after an error.

        If `finish` has run, nothing is reserved any more, and this does nothing.
        """
        record = self._quota.unfinished_record(error) if self._quota is not None and self._reserved else None
        for part in self._leave(record):
            self._metering.ledger.record(part)

    def release(self) -> None:
        for part in self._leave(None):
            self._metering.ledger.record(part)

    def _leave(self, record: UsageRecord | None) -> list[UsageRecord]:
        """Return the usage records to write at the end of this generation.

        `record` is the usage of the generation, if any. Reservations without usage are released. With several choices,
        the last choice to end returns the records of all choices.
        """
        reserved, self._reserved = self._reserved, ()
        parts: list[UsageRecord] = []
        unused: list[QuotaReservation] = []
        for budget, claim in reserved:
            part = None if record is None else self._part_of(record, budget, claim)
            if part is None:
                unused.append(claim)
            else:
                parts.append(part)
        choices, self._choices = self._choices, None
        if choices is not None:
            parts, unused = choices.leave(parts)
        self._metering.ledger.release(*unused)
        return parts

    def _part_of(self, record: UsageRecord, budget: SharedBudget, claim: QuotaReservation) -> UsageRecord | None:
        """Return the part of an answer's usage to charge to a budget; None if there is no such part.

        After a failover, each budget is charged for the attempts in which its deployments generated tokens: for these
        tokens and for the prompts. If no tokens were generated, as for embeddings, each budget is charged for the
        prompts that its deployments answered.
        """
        entry = replace(record.entry, account=budget.account)
        every = self.report.facts.steps
        steps = [step for step in every if step.generated] or [step for step in every if not step.failure]
        own = [step for step in steps if step.deployment in budget.deployments]
        # The last deployment may have failed before its first token, so it is used only if no step has generated
        # tokens.
        if not own and (steps or self.report.backend not in budget.deployments):
            return None
        if len(own) < len(steps):
            cost = sum(self._cost_of(step, entry.model) for step in own)
            sent, generated = sum(step.prompt_tokens for step in own), sum(step.generated for step in own)
            entry = replace(entry, used=replace(entry.used, input=sent, output=generated, cost=cost))
        return replace(record, entry=entry, claim=claim)

    def _cost_of(self, step: StepDone, model: str) -> int:
        price = self._metering.prices.settled(model, step.deployment)
        tokens = price.input_cost(step.prompt_tokens, step.cached_tokens or 0) + price.output_cost(step.generated)
        return tokens + price.unit_cost(step.units)


def _refused(refusals: Sequence[tuple[SharedBudget, QuotaStatus]]) -> LimitReached:
    """Return the error for a request after the `refusals` of budgets left no deployment."""
    reserved = [budget.owner for budget, status in refusals if status.refused is QuotaKind.BUDGET_RESERVED]
    if reserved:
        return LimitReached(
            f"Running requests have reserved the rest of the budget of {' and '.join(reserved)}; try again when they "
            "have ended.",
            retry_after_s=RESERVED_AGAIN_S,
        )
    delays = [NEVER_S if status.retry_after_s is None else status.retry_after_s for _, status in refusals]
    owners = " and ".join(budget.owner for budget, _ in refusals)
    message = f"The budget of {owners} is spent; ask the operator to raise it."
    return QuotaExceeded(message, retry_after_s=min(delays))


# Maximum number of cached results. The limit is necessary because clients choose the routing fields in the cache keys.
CACHED_SELECTIONS: Final = 1024


class EligibleDeployments:
    """Function that returns the names of all deployments that may answer a request.

    `deployments(model, requested)` returns the names of the deployments of `model` that a request with these routing
    fields may use. `fallback_models` contains the configured fallbacks of each model. The deployments of a request's
    fallback models may answer too.
    """

    def __init__(
        self,
        deployments: Callable[[str, RequestedRouting], frozenset[str]],
        fallback_models: Mapping[str, FallbackModels],
    ) -> None:
        self._deployments = deployments
        self._fallback_models = fallback_models
        self._cached = lru_cache(CACHED_SELECTIONS)(self._select)

    def __call__(self, request: GenerationRequest) -> frozenset[str]:
        caller = request.origin.caller
        return self._cached(request.model, NO_ROUTING if caller is None else caller.routing)

    def _select(self, model: str, requested: RequestedRouting) -> frozenset[str]:
        others = self._fallback_models.get(model, NO_FALLBACK_MODELS).for_request(model, requested)
        models = (model, *others.fallbacks, *others.larger)
        return frozenset[str]().union(*(self._deployments(each, requested) for each in models))
