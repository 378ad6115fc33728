"""Route `/audit`: who changed which key, team, user or budget, and how."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import Field

from unisono.api.admin.administration import ADMIN, AdminDeps, CurrentActor
from unisono.api.admin.fields import MAX_PAGE_SIZE, iso
from unisono.api.answer_types import AnswerModel, Count, Object
from unisono.api.field_types import QueryModel
from unisono.core.conversation import Json
from unisono.core.directory import AuditRecord


class AuditQuery(QueryModel):
    page: Annotated[int, Field(ge=1, le=1_000_000, strict=False)] = 1
    page_size: Annotated[int, Field(ge=1, le=MAX_PAGE_SIZE, strict=False)] = 10


class AuditPage(AnswerModel):
    audit_logs: list[Object]
    total: Count
    page: Count
    page_size: Count
    total_pages: Count


def audit_answer(record: AuditRecord) -> dict[str, Json]:
    """Return an audit record with LiteLLM's field names."""
    return {
        "id": record.id,
        "updated_at": iso(record.at),
        "changed_by": record.actor,
        "action": record.action,
        "table_name": record.kind,
        "object_id": record.object_id,
        "before_value": None if record.before is None else dict(record.before),
        "updated_values": None if record.after is None else dict(record.after),
    }


@ADMIN.add("GET", "/audit")
async def list_audit_records(admin: AdminDeps, actor: CurrentActor, query: Annotated[AuditQuery, Query()]) -> AuditPage:
    """List all changes of keys, teams, users, customers, budgets and models, newest first."""
    del actor  # only the check of its role is needed
    total, records = await admin.store.audit_records((query.page - 1) * query.page_size, query.page_size)
    return AuditPage(
        audit_logs=[audit_answer(record) for record in records],
        total=total,
        page=query.page,
        page_size=query.page_size,
        total_pages=-(-total // query.page_size),
    )
