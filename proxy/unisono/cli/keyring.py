"""Implementation of `unisono keys`: changes records in the store and prints them.

The commands make the same changes as the admin API, including audit records.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from unisono.access.keys import Issued, issued, rotated
from unisono.api.admin.administration import Administration
from unisono.api.admin.carried_spend import carry_spend
from unisono.api.admin.keys import revoke_key
from unisono.api.admin.litellm_key_rows import ImportedKey
from unisono.api.admin.roles import Actor, Role
from unisono.bootstrap.salt import Salt
from unisono.bootstrap.store import store_address
from unisono.cli.param_types import MICRO, written_period
from unisono.cli.resolve_config import configured
from unisono.cli.terminal import on_one_line, print_key, table_lines
from unisono.config import Config
from unisono.core.access import KeyRecord
from unisono.core.frozen import dataclass
from unisono.core.quotas import KeyLimits
from unisono.core.state_store import Store
from unisono.errors import ConfigError, UnisonoError
from unisono.store import open_store

# Timeout of one store operation, in seconds. It is long, because no stream depends on it.
PATIENCE_S = 5.0
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


def create(config_path: Path, tenant: str, options: Mapping[str, Any], *, as_json: bool) -> None:
    config = configured(config_path).config
    if config.general_settings.master_key is None:
        raise click.ClickException("general_settings.master_key: not set, so the gateway requires no key; set it first")

    async def made(opened: OpenedKeyring) -> Issued:
        admin, now = opened.admin, time.time()
        new = issued(await admin.mint(), now, tenant=tenant)
        record = replace(changed(new.record, options), created_by=OPERATOR.id)
        audit = admin.audit_of(OPERATOR, "created", None, record)
        return replace(new, record=await opened.store.put_key(record, audit))

    _warn_of_unknown_names(config, options)
    _print_new_key(run_on_store(config, made), as_json=as_json)


def show(config_path: Path, *, as_json: bool) -> None:
    records = run_on_store(configured(config_path).config, lambda opened: opened.store.keys())
    now = time.time()
    if as_json:
        click.echo(json.dumps([to_json(record, now) for record in records], ensure_ascii=False, indent=2))
        return
    if not records:
        click.echo("There are no keys.", err=True)
        return
    print_table([_row(record, now) for record in records])


def update(config_path: Path, key_id: str, options: Mapping[str, Any], *, as_json: bool) -> None:
    async def change(opened: OpenedKeyring) -> KeyRecord:
        record = await _find(opened, key_id)
        await carry_spend(opened.admin, record, changed(record, options))
        return await _change(opened, key_id, "updated", lambda record: changed(record, options))

    config = configured(config_path).config
    _warn_of_unknown_names(config, options)
    record = run_on_store(config, change)
    document = to_json(record, time.time())
    click.echo(json.dumps(document, ensure_ascii=False, indent=2) if as_json else f"Changed {record.id}.")


def revoke(config_path: Path, key_id: str) -> None:
    async def gone(opened: OpenedKeyring) -> KeyRecord:
        return await revoke_key(opened.admin, OPERATOR, await _find(opened, key_id))

    record = run_on_store(configured(config_path).config, gone)
    click.echo(f"{record.id} was revoked at {_time(record.revoked_at)} UTC.")


def rotate(config_path: Path, key_id: str, grace_s: int, *, as_json: bool) -> None:
    async def turned(opened: OpenedKeyring) -> Issued:
        mint, latest = await opened.admin.mint(), ""

        def another(record: KeyRecord) -> KeyRecord:
            # The change may run again after a conflict. Only the secret of the last run is stored.
            nonlocal latest
            new = rotated(record, mint, time.time(), grace_s)
            latest = new.plaintext
            return new.record

        return Issued(await _change(opened, key_id, "rotated", another), latest)

    _print_new_key(run_on_store(configured(config_path).config, turned), as_json=as_json)


def import_litellm(config_path: Path, export: Path, ignored: Sequence[str], *, creates_owners: bool) -> None:
    from unisono.api.admin.litellm_key_rows import import_keys

    rows = litellm_rows(export)
    found = run_on_store(
        configured(config_path).config,
        lambda opened: import_keys(opened.admin, OPERATOR, rows, ignored=ignored, creates_owners=creates_owners),
    )
    print_imported(found)


def litellm_rows(export: Path) -> Sequence[Mapping[str, Any]]:
    """Return the keys in an export file of LiteLLM.

    Raises `ClickException` if the file is unreadable or invalid.
    """
    from unisono.api.admin.litellm_key_rows import read_export

    try:
        return read_export(export.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
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
    async def worked() -> Result:
        async with _opened(config) as store:
            return await work(OpenedKeyring(config, store))

    try:
        return asyncio.run(worked())
    except UnisonoError as error:
        raise click.ClickException(f"store: {error.message}") from error
    except ConfigError as error:
        raise click.ClickException(str(error)) from error


@asynccontextmanager
async def _opened(config: Config) -> AsyncIterator[Store]:
    address = store_address(config.store)
    if address.startswith("memory:"):
        raise ConfigError("store.url: a store in memory is lost when this command ends; use redis:// or sqlite:///path")
    store = open_store(
        address, deadline_s=max(config.store.deadline_s, PATIENCE_S), replicas=config.store.replicas, or_memory=False
    )
    try:
        await store.start()
        yield store
    finally:
        await store.aclose()


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


def print_table(keys: Sequence[tuple[str, ...]]) -> None:
    """Print one row per key under the headings."""
    click.echo("\n".join(table_lines([HEADINGS, *keys])))


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


def _row(record: KeyRecord, now: float) -> tuple[str, ...]:
    return (
        record.id,
        record.name or "-",
        record.tenant,
        state_of(record, now),
        "never" if record.expires_at is None else _time(record.expires_at),
        "all" if record.models is None else ",".join(sorted(record.models)) or "none",
        ", ".join(_limits(record.limits)) or "none",
        f"...{record.ending}",
    )


def _limits(limits: KeyLimits) -> Iterator[str]:
    period = limits.budget_period
    per = "" if period.kind == "none" else f"/{written_period(period)}"
    if limits.rpm is not None:
        yield f"{limits.rpm} rpm"
    if limits.tpm is not None:
        yield f"{limits.tpm} tpm"
    if limits.max_parallel is not None:
        yield f"{limits.max_parallel} at once"
    if limits.token_budget is not None:
        yield f"{limits.token_budget} tokens{per}"
    if limits.money_budget is not None:
        yield f"{limits.money_budget / MICRO:g} USD{per}"
    if limits.soft_budget is not None:
        yield f"alert at {limits.soft_budget / MICRO:g} USD{per}"


def _time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def _print_new_key(new: Issued, *, as_json: bool) -> None:
    if as_json:
        document = {"key": new.plaintext, **to_json(new.record, time.time())}
        print_key(json.dumps(document, ensure_ascii=False, indent=2), new.plaintext)
        return
    # Only the key is written to standard output, so that a script can capture it.
    click.echo(f"{new.record.id}, of tenant {new.record.tenant}. This is shown once:", err=True)
    print_key(new.plaintext, new.plaintext)


def _warn_of_unknown_names(config: Config, options: Mapping[str, Any]) -> None:
    """Warn about names that the configuration does not define.

    Such names are accepted, because the configuration may change.
    """
    models = {entry.model_name for entry in config.model_list} | set(config.router_settings.model_group_alias)
    models |= {group for entry in config.model_list for group in entry.model_info.access_groups}
    for field, known in (("models", models), ("mcp_servers", set(config.mcp_servers))):
        for name in sorted((options.get(field) or frozenset()) - known):
            click.echo(f"Warning: {field}: {name!r} is not in this configuration.", err=True)
