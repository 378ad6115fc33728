"""`unisono models`: lists the models of a configuration without contacting any backend."""

from __future__ import annotations

from pathlib import Path

import click

from unisono.bootstrap.deployments import build_pool, deployment_names
from unisono.cli.resolve_config import configured
from unisono.cli.terminal import table_lines
from unisono.config import ModelRegistry
from unisono.errors import ConfigError

HEADINGS = ("MODEL", "BACKEND", "KIND", "MODEL ON THE BACKEND")


def show(config_path: Path) -> None:
    """Print a row for every backend of every model, then the aliases of models."""
    loaded = configured(config_path)
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
