"""The way to a Redis or Valkey server: standalone, behind Sentinel, or a cluster; short deadlines, no blind retry.

redis-py's own defaults would repeat a write after a stall and hold a caller for a minute. Here every operation has one
deadline, and ends in `StoreUnavailable` when it is missed; whether to repeat it is for those to say who know that it
may be repeated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as LateAnswer
from redis.maint_notifications import MaintNotificationsConfig

from unisono.errors import ConfigError, StoreUnavailable
from unisono.store.redis.scripts import Script
from unisono.store.refusals import refusal

AT_ONCE = 64
"""Operations on the way at the same time; further ones wait within their own deadline."""

WRITES_TOGETHER = 256
"""Far fewer than a server takes within the shortest of deadlines, and enough that the way there does not count."""

UNREADABLE = (
    "not an address; write redis://user:password@host:6379/0, with signs like / # @ : in a password percent-encoded"
)

Command = tuple[str | bytes | int, ...]

TROUBLE: tuple[tuple[type[Exception], str], ...] = (
    (OutOfMemoryError, "the store is full"),
    (ReadOnlyError, "the store takes no writes at the moment"),
    (TimeoutError, "the store did not answer in time"),
    (LateAnswer, "the store did not answer in time"),
    (Exception, "the store cannot be reached"),
)
"""What a caller is told; the first row that fits. The error itself is the cause, for the log."""

IN_A_SCRIPT = re.compile(r"@user_script: \d+: -(OOM|READONLY) ")
REFUSED: Mapping[str, type[Exception]] = {"OOM": OutOfMemoryError, "READONLY": ReadOnlyError}
"""Redis 6.2 wraps what a script's command is refused with in an error of its own, which the library does not know."""


def told(error: Exception) -> str:
    """The words for what an operation failed with."""
    inner = IN_A_SCRIPT.search(str(error))
    failed = REFUSED[inner[1]] if inner else type(error)
    return next(words for kind, words in TROUBLE if issubclass(failed, kind))


