"""Routes `/team/*`.

A team is the tenant of its keys: they share stored state and the limits of the team.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from unisono.api.admin.administration import (
    ADMIN,
    AdminDeps,
    Administration,
    CurrentActor,
    IdempotencyKey,
    no_such,
    page_of,
)
from unisono.api.admin.budget_spend import spend_by
from unisono.api.admin.directory import (
    change_members,
    create_entry,
    delete_entries,
    ensure_users,
    find_entry,
    page_answer,
    set_blocked,
    update_entry,
)
from unisono.api.admin.entry_schema import (
    AddMembers,
    ChangedTeam,
    DeleteMember,
    DeleteTeams,
    NewTeam,
    TeamInfo,
    TeamObject,
    TeamPage,
    TeamQuery,
    TeamReference,
    UpdateTeam,
)
from unisono.api.admin.roles import Actor
from unisono.api.admin.user_emails import user_with_email
from unisono.api.answer_types import AnswerModel, Object
from unisono.api.dependencies import ParsedBody
from unisono.api.route_table import BODY_404_409, READ_404
from unisono.core.conversation import Json
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.errors import InvalidRequest


class DeletedTeams(AnswerModel):
    deleted_teams: list[str]


@ADMIN.add("POST", "/team/new", BODY_404_409, answer=TeamObject, body=NewTeam)
async def create_team(
    admin: AdminDeps, actor: CurrentActor, body: ParsedBody[NewTeam], idempotency_key: IdempotencyKey = ""
) -> Object:
    """Create a team."""
    members = await ensure_users(admin, actor, body.members_with_roles)
    team = await create_entry(admin, actor, EntryKind.TEAM, body, idempotency_key, members)
    return admin.view(team)


@ADMIN.add("GET", "/team/info", READ_404)
async def get_team_info(
    admin: AdminDeps,
    actor: CurrentActor,
    team_id: Annotated[str, Query()],
    key_limit: Annotated[int | None, Query(ge=0, description="Maximum number of keys in the answer.")] = None,
) -> TeamInfo:
    """Return a team, the spend of the team, and those of its keys that the caller may see."""
    team = await find_entry(admin, actor, EntryKind.TEAM, team_id)
    owned = [key for key in await admin.store.keys() if key.tenant == team.id]
    keys = [admin.view(key) for key in owned if key.revoked_at is None and actor.sees_key(key)]
    # Keys of a deleted team with the same id.
    former = {key.id for key in owned if key.revoked_at is not None and key.revoked_at <= team.created_at}
    sums = await spend_by(admin, lambda line: "" if line.account.key in former else line.account.tenant)
    spend = sums.get(team.id, 0.0)
    info = {**admin.view(team), "spend": spend}
    return TeamInfo(team_id=team.id, team_info=info, keys=keys[:key_limit], team_memberships=[])


async def _visible(admin: Administration, actor: Actor, query: TeamQuery) -> list[dict[str, Json]]:
    return [
        admin.view(team)
        for team in await admin.store.directory(EntryKind.TEAM)
        if actor.sees(team)
        and (query.user_id is None or query.user_id in team.members)
        and query.team_id in (None, team.id)
        and query.team_alias in (None, team.alias)
    ]


@ADMIN.add("GET", "/team/list")
async def list_teams(admin: AdminDeps, actor: CurrentActor, query: Annotated[TeamQuery, Query()]) -> list[TeamObject]:
    """List teams, oldest first."""
    page, _ = page_of(await _visible(admin, actor, query), query.page, query.page_size)
    return [TeamObject.model_validate(team) for team in page]


@ADMIN.add("GET", "/v2/team/list", answer=TeamPage)
async def list_team_page(admin: AdminDeps, actor: CurrentActor, query: Annotated[TeamQuery, Query()]) -> Object:
    """List teams, oldest first. The answer contains one page and the number of pages."""
    return page_answer("teams", await _visible(admin, actor, query), query)


@ADMIN.add("POST", "/team/update", BODY_404_409, answer=ChangedTeam, body=UpdateTeam)
async def update_team(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[UpdateTeam]) -> Object:
    """Change the settings that the body contains; all other settings of the team stay."""
    team = await update_entry(admin, actor, EntryKind.TEAM, body.team_id, body)
    return {"team_id": team.id, "data": admin.view(team)}


@ADMIN.add("POST", "/team/delete", BODY_404_409, body=DeleteTeams)
async def delete_teams(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[DeleteTeams]) -> DeletedTeams:
    """Delete teams and revoke their keys permanently."""
    return DeletedTeams(deleted_teams=await delete_entries(admin, actor, EntryKind.TEAM, body.team_ids, "team_ids"))


async def _block(admin: Administration, actor: Actor, id: str, *, is_blocked: bool) -> Object:
    team = await find_entry(admin, actor, EntryKind.TEAM, id)
    return admin.view(await set_blocked(admin, actor, team, is_blocked=is_blocked))


@ADMIN.add("POST", "/team/block", BODY_404_409, answer=TeamObject, body=TeamReference)
async def block_team(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[TeamReference]) -> Object:
    """Block a team: requests with its keys are refused until the team is unblocked."""
    return await _block(admin, actor, body.team_id, is_blocked=True)


@ADMIN.add("POST", "/team/unblock", BODY_404_409, answer=TeamObject, body=TeamReference)
async def unblock_team(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[TeamReference]) -> Object:
    """Unblock a team, so that its keys are accepted again."""
    return await _block(admin, actor, body.team_id, is_blocked=False)


async def _own_team(admin: Administration, actor: Actor, id: str) -> DirectoryEntry:
    """Return a team. Raises `NotFound` if the actor may not change the members of the team."""
    team = await find_entry(admin, actor, EntryKind.TEAM, id)
    if not actor.changes_team(team):
        raise no_such(EntryKind.TEAM, id, "team_id")
    return team


@ADMIN.add("POST", "/team/member_add", BODY_404_409, answer=TeamObject, body=AddMembers)
async def add_team_members(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[AddMembers]) -> Object:
    """Add members to a team, or change their role in it."""
    team = await _own_team(admin, actor, body.team_id)
    roles = await ensure_users(admin, actor, body.member)
    team = await change_members(admin, actor, team, add=roles)
    users = await admin.store.entries(*((EntryKind.USER, id) for id in roles))
    memberships: list[Json] = [{"user_id": id, "team_id": team.id} for id in roles]
    return {
        **admin.view(team),
        # Team admins learn nothing about users whom they add by id.
        "updated_users": [
            admin.view(user) if user is not None and actor.sees(user) else {"user_id": id}
            for id, user in zip(roles, users, strict=True)
        ],
        "updated_team_memberships": memberships,
    }


@ADMIN.add("POST", "/team/member_delete", BODY_404_409, answer=TeamObject, body=DeleteMember)
async def delete_team_member(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[DeleteMember]) -> Object:
    """Remove a member from a team. The member's keys stay in the team."""
    team = await _own_team(admin, actor, body.team_id)
    if body.user_id is None and body.user_email is None:
        raise InvalidRequest("Missing required field 'user_id'.", param="user_id")
    user = body.user_id or await user_with_email(admin, body.user_email or "") or ""
    if user not in team.members:
        raise no_such("member", body.user_id or body.user_email or "", "user_id")
    return admin.view(await change_members(admin, actor, team, remove=[user]))
