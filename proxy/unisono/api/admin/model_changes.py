"""Operations on the deployments in the store, for the admin routes and for `unisono models`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import uuid4

import orjson

from unisono.api.admin.administration import Administration, until_stored
from unisono.api.admin.fields import iso
from unisono.api.admin.roles import Actor
from unisono.core.conversation import Json
from unisono.core.deployments import ManagedDeployment, finding_fields
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.frozen import dataclass
from unisono.errors import ConfigError, InvalidRequest, NotFound, StoreConflict

SECTIONS: Final = ("litellm_params", "model_info", "unisono")
MAX_SETTINGS_BYTES: Final = 64 * 1024
_PATH: Final = re.compile(r"[\w.\[\]-]+")


@dataclass(frozen=True, slots=True)
class ModelAdministration:
    """Deployments of the gateway, and operations on stored deployments.

    `file_names` returns the names of the deployments in the configuration file. `check` raises ConfigError for settings
    that the gateway cannot use. `seal` gets the id and the settings of a deployment, and encrypts the settings for the
    store. `opened` decrypts the settings in an entry, and returns None if that fails. `visible` returns settings
    without secrets. `applied` waits a few seconds until this process uses a change and has probed the deployment.
    `deployments` returns the current state of all deployments.
    """

    file_names: Callable[[], Collection[str]]
    check: Callable[[str, Mapping[str, Any]], Awaitable[None]]
    seal: Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
    opened: Callable[[DirectoryEntry], Awaitable[Mapping[str, Any] | None]]
    visible: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    applied: Callable[[str, DirectoryEntry | None], Awaitable[None]]
    deployments: Callable[[], Sequence[ManagedDeployment]]


async def create_model(
    admin: Administration, models: ModelAdministration, actor: Actor, settings: Mapping[str, Any], once: str = ""
) -> DirectoryEntry:
    """Store a new deployment, or return the deployment that an earlier equal request has stored.

    `once` is the Idempotency-Key, or "". Raises `InvalidRequest` for invalid settings and if a deployment with the id
    has different settings, and `KeyReused` if the Idempotency-Key was used with a different body.
    """
    info = settings.get("model_info") or {}
    candidate = info.get("id") or str(uuid4())
    await _check(models, candidate, settings)
    id = info.get("id") or await admin.created_id(actor, EntryKind.MODEL, settings, once, candidate)
    _refuse_file_entry(models, id, "added")
    now = admin.clock()
    entry = DirectoryEntry(
        EntryKind.MODEL,
        id,
        now,
        alias=settings["model_name"],
        metadata=await models.seal(id, settings),
        created_by=actor.id,
    )
    audit = admin.audit(actor, "created", EntryKind.MODEL, id, None, _audited(models, id, settings))
    try:
        entry = await admin.store.put_entry(entry, audit)
    except StoreConflict:
        found = await admin.entry(EntryKind.MODEL, id)
        if found is None or await models.opened(found) != settings:
            raise InvalidRequest(
                f"'model_info.id': '{id[:64]}' exists with different settings; choose a different id, or update the "
                "existing deployment.",
                param="model_info.id",
            ) from None
        entry = found
    await models.applied(id, entry)
    return entry


async def change_model(
    admin: Administration, models: ModelAdministration, actor: Actor, id: str, sent: Mapping[str, Any]
) -> DirectoryEntry:
    """Change a stored deployment; try again after a concurrent change.

    Raises `NotFound` if there is no such deployment, and `StoreConflict` after `MAX_TRIES` attempts. Raises
    `InvalidRequest` for invalid settings and for a deployment of the configuration file.
    """

    async def attempt() -> DirectoryEntry:
        was = await _stored(admin, models, id, "changed")
        old = await models.opened(was)
        # The name of the deployment is not encrypted.
        settings = merged({"model_name": was.alias} if old is None else old, sent)
        if old is None and "litellm_params" not in sent:
            raise InvalidRequest(
                "The stored settings of this deployment cannot be decrypted; send all settings again.",
                param="litellm_params",
            )
        await _check(models, id, settings)
        if settings == old:
            return was
        now = replace(
            was, alias=settings["model_name"], metadata=await models.seal(id, settings), updated_at=admin.clock()
        )
        views = (_audited(models, id, each) for each in (old or {}, settings))
        now = await admin.store.put_entry(now, admin.audit(actor, "updated", EntryKind.MODEL, id, *views))
        await models.applied(id, now)
        return now

    return await until_stored(attempt)


async def delete_model(admin: Administration, models: ModelAdministration, actor: Actor, id: str) -> None:
    """Delete a stored deployment.

    Raises `NotFound` if there is no such deployment, and `InvalidRequest` for a deployment of the configuration file.
    """
    entry = await _stored(admin, models, id, "deleted")
    before = _audited(models, id, await models.opened(entry) or {"model_name": entry.alias})
    await admin.store.delete_entry(entry, admin.audit(actor, "deleted", EntryKind.MODEL, id, before, None))
    await models.applied(id, None)


async def set_drained(
    admin: Administration, models: ModelAdministration, actor: Actor, id: str, *, is_drained: bool
) -> None:
    """Drain or resume a deployment of the store or of the configuration file.

    Raises `NotFound` if there is no such deployment, and `StoreConflict` after `MAX_TRIES` attempts.
    """

    async def attempt() -> None:
        was = await admin.entry(EntryKind.MODEL, id)
        if was is None and id not in models.file_names():
            raise _no_such(id)
        if (was is not None and was.is_blocked) == is_drained:
            return
        views: tuple[dict[str, Json], ...] = ({"drained": not is_drained}, {"drained": is_drained})
        audit = admin.audit(actor, "drained" if is_drained else "resumed", EntryKind.MODEL, id, *views)
        now: DirectoryEntry | None = None
        if was is not None and not is_drained and not was.metadata:
            await admin.store.delete_entry(was, audit)
        else:
            new = was or DirectoryEntry(EntryKind.MODEL, id, admin.clock(), created_by=actor.id)
            new = replace(new, is_blocked=is_drained, updated_at=admin.clock())
            now = await admin.store.put_entry(new, audit)
        await models.applied(id, now)

    await until_stored(attempt)


def merged(old: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the old settings, updated with the settings that were sent.

    The settings inside a section are merged one by one. A setting that was sent as null is removed. If the value of a
    setting is an object, it is replaced as a whole.
    """
    settings = {**old, **({"model_name": sent["model_name"]} if sent.get("model_name") else {})}
    for section in SECTIONS:
        if section in sent:
            both = {**settings.get(section, {}), **(sent[section] or {})}
            settings[section] = {key: value for key, value in both.items() if value is not None}
    return settings


