"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

HELP = "The configuration, YAML or JSON; config.example.yaml shows every option."
CONFIG = click.option("--config", "config_path", type=click.Path(path_type=Path), help=HELP)
CONFIG_REQUIRED = click.option("--config", "config_path", type=click.Path(path_type=Path), required=True, help=HELP)
