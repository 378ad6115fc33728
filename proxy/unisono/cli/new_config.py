"""`unisono init` and `unisono import-litellm`: write a new configuration.

Only the owner of the file can read it, because it may contain keys.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click
import yaml

from unisono.cli.discover import discover, identified
from unisono.cli.resolve_config import demo_missing, found_config
from unisono.config import imported, own_servers

HEAD = """# Written by `unisono init`. All settings: config.example.yaml and docs/configuration.md.
# To serve other machines, set a key (general_settings.master_key) and listen on another address (--host).
"""


def init(target: Path, *, force: bool) -> None:
    """Write a configuration for the backends on this machine.

    Prints what the file contains and what to do next.
    """
    raw, remarks = found_config(asyncio.run(discover()), demo_missing(), os.environ)
    text = HEAD + yaml.safe_dump(raw, sort_keys=False, allow_unicode=True, width=120)
    try:
        _write(target, text, force=force)
    except FileExistsError:
        raise click.ClickException(f"{target} exists; choose another --output, or replace it with --force") from None
    except OSError as error:
        raise _write_error(target, error) from error
    for remark in remarks:
        click.echo(remark)
    click.echo(f"Wrote {target}. Next: `unisono check --config {target}`, then `unisono serve --config {target}`.")


def import_litellm(source: Path, target: Path | None, *, probes: bool) -> None:
    """Convert the LiteLLM file `source`; print the result, or write it to the new file `target`.

    With `probes`, servers of unknown kind are probed to find their kind.
    """
    kinds = asyncio.run(identified(own_servers(source))) if probes else {}
    text = imported(source, kinds)
    if target is None:
        click.echo(text, nl=False)
        return
    try:
        _write(target, text)
    except OSError as error:
        raise _write_error(target, error) from error
    click.echo(f"Wrote {target}. Run `unisono check --config {target}` to probe its backends.")


def _write(target: Path, text: str, *, force: bool = False) -> None:
    """Write a file that only its owner can read.

    Raises OSError, also if the file exists and `force` is False.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    # The mode applies as soon as the file exists, so no other user can read keys.
    with os.fdopen(os.open(target, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _write_error(target: Path, error: OSError) -> click.ClickException:
    return click.ClickException(f"{target}: cannot write the file: {error.strerror or error}")
