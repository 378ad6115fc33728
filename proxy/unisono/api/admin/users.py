"""Routes `/user/*`: users with a role and limits."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from unisono.api.admin.administration import ADMIN, AdminDeps, CurrentActor, IdempotencyKey, creation_name
from unisono.api.admin.budget_spend import key_owners, spend_by
from unisono.api.admin.directory import (
    change_members,
    create_entry,
    delete_entries,
    find_entry,
    page_answer,
    update_entry,
)
from unisono.api.admin.entry_schema import (
    ChangedUser,
    DeleteUsers,
    NewUser,
    NewUserAnswer,
    UpdateUser,
    UserInfo,
    UserPage,
    UserQuery,
)
from unisono.api.admin.key_lookup import check_alias
from unisono.api.admin.key_schema import GenerateKey
from unisono.api.admin.keys import create_key
from unisono.api.admin.roles import MemberRole
from unisono.api.answer_types import Object
from unisono.api.dependencies import ParsedBody
from unisono.api.route_table import BODY_404_409, READ_404
from unisono.core.directory import EntryKind
from unisono.errors import InvalidRequest


@ADMIN.add("POST", "/user/new", BODY_404_409, answer=NewUserAnswer, body=NewUser)
async def create_user(
    admin: AdminDeps, actor: CurrentActor, body: ParsedBody[NewUser], idempotency_key: IdempotencyKey = ""
) -> Object:
    """Create a user, and a key of the user unless `auto_create_key` is false."""
    for field, value in () if body.auto_create_key else (("key_alias", body.key_alias), ("duration", body.duration)):
        if value is not None:
            raise InvalidRequest(
                f"'{field}': has no effect without a key; omit this field, or set 'auto_create_key' to true.",
                param=field,
            )
    teams = [await find_entry(admin, actor, EntryKind.TEAM, id, "teams") for id in dict.fromkeys(body.teams)]
    if body.key_alias:
        await check_alias(admin, body.key_alias, creation_name(actor, "key", idempotency_key), body.user_id)
    user = await create_entry(admin, actor, EntryKind.USER, body, idempotency_key)
    for team in teams:
        if user.id not in team.members:
            await change_members(admin, actor, team, add={user.id: MemberRole.USER})
    answer: Object = {**admin.view(user), "teams": [team.id for team in teams], "key": None}
    if not body.auto_create_key:
        return answer
    fields = {"key_alias": body.key_alias, "duration": body.duration}
    wanted = GenerateKey.model_validate({"user_id": user.id} | {k: v for k, v in fields.items() if v is not None})
    # A repeated request returns the same key.
    key = await create_key(admin, actor, wanted, idempotency_key or f"user {user.id} {user.created_at}")
    return answer | {name: key[name] for name in ("key", "token", "key_name", "key_alias", "expires")}


@ADMIN.add("GET", "/user/info", READ_404)
async def get_user_info(
    admin: AdminDeps, actor: CurrentActor, user_id: Annotated[str | None, Query()] = None
) -> UserInfo:
    """Return a user with keys, teams and spend; by default, the user of the request's key."""
    if not user_id and not actor.user:
        raise InvalidRequest("'user_id': the key of this request has no user; send the id of a user.", param="user_id")
    user = await find_entry(admin, actor, EntryKind.USER, user_id or actor.user)
    keys = [
        admin.view(key)
        for key in await admin.store.keys()
        if key.user == user.id and key.revoked_at is None and actor.sees_key(key)
    ]
    teams = [
        admin.view(team)
        for team in await admin.store.directory(EntryKind.TEAM)
        if user.id in team.members and actor.sees(team)
    ]
    owners = await key_owners(admin)
    spend = (await spend_by(admin, lambda line: owners.get(line.account.key, ""))).get(user.id, 0.0)
    return UserInfo(user_id=user.id, user_info={**admin.view(user), "spend": spend}, keys=keys, teams=teams)


@ADMIN.add("GET", "/user/list", READ_404, answer=UserPage)
async def list_users(admin: AdminDeps, actor: CurrentActor, query: Annotated[UserQuery, Query()]) -> Object:
    """List users, oldest first, one page per request."""
    team = query.team and await find_entry(admin, actor, EntryKind.TEAM, query.team, "team")
    users = [
        admin.view(user)
        for user in await admin.store.directory(EntryKind.USER)
        if actor.sees(user) and query.selects(user) and (not team or user.id in team.members)
    ]
    return page_answer("users", users, query)


@ADMIN.add("POST", "/user/update", BODY_404_409, answer=ChangedUser, body=UpdateUser)
async def update_user(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[UpdateUser]) -> Object:
    """Change the settings that the body contains; all other settings of the user stay."""
    user = await update_entry(admin, actor, EntryKind.USER, body.user_id, body)
    return {"user_id": user.id, "data": admin.view(user)}


@ADMIN.add("POST", "/user/delete", BODY_404_409, answer=int, body=DeleteUsers)
async def delete_users(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[DeleteUsers]) -> int:
    """Delete users, revoke their keys permanently, and return the number of deleted users."""
    return len(await delete_entries(admin, actor, EntryKind.USER, body.user_ids, "user_ids"))
