"""Request and response models of the routes for teams, users, end users and budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import tzinfo
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from unisono.api.admin.fields import (
    AdminBody,
    ExpiryText,
    Metadata,
    Name,
    Names,
    NewMetadata,
    applicable_metadata,
    has_part,
    iso,
    models_answer,
    period_of,
    to_models,
)
from unisono.api.admin.limit_fields import LimitFields, limit_answer
from unisono.api.admin.roles import MemberRole, UserRole
from unisono.api.answer_types import AnswerModel, Count, Object
from unisono.api.field_types import FieldInput, QueryModel, invalid_field
from unisono.core.conversation import Json
from unisono.core.directory import DirectoryEntry, EntryKind

MAX_MEMBERS = 1000


class TeamMember(AdminBody):
    """Member of a team. A user that does not exist yet is created."""

    user_id: Name | None = None
    user_email: Name | None = None
    role: Literal["admin", "user"] = "user"

    @model_validator(mode="after")
    def _is_named(self) -> TeamMember:
        if self.user_id is None and self.user_email is None:
            raise invalid_field("must name the user in `user_id` or `user_email`")
        return self


Members = Annotated[list[TeamMember], Field(max_length=MAX_MEMBERS)]


def _to_members(value: Any) -> Any:
    # The type of the value selects the parser. Errors of a union type would name a branch of the union, not the field.
    if isinstance(value, Mapping):
        return [TeamMember.model_validate(value)]
    if not isinstance(value, list):
        raise invalid_field("must be a member, or a list of members")
    return value


class EntrySettings(LimitFields):
    """Settings that teams, users and budgets share."""

    models: Names | None = None
    metadata: Metadata | None = None
    blocked: bool | None = None
    budget_id: Name | None = None

    def applied(self, entry: DirectoryEntry, now: float) -> DirectoryEntry:
        """Return the entry with the settings that the body contains."""
        sent, limits = self.model_fields_set, self.limits(entry.limits)
        if "budget_duration" in sent and period_of(self.budget_duration) != entry.limits.budget_period:
            limits = replace(limits, budget_since=now)
        fields: dict[str, Any] = {"limits": limits}
        if "models" in sent:
            fields["models"] = to_models(self.models)
        if "metadata" in sent:
            fields["metadata"] = applicable_metadata(self.metadata or {}, entry.metadata)
        if "blocked" in sent:
            fields["is_blocked"] = bool(self.blocked)
        if "budget_id" in sent and entry.kind is not EntryKind.BUDGET:
            fields["budget"] = self.budget_id or ""
        for name, own in (
            ("team_alias", "alias"),
            ("user_alias", "alias"),
            ("alias", "alias"),
            ("user_email", "email"),
            ("user_role", "role"),
        ):
            if name in sent:
                fields[own] = getattr(self, name) or ""
        return replace(entry, **fields)


class NewTeam(EntrySettings):
    """Body of `/team/new`."""

    metadata: NewMetadata | None = None
    team_id: Name | None = None
    team_alias: Name | None = None
    members_with_roles: Members = Field(default_factory=list)


class UpdateTeam(EntrySettings):
    """Body of `/team/update`."""

    team_id: Name
    team_alias: Name | None = None


class TeamReference(AdminBody):
    team_id: Name


class DeleteTeams(AdminBody):
    team_ids: Annotated[Names, Field(min_length=1)]


class AddMembers(AdminBody):
    """Body of `/team/member_add`."""

    team_id: Name
    member: Annotated[Members, BeforeValidator(_to_members), FieldInput(Members | TeamMember)]


class DeleteMember(AdminBody):
    """Body of `/team/member_delete`."""

    team_id: Name
    user_id: Name | None = None
    user_email: Name | None = None


class UserFields(EntrySettings):
    """Settings of a user."""

    user_email: Name | None = None
    user_alias: Name | None = None
    user_role: Literal["proxy_admin", "proxy_admin_viewer", "internal_user", "internal_user_viewer"] | None = None


class NewUser(UserFields):
    """Body of `/user/new`. By default a key of the user is created too."""

    metadata: NewMetadata | None = None
    user_id: Name | None = None
    teams: Names = Field(default_factory=list)
    auto_create_key: bool = True
    key_alias: Name | None = None
    duration: ExpiryText | None = None


class UpdateUser(UserFields):
    """Body of `/user/update`."""

    user_id: Name


class DeleteUsers(AdminBody):
    user_ids: Annotated[Names, Field(min_length=1)]


class UpdateCustomer(EntrySettings):
    """Body of `/customer/update`. `user_id` is the name of the end user in requests."""

    user_id: Name
    alias: Name | None = None


class NewCustomer(UpdateCustomer):
    """Body of `/customer/new`."""

    metadata: NewMetadata | None = None


class CustomerReferences(AdminBody):
    user_ids: Annotated[Names, Field(min_length=1)]


class NewBudget(LimitFields):
    """Body of `/budget/new`."""

    budget_id: Name | None = None


class UpdateBudget(LimitFields):
    """Body of `/budget/update`."""

    budget_id: Name


# Field with the id of an entry, by the kind of the entry.
ID_FIELDS: Mapping[EntryKind, str] = {
    EntryKind.TEAM: "team_id",
    EntryKind.USER: "user_id",
    EntryKind.CUSTOMER: "user_id",
    EntryKind.BUDGET: "budget_id",
}


class BudgetReferences(AdminBody):
    budgets: Annotated[Names, Field(min_length=1)]


class DeleteBudget(AdminBody):
    """Body of `/budget/delete`."""

    id: Name


class ListQuery(QueryModel):
    """Page of a list, numbered from 1. Without `page_size`, the page contains all entries."""

    page: Annotated[int, Field(ge=1, le=1_000_000, strict=False)] = 1
    page_size: Annotated[int, Field(ge=1, le=1000, strict=False)] | None = None


class CustomerQuery(ListQuery):
    """Filters of `/customer/list`."""

    user_id: str | None = None


class TeamQuery(ListQuery):
    """Filters of the lists of teams."""

    user_id: str | None = None
    team_id: str | None = None
    team_alias: str | None = None


class UserQuery(ListQuery):
    """Filters of `/user/list`.

    `user_ids` contains ids, separated by commas. `user_email` may be a part of the address. `search` may be a part of
    the id, the address or the alias.
    """

    user_id: str | None = None
    user_ids: str | None = None
    user_email: str | None = None
    role: str | None = None
    team: str | None = None
    search: str | None = None

    def selects(self, user: DirectoryEntry) -> bool:
        """Return whether the user matches all filters except `team`."""
        return (
            self.user_id in (None, user.id)
            and (self.user_ids is None or user.id in self.user_ids.split(","))
            and self.role in (None, user.role)
            and has_part(self.user_email, user.email)
            and has_part(self.search, user.id, user.email, user.alias)
        )


class TeamObject(AnswerModel):
    team_id: str
    team_alias: str | None
    members_with_roles: list[Object]
    models: list[str]
    blocked: bool


class TeamInfo(AnswerModel):
    team_id: str
    team_info: Object
    keys: list[Object]
    team_memberships: list[Object]


class TeamPage(AnswerModel):
    teams: list[TeamObject]
    total: Count
    page: Count
    page_size: Count
    total_pages: Count


class ChangedTeam(AnswerModel):
    team_id: str
    data: TeamObject


class UserObject(AnswerModel):
    user_id: str
    user_email: str | None
    user_role: str
    models: list[str]


class NewUserAnswer(UserObject):
    """A user, and the secret of its new key if one was created."""

    key: str | None


class UserInfo(AnswerModel):
    user_id: str
    user_info: Object
    keys: list[Object]
    teams: list[Object]


class UserPage(AnswerModel):
    users: list[UserObject]
    total: Count
    page: Count
    page_size: Count
    total_pages: Count


class ChangedUser(AnswerModel):
    user_id: str
    data: UserObject


class CustomerObject(AnswerModel):
    """An end user, with the spend in the current period of its budget."""

    user_id: str
    alias: str | None
    blocked: bool
    spend: float
    budget_id: str | None
    litellm_budget_table: Object | None


class BudgetObject(AnswerModel):
    budget_id: str
    max_budget: float | None
    budget_duration: str | None


def entry_view(entry: DirectoryEntry, now: float, zone: tzinfo) -> dict[str, Json]:
    """Return a team, user, end user or budget in LiteLLM's format."""
    times: dict[str, Json] = {
        "created_at": iso(entry.created_at),
        "created_by": entry.created_by or None,
        "updated_at": iso(entry.updated_at or entry.created_at),
    }
    limits = limit_answer(entry.limits, now, zone)
    if entry.kind is EntryKind.BUDGET:
        return {"budget_id": entry.id, **limits, **times}
    settings: dict[str, Json] = {
        "models": models_answer(entry.models),
        "metadata": dict(entry.metadata),
        "blocked": entry.is_blocked,
        "budget_id": entry.budget or None,
    }
    if entry.kind is EntryKind.USER:
        return {
            "user_id": entry.id,
            "user_alias": entry.alias or None,
            "user_email": entry.email or None,
            "user_role": entry.role or UserRole.USER.value,
            **settings,
            **limits,
            **times,
        }
    if entry.kind is EntryKind.CUSTOMER:
        return {
            "user_id": entry.id,
            "alias": entry.alias or None,
            "allowed_model_region": None,
            "default_model": None,
            **settings,
            **limits,
            **times,
        }
    members: list[Json] = [{"user_id": user, "role": role} for user, role in sorted(entry.members.items())]
    return {
        "team_id": entry.id,
        "team_alias": entry.alias or None,
        "members_with_roles": members,
        "admins": [user for user, role in sorted(entry.members.items()) if role == MemberRole.ADMIN],
        "members": [*sorted(entry.members)],
        **settings,
        **limits,
        **times,
    }
