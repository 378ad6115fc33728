"""`unisono keys`: creates and changes virtual keys, in the store or over the admin API.

Gateways apply changes within one second. A key is printed to standard output once, when it is created or rotated, alone
on a line. All other output of these commands goes to standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
from click.core import ParameterSource

from unisono.cli.options import CONFIG_UNREPORTED, CommandGroup, report_source, with_options
from unisono.cli.param_types import AMOUNT, DURATION, LINE, MOMENT, MONEY, NAMES, PERIOD, OptionValue

Command = TypeVar("Command", bound=Callable[..., Any])

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

# Options for the permissions and limits of a key. Names of the LiteLLM proxy are accepted too, so that scripts for
# LiteLLM continue to work.
permitting = with_options(
    click.option("--name", "--key-alias", "name", type=LINE, help="Name of the key in lists."),
    click.option("--models", type=NAMES, help="Allowed models or aliases: names separated by commas, or all."),
    click.option("--mcp-servers", type=NAMES, help="Allowed tool servers: labels separated by commas, all or none."),
    click.option("--expires", "--duration", "expires_at", type=MOMENT, help="Expiry: 12h, 30d, 2099-01-31 or never."),
    click.option("--rpm", "--rpm-limit", "rpm", type=AMOUNT, help="Maximum requests within any minute."),
    click.option("--tpm", "--tpm-limit", "tpm", type=AMOUNT, help="Maximum tokens within any minute."),
    click.option("--max-parallel", "--max-parallel-requests", "max_parallel", type=AMOUNT, help="Maximum concurrency."),
    click.option("--token-budget", type=AMOUNT, help="Maximum tokens per budget period."),
    click.option(
        "--money-budget", "--max-budget", "money_budget", type=MONEY, help="Maximum cost per budget period, in USD."
    ),
    click.option("--soft-budget", type=MONEY, help="Cost per budget period that causes an alert, in USD."),
    click.option(
        "--budget-period",
        "--budget-duration",
        "budget_period",
        type=PERIOD,
        help="Period: day, month, 12h, 30d or none.",
    ),
    click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Tag for reports; KEY= removes it."),
    click.option("--raw/--no-raw", "raw", default=None, help="Permission for raw prompts at /v1/completions."),
)


# Options that select the configured store or a running gateway.
store_or_gateway = with_options(
    CONFIG_UNREPORTED,
    click.option("--url", help="Address of a running gateway, instead of the store of a configuration."),
    click.option(
        "--key-env",
        default="UNISONO_API_KEY",
        show_default=True,
        metavar="NAME",
        help="Environment variable with the master key or an admin's key, for --url.",
    ),
)


def is_remote(config_path: Path | None, url: str | None) -> bool:
    """Return True for `--url`, False for the store of a configuration.

    For a store, prints which configuration file is used, unless the command line names the file. Raises `UsageError` if
    both arguments are None, or if the command line names both.
    """
    context = click.get_current_context()
    if url is not None:
        if context.get_parameter_source("config_path") is ParameterSource.COMMANDLINE:
            raise click.UsageError("Give either --config or --url.")
        return True
    if config_path is None:
        raise click.UsageError("Missing option '--config' or '--url'.")
    report_source(context, config_path)
    return False


class KeyCommands(Protocol):
    """Operations on keys. Each method prints its result."""

    def create(self, tenant: str, options: Mapping[str, Any], *, as_json: bool) -> None: ...

    def show(self, *, as_json: bool) -> None: ...

    def update(self, key_id: str, options: Mapping[str, Any], *, as_json: bool) -> None: ...

    def revoke(self, key_id: str) -> None: ...

    def rotate(self, key_id: str, grace_s: int, *, as_json: bool) -> None: ...

    def import_litellm(self, export: Path, ignored: Sequence[str], *, creates_owners: bool) -> None: ...


def _commands(config_path: Path | None, url: str | None, key_env: str) -> KeyCommands:
    if is_remote(config_path, url) and url is not None:
        from unisono.cli.remote_keys import RemoteKeys

        return RemoteKeys(url, key_env)
    from unisono.cli.keyring import LocalKeys

    assert config_path is not None
    return LocalKeys(config_path)


@click.group(cls=CommandGroup)
def keys() -> None:
    """Create, list, change and revoke virtual keys.

    docs/keys.md describes limits and budgets.
    """


@keys.command()
@store_or_gateway
@click.option("--tenant", "--team-id", "tenant", type=LINE, help="Tenant whose keys share state; by default a new one.")
@permitting
@JSON
def create(
    config_path: Path | None,
    url: str | None,
    key_env: str,
    tenant: OptionValue[str] | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Create a key and print it. It cannot be printed again."""
    commands = _commands(config_path, url, key_env)
    commands.create(tenant.value if tenant else "", given_options(options), as_json=as_json)


