"""Implementation of `unisono keys`: changes records in the store and prints them.

The commands make the same changes as the admin API, including audit records.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from unisono.access.keys import Issued, issued, rotated
from unisono.api.admin.administration import Administration
from unisono.api.admin.budget_spend import carry_spend
from unisono.api.admin.key_import import ImportedKey, import_keys, read_export
from unisono.api.admin.keys import revoke_key
from unisono.api.admin.roles import Actor, Role
from unisono.bootstrap.salt import Salt
from unisono.cli import opened_store
from unisono.cli.param_types import MICRO, written_period
from unisono.cli.terminal import on_one_line, print_key, table_lines
from unisono.config import Config, load
from unisono.config.config_file import text_of
from unisono.core.access import KeyRecord
from unisono.core.frozen import dataclass
from unisono.core.quotas import KeyLimits
from unisono.core.state_store import Store

# A user who can read the configuration has the rights of the master key.
OPERATOR = Actor(Role.MASTER)

LIMITS = frozenset(KeyLimits.__slots__)
HEADINGS = ("ID", "NAME", "TENANT", "STATE", "EXPIRES", "MODELS", "LIMITS", "KEY")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class OpenedKeyring:
    config: Config
    store: Store

    @property
    def admin(self) -> Administration:
        """Operations of the admin API on this store."""
        zone = self.config.litellm_settings.zone
        return Administration(self.store, Salt(self.config, self.store), time.time, zone=zone)


# -- commands


class LocalKeys:
    """Commands that manage the keys in the configured store."""

    def __init__(self, config_path: Path) -> None:
        self._config = load(config_path).config

    def create(self, tenant: str, options: Mapping[str, Any], *, as_json: bool) -> None:
        if self._config.general_settings.master_key is None:
            raise click.ClickException(
                "general_settings.master_key: not set, so the gateway requires no key; set it first"
            )

        async def made(opened: OpenedKeyring) -> Issued:
            admin, now = opened.admin, time.time()
            new = issued(await admin.mint(), now, tenant=tenant)
            record = replace(changed(new.record, options), created_by=OPERATOR.id)
            audit = admin.audit_of(OPERATOR, "created", None, record)
            return replace(new, record=await opened.store.put_key(record, audit))

        _warn_of_unknown_names(self._config, options)
        _print_issued(run_on_store(self._config, made), as_json=as_json)

    def show(self, *, as_json: bool) -> None:
        records = run_on_store(self._config, lambda opened: opened.store.keys())
        documents = [to_json(record, time.time()) for record in records]
        print_keys(documents, map(_row, documents), as_json=as_json)

    def update(self, key_id: str, options: Mapping[str, Any], *, as_json: bool) -> None:
        async def change(opened: OpenedKeyring) -> KeyRecord:
            record = await _find(opened, key_id)
            await carry_spend(opened.admin, record, changed(record, options))
            return await _change(opened, key_id, "updated", lambda record: changed(record, options))

        _warn_of_unknown_names(self._config, options)
        record = run_on_store(self._config, change)
        document = to_json(record, time.time())
        click.echo(json.dumps(document, ensure_ascii=False, indent=2) if as_json else f"Changed {record.id}.")

    def revoke(self, key_id: str) -> None:
        async def gone(opened: OpenedKeyring) -> KeyRecord:
            return await revoke_key(opened.admin, OPERATOR, await _find(opened, key_id))

        record = run_on_store(self._config, gone)
        click.echo(f"{record.id} was revoked at {_time(record.revoked_at)} UTC.")

    def rotate(self, key_id: str, grace_s: int, *, as_json: bool) -> None:
        async def turned(opened: OpenedKeyring) -> Issued:
            mint, latest = await opened.admin.mint(), ""

            def another(record: KeyRecord) -> KeyRecord:
                # The change may run again after a conflict. Only the secret of the last run is stored.
                nonlocal latest
                new = rotated(record, mint, time.time(), grace_s)
                latest = new.plaintext
                return new.record

            return Issued(await _change(opened, key_id, "rotated", another), latest)

        _print_issued(run_on_store(self._config, turned), as_json=as_json)

    def import_litellm(self, export: Path, ignored: Sequence[str], *, creates_owners: bool) -> None:
        rows = litellm_rows(export)
        found = run_on_store(
            self._config,
            lambda opened: import_keys(opened.admin, OPERATOR, rows, ignored=ignored, creates_owners=creates_owners),
        )
        print_imported(found)


def litellm_rows(export: Path) -> Sequence[Mapping[str, Any]]:
    """Return the keys in an export file of LiteLLM.

    Raises `ClickException` if the file is invalid, and ConfigError if it is unreadable.
    """
    try:
        return read_export(text_of(export))
    except ValueError as error:
        raise click.ClickException(f"{export} {error}") from None


def print_imported(found: Sequence[ImportedKey]) -> None:
    """Print the result for each key. Raises `ClickException` if any key was not imported."""
    for key in found:
        what = key.problem or (f"imported as {key.id}" if key.is_new else f"already exists as {key.id}")
        click.echo(on_one_line(f"{key.name}: {what}"), err=True)
    if refused := sum(bool(key.problem) for key in found):
        raise click.ClickException(f"{refused} of {len(found)} keys were not imported")


# -- the store


def run_on_store(config: Config, work: Callable[[OpenedKeyring], Awaitable[Result]]) -> Result:
    return opened_store.run_on_store(
        config,
        lambda store: work(OpenedKeyring(config, store)),
        if_memory="a store in memory is lost when this command ends",
        writes=True,
    )


async def _find(opened: OpenedKeyring, key_id: str) -> KeyRecord:
    record = await opened.store.key(key_id)
    if record is None:
        raise click.ClickException(f"unknown key {key_id!r}; run `unisono keys list` for all keys")
    return record


async def _change(
    opened: OpenedKeyring, key_id: str, action: str, change: Callable[[KeyRecord], KeyRecord]
) -> KeyRecord:
    await _find(opened, key_id)

    def change_active(record: KeyRecord) -> KeyRecord:
        if record.revoked_at is not None:
            raise click.ClickException(f"{key_id} is revoked; create a new key with `unisono keys create`")
        return change(record)

    return await opened.admin.change_key(OPERATOR, key_id, action, change_active)


def changed(record: KeyRecord, options: Mapping[str, Any]) -> KeyRecord:
    """Return a copy of the record with new values.

    `options` maps names of fields, either of the record or of its limits, to their new values.
    """
    own = {name: value for name, value in options.items() if name not in LIMITS}
    limits = {name: value for name, value in options.items() if name in LIMITS}
    if "tags" in own:
        # New tags are added to those of the key. An empty value removes a tag.
        own["tags"] = {key: value for key, value in {**record.tags, **own["tags"]}.items() if value}
    return replace(record, **own, limits=replace(record.limits, **limits))


# -- output


def print_keys(documents: Sequence[Any], rows: Iterable[tuple[str, ...]], *, as_json: bool) -> None:
    """Print all keys: `documents` as JSON, or `rows` as a table with one row per key."""
    if as_json:
        click.echo(json.dumps(documents, ensure_ascii=False, indent=2))
    elif documents:
        click.echo("\n".join(table_lines([HEADINGS, *rows])))
    else:
        click.echo("There are no keys.", err=True)


def print_new_key(document: Mapping[str, Any], id: str, tenant: str, *, as_json: bool) -> None:
    """Print a new key; the field `key` of `document` contains the secret."""
    if as_json:
        print_key(json.dumps(document, ensure_ascii=False, indent=2), document["key"])
        return
    # Only the key is written to standard output, so that a script can capture it.
    click.echo(f"{id}, of tenant {tenant}. This is shown once:", err=True)
    print_key(document["key"], document["key"])


def to_json(record: KeyRecord, now: float) -> dict[str, Any]:
    """Return a key as JSON data, with LiteLLM's field names where they exist.

    Times are in seconds since 1970, money is in USD.
    """
    limits = record.limits
    return {
        "id": record.id,
        "key_alias": record.name,
        "team_id": record.tenant,
        "ending": record.ending,
        "state": state_of(record, now),
        "created_at": record.created_at,
        "expires": record.expires_at,
        "revoked_at": record.revoked_at,
        "models": _sorted(record.models),
        "mcp_servers": _sorted(record.mcp_servers),
        "rpm_limit": limits.rpm,
        "tpm_limit": limits.tpm,
        "max_parallel_requests": limits.max_parallel,
        "token_budget": limits.token_budget,
        "max_budget": None if limits.money_budget is None else limits.money_budget / MICRO,
        "soft_budget": None if limits.soft_budget is None else limits.soft_budget / MICRO,
        "budget_duration": written_period(limits.budget_period),
        "tags": dict(record.tags),
        "raw": record.raw,
    }


def state_of(record: KeyRecord, now: float) -> str:
    if record.revoked_at is not None:
        return "revoked"
    return "active" if record.is_valid(now) else "expired"


def _sorted(names: frozenset[str] | None) -> list[str] | None:
    return None if names is None else sorted(names)


def _row(key: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        key["id"],
        key["key_alias"] or "-",
        key["team_id"],
        key["state"],
        "never" if key["expires"] is None else _time(key["expires"]),
        "all" if key["models"] is None else ",".join(key["models"]) or "none",
        limit_texts(key),
        f"...{key['ending']}",
    )


def limit_texts(key: Mapping[str, Any]) -> str:
    """Return the limits in the JSON data of a key, separated by commas."""
    per = "" if key["budget_duration"] in (None, "none") else f"/{key['budget_duration']}"
    formats = {
        "rpm_limit": "{} rpm",
        "tpm_limit": "{} tpm",
        "max_parallel_requests": "{} at once",
        "token_budget": "{} tokens" + per,
        "max_budget": "{:g} USD" + per,
        "soft_budget": "alert at {:g} USD" + per,
    }
    return ", ".join(text.format(key[name]) for name, text in formats.items() if key[name] is not None) or "none"


def _time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _print_issued(new: Issued, *, as_json: bool) -> None:
    document = {"key": new.plaintext, **to_json(new.record, time.time())}
    print_new_key(document, new.record.id, new.record.tenant, as_json=as_json)


def _warn_of_unknown_names(config: Config, options: Mapping[str, Any]) -> None:
    """Warn about names that the configuration does not define.

    Such names are accepted, because the configuration may change.
    """
    models = {entry.model_name for entry in config.model_list} | set(config.router_settings.model_group_alias)
    models |= {group for entry in config.model_list for group in entry.model_info.access_groups}
    for field, known in (("models", models), ("mcp_servers", set(config.mcp_servers))):
        for name in sorted((options.get(field) or frozenset()) - known):
            click.echo(f"Warning: {field}: {name!r} is not in this configuration.", err=True)
