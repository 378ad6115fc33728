"""`unisono keys`: creates and changes virtual keys in the store that the gateways share.

Gateways apply changes within one second. A key is printed to standard output once, when it is created or rotated, alone
on a line. All other output of these commands goes to standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from unisono.cli.options import CONFIG_REQUIRED, CommandGroup
from unisono.cli.param_types import AMOUNT, DURATION, LINE, MOMENT, MONEY, NAMES, PERIOD, OptionValue

Command = TypeVar("Command", bound=Callable[..., Any])

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

MAY = (
    click.option("--name", "--key-alias", "name", type=LINE, help="What it is called in lists."),
    click.option("--models", type=NAMES, help="Models or aliases it may use, with commas; all."),
    click.option("--mcp-servers", type=NAMES, help="Tool servers it may use, by label; all, none."),
    click.option("--expires", "--duration", "expires_at", type=MOMENT, help="12h, 30d, 2027-01-31, never."),
    click.option("--rpm", "--rpm-limit", "rpm", type=AMOUNT, help="Requests in any minute."),
    click.option("--tpm", "--tpm-limit", "tpm", type=AMOUNT, help="Tokens in any minute."),
    click.option("--max-parallel", "--max-parallel-requests", "max_parallel", type=AMOUNT, help="Requests at once."),
    click.option("--token-budget", type=AMOUNT, help="Tokens in a period."),
    click.option("--money-budget", "--max-budget", "money_budget", type=MONEY, help="USD in a period."),
    click.option(
        "--budget-period", "--budget-duration", "budget_period", type=PERIOD, help="day, month, 12h, 30d, none."
    ),
    click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="For reports; KEY= takes it away."),
    click.option("--raw/--no-raw", "raw", default=None, help="Whether it may send prompts that are not rendered here."),
)


def permitting(command: Command) -> Command:
    """Add the options for the permissions of a key."""
    for option in reversed(MAY):
        command = option(command)
    return command


@click.group(cls=CommandGroup)
def keys() -> None:
    """Virtual keys: make, list, change and revoke them. Limits and budgets are in docs/keys.md."""


@keys.command()
@CONFIG_REQUIRED
@click.option("--tenant", "--team-id", "tenant", type=LINE, help="Keys of one tenant share state; by default its own.")
@permitting
@JSON
def create(config_path: Path, tenant: OptionValue[str] | None, as_json: bool, **options: Any) -> None:
    """Make a key and print it, this once."""
    from unisono.cli.keyring import create as run

    run(config_path, tenant.value if tenant else "", wishes(options), as_json=as_json)


@keys.command("list")
@CONFIG_REQUIRED
@JSON
def list_keys(config_path: Path, as_json: bool) -> None:
    """List all keys with what they may do; none of them can be shown again."""
    from unisono.cli.keyring import show

    show(config_path, as_json=as_json)


@keys.command()
@CONFIG_REQUIRED
@click.argument("key_id", metavar="ID")
@permitting
@JSON
def update(config_path: Path, key_id: str, as_json: bool, **options: Any) -> None:
    """Change what a key may do; what is not named stays as it is."""
    from unisono.cli.keyring import update as run

    changes = wishes(options)
    if not changes:
        raise click.UsageError("nothing to change was given")
    run(config_path, key_id, changes, as_json=as_json)


@keys.command()
@CONFIG_REQUIRED
@click.argument("key_id", metavar="ID")
def revoke(config_path: Path, key_id: str) -> None:
    """End a key for ever. What runs with it is finished, nothing new is begun."""
    from unisono.cli.keyring import revoke as run

    run(config_path, key_id)


@keys.command()
@CONFIG_REQUIRED
@click.argument("key_id", metavar="ID")
@click.option("--grace", type=DURATION, default="0s", show_default=True, help="How long the one before is still good.")
@JSON
def rotate(config_path: Path, key_id: str, grace: OptionValue[int], as_json: bool) -> None:
    """Give a key another secret and print it, this once. Its id, state, limits and usage stay."""
    from unisono.cli.keyring import rotate as run

    run(config_path, key_id, grace.value, as_json=as_json)


def wishes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options, by field of a key or of its limits.

    None removes a value, as an empty tag does.
    """
    given = {name: option.value for name, option in options.items() if isinstance(option, OptionValue)}
    if options["raw"] is not None:
        given["raw"] = options["raw"]
    if options["tags"]:
        given["tags"] = dict(map(_tag, options["tags"]))
    return given


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or len(text) > 256 or not text.isprintable():
        raise click.BadParameter(f"{text!r} is not KEY=VALUE on one line", param_hint="--tag")
    return key, value
