"""`unisono mcp`: commands for tool servers. `serve` starts one of the two included servers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from unisono.cli.options import CommandGroup, with_options

if TYPE_CHECKING:
    from unisono.toolservers.transports import ToolServer

BROWSER_PORT = 8001
PYTHON_PORT = 8002

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(cls=CommandGroup)
def mcp() -> None:
    """Start and test tool servers of the Model Context Protocol."""


@mcp.group()
def serve() -> None:
    """Start one of the included tool servers.

    These servers provide the tools that gpt-oss was trained to use.
    """


def listening(port: int) -> Callable[[Command], Command]:
    """Return a decorator that adds the options common to all servers."""
    return with_options(
        click.option(
            "--host",
            default="127.0.0.1",
            show_default=True,
            help="Address to listen on; any address except loopback needs a key.",
        ),
        click.option(
            "--port",
            default=port,
            show_default=True,
            type=click.IntRange(0, 65535),
            help="Port to listen on; 0 selects a free one.",
        ),
        click.option("--stdio", is_flag=True, help="Serve on standard input and output instead of HTTP."),
        click.option("--key-variable", help="Environment variable with the key that clients must send."),
    )


@serve.command()
@click.option("--searxng", metavar="URL", help="Search with this SearXNG instance and open web pages.")
@click.option("--folder", type=click.Path(path_type=Path), help="Search and open the text files in this folder.")
@click.option("--web", is_flag=True, help="With --folder: also open web pages.")
@click.option("--allow-private", is_flag=True, help="Also open pages on this machine and in private networks.")
@click.option(
    "--view-tokens",
    default=1024,
    show_default=True,
    type=click.IntRange(64, 32768),
    help="Approximate size of a page view.",
)
@listening(BROWSER_PORT)
def browser(
    searxng: str | None,
    folder: Path | None,
    web: bool,
    allow_private: bool,
    view_tokens: int,
    **where: Any,
) -> None:
    """Search web pages or the files of a folder."""
    from unisono.toolservers.browser.actions import Browser
    from unisono.toolservers.browser.folder import Folder
    from unisono.toolservers.browser.page_sources import PageReader, SearchEngine
    from unisono.toolservers.browser.searxng import SearxNG
    from unisono.toolservers.browser.server import browser_server
    from unisono.toolservers.browser.web import Web

    # Searches use exactly one source. Pages may be read from several.
    if (searxng is None) == (folder is None):
        raise click.UsageError("give either --searxng or --folder")
    searching: SearchEngine
    readings: list[PageReader] = []
    if folder is not None:
        documents = Folder(folder)
        searching = documents
        readings.append(documents)
    else:
        assert searxng is not None
        if not searxng.startswith(("http://", "https://")):
            raise click.UsageError("--searxng: must be an http or https URL")
        searching = SearxNG(searxng)
    # A search engine finds web pages, so they must be readable too.
    opens_web = searxng is not None or web
    if opens_web:
        readings.append(Web(private=allow_private))
    reach = "public and private addresses" if allow_private else "public addresses only"
    remark = f"Search: {folder or searxng}{f'; web pages: {reach}' if opens_web else ''}."
    _serve(browser_server(Browser(searching, readings, view_tokens)), [remark], remembers=True, **where)


@serve.command()
@click.option("--python", "interpreter", metavar="PATH", help="Interpreter that runs the code.")
@click.option(
    "--seconds", default=30.0, show_default=True, type=click.FloatRange(0.1, 3600), help="Time limit of a run."
)
@click.option(
    "--cpu-seconds", default=30, show_default=True, type=click.IntRange(1, 3600), help="CPU time limit per process."
)
@click.option("--memory-mib", default=1024, show_default=True, type=click.IntRange(32), help="Memory limit of a run.")
@click.option(
    "--processes",
    default=32,
    show_default=True,
    type=click.IntRange(2, 4096),
    help="Process limit of a run, threads included.",
)
@click.option("--at-once", default=4, show_default=True, type=click.IntRange(1, 256), help="Concurrent runs.")
@click.option("--as-root", is_flag=True, help="Run the code as root if the server is root. Unsafe without namespaces.")
@click.option("--unsafe", is_flag=True, help="Start even if the code can attack this server.")
@listening(PYTHON_PORT)
def python(
    interpreter: str | None,
    seconds: float,
    cpu_seconds: int,
    memory_mib: int,
    processes: int,
    at_once: int,
    as_root: bool,
    unsafe: bool,
    **where: Any,
) -> None:
    """Run Python code in separate processes.

    This is not a security boundary against malicious code: run the server in a container or virtual machine.
    """
    from unisono.toolservers.python.executor import MIB, CodeRunner, RunLimits
    from unisono.toolservers.python.sandbox_probe import close_to_inspection, find_sandbox
    from unisono.toolservers.python.server import python_server

    # This must be the first step, so that code which runs later cannot read this process.
    close_to_inspection()
    way = find_sandbox(interpreter, as_root=as_root, unsafe=unsafe)
    limits = RunLimits(seconds=seconds, cpu_s=cpu_seconds, memory=memory_mib * MIB, processes=processes)
    remarks = [
        f"Code runs with {way.described}; {seconds:g} s, {memory_mib} MiB, {processes} processes.",
        "This is not a security boundary: run the server in a container or virtual machine.",
        *(f"UNSAFE: {problem}." for problem in way.missing),
    ]
    _serve(python_server(CodeRunner(way, limits, at_once)), remarks, remembers=False, **where)


def _serve(
    server: ToolServer,
    remarks: list[str],
    *,
    remembers: bool,
    host: str,
    port: int,
    stdio: bool,
    key_variable: str | None,
) -> None:
    """Serve until stopped.

    With `stdio`, only messages of the protocol are written to standard output. With `remembers`, the server has state
    for each client.
    """
    import asyncio

    from unisono.toolservers.transports import application, serve_http, serve_stdio

    # With `stdio`, remarks are written to standard error.
    say = partial(click.echo, err=stdio)
    if stdio:
        for remark in remarks:
            say(remark)
        asyncio.run(serve_stdio(server))
        return
    key = None
    if key_variable is not None:
        key = os.environ.get(key_variable)
        if not key:
            raise click.ClickException(f"--key-variable: the environment variable {key_variable} is not set or empty")

    def started(url: str) -> None:
        for remark in (*remarks, f"Serving {server.name} at {url}"):
            say(remark)

    app = application(server, host, key=key, remembers=remembers)
    asyncio.run(serve_http(app, host, port, started))
