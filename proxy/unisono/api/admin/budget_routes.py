"""Routes `/budget/*`: named budgets."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from unisono.api.admin.administration import ADMIN, AdminDeps, CurrentActor, IdempotencyKey, page_of
from unisono.api.admin.directory import check_unused, create_entry, delete_entry, find_entry, update_entry
from unisono.api.admin.entry_schema import (
    BudgetObject,
    BudgetReferences,
    DeleteBudget,
    ListQuery,
    NewBudget,
    UpdateBudget,
)
from unisono.api.answer_types import Object
from unisono.api.dependencies import ParsedBody
from unisono.api.route_table import BODY_404_409, BODY_ERRORS
from unisono.core.directory import EntryKind


@ADMIN.add("POST", "/budget/new", BODY_404_409, answer=BudgetObject, body=NewBudget)
async def create_budget(
    admin: AdminDeps,
    actor: CurrentActor,
    body: ParsedBody[NewBudget],
    idempotency_key: IdempotencyKey = "",
) -> Object:
    """Create a named budget: limits for the keys, teams and users that name it in `budget_id`."""
    budget = await create_entry(admin, actor, EntryKind.BUDGET, body, idempotency_key)
    return admin.view(budget)


@ADMIN.add("POST", "/budget/info", (*BODY_ERRORS, 404), body=BudgetReferences)
async def get_budget_info(
    admin: AdminDeps, actor: CurrentActor, body: ParsedBody[BudgetReferences]
) -> list[BudgetObject]:
    """Return named budgets."""
    found = [await find_entry(admin, actor, EntryKind.BUDGET, id, "budgets") for id in body.budgets]
    return [BudgetObject.model_validate(admin.view(budget)) for budget in found]


@ADMIN.add("GET", "/budget/list")
async def list_budgets(
    admin: AdminDeps, actor: CurrentActor, query: Annotated[ListQuery, Query()]
) -> list[BudgetObject]:
    """List named budgets, oldest first."""
    del actor  # only the check of its role is needed
    page, _ = page_of(await admin.store.directory(EntryKind.BUDGET), query.page, query.page_size)
    return [BudgetObject.model_validate(admin.view(budget)) for budget in page]


@ADMIN.add("POST", "/budget/delete", BODY_404_409, answer=BudgetObject, body=DeleteBudget)
async def delete_budget(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[DeleteBudget]) -> Object:
    """Delete a named budget, which no key, team, user or end user may still use."""
    budget = await find_entry(admin, actor, EntryKind.BUDGET, body.id, "id")
    await check_unused(admin, budget)
    await delete_entry(admin, actor, budget)
    return admin.view(budget)


@ADMIN.add("POST", "/budget/update", BODY_404_409, answer=BudgetObject, body=UpdateBudget)
async def update_budget(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[UpdateBudget]) -> Object:
    """Change the limits of a named budget. The change takes effect everywhere within a second."""
    return admin.view(await update_entry(admin, actor, EntryKind.BUDGET, body.budget_id, body))
