"""Messages between the two threads of the engine process, and the limits of the engine.

This module does not import mlx. So the socket thread can still run, and report the error, if mlx cannot be imported.
"""

from __future__ import annotations

from typing import TypeAlias

from unisono.core.frozen import dataclass
from unisono_adapters.mlx.guides import Guide
from unisono_adapters.mlx.wire import GenerateCommand, ToGateway

EVERYONE = -1

# Message with the number of the connection to send it on, or EVERYONE for all connections.
Addressed: TypeAlias = tuple[int, ToGateway]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of the engine.

    At most `batch` requests run at the same time, and at most `waiting` more are queued. `prefill_chunk` is the maximum
    number of prompt tokens that one step reads. It limits the duration of a step, and therefore the time until a
    cancelled request leaves the batch. A `prefix_cache_bytes` of 0 turns the prefix cache off.
    """

    batch: int = 32
    waiting: int = 256
    prefill_chunk: int = 512
    prefix_cache_bytes: int = 2 * 1024**3
    prefix_cache_entries: int = 64


@dataclass(frozen=True, slots=True)
class Submit:
    """Order to add a request to the batch.

    `guide` enforces the constraint of the request; it is None if the request has no constraint.
    """

    connection: int
    command: GenerateCommand
    guide: Guide | None = None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Order to cancel the request `id` of a connection, or all its requests if `id` is None."""

    connection: int
    id: int | None = None


Command: TypeAlias = Submit | Withdraw
