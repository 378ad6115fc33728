"""Writes to a cluster, and their redirections to other nodes.

A redirected write has not run on the node that redirects it. It is sent again alone, so that each write runs once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.exceptions import AskError, MovedError, TryAgainError

from unisono.core.frozen import dataclass
from unisono.errors import StoreUnavailable
from unisono.store.redis.command_client import Command
from unisono.store.redis.trouble import NO_NODE

MAX_REDIRECTIONS: Final = 8
# Answers of a node that has not run the command.
REDIRECTIONS: Final = (MovedError, AskError, TryAgainError)
# Delay before a write is repeated whose keys are on two nodes, because one of them is being moved.
TRY_AGAIN_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class ClusterWrite:
    """Write and its node.

    `is_asked` means that the slot is being moved to the node, which accepts the write only after ASKING.
    """

    command: Command
    node: ClusterNode
    is_asked: bool = False

    def commands(self) -> Iterator[Command]:
        if self.is_asked:
            yield ("ASKING",)
        yield self.command


def answers_of(writes: Sequence[ClusterWrite], answers: Sequence[Any]) -> list[Any]:
    """Return the answer of each write, without those to ASKING."""
    values, position = [], 0
    for write in writes:
        position += len([*write.commands()])
        values.append(answers[position - 1])
    return values


async def followed(client: RedisCluster, answer: Exception) -> ClusterNode | None:
    """Follow a redirection: return the node to ask, or None if the slots name the next node.

    Raises `StoreUnavailable` if the node is unknown.
    """
    if isinstance(answer, TryAgainError):
        await asyncio.sleep(TRY_AGAIN_S)
    elif isinstance(answer, MovedError):
        await client.nodes_manager.move_slot(answer)
    elif isinstance(answer, AskError):
        node: ClusterNode | None = client.get_node(host=answer.host, port=answer.port)
        if node is None:
            raise StoreUnavailable("the store cluster moves a slot to a node without slots; try again")
        return node
    return None


def node_of(client: RedisCluster, key: str) -> ClusterNode:
    """Return the primary of a key. Raises `StoreUnavailable` if there is none."""
    node = client.get_node_from_key(key)
    if node is None:
        raise StoreUnavailable(NO_NODE)
    return node
