"""Options shared by several commands, and validation of arguments as UTF-8 text."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from unisono.cli.terminal import occupy_closed_streams
from unisono.core.json_syntax import is_well_formed
from unisono.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])

HELP = (
    "Configuration file in YAML or JSON; config.example.yaml shows all settings. By default $UNISONO_CONFIG, else "
    "config.yaml in the working directory."
)
CONFIG_VARIABLE = "UNISONO_CONFIG"
CONFIG_FILE = Path("config.yaml")


def _check_source(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is None and parameter.required:
        raise click.MissingParameter(ctx=context, param=parameter)
    report_source(context, path)
    return path


def report_source(context: click.Context, path: Path | None) -> None:
    """Print which configuration file is used, unless the command line names the file."""
    source = context.get_parameter_source("config_path")
    if path is not None and source is ParameterSource.ENVIRONMENT:
        click.echo(f"Using the configuration {path} (from {CONFIG_VARIABLE}).", err=True)
    elif path is not None and source in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP):
        click.echo(f"Using the configuration {path} of the working directory.", err=True)


def require_config(context: click.Context) -> Path:
    """Return the configuration for a group that runs without a command.

    Raises `MissingParameter` if there is no configuration.
    """
    parameter = next(each for each in context.command.params if each.name == "config_path")
    path: Path | None = context.params["config_path"]
    if path is None:
        raise click.MissingParameter(ctx=context, param=parameter)
    report_source(context, path)
    return path


def require_host(context: click.Context, parameter: click.Parameter, host: str) -> str:
    """Return the address of `--host`. Raises `BadParameter` if it is empty."""
    if not host.strip():
        raise click.BadParameter("must not be empty; 0.0.0.0 means all addresses", context, parameter)
    return host


def _config_option(*, required: bool, reports: bool = True) -> Callable[[Command], Command]:
    return click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        envvar=CONFIG_VARIABLE,
        default=lambda: CONFIG_FILE if CONFIG_FILE.is_file() else None,
        required=required,
        callback=_check_source if reports else None,
        help=HELP,
    )


CONFIG = _config_option(required=False)
CONFIG_REQUIRED = _config_option(required=True)
# Option for commands that do not always use the configuration. They call `report_source` when they use it.
CONFIG_UNREPORTED = _config_option(required=False, reports=False)

# Errors of a full device, an exceeded quota or file size, a failed device, and a standard output that is not open.
OUTPUT_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF))


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds the options to a command, in the order of the help."""

    def add(command: Command) -> Command:
        # click lists options in the reverse order of their decorators.
        for option in reversed(options):
            command = option(command)
        return command

    return add


# Options of the commands that configure another program.
for_gateway = with_options(
    click.option("--url", default="http://localhost:4000", show_default=True, help="Address of the gateway."),
    click.option("--model", help="Model to use; by default the first one of the gateway."),
    click.option(
        "--key-env",
        default="UNISONO_API_KEY",
        show_default=True,
        metavar="NAME",
        help="Environment variable with the key of the gateway.",
    ),
)


class TextCommand(click.Command):
    """Command that rejects arguments that are not UTF-8.

    Other text could not be stored or found. File names may contain any bytes.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for param in self.params:
            value = ctx.params.get(param.name or "")
            for text in value if isinstance(value, tuple) else (value,):
                if param.type is click.STRING and isinstance(text, str) and not is_well_formed(text):
                    raise click.BadParameter(f"{text!r} is not valid UTF-8", ctx, param)
        return rest


class CommandGroup(click.Group):
    """Group of `TextCommand` commands and of further groups of this class."""

    command_class = TextCommand
    group_class = type

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command to run. Raises `UsageError` if an option of the group precedes it."""
        # Such an option would have no effect, because it applies only if the group runs without a command.
        for param in self.params:
            if param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"Write {param.opts[0]} after the command `{args[0]}`.", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A ConfigError ends it with the error's message."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line. Interrupts and failed output cause no traceback."""
        occupy_closed_streams()
        try:
            return super().main(*args, **kwargs)
        except KeyboardInterrupt:
            click.echo("Aborted!", err=True)
            sys.exit(1)
        except OSError as error:
            if error.errno not in OUTPUT_ERRORS or error.filename is not None:
                raise
            # Python writes the rest of its buffer at exit, which would fail again.
            if sys.stdout is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            click.echo(f"Error: cannot write the output: {error.strerror}", err=True)
            sys.exit(1)
