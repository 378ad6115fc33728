"""`unisono models`: lists models, and changes models in the store or in a running gateway."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import click

from unisono.cli.keys import is_remote, store_or_gateway
from unisono.cli.options import CONFIG_UNREPORTED, CommandGroup, require_config


class ModelCommands(Protocol):
    """Changes to deployments. Each method returns the line to print."""

    def add(self, settings: Mapping[str, Any]) -> str: ...

    def remove(self, id: str) -> str: ...

    def set_drained(self, id: str, *, is_drained: bool) -> str: ...


@click.group(cls=CommandGroup, invoke_without_command=True)
@CONFIG_UNREPORTED
@click.pass_context
def models(context: click.Context, config_path: Path | None) -> None:
    """List configured models and their backends, or change them at run time.

    Without a command, the models of the configuration are listed, and no backend is contacted. The commands change
    deployments in the store. Every gateway with this store applies a change within a second. docs/admin.md describes
    the commands.
    """
    del config_path  # checked below
    if context.invoked_subcommand is None:
        from unisono.cli.stored_models import show

        show(require_config(context))


def _commands(config_path: Path | None, url: str | None, key_env: str) -> ModelCommands:
    if is_remote(config_path, url) and url is not None:
        from unisono.cli.stored_models import RemoteModels

        return RemoteModels(url, key_env)
    from unisono.cli.stored_models import LocalModels

    assert config_path is not None
    return LocalModels(config_path)


@models.command()
@click.argument("model_name", required=False)
@click.argument("model", required=False)
@store_or_gateway
@click.option("--api-base", help="Address of the backend.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable of this shell with the key of the backend.")
@click.option("--id", "id", help="Name of the deployment; by default a generated one.")
@click.option("--file", "file", type=click.Path(path_type=Path), help="YAML or JSON file with an entry of model_list.")
def add(
    model_name: str | None,
    model: str | None,
    config_path: Path | None,
    url: str | None,
    key_env: str,
    api_base: str | None,
    api_key_env: str | None,
    id: str | None,
    file: Path | None,
) -> None:
    """Add a deployment.

    MODEL_NAME is the name in the requests of clients, MODEL a backend kind and the name of the model there, such as
    vllm/openai/gpt-oss-20b. With --file, all settings of an entry are possible.
    """
    if (file is None) == (model_name is None or model is None):
        raise click.UsageError("Give either MODEL_NAME and MODEL, or --file.")
    named: dict[str, Any] = {"model_name": model_name, "litellm_params": {"model": model}}
    settings = named if file is None else _read(file)
    params = settings.setdefault("litellm_params", {})
    if api_base is not None:
        params["api_base"] = api_base
    if api_key_env is not None:
        if not os.environ.get(api_key_env):
            raise click.ClickException(f"${api_key_env} is not set; set it to the key of the backend")
        params["api_key"] = os.environ[api_key_env]
    if id is not None:
        settings["model_info"] = {**(settings.get("model_info") or {}), "id": id}
    click.echo(_commands(config_path, url, key_env).add(settings))


def _read(file: Path) -> dict[str, Any]:
    from unisono.config.config_file import read

    tree = read(file).tree
    sections = (tree.get("litellm_params", {}), tree.get("model_info") or {}) if isinstance(tree, dict) else ()
    if not isinstance(tree, dict) or not all(isinstance(section, dict) for section in sections):
        raise click.ClickException(f"{file}: must be one entry of `model_list`, with `model_name` and `litellm_params`")
    return tree


@models.command()
@click.argument("id")
@store_or_gateway
def remove(id: str, config_path: Path | None, url: str | None, key_env: str) -> None:
    """Remove a deployment that was added at run time.

    Its running answers finish.
    """
    click.echo(_commands(config_path, url, key_env).remove(id))


@models.command()
@click.argument("id")
@store_or_gateway
def drain(id: str, config_path: Path | None, url: str | None, key_env: str) -> None:
    """Send no new requests to a deployment.

    Its running answers finish. A deployment of the configuration file can be drained too.
    """
    click.echo(_commands(config_path, url, key_env).set_drained(id, is_drained=True))


@models.command()
@click.argument("id")
@store_or_gateway
def resume(id: str, config_path: Path | None, url: str | None, key_env: str) -> None:
    """Use a drained deployment again."""
    click.echo(_commands(config_path, url, key_env).set_drained(id, is_drained=False))
