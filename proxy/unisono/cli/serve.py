"""`unisono serve`: from a configuration to a listening gateway, and a clean end on Ctrl-C or SIGTERM."""

from __future__ import annotations

import errno
import gc
import json
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from urllib.parse import unquote

import click
import uvicorn
from pydantic import SecretStr

from unisono.app import Gateway, build
from unisono.cli.listener import connections
from unisono.cli.setup import MASTER_KEY_VARIABLE, prepared
from unisono.config import Config
from unisono.errors import ConfigError
from unisono.observe.logs import start_logging

PROBE_PATIENCE_S = 3.0
"""How long the start-up screen waits to tell the state of the backends, in seconds."""
BACKLOG = 2048
KEEP_ALIVE_S = 75
PING_EVERY_S = 20.0
"""Between two questions to an open WebSocket whether anybody is there."""
PONG_WITHIN_S = 60.0
"""For the answer. A client that is slow to read what it was sent answers late."""

STATES = {
    "ready": "ready",
    "unknown": "starting",
    "failing": "not reachable now, will be tried again",
    "resting": "failing, rests for a while",
    "unfit": "not fit for use; `unisono check` says why",
}


def serve(config_path: Path | None, host: str, port: int) -> None:
    """Serve until told to stop. Ends the command with a sentence when it cannot start."""
    try:
        ready = prepared(config_path)
        config = ready.loaded.config
        refuse_to_be_open(config, host)
        app = build(config)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    listener = listen(host, port)
    start_logging(config.unisono.log_level, secrets_of(config))
    for warning in ready.loaded.warnings:
        logging.getLogger("unisono.config").warning(warning)
    address = address_of(listener, host)
    server = Server(server_config(app, config), app.state.gateway, address, ready.remarks)
    server.run(sockets=[listener])
    click.echo("Stopped.")


def server_config(app: object, config: Config) -> uvicorn.Config:
    """How the application is served."""
    settings = config.unisono
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop="uvloop",
        http=connections(settings.header_timeout_s),
        ws="websockets-sansio",
        ws_max_size=settings.max_body_bytes,
        ws_ping_interval=PING_EVERY_S,
        ws_ping_timeout=PONG_WITHIN_S,
        # As for bodies: nothing compressed comes in, so nothing can unfold into more than it seemed.
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=settings.max_connections,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
    )


def is_loopback(host: str) -> bool:
    """Whether listening on `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_to_be_open(config: Config, host: str) -> None:
    """Raise ConfigError for an address others can reach while there is no key."""
    if config.general_settings.master_key is None and not is_loopback(host):
        raise ConfigError(
            f"general_settings.master_key: without one, everybody who can reach {host} could use your models. Set a "
            f"key (`master_key: os.environ/{MASTER_KEY_VARIABLE}`), or listen on 127.0.0.1"
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Ends the command with a sentence when the address is taken or not ours."""
    # A name may mean ::1 first, where clients that say 127.0.0.1 find nobody.
    host = "127.0.0.1" if host == "localhost" else host
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise click.ClickException(f"{host} is not an address of this machine ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise click.ClickException(
                f"port {port} is in use on {host}; another gateway may be running there. Choose one with --port"
            ) from error
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from error


def address_of(listener: socket.socket, host: str) -> str:
    """The URL clients on this machine use."""
    port = listener.getsockname()[1]
    if host in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def secrets_of(config: Config) -> Iterator[str]:
    """Every secret of a configuration, for the logs to leave out."""
    held: list[SecretStr | None] = [config.general_settings.master_key, config.unisono.salt_key, config.store.url]
    held += [entry.litellm_params.api_key for entry in config.model_list]
    yield from (secret.get_secret_value() for secret in held if secret is not None)
    if config.store.url is not None:
        yield from passwords_of(config.store.url.get_secret_value())


def passwords_of(url: str) -> Iterator[str]:
    """The password in a store's address, as it is written there and as it is meant."""
    credentials = url.partition("://")[2].rpartition("@")[0]
    written = [credentials.partition(":")[2]]
    written += [pair.partition("=")[2] for pair in url.partition("?")[2].split("&") if pair.startswith("password=")]
    for password in filter(None, written):
        yield from {password, unquote(password)}


class Server(uvicorn.Server):
    """uvicorn's server, with a start-up screen, and an end that is an ordinary one: the first signal lets running
    answers finish within the grace period, the second cuts them, and either way the process exits by itself."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, address: str, remarks: Sequence[str]) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._address = address
        self._remarks = remarks

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self._gateway.pool.settled(PROBE_PATIENCE_S)
        # What a start leaves lives as long as the process; going through it again and again halts every stream for
        # tens of milliseconds.
        gc.collect()
        gc.freeze()
        if not self.should_exit:
            for line in screen(self._gateway, self._address, self._remarks):
                click.echo(line)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            for task in self.server_state.tasks:
                task.cancel()
        self.should_exit = True


def screen(gateway: Gateway, address: str, remarks: Sequence[str]) -> list[str]:
    """What an operator reads first: what is served, where, by which backends, and one line that works."""
    lines = [*remarks, ""] if remarks else []
    lines += [f"Unisono listens on {address}/v1", ""]
    states = {status.name: status for status in gateway.pool.status()}
    for model, deployments in gateway.pool.members().items():
        lines.append(f"  {model}")
        for deployment in deployments:
            status = states[deployment.name]
            lines.append(f"    {deployment.name}: {STATES[status.state]}")
    names = [name for name, _ in gateway.catalogue.listed()]
    if names:
        lines += ["", "Try it:", "", f"  {curl_line(address, names[0], keyed=_keyed(gateway))}"]
    lines += ["", "Ctrl-C stops it."]
    return lines


def _keyed(gateway: Gateway) -> bool:
    return gateway.config.general_settings.master_key is not None


def curl_line(address: str, model: str, *, keyed: bool) -> str:
    """One command that gets an answer. The key stays in the caller's shell."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    key = f' -H "Authorization: Bearer ${MASTER_KEY_VARIABLE}"' if keyed else ""
    quoted = body.replace("'", "'\\''")
    return f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"
