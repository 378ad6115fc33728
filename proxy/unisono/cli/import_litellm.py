"""`unisono import-litellm`: converts a LiteLLM configuration to a Unisono configuration."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click

from unisono.cli.discover import identified
from unisono.config import imported, own_servers


def run(source: Path, target: Path | None, *, probes: bool) -> None:
    """Convert the LiteLLM file `source`; print the result, or write it to the new file `target`.

    With `probes`, servers of unknown kind are probed to find their kind. Only the owner of the new file can read it,
    because it may contain keys.
    """
    kinds = asyncio.run(identified(own_servers(source))) if probes else {}
    text = imported(source, kinds)
    if target is None:
        click.echo(text, nl=False)
        return
    try:
        # O_EXCL refuses to overwrite a file. The mode applies as soon as the file exists, so no other user can read
        # keys.
        opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise click.ClickException(f"{target}: cannot write the file: {error.strerror or error}") from error
    click.echo(f"Wrote {target}. Run `unisono check --config {target}` to probe its backends.")