class Link:
    """`replicas` is how many replicas must have a write before it counts as done."""

    def __init__(self, url: str, deadline_s: float, replicas: int) -> None:
        self._deadline_s = deadline_s
        self._replicas = replicas
        self._sentinel: Sentinel | None = None
        self._client = self._make(url)
        self._places = asyncio.Semaphore(AT_ONCE)

    def _make(self, url: str) -> Redis | RedisCluster:
        options: dict[str, Any] = {
            # A little less than the deadline, so that a stall ends where the library can close the connection itself.
            "socket_timeout": self._deadline_s * 0.8,
            "socket_connect_timeout": self._deadline_s * 0.8,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 3,
            # With them the library takes a connection the server has closed meanwhile for one that it may write to.
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        }
        scheme, _, rest = url.replace("valkey", "redis", 1).partition("://")
        if scheme in ("redis", "rediss", "unix"):
            try:
                client: Redis = Redis.from_url(f"{scheme}://{rest}", **options)
            except ValueError:
                # The library's words quote the part it stumbled over, which may be half a password.
                raise ConfigError(f"store.url: {UNREADABLE}") from None
            return client
        base, _, way = scheme.partition("+")
        if base not in ("redis", "rediss") or way not in ("sentinel", "cluster"):
            raise ConfigError("store.url: not a scheme of Redis; write redis://, redis+sentinel:// or redis+cluster://")
        nodes, service, db = _addresses(rest, 26379 if way == "sentinel" else 6379)
        options |= _credentials(rest) | ({"ssl": True} if base == "rediss" else {})
        if way == "cluster":
            return RedisCluster(startup_nodes=[ClusterNode(*node) for node in nodes], **options)
        if not service:
            raise ConfigError("store.url: redis+sentinel:// needs the service's name: redis+sentinel://host:26379/name")
        asking = {key: options[key] for key in ("socket_timeout", "socket_connect_timeout", "retry")}
        make: Any = Sentinel
        self._sentinel = make(nodes, sentinel_kwargs=asking, **options, db=db)
        found: Redis = make.master_for(self._sentinel, service)
        return found

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(self._deadline_s), self._places:
                yield
        except (RedisError, RedisClusterException, OSError) as error:
            raise StoreUnavailable(told(error)) from error
        finally:
            # The library may swallow a cancellation that comes while an answer does.
            if task and task.cancelling() > cancelled:
                raise asyncio.CancelledError

    async def act(self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run a script and return its value. Raises what it refuses with, or `StoreUnavailable`."""
        tail = (len(keys), *keys, *args)
        async with self._bounded():
            try:
                (answer,) = await self._send([("EVALSHA", script.sha, *tail)], keys[:1])
            except NoScriptError:
                (answer,) = await self._send([("EVAL", script.text, *tail)], keys[:1])
        code = bytes(answer[0]).decode()
        if code != "ok":
            raise refusal(code)
        return answer[1] if len(answer) > 1 else None

    async def ask(self, *commands: Command) -> list[Any]:
        """Run reads together, and return their answers. The second part of each is its key."""
        async with self._bounded():
            return await self._send(commands, ())

    async def put(self, *commands: Command) -> None:
        """Run writes that may be repeated, so many together as fit one deadline. The second part of each is its
        key."""
        for start in range(0, len(commands), WRITES_TOGETHER):
            together = commands[start : start + WRITES_TOGETHER]
            async with self._bounded():
                await self._send(together, [str(command[1]) for command in together])

    async def _send(self, commands: Sequence[Command], written: Sequence[str]) -> list[Any]:
        if len(commands) == 1 and not (self._replicas and written):
            return [await self._client.execute_command(*commands[0])]
        if isinstance(self._client, RedisCluster) and self._client.get_default_node() is None:
            await self._client.initialize()
        pipe: Any = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        waits = self._waits(written) if self._replicas else []
        for target in waits:
            # On the same connection as the writes: WAIT speaks only for its own connection.
            pipe.execute_command("WAIT", self._replicas, int(self._deadline_s * 600), **target)
        answers: list[Any] = await pipe.execute(raise_on_error=True)
        if any(reached < self._replicas for reached in answers[len(commands) :]):
            raise StoreUnavailable("the store could not copy a write to its replicas in time")
        return answers[: len(commands)]

    def _waits(self, written: Sequence[str]) -> list[dict[str, Any]]:
        if not isinstance(self._client, RedisCluster):
            return [{}] if written else []
        nodes = {node.name: node for key in written if (node := self._client.get_node_from_key(key))}
        return [{"target_nodes": node} for node in nodes.values()]

    async def settings(self, *names: str) -> list[Mapping[str, str]]:
        """The named settings of every primary; those it does not tell are missing."""
        if not isinstance(self._client, RedisCluster):
            return [await self._settings_of(names, {})]
        async with self._bounded():
            await self._client.initialize()
        return [await self._settings_of(names, {"target_nodes": node}) for node in self._client.get_primaries()]

    async def _settings_of(self, names: Sequence[str], target: dict[str, Any]) -> Mapping[str, str]:
        found: dict[Any, Any] = {}
        for name in names:
            async with self._bounded():
                try:
                    found |= await self._client.config_get(name, **target)
                except NoPermissionError:
                    # A hosted server may keep its settings to itself; one that does not answer is another thing.
                    continue
                except ResponseError as error:
                    if not str(error).lower().startswith("unknown command"):
                        raise
        return {_text(key): _text(value) for key, value in found.items()}

    async def replicas_there(self) -> int:
        async with self._bounded():
            target = {"target_nodes": RedisCluster.PRIMARIES} if isinstance(self._client, RedisCluster) else {}
            told = await self._client.info("replication", **target)
        each = told.values() if "connected_slaves" not in told else [told]
        return min((int(one.get("connected_slaves", 0)) for one in each), default=0)

    async def pubsub(self) -> PubSub:
        """One connection that listens, to any node: what is published reaches all of them."""
        if isinstance(self._client, RedisCluster):
            await self._client.initialize()
            return self._client.pubsub(node=self._client.get_random_node())
        return self._client.pubsub()

    async def aclose(self) -> None:
        await self._client.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _addresses(rest: str, port: int) -> tuple[list[tuple[str, int]], str, int]:
    """Hosts, the first part of the path, and the database after it."""
    netloc, _, path = rest.partition("/")
    nodes = []
    for address in netloc.rpartition("@")[2].split(","):
        try:
            parsed = urlsplit(f"//{address}")
            host, number = parsed.hostname, parsed.port or port
        except ValueError:
            raise ConfigError(f"store.url: {UNREADABLE}") from None
        if not host:
            raise ConfigError("store.url: a host is missing")
        nodes.append((host, number))
    service, _, db = path.partition("/")
    if db and not db.isdigit():
        raise ConfigError("store.url: what follows the service's name is the number of a database")
    return nodes, unquote(service), int(db or 0)


def _credentials(rest: str) -> dict[str, str]:
    user, _, password = rest.partition("/")[0].rpartition("@")[0].partition(":")
    return {key: unquote(value) for key, value in (("username", user), ("password", password)) if value}
