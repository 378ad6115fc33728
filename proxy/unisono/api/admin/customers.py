"""Routes `/customer/*`, also at `/end_user/*`: end users.

A request names its end user in `user` or `safety_identifier`. An end user without an entry has no limits, and the usage
of this end user is not counted.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from unisono.api.admin.administration import ADMIN, AdminDeps, Administration, CurrentActor, IdempotencyKey, page_of
from unisono.api.admin.budget_spend import account_spend, applied_limits
from unisono.api.admin.directory import (
    create_entry,
    delete_entries,
    find_entry,
    set_blocked,
    update_entry,
)
from unisono.api.admin.entry_schema import (
    CustomerObject,
    CustomerQuery,
    CustomerReferences,
    NewCustomer,
    UpdateCustomer,
)
from unisono.api.admin.roles import Actor
from unisono.api.answer_types import AnswerModel, Count, Object
from unisono.api.dependencies import ParsedBody
from unisono.api.route_table import BODY_404_409, READ_404, RouteTable
from unisono.core.access import shared_account
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.errors import StoreConflict

CUSTOMERS = RouteTable("admin", prefixes=("/customer", "/end_user"))


class DeletedCustomers(AnswerModel):
    deleted_customers: Count
    message: str


class BlockedCustomers(AnswerModel):
    blocked_users: list[CustomerObject]


class StillBlocked(AnswerModel):
    """The end users that are still blocked."""

    blocked_users: list[str]


async def customer_answer(admin: Administration, entry: DirectoryEntry) -> Object:
    """Return an end user in LiteLLM's format, with its spend."""
    limits, table = await applied_limits(admin, entry)
    return {
        **admin.view(entry),
        "spend": await account_spend(admin, shared_account(entry), limits),
        "litellm_budget_table": table,
    }


@CUSTOMERS.add("POST", "/new", BODY_404_409, answer=CustomerObject, body=NewCustomer)
async def create_customer(
    admin: AdminDeps, actor: CurrentActor, body: ParsedBody[NewCustomer], idempotency_key: IdempotencyKey = ""
) -> Object:
    """Create an end user. The body may set limits and permitted models, and may block the user."""
    entry = await create_entry(admin, actor, EntryKind.CUSTOMER, body, idempotency_key)
    return await customer_answer(admin, entry)


@CUSTOMERS.add("GET", "/info", READ_404, answer=CustomerObject)
async def get_customer_info(admin: AdminDeps, actor: CurrentActor, end_user_id: Annotated[str, Query()]) -> Object:
    """Return an end user with its spend."""
    return await customer_answer(admin, await find_entry(admin, actor, EntryKind.CUSTOMER, end_user_id, "end_user_id"))


@CUSTOMERS.add("GET", "/list")
async def list_customers(
    admin: AdminDeps, actor: CurrentActor, query: Annotated[CustomerQuery, Query()]
) -> list[CustomerObject]:
    """List end users, oldest first."""
    every = await admin.store.directory(EntryKind.CUSTOMER)
    visible = [entry for entry in every if actor.sees(entry) and query.user_id in (None, entry.id)]
    page, _ = page_of(visible, query.page, query.page_size)
    return [CustomerObject.model_validate(await customer_answer(admin, entry)) for entry in page]


@CUSTOMERS.add("POST", "/update", BODY_404_409, answer=CustomerObject, body=UpdateCustomer)
async def update_customer(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[UpdateCustomer]) -> Object:
    """Change the settings that the body contains; all other settings of the end user stay."""
    return await customer_answer(admin, await update_entry(admin, actor, EntryKind.CUSTOMER, body.user_id, body))


@CUSTOMERS.add("POST", "/delete", BODY_404_409, body=CustomerReferences)
async def delete_customers(
    admin: AdminDeps, actor: CurrentActor, body: ParsedBody[CustomerReferences]
) -> DeletedCustomers:
    """Delete end users. Requests that name them are then not limited any more."""
    ids = await delete_entries(admin, actor, EntryKind.CUSTOMER, body.user_ids, "user_ids")
    return DeletedCustomers(deleted_customers=len(ids), message=f"Successfully deleted customers with ids: {ids}")


@CUSTOMERS.add("POST", "/block", BODY_404_409, body=CustomerReferences)
async def block_customers(
    admin: AdminDeps, actor: CurrentActor, body: ParsedBody[CustomerReferences]
) -> BlockedCustomers:
    """Block end users: requests that name them are refused. Unknown end users are created."""
    blocked = [await _blocked(admin, actor, id) for id in dict.fromkeys(body.user_ids)]
    answers = [CustomerObject.model_validate(await customer_answer(admin, entry)) for entry in blocked]
    return BlockedCustomers(blocked_users=answers)


async def _blocked(admin: Administration, actor: Actor, id: str) -> DirectoryEntry:
    entry = await admin.entry(EntryKind.CUSTOMER, id)
    if entry is None:
        new = admin.new_entry(actor, EntryKind.CUSTOMER, id, is_blocked=True)
        audit = admin.audit_of(actor, "created", None, new)
        try:
            return await admin.store.put_entry(new, audit)
        except StoreConflict:  # another request has created it
            entry = await find_entry(admin, actor, EntryKind.CUSTOMER, id, "user_ids")
    return await set_blocked(admin, actor, entry, is_blocked=True)


@CUSTOMERS.add("POST", "/unblock", BODY_404_409, body=CustomerReferences)
async def unblock_customers(
    admin: AdminDeps, actor: CurrentActor, body: ParsedBody[CustomerReferences]
) -> StillBlocked:
    """Unblock end users: requests that name them are accepted again."""
    ids = dict.fromkeys(body.user_ids)
    for entry in [await find_entry(admin, actor, EntryKind.CUSTOMER, id, "user_ids") for id in ids]:
        await set_blocked(admin, actor, entry, is_blocked=False)
    every = await admin.store.directory(EntryKind.CUSTOMER)
    return StillBlocked(blocked_users=[entry.id for entry in every if entry.is_blocked])


ADMIN.routes.extend(CUSTOMERS.routes)
