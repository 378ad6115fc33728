"""Budgets that several keys share: one for the whole gateway, and one for each provider.

A request reserves its highest possible price in every budget that its answer may be charged to. When the answer has
ended, its actual price is charged to the budgets of the deployment that answered. Deployments whose budget is spent are
excluded from routing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import Final

from unisono.core.access import Caller
from unisono.core.events import Finished
from unisono.core.fallback_models import FallbackModels
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason
from unisono.core.observer import StepDone
from unisono.core.quotas import SHARED_TENANT, Account, KeyLimits, QuotaKind, QuotaReservation, QuotaStatus, UsageRecord
from unisono.engine.request import GenerationRequest
from unisono.errors import LimitReached, QuotaExceeded
from unisono.middleware.pipeline import Gate
from unisono.middleware.quota import NEVER_S, Metering, QuotaGate


@dataclass(frozen=True, slots=True)
class SharedBudget:
    """Budget to which all answers of `deployments` are charged; `name` is its id in the store."""

    name: str
    limits: KeyLimits
    deployments: frozenset[str]

    @property
    def account(self) -> Account:
        return Account(SHARED_TENANT, self.name)


class SharedBudgets:
    """Factory of gates that enforce shared budgets.

    `deployments(model, tags)` returns the names of the deployments that may answer a request for `model` with these
    tags. `fallback_models` contains the configured fallbacks of each model.
    """

    def __init__(
        self,
        metering: Metering,
        budgets: Sequence[SharedBudget],
        deployments: Callable[[str, Sequence[str]], frozenset[str]],
        fallback_models: Mapping[str, FallbackModels],
    ) -> None:
        self.metering = metering
        self._budgets = tuple(budgets)
        self._deployments = deployments
        self._fallback_models = fallback_models

    def __call__(self, request: GenerationRequest) -> BudgetGate | None:
        caller = request.origin.caller
        others = self._fallback_models.get(request.model, FallbackModels())
        tags: tuple[str, ...] = ()
        if caller is not None:
            others, tags = others.for_request(request.model, caller.routing), caller.routing.tags
        models = (request.model, *others.fallbacks, *others.larger)
        eligible = frozenset[str]().union(*(self._deployments(model, tags) for model in models))
        budgets = [budget for budget in self._budgets if budget.deployments & eligible]
        return BudgetGate(self.metering, budgets, eligible) if budgets else None


# Retry delay in seconds that a client gets while running requests have reserved the rest of a budget.
RESERVED_AGAIN_S: Final = 1.0


class BudgetGate(Gate):
    """Gate that reserves in the budgets of all deployments that may answer the request."""

    def __init__(self, metering: Metering, budgets: Sequence[SharedBudget], eligible: frozenset[str]) -> None:
        self._metering = metering
        self._budgets = tuple(budgets)
        self._eligible = eligible
        self._reserved: list[tuple[SharedBudget, QuotaReservation]] = []
        self._quota: QuotaGate | None = None
        self._is_capped = False

    async def admit(self, request: GenerationRequest) -> GenerationRequest:
        """Reserve in each budget, and exclude the deployments whose budget is spent.

        Raises `LimitReached` if no deployment is left, and `StoreUnavailable` if the store cannot be used.
        """
        whole = await self._metering.claim(request, Caller("", limits=self._budgets[0].limits))
        spent: frozenset[str] = frozenset()
        refusals: list[QuotaStatus] = []
        room: int | None = None
        for budget in self._budgets:
            claim = self._claim(whole, budget)
            status = await self._metering.reserve(claim)
            if status is not None and status.refused is not None:
                spent |= budget.deployments
                refusals.append(status)
                continue
            if status is not None:
                self._reserved.append((budget, claim))
                if status.output is not None:
                    room = status.output if room is None else min(room, status.output)
        if refusals and self._eligible <= spent:
            self.release()
            raise _refused(refusals)
        # This gate is used only to compute the usage of the answer.
        self._quota = QuotaGate(self._metering, request)
        self._quota.report = self.report
        await self._quota.read_journal()
        if spent:
            request = replace(request, routing=replace(request.routing, excluded=request.routing.excluded | spent))
        limit = request.answer.max_tokens
        if room is None:
            return request
        self._is_capped = room < (whole.max_output if limit is None else limit)
        # A pass-through request must contain the limit, because it may request several answers.
        is_limited = self._is_capped or (request.passthrough is not None and limit is None)
        return replace(request, answer=replace(request.answer, max_tokens=room)) if is_limited else request

    async def finish(self, finished: Finished) -> None:
        if self._is_capped and finished.reason is FinishReason.LENGTH and not self.report.unmet:
            self.report.unmet = "The remaining budget of this gateway was too small for a longer answer."
        reserved, self._reserved = self._reserved, []
        assert self._quota is not None
        record = self._quota.usage_record(finished.usage)
        settling = []
        for budget, claim in reserved:
            if (part := self._part_of(record, budget, claim)) is not None:
                settling.append(self._metering.ledger.settle(part))
            else:
                self._metering.ledger.release(claim)
        await asyncio.gather(*settling)

    def end(self, error: BaseException | None) -> None:
        """Record the usage of an answer that ended before its last event, such as after an error.

        If `finish` has run, nothing is reserved any more, and this does nothing.
        """
        reserved, self._reserved = self._reserved, []
        record = self._quota.unfinished_record(error) if self._quota is not None else None
        for budget, claim in reserved:
            part = self._part_of(record, budget, claim) if record is not None else None
            if part is not None:
                self._metering.ledger.record(part)
            else:
                self._metering.ledger.release(claim)

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

    def release(self) -> None:
        reserved, self._reserved = self._reserved, []
        for _, claim in reserved:
            self._metering.ledger.release(claim)

    def _claim(self, whole: QuotaReservation, budget: SharedBudget) -> QuotaReservation:
        limits = budget.limits
        start, ends = limits.budget_period.window(self._metering.clock(), zone=self._metering.zone)
        return replace(
            whole,
            account=budget.account,
            once=token_hex(12),
            limits=limits,
            period=f"{limits.budget_period.kind}:{start:.0f}",
            period_ends=ends,
        )


def _refused(refusals: Sequence[QuotaStatus]) -> LimitReached:
    """Return the error for a request after the `refusals` of budgets left no deployment."""
    if any(status.refused is QuotaKind.BUDGET_RESERVED for status in refusals):
        return LimitReached(
            "Running requests have reserved the rest of this gateway's budget; try again when they have ended.",
            retry_after_s=RESERVED_AGAIN_S,
        )
    delays = [NEVER_S if status.retry_after_s is None else status.retry_after_s for status in refusals]
    message = "The budget of this gateway is spent; ask the operator to raise it."
    return QuotaExceeded(message, retry_after_s=min(delays))
