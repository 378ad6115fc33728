"""Addresses of a Redis server, of sentinels or of a cluster, and the clients for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from unisono.core.frozen import dataclass
from unisono.errors import ConfigError, StoreUnavailable
from unisono.store.redis.command_client import CommandClient, CommandPool, SentinelCommandPool

# With a timeout, the library would start a task for each command.
UNTIMED: dict[str, Any] = {"socket_timeout": None}
UNREADABLE = "not a Redis address; use redis://user:password@host:6379/0 and percent-encode / # @ : in the password"


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
    sentinel: Sentinel | None = None
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
    if scheme in ("redis", "rediss", "unix"):
        standalone_url = f"{scheme}://{rest}"
        try:
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
    nodes, service, db = addresses(rest, 26379 if way == "sentinel" else 6379)
    options |= credentials(rest) | ({"ssl": True} if base == "rediss" else {})
    if way == "cluster":
        return RedisClients(RedisCluster(startup_nodes=[ClusterNode(*node) for node in nodes], **options), options)
    if not service:
        raise ConfigError("store.url: redis+sentinel:// needs a service name, as in redis+sentinel://host:26379/name")
    asking = {key: options[key] for key in ("socket_timeout", "socket_connect_timeout", "retry")}
    make: Any = Sentinel
    sentinel = make(nodes, sentinel_kwargs=asking, **options, db=db)
    commands = sentinel.master_for(service, CommandClient, SentinelCommandPool, **UNTIMED)
    return RedisClients(sentinel.master_for(service), options, commands, sentinel=sentinel, service=service)


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


async def majority_address(queries: Sequence[Awaitable[Any]], within_s: float) -> tuple[str, int]:
    """Return the address of the primary, as reported by more than half of the queries.

    Raises `StoreUnavailable` if two queries report different addresses, or if too few queries have succeeded after
    `within_s` seconds.
    """
    tasks = [asyncio.ensure_future(one) for one in queries]
    try:
        await asyncio.wait(tasks, timeout=within_s)
    finally:
        for task in tasks:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    found = [tuple(answer) for answer in answers if isinstance(answer, tuple | list)]
    if len(set(found)) > 1:
        raise StoreUnavailable("a failover of the store is in progress; try again")
    if 2 * len(found) <= len(answers):
        raise StoreUnavailable(
            f"no majority of the store's servers agreed on the primary within {within_s:g} s; "
            "try again, check the servers, or raise `store.deadline_s`"
        )
    host, port = found[0]
    return text(host), int(port)


async def primary_seen_by(client: RedisCluster, node: ClusterNode, key: str) -> tuple[str, int] | None:
    """Return the address of the primary of `key` according to one cluster node.

    None if this node knows no primary for the key.
    """
    slot = client.keyslot(key)
    seen: Any = await client.cluster_slots(target_nodes=node)
    for (first, last), servers in seen.items():
        if first <= slot <= last:
            host, port = servers["primary"]
            # The host is empty if the node does not know its own address.
            return text(host) or node.host, int(port)
    return None


def replicas_in(role: Any) -> int:
    """Return the number of connected replicas in an answer to ROLE.

    The number is 0 for an error, and for a server that is not a primary.
    """
    return len(role[2]) if isinstance(role, list) and role[0] in (b"master", "master") else 0


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
