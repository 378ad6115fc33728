"""Requests in the format of LiteLLM's spend logs, from the request records.

A record is stored within a second after its request. The store retains a limited number of records for a limited time,
so records are not a basis for bills.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Final

from unisono.api.admin.administration import Administration
from unisono.api.admin.fields import iso
from unisono.api.admin.roles import MASTER_ACTOR, Actor
from unisono.api.answer_types import Object
from unisono.core.access import KeyRecord
from unisono.core.quotas import MILLION
from unisono.core.request_filter import RequestFilter, has_failed
from unisono.core.request_record import RequestRecord

DAY_S: Final = 86_400
# Maximum number of records per read from the store, and of reads per answer.
RECORDS_PER_READ: Final = 200
MAX_READS: Final = 50
# Maximum number of requests in all pages of a list together.
MAX_LISTED: Final = RECORDS_PER_READ * MAX_READS


async def request_log(admin: Administration, actor: Actor, request_id: str) -> list[Object]:
    """Return a list of this one request; empty if it is unknown or the actor may not see it."""
    record = await admin.store.request(request_id)
    keys = {key.id: key for key in await admin.store.keys()}
    if record is None or not _sees(actor, record, keys.get(record.key)):
        return []
    return [to_log(record, keys.get(record.key))]


def _sees(actor: Actor, record: RequestRecord, key: KeyRecord | None) -> bool:
    return actor.sees_all or (key is not None and actor.sees_key(key))


async def request_logs(
    admin: Administration, keys: dict[str, KeyRecord], only: Collection[str] | None, wanted: RequestFilter, most: int
) -> list[Object]:
    """Return at most `most` requests to models that match `wanted`, newest first.

    `only` contains the ids of the keys whose requests are returned; None for all requests.
    """
    found: list[RequestRecord] = []
    for filter_ in [wanted] if only is None else [_of_key(wanted, key) for key in sorted(only)]:
        found += await _latest(admin, filter_, most)
    found.sort(key=lambda record: record.at, reverse=True)
    return [to_log(record, keys.get(record.key)) for record in found[:most]]


def _of_key(wanted: RequestFilter, key: str) -> RequestFilter:
    return RequestFilter(key=key, model=wanted.model, since=wanted.since, until=wanted.until)


async def _latest(admin: Administration, wanted: RequestFilter, most: int) -> list[RequestRecord]:
    found: list[RequestRecord] = []
    cursor = ""
    for _ in range(MAX_READS):
        page = await admin.store.requests(wanted, RECORDS_PER_READ, cursor)
        # Requests that are not to models, for example to the admin API, have no model.
        found += [record for record in page.records if record.model]
        if page.cursor is None or len(found) >= most:
            break
        cursor = page.cursor
    return found[:most]


def day_start(day: str) -> float:
    """Return the start of a UTC day, YYYY-MM-DD, as Unix time in seconds."""
    return datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()


def day_end(day: str) -> float:
    return day_start(day) + DAY_S


def to_log(record: RequestRecord, key: KeyRecord | None) -> Object:
    """Return a record with LiteLLM's field names."""
    first_at = None if record.first_token_s is None else record.at + record.first_token_s
    tags = key.metadata.get("tags") if key is not None else None
    return {
        "request_id": record.id,
        "call_type": record.route.removeprefix("/v1").strip("/") or "response",
        "api_key": record.key or MASTER_ACTOR,
        "spend": record.cost / MILLION,
        "total_tokens": record.input_tokens + record.output_tokens,
        "prompt_tokens": record.input_tokens,
        "completion_tokens": record.output_tokens,
        "startTime": iso(record.at),
        "endTime": iso(record.at + record.duration_s),
        "completionStartTime": iso(first_at),
        "request_duration_ms": round(record.duration_s * 1000),
        "model": record.served_model or record.model,
        "model_group": record.model,
        "model_id": record.deployment,
        "user": "" if key is None else key.user,
        "team_id": None if key is None or key.tenant == key.id else key.tenant,
        "end_user": record.user,
        "request_tags": tags if isinstance(tags, list) else [],
        # LiteLLM's values for requests whose content is not recorded.
        "messages": {},
        "response": {},
        "cache_hit": "False",
        "status": "failure" if has_failed(record) else "success",
        "metadata": {
            "user_api_key_alias": record.key_name or None,
            "error_code": record.error or None,
            "status_code": record.status,
            "cached_tokens": record.cached_tokens,
            "reasoning_tokens": record.reasoning_tokens,
            "recoveries": list(record.recoveries),
        },
    }
