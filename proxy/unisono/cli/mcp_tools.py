"""`unisono mcp list` and `unisono mcp call`: use tool servers as the gateway does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import click

from unisono.bootstrap.tool_servers import ServerToolSetup, build_server_tools
from unisono.cli.terminal import harmless
from unisono.config import load
from unisono.core.server_tool_arguments import ToolArguments, read_arguments
from unisono.core.tool_host import HostedTool, ToolHost, ToolOutcome, ToolServer
from unisono.errors import UnisonoError

T = TypeVar("T")

# Maximum number of printed characters of a description.
WIDEST = 72


def show(config_path: Path, label: str | None) -> None:
    """Print the tools of one server, or of all if `label` is None. Exit code 1: a server failed."""
    hosting = build_server_tools(load(config_path).config)
    servers = [_server(hosting, label)] if label else list(hosting.configured.values())
    if not servers:
        raise click.ClickException("`mcp_servers` is empty; add a tool server")

    async def listed(host: ToolHost) -> list[tuple[HostedTool, ...] | UnisonoError]:
        return await asyncio.gather(*(_list_tools(host, server) for server in servers))

    answers = asyncio.run(_run_with_host(hosting.host, listed))
    for server, answer in zip(servers, answers, strict=True):
        click.echo(server.label)
        if isinstance(answer, UnisonoError):
            click.echo(f"  {harmless(answer.message)}")
            continue
        width = max((len(tool.name) for tool in answer), default=0)
        for tool in answer:
            needs = "needs approval" if server.approval.needed(tool) else "no approval"
            click.echo(f"  {tool.name.ljust(width)}  {needs:14}  {_first_line(tool.description)}".rstrip())
    if any(isinstance(answer, UnisonoError) for answer in answers):
        raise SystemExit(1)


def call(config_path: Path, label: str, tool: str, arguments: str) -> None:
    """Run a tool and print the text for the model. Exit code 1: the result is an error."""
    hosting = build_server_tools(load(config_path).config)
    server = _server(hosting, label)
    values = _arguments(arguments)

    async def called(host: ToolHost) -> ToolOutcome:
        return await host.call(server, tool, values)

    try:
        outcome = asyncio.run(_run_with_host(hosting.host, called))
    except UnisonoError as error:
        raise click.ClickException(harmless(error.message)) from error
    click.echo(harmless(outcome.text), err=outcome.is_error)
    if outcome.is_error:
        raise SystemExit(1)


def _server(setup: ServerToolSetup, label: str) -> ToolServer:
    server = setup.configured.get(label)
    if server is None:
        known = ", ".join(setup.configured) or "none"
        raise click.ClickException(f"mcp_servers: unknown tool server `{label}`; servers: {known}")
    return server


def _arguments(text: str) -> ToolArguments:
    arguments = read_arguments("", text)
    if arguments.problem:
        raise click.BadParameter(f"the arguments cannot be sent: {arguments.problem}", param_hint="JSON")
    return arguments


async def _list_tools(host: ToolHost, server: ToolServer) -> tuple[HostedTool, ...] | UnisonoError:
    try:
        return (await host.list_tools(server)).tools
    except UnisonoError as error:
        return error


async def _run_with_host(host: ToolHost, act: Callable[[ToolHost], Awaitable[T]]) -> T:
    try:
        return await act(host)
    finally:
        await host.aclose()


def _first_line(text: str) -> str:
    # Descriptions are foreign text, in which control sequences could change the terminal.
    line = harmless(text.strip().partition("\n")[0])
    return line if len(line) <= WIDEST else f"{line[: WIDEST - 1]}…"