async def report_of(models: ModelAdministration, id: str) -> ManagedDeployment:
    """Return a deployment. The state is `unknown` if this process does not use it yet."""
    unknown = ManagedDeployment(id, "", is_stored=True, state="unknown", error="not probed yet")
    return next((each for each in models.deployments() if each.id == id), unknown)


def deployment_view(report: ManagedDeployment) -> dict[str, Any]:
    """Return a deployment as an entry of LiteLLM's `/model/info`."""
    settings = {"litellm_params": {}, **report.settings}
    facts = {
        "id": report.id,
        "db_model": report.is_stored,
        "state": report.state,
        "error": report.error or None,
        "drained": report.is_drained,
        "running": report.running,
        "checks": [finding_fields(finding) for finding in report.checks],
    }
    info = {**settings.get("model_info", {}), **facts}
    return {**settings, "model_name": report.model_name, "model_info": info}


def row_view(entry: DirectoryEntry, report: ManagedDeployment) -> dict[str, Any]:
    """Return a stored deployment in the format of LiteLLM's `/model/new`."""
    return {
        **deployment_view(replace(report, model_name=entry.alias)),
        "model_id": entry.id,
        "created_at": iso(entry.created_at),
        "created_by": entry.created_by or None,
        "updated_at": iso(entry.updated_at or entry.created_at),
    }


async def _check(models: ModelAdministration, id: str, settings: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` for invalid settings, with the configuration loader's message."""
    try:
        size = len(orjson.dumps(dict(settings), default=str))
    except TypeError as error:
        raise InvalidRequest(f"'litellm_params': the settings cannot be stored as JSON: {error}.") from error
    if size > MAX_SETTINGS_BYTES:
        raise InvalidRequest(f"'litellm_params': the settings must have at most {MAX_SETTINGS_BYTES:,} bytes.")
    try:
        await models.check(id, settings)
    except ConfigError as error:
        path = str(error).partition(":")[0]
        raise InvalidRequest(str(error), param=path if _PATH.fullmatch(path) else None) from None


async def _stored(admin: Administration, models: ModelAdministration, id: str, done: str) -> DirectoryEntry:
    entry = await admin.entry(EntryKind.MODEL, id)
    if entry is not None and entry.metadata:
        return entry
    _refuse_file_entry(models, id, done)
    raise _no_such(id)


def _refuse_file_entry(models: ModelAdministration, id: str, done: str) -> None:
    if id in models.file_names():
        raise InvalidRequest(
            f"The deployment '{id[:64]}' is in the configuration file, so it cannot be {done} over HTTP; change the "
            "file and reload it, or drain the deployment.",
            param="model_info.id",
        )


def _no_such(id: str) -> NotFound:
    return NotFound(f"There is no deployment '{id[:64]}'.", param="id")


def _audited(models: ModelAdministration, id: str, settings: Mapping[str, Any]) -> dict[str, Json]:
    return {"id": id, **models.visible(settings)}
