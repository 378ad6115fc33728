"""`unisono init`: writes a first configuration for the backends on this machine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click
import yaml

from unisono.cli.discover import discover
from unisono.cli.resolve_config import demo_missing, found_config

HEAD = """# Written by `unisono init`. All settings: config.example.yaml and docs/configuration.md.
# To serve other machines, set a key (general_settings.master_key) and listen on another address (--host).
"""


def run(target: Path, *, force: bool) -> None:
    """Write the file, and print what it contains and what to do next."""
    raw, remarks = found_config(asyncio.run(discover()), demo_missing(), os.environ)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        # Only the owner may read the file, because it may later contain keys.
        with os.fdopen(os.open(target, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(HEAD + yaml.safe_dump(raw, sort_keys=False, allow_unicode=True, width=120))
    except FileExistsError:
        raise click.ClickException(f"{target} exists; choose another --output, or replace it with --force") from None
    except OSError as error:
        raise click.ClickException(f"{target}: cannot write the file: {error.strerror or error}") from error
    for remark in remarks:
        click.echo(remark)
    click.echo(f"Wrote {target}. Next: `unisono check --config {target}`, then `unisono serve --config {target}`.")
