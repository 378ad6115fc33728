"""Request and response models of the key routes, in LiteLLM's format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import tzinfo
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from unisono.access.keys import VISIBLE_SUFFIX_LENGTH
from unisono.api.admin.fields import (
    MAX_PAGE_SIZE,
    NEUTRAL_VALUES,
    NEVER,
    AdminBody,
    DurationText,
    ExpiryText,
    Metadata,
    Name,
    Names,
    NewMetadata,
    applicable_metadata,
    iso,
    models_answer,
    period_of,
    seconds_of,
    to_models,
)
from unisono.api.admin.limit_fields import LimitFields, limit_answer
from unisono.api.answer_types import AnswerModel, Object
from unisono.api.field_types import QueryModel, invalid_field
from unisono.core.access import KeyRecord
from unisono.core.conversation import Json


def _neutral(value: Any) -> Any:
    if value not in NEUTRAL_VALUES:
        raise invalid_field("is not supported: this gateway has permissions for `mcp_servers` only; omit this field")
    return value


Neutral = Annotated[Any, AfterValidator(_neutral)]


class ObjectPermission(AdminBody):
    """Permitted tool servers, by label. None permits all.

    `object_permission_id` has no effect. Answers contain it, so clients may send it back. LiteLLM's clients send the
    form of a key without permissions as an empty list in each field; in LiteLLM, it restricts nothing.
    """

    object_permission_id: str | None = None
    mcp_servers: Names | None = None
    mcp_access_groups: Neutral = None
    mcp_tool_permissions: Neutral = None
    mcp_toolsets: Neutral = None
    mcp_tool_search_enabled: Neutral = None
    blocked_tools: Neutral = None
    vector_stores: Neutral = None
    agents: Neutral = None
    agent_access_groups: Neutral = None
    models: Neutral = None
    search_tools: Neutral = None
    skills: Neutral = None

    def applied(self, servers: frozenset[str] | None) -> frozenset[str] | None:
        """Return the tool servers of a key that may use `servers` before the change.

        LiteLLM's empty form does not restrict a key that has no restriction.
        """
        is_form = self.mcp_servers == [] and bool(self.model_fields_set - {"mcp_servers", "object_permission_id"})
        if self.mcp_servers is None or (is_form and servers is None):
            return None
        return frozenset(self.mcp_servers)


def _with_valid_tags(metadata: dict[str, Any]) -> dict[str, Any]:
    tags = metadata.get("tags")
    if tags is not None and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise invalid_field("its `tags` must be a list of strings")
    return metadata


class KeySettings(LimitFields):
    """Settings of a key. `raw` permits raw completions; LiteLLM has no such field."""

    key_alias: Name | None = None
    duration: ExpiryText | None = None
    models: Names | None = None
    metadata: Annotated[Metadata, AfterValidator(_with_valid_tags)] | None = None
    tags: Names | None = None
    blocked: bool | None = None
    budget_id: Name | None = None
    object_permission: ObjectPermission | None = None
    raw: bool | None = None

    def applied(self, record: KeyRecord, now: float) -> KeyRecord:
        """Return the key with the settings that the body contains."""
        sent = self.model_fields_set
        limits = self.limits(record.limits)
        if "budget_duration" in sent and period_of(self.budget_duration) != record.limits.budget_period:
            # If the length of the period changes, a new period begins.
            limits = replace(limits, budget_since=now if record.revision else record.created_at)
        fields: dict[str, Any] = {"limits": limits}
        if "key_alias" in sent:
            fields["name"] = self.key_alias or ""
        if "duration" in sent:
            is_bounded = self.duration is not None and self.duration != NEVER
            fields["expires_at"] = now + seconds_of(self.duration or "") if is_bounded else None
        if "models" in sent:
            fields["models"] = to_models(self.models)
        if "blocked" in sent:
            fields["is_blocked"] = bool(self.blocked)
        if "budget_id" in sent:
            fields["budget"] = self.budget_id or ""
        if "raw" in sent:
            fields["raw"] = bool(self.raw)
        if self.object_permission is not None:
            fields["mcp_servers"] = self.object_permission.applied(record.mcp_servers)
        return replace(record, **fields, metadata=self._metadata(record))

    def _metadata(self, record: KeyRecord) -> dict[str, Json]:
        """Return the key's metadata, with the tags in the body. LiteLLM stores tags in the metadata."""
        is_sent = "metadata" in self.model_fields_set
        stored = record.metadata
        metadata = applicable_metadata(self.metadata or {}, stored) if is_sent else dict(stored)
        tags = self.tags if "tags" in self.model_fields_set else record.metadata.get("tags")
        if tags and "tags" not in metadata:
            metadata["tags"] = [*tags] if isinstance(tags, list) else []
        elif "tags" in self.model_fields_set:
            metadata["tags"] = [*(self.tags or ())]
        return metadata


