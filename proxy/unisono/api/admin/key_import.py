"""Import of keys from LiteLLM: rows of its key table, or its response to `/key/list`.

Imported keys keep their secrets, because LiteLLM stores the SHA-256 of each secret. A key with settings that this
gateway does not support is refused. Without these settings, the key might permit more than before. LiteLLM has no
route `/key/import`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from unisono.access.imported_keys import IMPORTED, to_digest
from unisono.api.admin.administration import ADMIN, AdminDeps, Administration, CurrentActor
from unisono.api.admin.fields import NEUTRAL_VALUES, AdminBody, Names
from unisono.api.admin.key_lookup import claim_alias
from unisono.api.admin.key_schema import GenerateKey
from unisono.api.admin.keys import store_new_key
from unisono.api.admin.roles import Actor, UserRole
from unisono.api.answer_types import AnswerModel
from unisono.api.dependencies import ParsedBody
from unisono.api.route_table import BODY_404_409
from unisono.core.access import KeyDigest, KeyRecord
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.frozen import dataclass
from unisono.core.json_syntax import parsed_json
from unisono.core.quotas import KeyLimits
from unisono.errors import InvalidRequest, StoreConflict, UnisonoError

TOKEN: Final = re.compile("[0-9a-f]{64}")
# Start of the year 9999.
MAX_TIME_S: Final = 253_370_764_800
# Fields of a row that are not settings.
FACTS: Final = frozenset(
    (
        *("token", "token_id", "key_name", "spend", "expires", "created_at", "created_by", "updated_at", "updated_by"),
        *("last_active", "budget_reset_at", "model_spend", "soft_budget_cooldown", "rotation_count", "key_rotation_at"),
        *("last_rotation_at", "status", "litellm_budget_table", "user", "user_email", "key", "total_spend"),
        *("settings_updated_at", "object_permission_id"),
    )
)
# Columns of the key table with JSON, with floats and with integers. Booleans are recognised by their spelling.
JSON_COLUMNS: Final = frozenset(
    (
        *("metadata", "aliases", "config", "permissions", "model_max_budget", "model_spend", "router_settings"),
        *("budget_limits", "budget_fallbacks"),
    )
)
FLOATS: Final = frozenset(("max_budget", "spend", "total_spend", "soft_budget"))
INTEGERS: Final = frozenset(("tpm_limit", "rpm_limit", "tpd_limit", "max_parallel_requests", "rotation_count"))
BOOLEANS: Final = {"t": True, "true": True, "f": False, "false": False}


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """Result for one key.

    `problem` is empty for an imported key. `is_new` is False if the key was imported before.
    """

    name: str
    id: str = ""
    problem: str = ""
    is_new: bool = True


def read_export(text: str) -> Sequence[Mapping[str, Any]]:
    """Return the keys of an export, as JSON or as CSV with a line of column names.

    Raises ValueError for any other text.
    """
    if text.lstrip().startswith(("{", "[")):
        try:
            value = parsed_json(text)
        except ValueError as error:
            raise ValueError(f"is not valid JSON: {error}") from None
        rows = value.get("keys") if isinstance(value, dict) else value
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("has no list of keys as objects; export them with `/key/list?return_full_object=true`")
        return rows
    reader = csv.DictReader(io.StringIO(text))
    if "token" not in (reader.fieldnames or ()):
        raise ValueError("is neither JSON nor CSV with a `token` column")
    return [{name: _cell(name, value) for name, value in row.items() if name} for row in reader]


def _cell(name: str, value: str | None) -> Any:
    """Parse a cell in PostgreSQL's notation; None for an empty cell.

    Raises ValueError if the value does not fit the column `name`.
    """
    if not value:
        return None
    try:
        if name in JSON_COLUMNS:
            return parsed_json(value)
        if name in FLOATS:
            return float(value)
        if name in INTEGERS:
            return int(value)
    except ValueError:
        raise ValueError(f"has the value {value[:40]!r} in the column `{name}`") from None
    if value.startswith("{") and value.endswith("}"):
        return next(csv.reader([value[1:-1]]), [])
    return BOOLEANS.get(value, value)


async def import_keys(
    admin: Administration,
    actor: Actor,
    rows: Sequence[Mapping[str, Any]],
    *,
    ignored: Collection[str] = (),
    creates_owners: bool = False,
) -> list[ImportedKey]:
    """Import keys, and return a result for each. A refused key does not affect the other keys.

    With `creates_owners`, missing teams and users are created without limits. `ignored` contains the names of settings
    to drop. Errors with a status of 500 or more, such as those of the store, are raised.
    """
    await _announce(admin)
    found = []
    for row in rows:
        name = str(row.get("key_alias") or row.get("key_name") or row.get("token") or "")[:64]
        try:
            found.append(await _import_key(admin, actor, row, name, ignored, creates_owners=creates_owners))
        except ValidationError as error:
            first = error.errors()[0]
            found.append(ImportedKey(name, problem=f"'{'.'.join(map(str, first['loc']))}': {first['msg']}"))
        except UnisonoError as error:
            if error.status >= 500:
                raise
            found.append(ImportedKey(name, problem=error.message))
    return found


async def _announce(admin: Administration) -> None:
    """Store the entry from which all gateway processes know that imported keys may exist."""
    if await admin.entry(*IMPORTED) is None:
        kind, id = IMPORTED
        try:
            await admin.store.put_entry(DirectoryEntry(kind, id, admin.clock()))
        except StoreConflict:
            return  # another import has stored it


async def _import_key(
    admin: Administration,
    actor: Actor,
    row: Mapping[str, Any],
    name: str,
    ignored: Collection[str],
    *,
    creates_owners: bool,
) -> ImportedKey:
    token = row.get("token")
    if not isinstance(token, str) or TOKEN.fullmatch(token) is None:
        raise InvalidRequest("'token': must be the SHA-256 of the key in hexadecimal", param="token")
    key_id = f"key_{token[:24]}"
    if (existing := await admin.store.key(key_id)) is not None:
        if existing.revoked_at is not None:
            raise InvalidRequest(
                "'token': this key was deleted and cannot be imported again; remove it from the import", param="token"
            )
        return ImportedKey(name, key_id, is_new=False)
    body = _settings(_without(row, ignored))
    await _ensure_owners(admin, actor, body, creates_owners=creates_owners)
    if body.key_alias:
        await claim_alias(admin, body.key_alias, token, key_id, is_fixed=True)
    now = admin.clock()
    record = KeyRecord(
        id=key_id,
        tenant=body.team_id or key_id,
        digests=(KeyDigest(to_digest(token)),),
        created_at=_time(row, "created_at") or now,
        ending=str(row.get("key_name") or "")[-4:],
        user=body.user_id or "",
        created_by=actor.id,
        limits=KeyLimits(budget_since=now),
        # An empty list permits no tool servers here, even in an empty form: an imported key gets no further rights.
        mcp_servers=None if body.object_permission is None else frozenset(),
    )
    record = replace(body.applied(record, now), expires_at=_time(row, "expires"))
    await store_new_key(admin, actor, record, "imported")
    return ImportedKey(name, key_id)


def _settings(row: Mapping[str, Any]) -> GenerateKey:
    """Return the settings in a row.

    A field that this gateway does not support must have a neutral value. Raises ValidationError or `InvalidRequest` for
    other settings.
    """
    # The permissions have a table of their own. `/key/list` includes them, but a dump of the table of keys does not.
    if row.get("object_permission_id") and not row.get("object_permission"):
        raise InvalidRequest(
            "'object_permission_id': the permissions of this key are not in the export; export the keys with "
            "`/key/list?return_full_object=true`",
            param="object_permission_id",
        )
    known = GenerateKey.model_fields
    return GenerateKey.model_validate(
        {
            field: value
            for field, value in row.items()
            if field not in FACTS and (field in known or value not in NEUTRAL_VALUES)
        }
    )


def _without(row: Mapping[str, Any], ignored: Collection[str], path: str = "") -> dict[str, Any]:
    """Return a row without the ignored settings.

    A name such as `metadata.guardrails` means a setting in the object `metadata`.
    """
    return {
        field: _without(value, ignored, f"{field}.") if isinstance(value, dict) and not path else value
        for field, value in row.items()
        if f"{path}{field}" not in ignored
    }


async def _ensure_owners(admin: Administration, actor: Actor, body: GenerateKey, *, creates_owners: bool) -> None:
    """Create the team and the user of a key if they are missing.

    Raises `InvalidRequest` for a missing budget, and for a missing team or user unless `creates_owners` is True.
    """
    for kind, id, role in (
        (EntryKind.TEAM, body.team_id, ""),
        (EntryKind.USER, body.user_id, UserRole.USER.value),
        (EntryKind.BUDGET, body.budget_id, ""),
    ):
        if not id or await admin.entry(kind, id) is not None:
            continue
        if not creates_owners or kind is EntryKind.BUDGET:
            raise InvalidRequest(f"'{kind}_id': there is no {kind} '{id}'; create it first.", param=f"{kind}_id")
        entry = admin.new_entry(actor, kind, id, role=role)
        await admin.store.put_entry(entry, admin.audit_of(actor, "created", None, entry))


def _time(row: Mapping[str, Any], field: str) -> float | None:
    """Convert an ISO 8601 time to Unix time in seconds; None if the field is missing.

    Raises `InvalidRequest` for a value that is not a time from 1970 to 9998.
    """
    if (value := row.get(field)) is None:
        return None
    try:
        at = datetime.fromisoformat(str(value))
    except ValueError:
        raise InvalidRequest(f"'{field}': must be a time in ISO 8601", param=field) from None
    seconds = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    # Other times have no year of four digits in UTC, or are mistakes.
    if not 0 <= seconds < MAX_TIME_S:
        raise InvalidRequest(f"'{field}': must be a time from 1970 to 9998", param=field)
    return seconds


MAX_ROWS: Final = 1000


class ImportKeys(AdminBody):
    """Body of `/key/import`: rows of LiteLLM's `/key/list?return_full_object=true`.

    `ignore` contains the names of settings to drop. With `create_owners`, missing teams and users are created without
    limits.
    """

    keys: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ROWS)]
    ignore: Names = Field(default_factory=list)
    create_owners: bool = False


class ImportResult(AnswerModel):
    """Result for one key.

    `error` is null for an imported key; `created` is false if it was imported before.
    """

    name: str
    token: str | None
    created: bool
    error: str | None


class ImportAnswer(AnswerModel):
    keys: list[ImportResult]


@ADMIN.add("POST", "/key/import", BODY_404_409, body=ImportKeys)
async def import_keys_route(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[ImportKeys]) -> ImportAnswer:
    """Import keys of a LiteLLM proxy. A key that is refused does not affect the other keys."""
    found = await import_keys(admin, actor, body.keys, ignored=body.ignore, creates_owners=body.create_owners)
    return ImportAnswer(
        keys=[
            ImportResult(
                name=each.name,
                token=each.id or None,
                created=each.is_new and not each.problem,
                error=each.problem or None,
            )
            for each in found
        ]
    )