@keys.command("list")
@store_or_gateway
@JSON
def list_keys(config_path: Path | None, url: str | None, key_env: str, as_json: bool) -> None:
    """List all keys.

    The list contains their permissions and limits. Secrets are not stored and cannot be listed.
    """
    _commands(config_path, url, key_env).show(as_json=as_json)


@keys.command()
@store_or_gateway
@click.argument("key_id", metavar="ID")
@permitting
@JSON
def update(config_path: Path | None, url: str | None, key_env: str, key_id: str, as_json: bool, **options: Any) -> None:
    """Change permissions and limits of a key.

    Settings without an option stay unchanged.
    """
    changes = given_options(options)
    if not changes:
        raise click.UsageError("nothing to change; give at least one option")
    _commands(config_path, url, key_env).update(key_id, changes, as_json=as_json)


@keys.command()
@store_or_gateway
@click.argument("key_id", metavar="ID")
def revoke(config_path: Path | None, url: str | None, key_env: str, key_id: str) -> None:
    """Revoke a key permanently. Running requests finish; new ones are rejected."""
    _commands(config_path, url, key_env).revoke(key_id)


@keys.command()
@store_or_gateway
@click.argument("key_id", metavar="ID")
@click.option(
    "--grace", type=DURATION, default="0s", show_default=True, help="Time for which the old secret stays valid."
)
@JSON
def rotate(
    config_path: Path | None, url: str | None, key_env: str, key_id: str, grace: OptionValue[int], as_json: bool
) -> None:
    """Replace the secret of a key and print it once.

    The id, limits and usage of the key, and the state of its tenant, stay unchanged.
    """
    _commands(config_path, url, key_env).rotate(key_id, grace.value, as_json=as_json)


@keys.command("import")
@store_or_gateway
@click.argument("export", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--create-owners", is_flag=True, help="Create missing teams and users, without limits.")
@click.option("--ignore", "ignored", multiple=True, metavar="FIELD", help="Setting of LiteLLM to drop.")
def import_keys(
    config_path: Path | None,
    url: str | None,
    key_env: str,
    export: Path,
    create_owners: bool,
    ignored: tuple[str, ...],
) -> None:
    """Import the keys of a LiteLLM proxy. Their secrets stay valid.

    EXPORT is the answer of `/key/list?return_full_object=true`, or the table LiteLLM_VerificationToken as JSON or CSV.
    """
    _commands(config_path, url, key_env).import_litellm(export, ignored, creates_owners=create_owners)


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that were given on the command line.

    The keys are the names of the fields of an API key, and of its limits.

    The value None removes a setting from the API key. A tag name with an empty value removes the tag of that name.
    """
    # An option that was not given has no `OptionValue`. This distinguishes it from an option that removes a setting.
    values = {name: option.value for name, option in options.items() if isinstance(option, OptionValue)}
    if options["raw"] is not None:
        values["raw"] = options["raw"]
    if options["tags"]:
        values["tags"] = dict(map(_tag, options["tags"]))
    return values


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or len(text) > 256 or not text.isprintable():
        raise click.BadParameter(f"{text!r} is not KEY=VALUE on one line of at most 256 characters", param_hint="--tag")
    return key, value
