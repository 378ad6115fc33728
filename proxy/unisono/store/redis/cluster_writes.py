"""Writes to a cluster, and their redirections to other nodes.

A node that redirects a write has not run the write. Only redirected writes are sent again, so each write runs once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.exceptions import AskError, MovedError, TryAgainError

from unisono.core.frozen import dataclass
from unisono.errors import StoreUnavailable
from unisono.store.redis.clients import Command
from unisono.store.redis.redis_errors import NO_NODE

MAX_REDIRECTIONS: Final = 8
# Answers which mean that the node has not run the command.
REDIRECTIONS: Final = (MovedError, AskError, TryAgainError)
# Delay before a write is repeated because its slot is being moved and its keys are on two nodes.
TRY_AGAIN_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class ClusterWrite:
    """Write command, and the node to which it is sent.

    `is_asked` is True if the slot is being moved to the node, which then accepts the write only after ASKING.
    """

    command: Command
    node: ClusterNode
    is_asked: bool = False

    def commands(self) -> Iterator[Command]:
        if self.is_asked:
            yield ("ASKING",)
        yield self.command


def answers_of(writes: Sequence[ClusterWrite], answers: Sequence[Any]) -> list[Any]:
    """Return one answer for each write, without the answers to ASKING."""
    values, position = [], 0
    for write in writes:
        position += len([*write.commands()])
        values.append(answers[position - 1])
    return values


async def follow_redirection(client: RedisCluster, answer: Exception) -> ClusterNode | None:
    """Return the node to which a redirected write must be sent next.

    After ASK, this is the node that the answer names. Otherwise the result is None: the caller finds the node by the
    slot table. After MOVED, this table is updated first; after TRYAGAIN, the function waits `TRY_AGAIN_S` seconds.
    Raises `StoreUnavailable` if ASK names an unknown node.
    """
    if isinstance(answer, TryAgainError):
        await asyncio.sleep(TRY_AGAIN_S)
    elif isinstance(answer, MovedError):
        await client.nodes_manager.move_slot(answer)
    elif isinstance(answer, AskError):
        node: ClusterNode | None = client.get_node(host=answer.host, port=answer.port)
        if node is None:
            raise StoreUnavailable("the store cluster is moving a slot to a node that is not known yet; try again")
        return node
    return None


def node_of(client: RedisCluster, key: str) -> ClusterNode:
    """Return the primary node of the slot of `key`.

    Raises `StoreUnavailable` if no node serves this slot.
    """
    node = client.get_node_from_key(key)
    if node is None:
        raise StoreUnavailable(NO_NODE)
    return node
