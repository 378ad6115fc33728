"""Stream of the segments of an answer in progress, in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

from unisono.core.live_outputs import LiveOutput
from unisono.engine.journal import parts_of
from unisono.harmony.encoding import load_encoding
from unisono.web.recording_view import add_part
from unisono.web.segments import Segment, Segments

# Interval between two reads of the journal, in seconds.
INTERVAL_S: Final = 0.04
# Batches with more journal numbers are converted in a thread. This many take about a millisecond.
OFF_LOOP_NUMBERS: Final = 1_000
# Maximum time for which one client can watch an answer, in seconds.
MAX_WATCH_S: Final = 1_800.0


async def live_segments(output: LiveOutput) -> AsyncIterator[list[Segment]]:
    """Yield the segments of an answer as its journal grows, until it has ended."""
    segments, position = Segments(load_encoding()), 0
    for _ in range(int(MAX_WATCH_S / INTERVAL_S)):
        # The end is read before the journal, so that the last batch contains everything that was written before the
        # end.
        has_ended = output.is_ended
        new = output.journal[position:]
        position += len(new)
        if len(new) > OFF_LOOP_NUMBERS:
            await asyncio.to_thread(_add, segments, new)
        else:
            _add(segments, new)
        if batch := segments.pop_new() if has_ended else segments.pop_complete():
            yield batch
        if has_ended:
            return
        await asyncio.sleep(INTERVAL_S)


def _add(segments: Segments, journal: Sequence[int]) -> None:
    for part in parts_of(journal):
        add_part(segments, part)
