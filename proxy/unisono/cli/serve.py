"""`unisono serve`: starts a gateway from a configuration, in this process or in workers."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from unisono.app import build
from unisono.bootstrap.gateway import Gateway
from unisono.cli.open_gateway_check import refuse_to_be_open
from unisono.cli.resolve_config import prepared
from unisono.config import Config, Loaded, load
from unisono.errors import ConfigError, ConfigErrors
from unisono.observe.logs import start_logging
from unisono.observe.redaction import secrets_of
from unisono.server.config_reload import AppSwitch
from unisono.server.ipc import Serve
from unisono.server.server import BACKLOG, GatewayServer, server_config
from unisono.server.startup_screen import screen_lines


def serve(config_path: Path | None, host: str, port: int, workers: int) -> None:
    """Serve until stopped. A failed start ends the command with a message."""
    ready = prepared(config_path)
    config, errors = ready.loaded.config, ConfigErrors()
    with errors:
        refuse_to_be_open(config, host)
    with errors:
        # Workers build their own application. This build validates the configuration once for all of them.
        app = build(config, share=workers)
    try:
        errors.raise_all()
    except ConfigError as error:
        raise click.ClickException(str(ready.loaded.explained(error))) from error
    listener = listen(host, port)
    start_logging(config.unisono.log_level, secrets_of(config), log_format=config.unisono.log_format)
    warn(ready.loaded)
    variable = ready.loaded.master_key_variable
    order = Serve(config, workers, address_of(listener, host), ready.remarks, key_variable=variable)
    read_again = partial(load_again, config_path, host)
    if workers == 1:
        serve_in_process(AppSwitch(app), order, listener, read_again)
    else:
        serve_by_workers(order, listener, read_again)
    click.echo("Stopped.")


def load_again(config_path: Path | None, host: str) -> Loaded:
    """Load the configuration again, to replace the current one.

    Raises ConfigError if there is no file, or if the gateway may not serve the new configuration.
    """
    if config_path is None:
        raise ConfigError("there is no file to reload, because the gateway was started without --config")
    loaded = load(config_path)
    # The address stays the same, but the new file may lack the key that it requires.
    with explained(loaded):
        refuse_to_be_open(loaded.config, host)
    warn(loaded)
    return loaded


@contextmanager
def explained(loaded: Loaded) -> Iterator[None]:
    """Add the position in the configuration files to a ConfigError raised in this context."""
    try:
        yield
    except ConfigError as error:
        raise loaded.explained(error) from error


def warn(loaded: Loaded) -> None:
    for warning in loaded.warnings:
        logging.getLogger("unisono.config").warning(warning)


def serve_in_process(
    switch: AppSwitch, order: Serve, listener: socket.socket, read_again: Callable[[], Loaded]
) -> None:
    """Serve in this process."""

    async def started(gateway: Gateway) -> None:
        show(screen_lines(gateway, order.address, order.remarks, order.key_variable))

    async def reload() -> None:
        loaded = await asyncio.to_thread(read_again)
        with explained(loaded):
            await switch.reload(loaded.config)

    GatewayServer(server_config(switch, order.config), switch, started=started, reload=reload).run(sockets=[listener])


def serve_by_workers(order: Serve, listener: socket.socket, read_again: Callable[[], Loaded]) -> None:
    """Serve in worker processes that this process supervises."""
    from unisono.server.supervisor import Supervisor

    def checked() -> Config:
        loaded = read_again()
        # This build finds errors once, before any worker receives the configuration.
        with explained(loaded):
            build(loaded.config, share=order.share)
        return loaded.config

    supervisor = Supervisor(listener, order, read_again=checked, show=show)
    if not asyncio.run(supervisor.run()):
        raise click.ClickException("no worker could start; see the log above for the reason")


def show(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. If the address cannot be used, the command ends with a message."""
    # The name may resolve to ::1 first, which clients of 127.0.0.1 cannot reach.
    host = "127.0.0.1" if host == "localhost" else host
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # `::` means all addresses, so the socket must accept IPv4 clients too.
        is_dual = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
    except socket.gaierror as error:
        raise click.ClickException(
            f"{host} is not an address of this machine ({error.strerror}); choose another --host"
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise click.ClickException(
                f"port {port} is in use on {host}; another gateway may be running there. Choose another --port"
            ) from error
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from error


def address_of(listener: socket.socket, host: str) -> str:
    """Return the URL at which clients on this machine reach the gateway."""
    bound, port = listener.getsockname()[:2]
    if bound == "0.0.0.0":  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    elif bound == "::":
        host = "::1" if listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
