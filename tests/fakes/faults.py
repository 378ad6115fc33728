"""Faults of an event stream.

Each fault is a function from steps to broken steps. Faults combine in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .wire import Close, Flood, Hold, Reset, Sleep, Stall, Step, Write

Fault = Callable[[list[Step]], list[Step]]

DONE = b"data: [DONE]\n\n"


def _place(steps: list[Step], k: int) -> int:
    """Return the index of the step of event k."""
    events = [i for i, step in enumerate(steps) if isinstance(step, Write) and step.data.startswith((b"data:", b"{"))]
    if k >= len(events):
        raise IndexError(f"the script has only {len(events)} events")
    return events[k]


def _ending_at(k: int, *end: Step) -> Fault:
    # Give the client time to read the written bytes, because an RST discards unread bytes.
    return lambda steps: [*steps[: _place(steps, k)], Sleep(0.01), *end]


def reset_at(k: int) -> Fault:
    """Send RST instead of event k."""
    return _ending_at(k, Reset())


def close_at(k: int) -> Fault:
    """Send FIN instead of event k, in the middle of the body."""
    return _ending_at(k, Close())


def stall_at(k: int) -> Fault:
    """Send nothing more from event k on."""
    return _ending_at(k, Stall())


def hold_at(k: int, until: asyncio.Event) -> Fault:
    """Send event k and the following ones only after the event `until` is set."""

    def fault(steps: list[Step]) -> list[Step]:
        index = _place(steps, k)
        return [*steps[:index], Hold(until), *steps[index:]]

    return fault


def half_event_at(k: int) -> Fault:
    """Send the first half of event k, then FIN."""

    def fault(steps: list[Step]) -> list[Step]:
        index = _place(steps, k)
        event = steps[index]
        assert isinstance(event, Write)
        return [*steps[:index], Write(event.data[: len(event.data) // 2], framed=True), Sleep(0.01), Close()]

    return fault


def inject_at(k: int, data: bytes) -> Fault:
    """Insert bytes before event k; the stream continues after them."""

    def fault(steps: list[Step]) -> list[Step]:
        index = _place(steps, k)
        return [*steps[:index], Write(data, framed=True), *steps[index:]]

    return fault


def without_done(steps: list[Step]) -> list[Step]:
    """Remove `[DONE]` and the usage before it, or the event that is marked as the last."""
    return [step for step in steps if step != Write(DONE, framed=True) and not _says_last(step)]


# The event with the usage has no choices.
_LAST_MARKS = (b'"done": true', b'"stop": true', b'"choices": []')


def _says_last(step: Step) -> bool:
    return isinstance(step, Write) and any(end in step.data for end in _LAST_MARKS)


def done_twice(steps: list[Step]) -> list[Step]:
    """Repeat the last event."""
    return [*steps, *[step for step in steps if isinstance(step, Write)][-1:]]


def recut(size: int, pause_s: float = 0.0005) -> Fault:
    """Send the same bytes in writes of `size` bytes, regardless of event boundaries."""

    def fault(steps: list[Step]) -> list[Step]:
        body = b"".join(step.data for step in steps if isinstance(step, Write))
        recut: list[Step] = []
        for start in range(0, len(body), size):
            recut += [Write(body[start : start + size], framed=True), Sleep(pause_s)]
        return recut

    return fault


def in_one_write(steps: list[Step]) -> list[Step]:
    """Send the same bytes in one write."""
    return [Write(b"".join(step.data for step in steps if isinstance(step, Write)), framed=True)]


def line_ends(*ends: bytes) -> Fault:
    """Replace LF by other line ends, in turn."""

    def fault(steps: list[Step]) -> list[Step]:
        turn = 0
        changed: list[Step] = []
        for step in steps:
            if isinstance(step, Write):
                pieces = step.data.split(b"\n")
                data = pieces[0]
                for piece in pieces[1:]:
                    data += ends[turn % len(ends)] + piece
                    turn += 1
                step = Write(data, framed=True)
            changed.append(step)
        return changed

    return fault


def flood_from(k: int, total: int) -> Fault:
    """Repeat the events from k on, as fast as the client reads them.

    After `total` bytes, the last three events follow.
    """

    def fault(steps: list[Step]) -> list[Step]:
        index = _place(steps, k)
        pieces = tuple(step.data for step in steps[index:-3] if isinstance(step, Write))
        return [*steps[:index], Flood(pieces, total), *steps[-3:]]

    return fault
