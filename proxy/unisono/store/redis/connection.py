"""Connection to a Redis or Valkey server, Sentinel setup or cluster, with short deadlines.

Every operation has one deadline and raises `StoreUnavailable` when it is exceeded. redis-py's defaults would repeat a
write after a stall and block for a minute. Here callers repeat operations, and only idempotent ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.exceptions import ClusterDownError, MovedError, NoPermissionError, NoScriptError, ResponseError

from unisono.errors import StoreUnavailable, UnisonoError
from unisono.store.redis.address import open_clients
from unisono.store.redis.primary import majority_address, primary_seen_by, replicas_in, text
from unisono.store.redis.scripts import Script
from unisono.store.redis.trouble import NO_NODE, message_of
from unisono.store.write_errors import refusal

AT_ONCE = 64  # maximum concurrent operations; further ones wait within their own deadline

# Writes per round trip: few enough for the shortest deadline, enough to hide latency.
WRITES_PER_ROUND_TRIP = 256

Command = tuple[str | bytes | int, ...]

MAX_REDIRECTIONS = 3

# A former primary has no replica until the sentinels demote it, and a failover may reach it again: writes that it alone
# acknowledged are lost. With down-after-milliseconds 5000 that takes up to 20 seconds.
REPLICA_GRACE_S = 30.0


class Link:
    """Client of one server or cluster; `replicas` must acknowledge each write.

    None means one replica if the primary has one connected, or had one within REPLICA_GRACE_S.
    """

    def __init__(self, url: str, deadline_s: float, replicas: int | None) -> None:
        self._deadline_s = deadline_s
        self._replicas = replicas
        # Time (time.monotonic) until which writes need a replica, by primary; the key is empty without a cluster.
        self._copies_until: dict[str, float] = {}
        # Scripts that the server has loaded. A promoted one has none, and a rejected script wastes the WAIT time.
        self._loaded: set[str] = set()
        # Cluster node whose failure requires reading the slots again: empty if unknown, None if none failed.
        self._failed_node: str | None = None
        # Slightly less than the deadline, so that the library itself can close a stalled connection.
        self._server = open_clients(url, deadline_s * 0.8)
        self._client = self._server.client
        self._connection_slots = asyncio.Semaphore(AT_ONCE)

    @property
    def is_cluster(self) -> bool:
        """True if the keys of one script must be in one hash slot."""
        return isinstance(self._client, RedisCluster)

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(self._deadline_s), self._connection_slots:
                yield
        except UnisonoError:
            raise
        except Exception as error:
            # Only library calls run here. Broken connections raise RuntimeError (uvloop), AttributeError, IndexError.
            self._loaded.clear()
            raise StoreUnavailable(message_of(error)) from error
        finally:
            # The library may swallow a cancellation that coincides with an answer.
            if task and task.cancelling() > cancelled:
                raise asyncio.CancelledError

    async def act(self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run a script and return its value. Raises its refusal, or `StoreUnavailable`."""
        tail = (len(keys), *keys, *args)
        written = () if script.is_read else keys[:1]
        async with self._bounded():
            answer = None
            if script.sha in self._loaded:
                with suppress(NoScriptError):
                    (answer,) = await self._send([("EVALSHA", script.sha, *tail)], written)
            if answer is None:
                (answer,) = await self._send([("EVAL", script.text, *tail)], written)
                self._loaded.add(script.sha)
        code = bytes(answer[0]).decode()
        if code != "ok":
            raise refusal(code)
        return answer[1] if len(answer) > 1 else None

    async def read(self, *commands: Command) -> list[Any]:
        """Run reads together and return their answers. The second part of each command is its key."""
        async with self._bounded():
            return await self._send(commands, ())

    async def write(self, *commands: Command) -> None:
        """Run idempotent writes in batches that fit one deadline.

        A command's second part is its key.
        """
        for start in range(0, len(commands), WRITES_PER_ROUND_TRIP):
            together = commands[start : start + WRITES_PER_ROUND_TRIP]
            async with self._bounded():
                await self._send(together, [str(command[1]) for command in together])

    async def _send(self, commands: Sequence[Command], written: Sequence[str]) -> list[Any]:
        if isinstance(self._client, RedisCluster):
            await self._read_slots(self._client)
        if written and self._replicas is None and not self._copies_until:
            await self._refresh_replicas()
        for _ in range(MAX_REDIRECTIONS):
            waits = self._waits(written)
            if waits:
                try:
                    return await self._send_copied(commands, written, waits)
                except MovedError as error:
                    # Everything is sent again, as WAIT must follow the writes on their own connection.
                    if not isinstance(self._client, RedisCluster):
                        raise
                    await self._client.nodes_manager.move_slot(error)
                    continue
            values = await self._send_uncopied(commands)
            # The library follows redirections itself, perhaps to a primary that has replicas: then send again.
            if not self._waits(written):
                return values
        raise StoreUnavailable("the store cluster redirected every attempt to write; its slots are being moved")

    async def _read_slots(self, client: RedisCluster) -> None:
        await client.initialize()
        if self._failed_node is not None:
            await client.nodes_manager.initialize(last_failed_node_name=self._failed_node)
            self._failed_node = None

    async def _send_uncopied(self, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            return [await self._client.execute_command(*commands[0])]
        pipe: Any = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        values = await self._run(pipe, "")
        _raise_first(values)
        return values

    async def _send_copied(
        self, commands: Sequence[Command], written: Sequence[str], waits: Mapping[str, int]
    ) -> list[Any]:
        """Run writes, each on the node to which its WAIT is sent.

        Raises MovedError if a slot has moved to another node; the redirection is not followed.
        """
        client = self._client
        pipe: Any = client.pipeline(transaction=False)
        targets: dict[str, dict[str, Any]] = {name: {} for name in waits}
        if isinstance(client, RedisCluster):
            # The library would choose the node when it sends, and may have read other slots by then.
            nodes = [_node_of(client, key) for key in written]
            targets = {node.name: {"target_nodes": node} for node in nodes}
            for command, node in zip(commands, nodes, strict=True):
                pipe.execute_command(*command, **targets[node.name])
        else:
            for command in commands:
                pipe.execute_command(*command)
        for name, count in waits.items():
            # On the same connection as the writes: WAIT covers only its own connection. ROLE must use it too: after a
            # failover another connection may lead to the new primary.
            pipe.execute_command("WAIT", count, int(self._deadline_s * 600), **targets[name])
            pipe.execute_command("ROLE", **targets[name])
        options = {"allow_redirections": False} if isinstance(client, RedisCluster) else {}
        answers = await self._run(pipe, next(iter(waits)) if len(waits) == 1 else "", **options)
        values, checks = answers[: len(commands)], answers[len(commands) :]
        _raise_first(values)
        for (name, count), reached, role in zip(waits.items(), checks[::2], checks[1::2], strict=True):
            self._check_copied(name, count, reached, role)
        return values

    async def _run(self, pipe: Any, node: str, **options: bool) -> list[Any]:
        """Return answers and errors of a pipeline; a failed `node` marks the slots as outdated."""
        # The library does this for single commands only; without it the client would stay with a lost primary.
        try:
            answers: list[Any] = await pipe.execute(raise_on_error=False, **options)
        except BaseException:
            self._failed_node = node
            raise
        if any(map(_is_failure_of_node, answers)):
            self._failed_node = node
        return answers

    def _waits(self, written: Sequence[str]) -> dict[str, int]:
        """Return the number of replicas that must acknowledge a write, by the keys' primaries."""
        if not written or self._replicas == 0:
            return {}
        client, names = self._client, {""}
        if isinstance(client, RedisCluster):
            names = {_node_of(client, key).name for key in written}
        return {name: self._replicas or 1 for name in sorted(names) if self._replicas or self._needs_copy(name)}

    def _needs_copy(self, name: str) -> bool:
        """Return True if the primary had a replica within REPLICA_GRACE_S, or was not known before."""
        now_s = time.monotonic()
        return now_s < self._copies_until.setdefault(name, now_s + REPLICA_GRACE_S)

    def _check_copied(self, name: str, count: int, reached: Any, role: Any) -> None:
        if isinstance(reached, Exception):
            raise reached
        if self._replicas is None:
            # The default requires a copy only if replicas exist. A server that hides its role has no known replica.
            if reached or replicas_in(role):
                self._copies_until[name] = time.monotonic() + REPLICA_GRACE_S
            elif not self._needs_copy(name):
                return
        if reached < count:
            raise StoreUnavailable("the store did not copy a write to its replicas in time")

    async def check_replicas(self) -> None:
        """Check again which primaries have replicas, if the default depends on it."""
        if self._replicas is None:
            # A server's failure is detected by its writes. The known state of its replicas remains.
            with suppress(StoreUnavailable):
                async with self._bounded():
                    await self._refresh_replicas()

    async def _refresh_replicas(self) -> None:
        found, known = await self._found_replicas(), self._copies_until
        failures = [count for count in found.values() if isinstance(count, BaseException)]
        if len(failures) == len(found):
            raise failures[0]
        # A new primary was a replica, and its former primary may return. An unreachable primary may be a replica by
        # now.
        grace_s = time.monotonic() + REPLICA_GRACE_S
        unknown_s = grace_s if known else 0.0
        self._copies_until = {
            name: known[name] if isinstance(count, BaseException) else grace_s if count else known.get(name, unknown_s)
            for name, count in found.items()
            if name in known or not isinstance(count, BaseException)
        }

    async def connected_replicas(self) -> dict[str, int]:
        async with self._bounded():
            found = await self._found_replicas()
            for count in found.values():
                if isinstance(count, BaseException):
                    raise count
        return {name: count for name, count in found.items() if not isinstance(count, BaseException)}

    async def _found_replicas(self) -> dict[str, int | BaseException]:
        """Return the number of connected replicas by primary, or its failure if it does not answer."""
        targets: dict[str, dict[str, Any]] = {"": {}}
        if isinstance(self._client, RedisCluster):
            await self._read_slots(self._client)
            targets = {node.name: {"target_nodes": node} for node in self._client.get_primaries()}
        counts = await asyncio.gather(*map(self._replicas_of, targets.values()), return_exceptions=True)
        return dict(zip(targets, counts, strict=True))

    async def _replicas_of(self, target: dict[str, Any]) -> int:
        try:
            return replicas_in(await self._client.execute_command("ROLE", **target))
        except ResponseError as error:
            # A hosted server may deny ROLE (NOPERM) or not have the command.
            return replicas_in(error)

    async def settings(self, *names: str) -> list[Mapping[str, str]]:
        """Return the named settings of every primary, without those that it denies."""
        if not isinstance(self._client, RedisCluster):
            return [await self._settings_of(names, {})]
        async with self._bounded():
            await self._read_slots(self._client)
        return [await self._settings_of(names, {"target_nodes": node}) for node in self._client.get_primaries()]

    async def _settings_of(self, names: Sequence[str], target: dict[str, Any]) -> Mapping[str, str]:
        found: dict[Any, Any] = {}
        for name in names:
            async with self._bounded():
                try:
                    found |= await self._client.config_get(name, **target)
                except NoPermissionError:
                    # A hosted server may deny access to its settings. An unreachable one raises another error.
                    continue
                except ResponseError as error:
                    if not str(error).lower().startswith("unknown command"):
                        raise
        return {text(key): text(value) for key, value in found.items()}

    async def current_history(self, key: str) -> str:
        """Return the replication id of the primary of `key`, empty without permission for INFO.

        Uses no pooled connection. Raises StoreUnavailable, also while sentinels or nodes disagree on the primary.
        """
        async with self._bounded():
            async with await self._find_primary(key) as primary:
                try:
                    found = await primary.info("replication")
                except NoPermissionError:
                    return ""
            return str(found["master_replid"])

    async def _find_primary(self, key: str) -> Redis:
        server = self._server
        if server.sentinel is not None:
            calls = [one.sentinel_get_master_addr_by_name(server.service) for one in server.sentinel.sentinels]
        elif isinstance(self._client, RedisCluster):
            # A node that was isolated or stalled does not know of a failover yet.
            await self._read_slots(self._client)
            nodes = self._client.get_nodes()
            calls = [primary_seen_by(self._client, node, key) for node in nodes]
        else:
            return Redis.from_url(server.url, **server.options)
        # The remaining time is for the primary.
        host, port = await majority_address(calls, self._deadline_s / 2)
        return Redis(host=host, port=port, **server.options)

    async def pubsub(self) -> PubSub:
        """Return a subscriber for any node, not yet connected: published messages reach all nodes."""
        if isinstance(self._client, RedisCluster):
            await self._client.initialize()
            return self._client.pubsub(node=self._client.get_random_node())
        return self._client.pubsub()

    async def aclose(self) -> None:
        # A broken connection may fail to close.
        with suppress(Exception):
            await self._client.aclose()
        if isinstance(self._client, RedisCluster):
            # The library closes nothing while a new read of the slots is pending.
            for nodes in ("nodes_cache", "startup_nodes"):
                with suppress(Exception):
                    await self._client.nodes_manager.aclose(nodes)
        if self._server.sentinel is not None:
            with suppress(Exception):
                await self._server.sentinel.aclose()


def _node_of(client: RedisCluster, key: str) -> ClusterNode:
    node = client.get_node_from_key(key)
    if node is None:
        raise StoreUnavailable(NO_NODE)
    return node


def _raise_first(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer


def _is_failure_of_node(answer: Any) -> bool:
    """Return True if an answer reports a failed node. Other errors concern the command."""
    return isinstance(answer, ClusterDownError) or (
        isinstance(answer, Exception) and not isinstance(answer, ResponseError)
    )
