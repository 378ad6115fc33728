"""Collection of the events of a generation into one answer, for non-streaming requests.

Streaming and non-streaming requests are answered from the same events, so there is no second way to generate.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import Final, assert_never

from unisono.core.events import (
    Closed,
    Compacted,
    Delta,
    Event,
    Finished,
    Listed,
    Opened,
    Passed,
    PassedBytes,
    Ran,
    Repaired,
)
from unisono.core.frozen import dataclass

# Events that `collect` ignores: a Closed contains the text of its deltas.
REDUNDANT: Final = frozenset({Opened, Delta, Listed})


@dataclass(frozen=True, slots=True)
class CollectedAnswer:
    """A finished answer.

    `items` are the Closed events in order, including the events of truncated items. `repaired` are the Repaired events,
    and `ran` the Ran events of server tool calls. `compacted` is the compaction before the answer, or None.
    """

    items: tuple[Closed, ...]
    repaired: tuple[Repaired, ...]
    finished: Finished
    ran: tuple[Ran, ...] = ()
    compacted: Compacted | None = None


def collect(events: Iterable[Event]) -> CollectedAnswer:
    """Collect the events of a complete stream.

    Raises ValueError unless the last event, and no earlier one, is Finished. Also raises ValueError for events of a
    pass-through answer.
    """
    items: list[Closed] = []
    repaired: list[Repaired] = []
    ran: list[Ran] = []
    compacted: Compacted | None = None
    finished: Finished | None = None
    for event in events:
        if finished is not None:
            raise ValueError("an event after Finished")
        match event:
            case Closed():
                items.append(event)
            case Repaired():
                repaired.append(event)
            case Finished():
                finished = event
            case Ran():
                ran.append(event)
            case Compacted():
                compacted = event
            case Opened() | Delta() | Listed():
                pass
            case Passed() | PassedBytes():
                raise ValueError("a pass-through answer has no events to collect")
            case _:
                assert_never(event)
    if finished is None:
        raise ValueError("the events end without Finished")
    return CollectedAnswer(tuple(items), tuple(repaired), finished, tuple(ran), compacted)


async def collect_run(batches: AsyncIterable[list[Event]]) -> CollectedAnswer:
    """Collect a stream while it is generated; errors of the stream are propagated.

    Only the events needed for the result are buffered.
    """
    needed: list[Event] = []
    async for batch in batches:
        needed += [event for event in batch if type(event) not in REDUNDANT]
    return collect(needed)
