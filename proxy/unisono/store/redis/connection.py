"""Connection to a Redis or Valkey server, Sentinel setup or cluster, with short deadlines.

Every operation raises `StoreUnavailable` when its deadline has passed. Unlike redis-py by default, this module does not
repeat a write that may have run. Callers may repeat idempotent operations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from unisono.errors import StoreUnavailable, UnisonoError
from unisono.store.redis.clients import Command, open_clients, replicas_in, text
from unisono.store.redis.cluster_writes import (
    MAX_REDIRECTIONS,
    REDIRECTIONS,
    ClusterWrite,
    answers_of,
    follow_redirection,
    node_of,
)
from unisono.store.redis.redis_errors import DenialLog, is_failure_of_node, message_of, raise_first
from unisono.store.redis.script import Script
from unisono.store.redis.write_history import WriteHistory, read_history
from unisono.store.write_errors import refusal

AT_ONCE = 64  # maximum concurrent operations; further ones wait within their own deadline
WRITES_PER_ROUND_TRIP = 256  # few enough for the shortest deadline, enough to hide latency

P = ParamSpec("P")
T = TypeVar("T")

# Keys and arguments of a script.
ScriptCall = tuple[Sequence[str], Sequence[str | bytes | int]]

# Time in seconds for which writes still need a replica after the primary has lost its last one. This primary may be a
# former one, whose writes are lost when the sentinels demote it: up to 20 s with down-after-milliseconds 5000.
REPLICA_GRACE_S = 30.0


class Link:
    """Client of one server or cluster.

    `deadline_s` limits each operation, in seconds. `replicas` is the number of replicas that must acknowledge each
    write. None means one if the primary has a connected replica, or had one within the last `REPLICA_GRACE_S` seconds.
    """

    def __init__(self, url: str, deadline_s: float, replicas: int | None) -> None:
        self._deadline_s = deadline_s
        self._replicas = replicas
        self._denials = DenialLog()
        # Time (time.monotonic) until which writes need a replica. The keys are the names of the primaries; without a
        # cluster, the only key is empty.
        self._copies_until: dict[str, float] = {}
        # Hashes of loaded scripts. A newly promoted server has none, and an EVALSHA that fails wastes its WAIT time.
        self._loaded: set[str] = set()
        # Name of the failed node that requires reading the slots again: empty if it is unknown, None if none failed.
        self._failed_node: str | None = None
        # Slightly less than the deadline, so that the library itself can close a stalled connection.
        self._server = open_clients(url, deadline_s * 0.8)
        self._client = self._server.client
        self._connection_slots = asyncio.Semaphore(AT_ONCE)

    @property
    def is_cluster(self) -> bool:
        """True if the keys of one script must be in one hash slot."""
        return isinstance(self._client, RedisCluster)

    async def _bounded(self, work: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T:
        """Call the Redis library within the deadline. Its exceptions become `StoreUnavailable`."""
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            async with asyncio.timeout(self._deadline_s), self._connection_slots:
                return await work(*args, **named)
        except UnisonoError:
            raise
        except Exception as error:
            # Only library calls run here. Broken connections raise RuntimeError (uvloop), AttributeError, IndexError.
            self._loaded.clear()
            self._denials.add(error)
            raise StoreUnavailable(message_of(error, self._deadline_s)) from error
        finally:
            # The library may swallow a cancellation that coincides with an answer.
            if task and task.cancelling() > cancelled:
                raise asyncio.CancelledError

    async def act(self, script: Script, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run a script and return its value. Raises as `act_each` does."""
        (value,) = await self.act_each(script, [(keys, args)])
        return value

    async def act_each(self, script: Script, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run a script once for each pair of keys and arguments, and return its values.

        The runs are independent of each other. A single server gets all of them in one round trip, a cluster gets each
        in its own. Raises the error for the first refusal that the script returned, or `StoreUnavailable`.
        """
        if len(calls) > 1 and self.is_cluster:
            # If one node lacks the script, the runs on the other nodes must not be repeated.
            return await asyncio.gather(*(self.act(script, *call) for call in calls))
        values = []
        for answer in await self._bounded(self._run_script, script, calls):
            code = bytes(answer[0]).decode()
            if code != "ok":
                raise refusal(code)
            values.append(answer[1] if len(answer) > 1 else None)
        return values

    async def _run_script(self, script: Script, calls: Sequence[ScriptCall]) -> list[Any]:
        written = [] if script.is_read else [keys[0] for keys, _ in calls]
        commands = [("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls]
        answers: list[Any] = [NoScriptError()] * len(commands)
        if script.sha in self._loaded:
            answers = await self._send(commands, written)
        # Only commands that found no script are repeated. A second run of others might return a different answer.
        missed = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if missed:
            again = [("EVAL", script.text, *commands[at][2:]) for at in missed]
            values = await self._send(again, [written[at] for at in missed] if written else ())
            for at, value in zip(missed, values, strict=True):
                answers[at] = value
            self._loaded.add(script.sha)
        return answers

    async def read(self, *commands: Command) -> list[Any]:
        """Run reads together and return their answers. The second element of a command is its key."""
        return await self._bounded(self._send, commands, ())

    async def write(self, *commands: Command) -> None:
        """Run idempotent writes in batches, each within the deadline.

        The second element of each command is the Redis key.
        """
        for start in range(0, len(commands), WRITES_PER_ROUND_TRIP):
            together = commands[start : start + WRITES_PER_ROUND_TRIP]
            await self._bounded(self._send, together, [str(command[1]) for command in together])

    async def _send(self, commands: Sequence[Command], written: Sequence[str]) -> list[Any]:
        """Run commands and return their answers.

        `written` contains the key of each command if the commands are writes, and is empty for reads. Raises the first
        error of a command, except for a missing script: this error is returned as the answer of the command.
        """
        if written and self._replicas is None and not self._copies_until:
            await self._refresh_replicas()
        if isinstance(self._client, RedisCluster):
            return await self._send_to_cluster(self._client, commands, written)
        assert self._server.commands is not None
        copies = self._required_copies("") if written else 0
        checks = self._checks(copies) if copies else ()
        answers = await self._server.commands.exchange([*commands, *checks])
        values = answers[: len(commands)]
        raise_first(values)
        if copies:
            self._check_copied("", copies, *answers[len(commands) :])
        return values

    async def _send_to_cluster(
        self, client: RedisCluster, commands: Sequence[Command], written: Sequence[str]
    ) -> list[Any]:
        await self._read_slots(client)
        if not written:
            return await self._send_reads(client, commands)
        # Redirections are not left to the library, because replicas of the node that runs a write must acknowledge it.
        values: list[Any] = [None] * len(commands)
        # Positions of writes that no node has run yet, with the node that an ASK named (None: the primary of the key).
        pending: dict[int, ClusterNode | None] = dict.fromkeys(range(len(commands)))
        for _ in range(MAX_REDIRECTIONS):
            writes = [
                ClusterWrite(commands[at], node or node_of(client, written[at]), is_asked=node is not None)
                for at, node in pending.items()
            ]
            answers = dict(zip(pending, await self._send_writes(client, writes), strict=True))
            for at, answer in answers.items():
                values[at] = answer
            redirected = {at: answer for at, answer in answers.items() if isinstance(answer, REDIRECTIONS)}
            if not redirected:
                return values
            pending = {at: await follow_redirection(client, answer) for at, answer in redirected.items()}
        raise StoreUnavailable("the store cluster redirected every attempt to write; slots are being moved; try again")

    async def _read_slots(self, client: RedisCluster) -> None:
        await client.initialize()
        if self._failed_node is not None:
            await client.nodes_manager.initialize(last_failed_node_name=self._failed_node)
            self._failed_node = None

    async def _send_reads(self, client: RedisCluster, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            try:
                return [await client.execute_command(*commands[0])]
            except NoScriptError as error:
                return [error]
        pipe: Any = client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        values = await self._run(pipe, "")
        raise_first(values)
        return values

    async def _send_writes(self, client: RedisCluster, writes: Sequence[ClusterWrite]) -> list[Any]:
        """Run each write on its node, followed by a WAIT for the replicas of that node.

        Returns one answer for each write. If a node redirects a write, the redirection is the answer.
        """
        pipe: Any = client.pipeline(transaction=False)
        for write in writes:
            for command in write.commands():
                pipe.execute_command(*command, target_nodes=write.node)
        targets = {write.node.name: write.node for write in writes}
        copies = {name: count for name in sorted(targets) if (count := self._required_copies(name))}
        for name, count in copies.items():
            for command in self._checks(count):
                pipe.execute_command(*command, target_nodes=targets[name])
        answers = await self._run(pipe, next(iter(targets)) if len(targets) == 1 else "", allow_redirections=False)
        sent, checks = answers[: len(answers) - 2 * len(copies)], answers[len(answers) - 2 * len(copies) :]
        values = answers_of(writes, sent)
        raise_first([value for value in values if not isinstance(value, REDIRECTIONS)])
        run_on = {
            write.node.name for write, value in zip(writes, values, strict=True) if not isinstance(value, REDIRECTIONS)
        }
        for (name, count), reached, role in zip(copies.items(), checks[::2], checks[1::2], strict=True):
            if name in run_on:
                self._check_copied(name, count, reached, role)
        return values

    async def _run(self, pipe: Any, node: str, **options: bool) -> list[Any]:
        """Run a pipeline. If `node` fails, the next command reads the cluster's slot table again."""
        # The library does so for single commands only. Without a new read, the client would stay with a lost primary.
        try:
            answers: list[Any] = await pipe.execute(raise_on_error=False, **options)
        except BaseException:
            self._failed_node = node
            raise
        if any(map(is_failure_of_node, answers)):
            self._failed_node = node
        return answers

    def _checks(self, copies: int) -> Sequence[Command]:
        """Return WAIT, which waits for replicas, and ROLE, which lists them.

        Both must be sent on the connection of the writes: WAIT covers only writes of its own connection. After a
        failover, a different connection may lead to the new primary.
        """
        return ("WAIT", copies, int(self._deadline_s * 600)), ("ROLE",)

    def _required_copies(self, name: str) -> int:
        """Return the number of replicas that must acknowledge a write on a primary."""
        return int(self._needs_copy(name)) if self._replicas is None else self._replicas

    def _needs_copy(self, name: str) -> bool:
        """Return True if the primary had a replica within REPLICA_GRACE_S, or was not known before."""
        now_s = time.monotonic()
        return now_s < self._copies_until.setdefault(name, now_s + REPLICA_GRACE_S)

    def _check_copied(self, name: str, count: int, reached: Any, role: Any) -> None:
        if isinstance(reached, Exception):
            raise reached
        if self._replicas is None:
            # By default, a copy is required only if replicas exist. A server that denies ROLE has no known replica.
            if reached or replicas_in(role):
                self._copies_until[name] = time.monotonic() + REPLICA_GRACE_S
            elif not self._needs_copy(name):
                return
        if reached < count:
            raise StoreUnavailable(
                f"the store did not copy a write to its replicas within {0.6 * self._deadline_s:g} s; "
                "check its replicas, or raise `store.deadline_s`"
            )

    async def check_replicas(self) -> None:
        """Update which primaries have replicas, unless `replicas` is configured."""
        if self._replicas is None:
            # If a server fails, the known state remains, and the next write detects the failure.
            with suppress(StoreUnavailable):
                await self._bounded(self._refresh_replicas)

    async def _refresh_replicas(self) -> None:
        found, known = await self._found_replicas(), self._copies_until
        failures = [count for count in found.values() if isinstance(count, BaseException)]
        if len(failures) == len(found):
            raise failures[0]
        # A newly found primary was a replica before, and its former primary may return: its writes need a copy. The
        # known state of an unreachable primary remains, because it may be a replica by now.
        grace_s = time.monotonic() + REPLICA_GRACE_S
        unknown_s = grace_s if known else 0.0
        self._copies_until = {
            name: known[name] if isinstance(count, BaseException) else grace_s if count else known.get(name, unknown_s)
            for name, count in found.items()
            if name in known or not isinstance(count, BaseException)
        }

    async def connected_replicas(self) -> dict[str, int]:
        return await self._bounded(self._all_replicas)

    async def _all_replicas(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, count in (await self._found_replicas()).items():
            if isinstance(count, BaseException):
                raise count
            found[name] = count
        return found

    async def _found_replicas(self) -> dict[str, int | BaseException]:
        """Return each primary's number of connected replicas, or the error, keyed by its name."""
        targets = await self._primaries()
        counts = await asyncio.gather(*map(self._replicas_of, targets.values()), return_exceptions=True)
        return dict(zip(targets, counts, strict=True))

    async def _primaries(self) -> dict[str, dict[str, Any]]:
        """Return the options with which a command reaches each primary, keyed by the primary's name."""
        if not isinstance(self._client, RedisCluster):
            return {"": {}}
        await self._read_slots(self._client)
        return {node.name: {"target_nodes": node} for node in self._client.get_primaries()}

    async def _replicas_of(self, target: dict[str, Any]) -> int:
        try:
            return replicas_in(await self._client.execute_command("ROLE", **target))
        except ResponseError as error:
            # A hosted server may deny ROLE (NOPERM) or not have the command.
            return replicas_in(error)

    async def settings(self, *names: str) -> list[Mapping[str, str]]:
        """Return the named settings of every primary, without those that a server refuses to show."""
        found: list[Mapping[str, str]] = []
        for target in (await self._bounded(self._primaries)).values():
            answers = [await self._bounded(self._setting, name, target) for name in names]
            found.append({text(key): text(value) for answer in answers for key, value in answer.items()})
        return found

    async def _setting(self, name: str, target: dict[str, Any]) -> Mapping[Any, Any]:
        try:
            return dict(await self._client.config_get(name, **target))
        except ResponseError as error:
            # A hosted server may deny access to its settings. An unreachable one raises another error.
            if isinstance(error, NoPermissionError) or str(error).lower().startswith("unknown command"):
                return {}
            raise

    @property
    def epoch(self) -> str:
        """Epoch of the primary that the sentinels reported last; empty without sentinels.

        While the connections to this primary work, the sentinels are not queried, so a newer epoch may exist.
        """
        return self._server.sentinel.epoch if self._server.sentinel is not None else ""

    async def current_history(self, key: str) -> WriteHistory:
        """Return the write history of the primary of `key`, as reported by a majority now.

        Raises `StoreUnavailable` if the store fails, or if sentinels or nodes disagree on the primary.
        """
        return await self._bounded(self._read_history, key)

    async def _read_history(self, key: str) -> WriteHistory:
        if isinstance(self._client, RedisCluster):
            await self._read_slots(self._client)
        # The other half of the deadline remains for the query of the primary.
        return await read_history(self._server, key, self._deadline_s / 2)

    async def pubsub(self) -> PubSub:
        """Return an unconnected subscriber for any node, because messages reach all nodes."""
        if isinstance(self._client, RedisCluster):
            await self._client.initialize()
            return self._client.pubsub(node=self._client.get_random_node())
        return self._client.pubsub()

    async def aclose(self) -> None:
        # A broken connection may fail to close.
        for client in (self._client, self._server.commands):
            if client is not None:
                with suppress(Exception):
                    await client.aclose()
        if isinstance(self._client, RedisCluster):
            # `aclose` of the library closes no node while a new read of the slots is pending.
            for nodes in ("nodes_cache", "startup_nodes"):
                with suppress(Exception):
                    await self._client.nodes_manager.aclose(nodes)
        if self._server.sentinel is not None:
            with suppress(Exception):
                await self._server.sentinel.aclose()
