"""The way to a Redis or Valkey server: standalone, behind Sentinel, or a cluster; short deadlines, no blind retry.

redis-py's own defaults would repeat a write after a stall and hold a caller for a minute. Here every operation has one
deadline, and ends in `StoreUnavailable` when it is missed; whether to repeat it is for those to say who know that it
may be repeated.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import TimeoutError as LateAnswer
from redis.maint_notifications import MaintNotificationsConfig

from unisono.errors import ConfigError, StoreUnavailable, UnisonoError
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

MAX_REDIRECTIONS = 3

# A former primary has no replica until the sentinels demote it, and a failover may reach it again: what it acknowledges
# alone is lost. With down-after-milliseconds 5000 that takes up to 20 seconds.
REPLICA_GRACE_S = 30.0

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
    """Client of one server or cluster. `replicas` is how many replicas must acknowledge a write; None means one where
    the primary has a connected replica, or had one within REPLICA_GRACE_S."""

    def __init__(self, url: str, deadline_s: float, replicas: int | None) -> None:
        self._deadline_s = deadline_s
        self._replicas = replicas
        # Until when a write needs a replica (time.monotonic), by primary; without a cluster the only name is empty.
        self._copies_until: dict[str, float] = {}
        self._sentinel: Sentinel | None = None
        self._service = ""
        self._standalone_url = ""
        self._options: dict[str, Any] = {}
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
        self._options = options
        scheme, _, rest = url.replace("valkey", "redis", 1).partition("://")
        if scheme in ("redis", "rediss", "unix"):
            self._standalone_url = f"{scheme}://{rest}"
            try:
                client: Redis = Redis.from_url(self._standalone_url, **options)
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
        self._service = service
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
        except UnisonoError:
            raise
        except Exception as error:
            # A broken connection fails with errors of many kinds: RuntimeError by uvloop, AttributeError and
            # IndexError by redis-py. Only calls of the library stand in this context, so each of them means the same.
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
        client = self._client
        if isinstance(client, RedisCluster) and client.get_default_node() is None:
            await client.initialize()
        for _ in range(MAX_REDIRECTIONS):
            waits = self._waits(written)
            if len(commands) == 1 and not waits:
                return [await client.execute_command(*commands[0])]
            try:
                return await self._send_together(commands, waits)
            except MovedError as error:
                # All of it is sent again, as WAIT has to follow the writes on their own connection. Left to itself, the
                # library would redirect a write alone, and the WAIT of another node would acknowledge it.
                assert isinstance(client, RedisCluster)
                await client.nodes_manager.move_slot(error)
        raise StoreUnavailable("the store cannot be reached")

    async def _send_together(self, commands: Sequence[Command], waits: Mapping[str, int]) -> list[Any]:
        pipe: Any = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        for name, count in waits.items():
            node = self._client.get_node(node_name=name) if isinstance(self._client, RedisCluster) else None
            target = {} if node is None else {"target_nodes": node}
            # On the same connection as the writes: WAIT covers only its own connection. So is ROLE: another connection
            # may lead to the primary after a failover.
            pipe.execute_command("WAIT", count, int(self._deadline_s * 600), **target)
            pipe.execute_command("ROLE", **target)
        redirection = {"allow_redirections": not waits} if isinstance(self._client, RedisCluster) else {}
        answers: list[Any] = await pipe.execute(raise_on_error=False, **redirection)
        values, checks = answers[: len(commands)], answers[len(commands) :]
        for value in values:
            if isinstance(value, Exception):
                if isinstance(self._client, RedisCluster) and not isinstance(value, MovedError | NoScriptError):
                    # Other than for a single command, the library does not read the slots again by itself, and the
                    # client would stay with a primary that is gone. Its public `aclose` would close every connection.
                    self._client._initialize = True
                raise value
        for (name, count), reached, role in zip(waits.items(), checks[::2], checks[1::2], strict=True):
            self._check_copied(name, count, reached, role)
        return values

    def _waits(self, written: Sequence[str]) -> dict[str, int]:
        """How many replicas must acknowledge a write, by the primaries of the keys."""
        if not written or self._replicas == 0:
            return {}
        if self._replicas is None and not self._copies_until:
            # Nothing was looked at yet.
            return {}
        names = {""}
        if isinstance(self._client, RedisCluster):
            names = {node.name for key in written if (node := self._client.get_node_from_key(key))}
        return {name: self._replicas or 1 for name in sorted(names) if self._replicas or self._needs_copy(name)}

    def _needs_copy(self, name: str) -> bool:
        """Whether the default asks for a copy: the primary has a replica or had one within REPLICA_GRACE_S."""
        now_s = time.monotonic()
        return now_s < self._copies_until.setdefault(name, now_s + REPLICA_GRACE_S)

    def _check_copied(self, name: str, count: int, reached: Any, role: Any) -> None:
        """Raise StoreUnavailable for a write that too few replicas have."""
        if isinstance(reached, Exception):
            raise reached
        if self._replicas is None:
            # The default asks for a copy where there can be one. A server that hides its role has none that is known.
            if reached or _replicas_in(role):
                self._copies_until[name] = time.monotonic() + REPLICA_GRACE_S
            elif not self._needs_copy(name):
                return
        if reached < count:
            raise StoreUnavailable("the store could not copy a write to its replicas in time")

    async def check_replicas(self) -> None:
        """Look again which primaries have replicas, if the default depends on it."""
        if self._replicas is None:
            # One node in trouble is no trouble of the others: what was known of them stays.
            with suppress(StoreUnavailable):
                found, known = await self.connected_replicas(), self._copies_until
                # A primary that a failover made since was a replica itself, and its former primary may return.
                grace_s = time.monotonic() + REPLICA_GRACE_S
                unknown_s = grace_s if known else 0.0
                self._copies_until = {
                    name: grace_s if count else known.get(name, unknown_s) for name, count in found.items()
                }

    async def connected_replicas(self) -> dict[str, int]:
        """The number of connected replicas by primary."""
        if not isinstance(self._client, RedisCluster):
            return {"": await self._replicas_of({})}
        async with self._bounded():
            await self._client.initialize()
        return {node.name: await self._replicas_of({"target_nodes": node}) for node in self._client.get_primaries()}

    async def _replicas_of(self, target: dict[str, Any]) -> int:
        async with self._bounded():
            try:
                return _replicas_in(await self._client.execute_command("ROLE", **target))
            except ResponseError as error:
                # A hosted server may hide it (NOPERM) or not have the command.
                return _replicas_in(error)

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

    async def current_history(self, key: str) -> str:
        """Look up the primary of `key` and return its replication id, empty where the server does not permit INFO. Uses
        no pooled connection. Raises StoreUnavailable while the sentinels do not agree."""
        async with self._bounded():
            async with await self._found_anew(key) as primary:
                try:
                    found = await primary.info("replication")
                except NoPermissionError:
                    return ""
            return str(found["master_replid"])

    async def _found_anew(self, key: str) -> Redis:
        if self._sentinel is not None:
            host, port = await self._agreed_primary(self._sentinel)
            return Redis(host=host, port=port, **self._options)
        if isinstance(self._client, RedisCluster):
            # Slots are read anew too: those in hand may be from before a failover.
            await self._client.nodes_manager.initialize()
            node = self._client.get_node_from_key(key)
            if node is None:
                raise StoreUnavailable("the store cannot be reached")
            return Redis(host=node.host, port=int(node.port), **self._options)
        return Redis.from_url(self._standalone_url, **self._options)

    async def _agreed_primary(self, sentinel: Sentinel) -> tuple[str, int]:
        asked = (one.sentinel_get_master_addr_by_name(self._service) for one in sentinel.sentinels)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found: list[tuple[Any, ...]] = [tuple(answer) for answer in answers if isinstance(answer, tuple | list)]
        if len(set(found)) != 1 or 2 * len(found) <= len(answers):
            raise StoreUnavailable("the store fails over at the moment")
        host, port = found[0]
        return _text(host), int(port)

    async def pubsub(self) -> PubSub:
        """One connection that listens, to any node: what is published reaches all of them."""
        if isinstance(self._client, RedisCluster):
            await self._client.initialize()
            return self._client.pubsub(node=self._client.get_random_node())
        return self._client.pubsub()

    async def aclose(self) -> None:
        # A connection that is broken already may fail to close.
        with suppress(Exception):
            await self._client.aclose()
        if self._sentinel is not None:
            with suppress(Exception):
                await self._sentinel.aclose()


def _replicas_in(role: Any) -> int:
    """The number of connected replicas in the answer to ROLE; 0 for an error and for a server that is no primary."""
    return len(role[2]) if isinstance(role, list) and role[0] in (b"master", "master") else 0


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
