"""Clients for a Redis server, for sentinels or for a cluster, and their addresses.

The clients for commands leave out unused parts of the Redis library. The library's retries, metrics, locks, timeouts
and packing in Python take several times as long as the rest of a command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

from hiredis import pack_command
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection, ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.maint_notifications import MaintNotificationsConfig

from unisono.core.frozen import dataclass
from unisono.errors import ConfigError

Command = tuple[str | bytes | int, ...]


class CommandClient(Redis):
    """Client whose commands have no time limit. Cancelling a command closes its connection."""

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands on one connection, and return one answer for each.

        The answer to a command that the server rejects is the `ResponseError`.
        """
        pool: Any = self.connection_pool
        connection = await pool.get_connection()
        try:
            await connection.send_packed_command([pack_command(cast("Any", command)) for command in commands])
            answers: list[Any] = []
            for name, *_ in commands:
                try:
                    answers.append(await self.parse_response(connection, str(name)))
                except ResponseError as error:
                    answers.append(error)
        except BaseException:
            # Some answers may be unread. A later command on this connection would get them as its own.
            await connection.disconnect(nowait=True)
            raise
        else:
            return answers
        finally:
            await pool.release(connection)


class CommandPool(ConnectionPool):
    """Pool of connections for one event loop."""

    async def get_connection(self, command_name: object = None, *keys: object, **options: object) -> Any:
        connection: Any = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            if connection.is_connected and self._is_outdated(connection):
                await connection.disconnect(nowait=True)
            # If there is data to read, the server has closed the connection, or no command waits for this answer.
            if not connection.is_connected or await connection.can_read():
                await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        self._in_use_connections.remove(connection)
        self._available_connections.append(connection)

    def _is_outdated(self, connection: Any) -> bool:
        return False


class SentinelCommandPool(CommandPool, SentinelConnectionPool):
    """Pool of connections to the primary that the sentinels reported last, for one event loop.

    A former primary accepts writes until the sentinels demote it. Therefore, connections to a former primary are closed
    before they are used again. Otherwise, consecutive commands could go to different servers.
    """

    def _is_outdated(self, connection: Any) -> bool:
        # When the primary changes, the library closes idle connections, but not those in use.
        return self.master_address not in (None, (connection.host, connection.port))


# With a timeout, the library would start a task for each command.
UNTIMED: dict[str, Any] = {"socket_timeout": None}
UNREADABLE = "not a Redis address; use redis://user:password@host:6379/0 and percent-encode / ? # @ : in the password"

# Options of the Redis library that an address may contain. Other options would change the form of the library's answers
# or its retries, on which the store depends.
URL_OPTIONS = frozenset(
    (
        "db",
        "username",
        "password",
        "client_name",
        "health_check_interval",
        "max_connections",
        "socket_timeout",
        "socket_connect_timeout",
        "socket_keepalive",
        "socket_read_size",
    )
)
TLS_OPTIONS = frozenset(
    (
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_ca_data",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_password",
        "ssl_cert_reqs",
        "ssl_check_hostname",
        "ssl_min_version",
        "ssl_ciphers",
        "ssl_include_verify_flags",
        "ssl_exclude_verify_flags",
    )
)


class EpochSentinel(Sentinel):
    """Client of the sentinels; `epoch` is that of the primary reported last."""

    epoch = ""

    def check_master_state(self, state: dict[str, Any], service_name: str) -> bool:
        is_usable = super().check_master_state(state, service_name)
        if is_usable:
            self.epoch = epoch_in(state)
        return is_usable


def epoch_in(state: dict[str, Any]) -> str:
    """Return the epoch in a sentinel's description of a primary; each failover increases it."""
    return str(state.get("config-epoch", ""))


@dataclass(frozen=True, slots=True)
class RedisClients:
    """Clients of one Redis address, with the `options` of their connections.

    `commands` is the client for reads and writes, or None for a cluster. `url` is set only for a standalone server. For
    a Sentinel setup, `sentinel` is the client of the sentinels, and `service` the name of the primary.
    """

    client: Redis | RedisCluster
    options: dict[str, Any]
    commands: CommandClient | None = None
    url: str = ""
    sentinel: EpochSentinel | None = None
    service: str = ""


