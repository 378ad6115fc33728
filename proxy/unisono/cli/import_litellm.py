"""`unisono import-litellm`: converts a LiteLLM configuration to a Unisono configuration."""

from __future__ import annotations

import os
from pathlib import Path

import click

from unisono.config import imported
from unisono.errors import ConfigError


def run(source: Path, target: Path | None) -> None:
    """Print the configuration or write it to a new file.

    Only its owner can read the file, because it may contain keys.
    """
    try:
        text = imported(source)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    if target is None:
        click.echo(text, nl=False)
        return
    try:
        # O_EXCL refuses to overwrite a file. The mode applies from the creation on, so no other user can read the keys.
        opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise click.ClickException(f"{target}: cannot write the file: {error.strerror or error}") from error
    click.echo(f"Wrote {target}. Run `unisono check --config {target}` to probe its backends.")
