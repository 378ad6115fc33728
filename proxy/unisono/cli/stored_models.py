"""Implementation of `unisono models`: the list, and changes in a store or a running gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import click

from unisono.api.admin.model_changes import ModelAdministration, create_model, delete_model, set_drained
from unisono.app import build
from unisono.bootstrap.deployments import build_pool, deployment_names
from unisono.bootstrap.model_admin import build_model_administration
from unisono.bootstrap.salt import Salt
from unisono.bootstrap.stored_models import NO_MODELS
from unisono.cli.keyring import OPERATOR, OpenedKeyring, run_on_store
from unisono.cli.remote_keys import AdminClient, reads_answers
from unisono.cli.terminal import table_lines
from unisono.config import ModelRegistry, load
from unisono.core.directory import DirectoryEntry
from unisono.errors import ConfigError, InvalidRequest, NotFound

HEADINGS = ("MODEL", "BACKEND", "KIND", "MODEL ON THE BACKEND")

Result = TypeVar("Result")


def show(config_path: Path) -> None:
    """Print a row for every backend of every model, then the aliases of models."""
    loaded = load(config_path)
    config = loaded.config
    try:
        catalogue = ModelRegistry(config)
        build_pool(config, catalogue)
        names = deployment_names(config.model_list)
    except ConfigError as error:
        raise click.ClickException(str(loaded.explained(error))) from error
    rows = [HEADINGS]
    for entry, name in zip(config.model_list, names, strict=True):
        rows.append((entry.model_name, name, entry.display_kind, entry.backend_model or entry.litellm_params.model))
    click.echo("\n".join(table_lines(rows)))
    for alias, model in catalogue.listed():
        if alias != model.name:
            click.echo(f"{alias} is an alias of {model.name}")


class RemoteModels(AdminClient):
    """Changes over the admin API of a running gateway."""

    @reads_answers
    def add(self, settings: Mapping[str, Any]) -> str:
        row = self.send("/model/new", settings)
        info = row["model_info"]
        state = f"{info['state']}: {info['error']}" if info["error"] else info["state"]
        return f"Added {row['model_id']} to {row['model_name']} ({state})."

    def remove(self, id: str) -> str:
        self.send("/model/delete", {"id": id})
        return f"Removed {id}."

    @reads_answers
    def set_drained(self, id: str, *, is_drained: bool) -> str:
        answer = self.send(f"/model/{quote(id)}/{'drain' if is_drained else 'resume'}", {})
        info = answer["model_info"]
        return (
            f"{id} is drained; {info['running']} requests are running." if is_drained else f"{id} is {info['state']}."
        )


class LocalModels:
    """Changes in the store of a configuration."""

    def __init__(self, config_path: Path) -> None:
        self._config = load(config_path).config

    def add(self, settings: Mapping[str, Any]) -> str:
        entry = self._run(lambda opened, models: create_model(opened.admin, models, OPERATOR, settings))
        return f"Added {entry.id} to {entry.alias}. Gateways use it once a probe has passed."

    def remove(self, id: str) -> str:
        self._run(lambda opened, models: delete_model(opened.admin, models, OPERATOR, id))
        return f"Removed {id}."

    def set_drained(self, id: str, *, is_drained: bool) -> str:
        self._run(lambda opened, models: set_drained(opened.admin, models, OPERATOR, id, is_drained=is_drained))
        return f"{id} is {'drained' if is_drained else 'resumed'}."

    def _run(self, work: Callable[[OpenedKeyring, ModelAdministration], Awaitable[Result]]) -> Result:
        async def worked(opened: OpenedKeyring) -> Result:
            try:
                return await work(opened, self._models(opened))
            except (InvalidRequest, NotFound) as error:
                raise click.ClickException(error.message) from error

        return run_on_store(self._config, worked)

    def _models(self, opened: OpenedKeyring) -> ModelAdministration:
        from unisono.api.sealing import Sealer

        async def seals() -> Sealer:
            return Sealer(await Salt(self._config, opened.store)())

        async def applied(id: str, entry: DirectoryEntry | None) -> None:
            """Do nothing, because the gateways read the change from the store themselves."""

        return build_model_administration(
            self._config,
            opened.store,
            seals,
            lambda config, _: build(config),
            applied=applied,
            current=lambda: (self._config, None, NO_MODELS),
        )
