"""Reading of an answer in portions that do not block other streams.

At the end of a message it is checked, encoded again and emitted, in time proportional to its length. Long messages are
processed in a thread. Short ones are processed on the event loop, since a thread would cost more than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Final, TypeVar

from unisono.core.events import Event
from unisono.core.generation import FIRST_SPECIAL, Chunk, FinishReason
from unisono.engine.limit import TokenCap
from unisono.engine.reading import OutputReader
from unisono.engine.telling import AttemptTelemetry
from unisono.harmony.decode import Decoder

LONG_MESSAGE_TOKENS: Final = 1_000  # tokens of a message whose end takes up to 1 ms under a schema of usual size
LONG_CHUNK_CHARS: Final = 8_000  # characters that take about 2 ms to encode
PORTION_TOKENS: Final = 256  # tokens that take less than 1 ms to read while their message is open

T = TypeVar("T")


def portions(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(tokens), PORTION_TOKENS):
        yield tokens[begin : begin + PORTION_TOKENS]


class Pauses:
    """Pauses that let other tasks run between portions of a generation, at any token rate."""

    def __init__(self) -> None:
        self._since_last = 0

    async def before(self, portion: Sequence[int]) -> None:
        self._since_last += len(portion)
        if self._since_last > PORTION_TOKENS:
            self._since_last = len(portion)
            await asyncio.sleep(0)


class Feeder:
    """Feeds portions of a generation to `reading`, with pauses."""

    def __init__(self, reading: OutputReader) -> None:
        self._reading = reading
        self._pauses = Pauses()

    async def feed(self, portion: Sequence[int]) -> list[Event]:
        """Return the events of some more tokens."""
        await self._pauses.before(portion)
        reading = self._reading
        if reading.unsettled > LONG_MESSAGE_TOKENS and max(portion, default=0) >= FIRST_SPECIAL:
            return await settled(reading, lambda: reading.feed(portion))
        return reading.feed(portion)


async def settled(reading: OutputReader, work: Callable[[], T]) -> T:
    """Run `work`, which may settle the open message of `reading`.

    It runs in a thread if that message is long.
    """
    return await in_thread(reading, work) if reading.unsettled > LONG_MESSAGE_TOKENS else work()


async def in_thread(reading: OutputReader, work: Callable[[], T]) -> T:
    """Run `work` on `reading` in a thread."""
    # The thread continues when its caller is cancelled. It must not change a report that was already sent.
    with reading.apart():
        return await asyncio.to_thread(work)


async def received(
    chunk: Chunk, limit: TokenCap, decoder: Decoder, told: AttemptTelemetry
) -> tuple[Sequence[int], FinishReason | None]:
    """Return the tokens of a chunk within `limit`, and the reason if the generation ends there.

    The tokens are also reported to `told`.
    """
    # All three belong to one generation, so that a thread whose caller was cancelled changes nothing else.
    is_long = len(chunk.text) > LONG_CHUNK_CHARS
    tokens = await asyncio.to_thread(decoder.feed, chunk) if is_long else decoder.feed(chunk)
    if limit.counts_anew(tokens) > LONG_MESSAGE_TOKENS:
        tokens = await asyncio.to_thread(limit.taken, tokens)
    else:
        tokens = limit.taken(tokens)
    told.came(chunk, len(tokens), monotonic())
    finish = FinishReason.LENGTH if limit.passed else chunk.finish
    if finish is None:
        return tokens, None
    stop = () if chunk.stop_token is None else (chunk.stop_token,)
    rest = () if limit.passed else (*decoder.end(), *stop)
    told.ended(finish, len(rest))
    return [*tokens, *rest], finish
