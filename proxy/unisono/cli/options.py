"""Options shared by several commands, and validation of arguments as UTF-8 text."""

from __future__ import annotations

from pathlib import Path

import click

from unisono.core.surrogates import is_well_formed

HELP = "Configuration file in YAML or JSON; config.example.yaml shows all settings."
CONFIG = click.option("--config", "config_path", type=click.Path(path_type=Path), help=HELP)
CONFIG_REQUIRED = click.option("--config", "config_path", type=click.Path(path_type=Path), required=True, help=HELP)


class TextCommand(click.Command):
    """Command that rejects arguments other than UTF-8, which could not be stored or found.

    File names may contain any bytes.
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
    """Group of such commands and of further groups."""

    command_class = TextCommand
    group_class = type
