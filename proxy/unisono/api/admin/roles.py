"""Roles of the admin API, and the routes that each role may use.

A route that is not in the table is denied. If an actor may not see an object, the response is the same as for an object
that does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from unisono.core.access import KeyRecord
from unisono.core.directory import ADMIN_ROLE, VIEWER_ROLE, DirectoryEntry, EntryKind
from unisono.core.frozen import dataclass

# Actor of the master key in audit records.
MASTER_ACTOR: Final = "master_key"


class UserRole(StrEnum):
    """Role of a user in the gateway, by LiteLLM's name."""

    ADMIN = ADMIN_ROLE
    VIEWER = VIEWER_ROLE
    USER = "internal_user"
    USER_VIEWER = "internal_user_viewer"


class MemberRole(StrEnum):
    """Role of a user in a team."""

    ADMIN = "admin"
    USER = "user"


class Role(StrEnum):
    """Role of a caller of the admin API. A caller with several roles acts in the strongest role."""

    MASTER = "master"
    ADMIN = "admin"
    VIEWER = "viewer"
    TEAM_ADMIN = "team_admin"
    USER = "user"
    USER_VIEWER = "user_viewer"
    # A key without a user.
    KEY = "key"


@dataclass(frozen=True, slots=True)
class Actor:
    """Caller of the admin API.

    `key` is the caller's key; None for the master key. `user` is the id of the key's user, or "". `teams` contains the
    ids of the teams that the user administers, and `member_of` the ids of all teams of the user. `home` is the id of
    the key's team, outside which the caller has no rights; None for a key without a team.
    """

    role: Role
    key: KeyRecord | None = None
    user: str = ""
    teams: frozenset[str] = frozenset()
    member_of: frozenset[str] = frozenset()
    home: str | None = None

    @property
    def id(self) -> str:
        return MASTER_ACTOR if self.key is None else self.key.id

    @property
    def sees_all(self) -> bool:
        return self.role in {Role.MASTER, Role.ADMIN, Role.VIEWER}

    @property
    def changes_all(self) -> bool:
        return self.role in {Role.MASTER, Role.ADMIN}

    def sees_key(self, record: KeyRecord) -> bool:
        is_own = self.key is not None and self.key.id == record.id
        return self.sees_all or is_own or self._owns(record) or record.tenant in self.teams

    def changes_key(self, record: KeyRecord) -> bool:
        """Return True if the actor may change the key, as an admin, the team's admin or the owner."""
        is_users = self.role in {Role.USER, Role.TEAM_ADMIN} and self._owns(record)
        return self.changes_all or is_users or record.tenant in self.teams

    def _owns(self, record: KeyRecord) -> bool:
        """Return whether the key belongs to the actor's user, and to the team of the actor's key."""
        return bool(self.user) and record.user == self.user and self.home in (None, record.tenant)

    def sees(self, entry: DirectoryEntry) -> bool:
        match entry.kind:
            case EntryKind.TEAM:
                return self.sees_all or entry.id in self.teams | self.member_of
            case EntryKind.USER:
                return self.sees_all or entry.id == self.user
            case EntryKind.BUDGET | EntryKind.CUSTOMER | EntryKind.SETTING | EntryKind.MODEL:
                return self.sees_all

    def changes_user(self, entry: DirectoryEntry) -> bool:
        return self.changes_all or (entry.id == self.user and self.home is None)

    def changes_team(self, entry: DirectoryEntry) -> bool:
        return self.changes_all or entry.id in self.teams


_ADMINS: Final = frozenset({Role.MASTER, Role.ADMIN})
_VIEWERS: Final = _ADMINS | {Role.VIEWER}
_TEAM: Final = _ADMINS | {Role.TEAM_ADMIN}
_OWNERS: Final = _TEAM | {Role.USER}
_ALL: Final = frozenset(Role)

# Roles that may use a route; every other role gets 403.
PERMISSIONS: Final[Mapping[str, frozenset[Role]]] = {
    "/key/generate": _OWNERS,
    "/key/info": _ALL,
    "/key/list": _ALL,
    "/key/update": _OWNERS,
    "/key/delete": _OWNERS,
    "/key/import": _ADMINS,
    "/key/block": _TEAM,
    "/key/unblock": _TEAM,
    "/key/regenerate": _OWNERS,
    "/key/{key}/regenerate": _OWNERS,
    "/team/new": _ADMINS,
    "/team/info": _ALL - {Role.KEY},
    "/team/list": _ALL - {Role.KEY},
    "/v2/team/list": _ALL - {Role.KEY},
    "/team/update": _TEAM,
    "/team/delete": _ADMINS,
    "/team/block": _ADMINS,
    "/team/unblock": _ADMINS,
    "/team/member_add": _TEAM,
    "/team/member_delete": _TEAM,
    "/user/new": _ADMINS,
    "/user/info": _ALL - {Role.KEY},
    "/user/list": _VIEWERS,
    "/user/update": _OWNERS,
    "/user/delete": _ADMINS,
    "/budget/new": _ADMINS,
    "/budget/info": _VIEWERS,
    "/budget/list": _VIEWERS,
    "/budget/delete": _ADMINS,
    "/budget/update": _ADMINS,
    # LiteLLM's clients know both names.
    **{
        f"/{name}/{action}": _VIEWERS if action in ("info", "list") else _ADMINS
        for name in ("customer", "end_user")
        for action in ("new", "info", "list", "update", "delete", "block", "unblock")
    },
    "/spend/logs": _ALL,
    "/spend/keys": _ALL,
    "/spend/users": _ALL - {Role.KEY},
    "/spend/tags": _ALL,
    "/global/spend/report": _VIEWERS,
    "/user/daily/activity": _ALL,
    "/model/new": _ADMINS,
    "/model/update": _ADMINS,
    "/model/{id:path}/update": _ADMINS,
    "/model/delete": _ADMINS,
    "/model/{id:path}/drain": _ADMINS,
    "/model/{id:path}/resume": _ADMINS,
    "/health": _VIEWERS,
    "/audit": _VIEWERS,
}


def strongest(user: DirectoryEntry | None, teams: frozenset[str], home: str | None = None) -> Role:
    """Return the strongest role of a key of `user`, who administers `teams`.

    `home` is the team of the key; None for a key without a team. A key in a team never has the role of a gateway admin,
    because team admins can create keys for any member of their team. If a member is a gateway admin, a team admin could
    otherwise use a key of this member to act as a gateway admin.
    """
    if user is None:
        return Role.KEY
    match user.role:
        case UserRole.ADMIN if home is None:
            return Role.ADMIN
        case UserRole.VIEWER if home is None:
            return Role.VIEWER
        case UserRole.USER_VIEWER | UserRole.VIEWER:
            return Role.USER_VIEWER
        case _:
            return Role.TEAM_ADMIN if teams else Role.USER
