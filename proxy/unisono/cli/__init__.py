"""The command line: one module per command, and this one to name them.

Commands import what they need when they run: `unisono --version` answers at once.
"""

from __future__ import annotations

from pathlib import Path

import click

from unisono import __version__
from unisono.cli.mcp import mcp

HELP = "The configuration, YAML or JSON; config.example.yaml shows every option."
CONFIG = click.option("--config", "config_path", type=click.Path(path_type=Path), help=HELP)
CONFIG_REQUIRED = click.option("--config", "config_path", type=click.Path(path_type=Path), required=True, help=HELP)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="unisono")
def main() -> None:
    """One OpenAI-compatible gateway that makes every gpt-oss backend reliable."""


@main.command()
@CONFIG
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=4000, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free one.")
def serve(config_path: Path | None, host: str, port: int) -> None:
    """Serve the models of a configuration; without one, what runs on this machine, or the demo model."""
    from unisono.cli.serve import serve as run

    run(config_path, host, port)


@main.command()
@CONFIG
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def check(config_path: Path | None, as_json: bool) -> None:
    """Examine every backend of a configuration: is it gpt-oss, does it generate, what can be seen of it.

    Without a configuration, what runs on this machine, or the demo model. Exit code 0: all can be used; 1: some cannot;
    2: the configuration cannot.
    """
    from unisono.cli.check import check as run

    run(config_path, as_json=as_json)


@main.command()
@CONFIG_REQUIRED
def models(config_path: Path) -> None:
    """List the models of a configuration and their backends, without asking any of them."""
    from unisono.cli.models import show

    show(config_path)


@mcp.command("list")
@CONFIG_REQUIRED
@click.argument("server", required=False)
def list_tools(config_path: Path, server: str | None) -> None:
    """List the tools of a configuration's tool servers, or of one, and which of them need approval."""
    from unisono.cli.tools import show

    show(config_path, server)


@mcp.command("call")
@CONFIG_REQUIRED
@click.argument("server")
@click.argument("tool")
@click.argument("arguments", metavar="JSON", default="{}")
def call_tool(config_path: Path, server: str, tool: str, arguments: str) -> None:
    """Run a tool of a configuration's tool server and print what a model would read."""
    from unisono.cli.tools import call

    call(config_path, server, tool, arguments)


main.add_command(mcp)