def open_clients(url: str, timeout_s: float) -> RedisClients:
    """Return the clients of an address, not yet connected.

    `timeout_s` limits connecting, and each read of the Redis library's own `client`, in seconds. Raises `ConfigError`
    for an invalid address.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 3,
        # With these notifications, the library may write to a connection that the server has closed meanwhile.
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
    scheme, _, rest = url.replace("valkey", "redis", 1).partition("://")
    given = url_options(scheme, rest)
    if scheme in ("redis", "rediss", "unix"):
        standalone_url = f"{scheme}://{rest}"
        try:
            if scheme != "unix":
                check_database(rest)
            pool = CommandPool.from_url(standalone_url, **options | UNTIMED)
            return RedisClients(
                Redis.from_url(standalone_url, **options),
                options,
                cast("CommandClient", CommandClient.from_pool(pool)),
                url=standalone_url,
            )
        except ValueError:
            # The library's message quotes the unparsable part, which may contain half a password.
            raise ConfigError(f"store.url: {UNREADABLE}") from None
    base, _, way = scheme.partition("+")
    if base not in ("redis", "rediss") or way not in ("sentinel", "cluster"):
        raise ConfigError("store.url: unknown scheme; use redis://, redis+sentinel:// or redis+cluster://")
    rest = rest.partition("?")[0]
    nodes, service, db = addresses(rest, 26379 if way == "sentinel" else 6379)
    if way == "cluster" and (db or service not in ("", "0")):
        raise ConfigError("store.url: a cluster has no databases and no service name; remove the part after the hosts")
    options |= given | credentials(rest) | ({"ssl": True} if base == "rediss" else {})
    if way == "cluster":
        return RedisClients(RedisCluster(startup_nodes=[ClusterNode(*node) for node in nodes], **options), options)
    if not service:
        raise ConfigError("store.url: redis+sentinel:// needs a service name, as in redis+sentinel://host:26379/name")
    asking = {key: options[key] for key in ("socket_timeout", "socket_connect_timeout", "retry")}
    make: Any = EpochSentinel
    sentinel = make(nodes, sentinel_kwargs=asking, **options, db=db)
    commands = sentinel.master_for(service, CommandClient, SentinelCommandPool, **UNTIMED)
    return RedisClients(sentinel.master_for(service), options, commands, sentinel=sentinel, service=service)


def url_options(scheme: str, rest: str) -> dict[str, Any]:
    """Return the options in the query of an address; `rest` is the address after `//`.

    Raises `ConfigError` for an option that is not supported, and for an invalid value.
    """
    query = rest.partition("?")[2].partition("#")[0]
    if "@" in query:
        # The question mark belongs to the password, so the address has no query.
        raise ConfigError(f"store.url: {UNREADABLE}")
    supported = URL_OPTIONS if "+" not in scheme else URL_OPTIONS - {"db"}
    for name in parse_qs(query, keep_blank_values=True):
        if name in TLS_OPTIONS and not scheme.startswith("rediss"):
            raise ConfigError(f"store.url: the option `{name}` needs TLS; use rediss:// instead of redis://")
        if name not in supported | TLS_OPTIONS:
            known = ", ".join(sorted(supported | TLS_OPTIONS))
            raise ConfigError(f"store.url: unsupported option `{name[:64]}`; remove it, or use one of: {known}")
    try:
        return dict(parse_url(f"redis://?{query}"))
    except ValueError as error:
        # The message contains the name of the option, but not its value.
        raise ConfigError(f"store.url: {error}") from None


def check_database(rest: str) -> None:
    """Check the path of a standalone server; `rest` is the address after `//`.

    The Redis library ignores a path that is not a number. Raises `ConfigError` for such a path.
    """
    path = unquote(urlsplit(f"//{rest}").path).strip("/")
    if path and not (path.isascii() and path.isdigit()):
        raise ConfigError("store.url: the path must be a database number, as in redis://host:6379/0")


def addresses(rest: str, port: int) -> tuple[list[tuple[str, int]], str, int]:
    """Return the hosts with ports, the service name, and the database number.

    `rest` is the address after `//`, and `port` the default port. The first part of the path is the service name, or
    empty if it is missing. The second part is the database number, or 0 if it is missing. Raises `ConfigError` for an
    invalid host, port or database number.
    """
    netloc, _, path = rest.partition("/")
    nodes = []
    for address in netloc.rpartition("@")[2].split(","):
        try:
            parsed = urlsplit(f"//{address}")
            host, number = parsed.hostname, parsed.port or port
        except ValueError:
            raise ConfigError(f"store.url: {UNREADABLE}") from None
        if not host:
            raise ConfigError("store.url: the host is missing; add it, as in redis://host:6379/0")
        nodes.append((host, number))
    service, _, db = path.partition("/")
    if db and not db.isdigit():
        raise ConfigError("store.url: the part after the service name must be a database number, as in /name/0")
    return nodes, unquote(service), int(db or 0)


def credentials(rest: str) -> dict[str, str]:
    user, _, password = rest.partition("/")[0].rpartition("@")[0].partition(":")
    return {key: unquote(value) for key, value in (("username", user), ("password", password)) if value}


def replicas_in(role: Any) -> int:
    """Return the number of connected replicas in an answer to ROLE.

    The number is 0 for an error, and for a server that is not a primary.
    """
    return len(role[2]) if isinstance(role, list) and role[0] in (b"master", "master") else 0


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
