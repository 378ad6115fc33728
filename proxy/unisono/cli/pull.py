"""`unisono pull`: download a model for the `mlx` backend, so that `serve` finds it on disk."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path, PurePath

import click

from unisono.core.install_commands import install_command
from unisono.errors import PullError

# Entry-point group of download functions, by backend kind: `(model, revision) -> folder`.
DOWNLOADERS = "unisono.pull"


def run(model: str, revision: str | None) -> None:
    """Download `model` and print its folder and a configuration.

    Exit code 1: the model is unusable.
    """
    points = entry_points(group=DOWNLOADERS, name="mlx")
    if not points:
        raise click.ClickException(f"this installation cannot download models; run `{install_command('mlx')}`")
    (point,) = points
    download: Callable[[str, str | None], Path] = point.load()
    try:
        folder = download(model, revision)
    except PullError as error:
        raise click.ClickException(str(error)) from error
    except ImportError as error:
        raise click.ClickException(f"{error.name} is not installed; run `{install_command('mlx')}`") from error
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    backend_model = model.removeprefix("mlx/")
    click.echo(f"{folder} ({size / 1e9:.1f} GB): the tokenizer is o200k_harmony, as required.")
    click.echo("To serve it, add this to model_list:")
    click.echo(f"  - model_name: {PurePath(backend_model).name}")
    click.echo(f"    litellm_params: {{model: mlx/{backend_model}}}")