class GenerateKey(KeySettings):
    """Body of `/key/generate`."""

    metadata: Annotated[NewMetadata, AfterValidator(_with_valid_tags)] | None = None
    team_id: Name | None = None
    user_id: Name | None = None
    key_type: Literal["default", "llm_api"] | None = None


class UpdateKey(KeySettings):
    """Body of `/key/update`.

    A key stays in its team, because the team owns the state that the key stored.
    """

    key: Name | None = None
    team_id: Name | None = None
    user_id: Name | None = None

    def applied(self, record: KeyRecord, now: float) -> KeyRecord:
        user = (self.user_id or "") if "user_id" in self.model_fields_set else record.user
        return super().applied(replace(record, user=user), now)


class RegenerateKey(KeySettings):
    """Body of `/key/regenerate`. The old secret stays valid for `grace_period`."""

    key: Name | None = None
    grace_period: DurationText | None = None


class KeyReference(AdminBody):
    key: Name


class DeleteKeys(AdminBody):
    keys: Names | None = None
    key_aliases: Names | None = None


class KeyInfo(AnswerModel):
    key: str
    info: Object


class KeyQuery(QueryModel):
    """Filters of `/key/list`."""

    page: Annotated[int, Field(ge=1, le=1_000_000, strict=False)] = 1
    size: Annotated[int, Field(ge=1, le=MAX_PAGE_SIZE, strict=False)] = 10
    user_id: str | None = None
    team_id: str | None = None
    key_hash: str | None = None
    key_alias: str | None = None
    # A part of the alias or of the id.
    search: str | None = None
    status: Literal["active", "expired", "revoked", "deleted"] | None = None
    # Accepted without effect: the list always contains the keys of the caller's teams and the keys created by the
    # caller.
    include_team_keys: Annotated[bool, Field(strict=False)] = True
    include_created_by_keys: Annotated[bool, Field(strict=False)] = True
    return_full_object: Annotated[bool, Field(strict=False)] = False
    sort_by: Literal["created_at", "key_alias"] = "created_at"
    sort_order: Literal["asc", "desc"] = "desc"


class KeyPage(AnswerModel):
    keys: list[str | Object]
    total_count: int
    current_page: int
    total_pages: int


class DeletedKeys(AnswerModel):
    deleted_keys: list[str]


class KeyObject(AnswerModel):
    """A key in LiteLLM's format. `token` is its id."""

    token: str
    key_name: str
    key_alias: str | None
    team_id: str | None
    user_id: str | None
    models: list[str]
    blocked: bool
    expires: str | None


class GeneratedKey(KeyObject):
    """A key with its secret, `key`, which no later response contains."""

    key: str


def state_of(record: KeyRecord, now: float) -> str:
    """Return LiteLLM's status of a key.

    LiteLLM calls a blocked key `revoked`, and a revoked key `deleted`.
    """
    if record.revoked_at is not None:
        return "deleted"
    if record.is_blocked:
        return "revoked"
    return "active" if record.is_valid(now) else "expired"


def team_of(record: KeyRecord) -> str | None:
    """Return the id of the key's team; None for a key with a tenant of its own."""
    return None if record.tenant == record.id else record.tenant


def key_view(record: KeyRecord, now: float, zone: tzinfo) -> dict[str, Json]:
    """Return a key in LiteLLM's format, without its secret and its spend."""
    permission: Json = None
    if record.mcp_servers is not None:
        permission = {"object_permission_id": record.id, "mcp_servers": [*sorted(record.mcp_servers)]}
    tags: Sequence[Json] = [f"{name}={value}" for name, value in sorted(record.tags.items())]
    return {
        "token": record.id,
        "token_id": record.id,
        "key_name": f"sk-...{record.ending[-VISIBLE_SUFFIX_LENGTH:]}",
        "key_alias": record.name or None,
        "status": state_of(record, now),
        "team_id": team_of(record),
        "user_id": record.user or None,
        "models": models_answer(record.models),
        **limit_answer(record.limits, now, zone),
        "budget_id": record.budget or None,
        "metadata": dict(record.metadata),
        "tags": [*_tags_of(record), *tags],
        "blocked": record.is_blocked,
        "expires": iso(record.expires_at),
        "created_at": iso(record.created_at),
        "created_by": record.created_by or None,
        "updated_at": iso(record.updated_at or record.created_at),
        "object_permission": permission,
        "raw": record.raw,
    }


def _tags_of(record: KeyRecord) -> list[Json]:
    tags = record.metadata.get("tags")
    return list(tags) if isinstance(tags, list) else []
