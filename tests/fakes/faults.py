"""Faults of an event stream, each a function from its steps to broken steps; they combine in order."""

from __future__ import annotations

from collections.abc import Callable

from .wire import Close, Flood, Reset, Sleep, Stall, Step, Write

Fault = Callable[[list[Step]], list[Step]]

DONE = b"data: [DONE]\n\n"


def _place(steps: list[Step], k: int) -> int:
    """Where event k begins, its delay included."""
    events = [i for i, step in enumerate(steps) if isinstance(step, Write) and step.data.startswith((b"data:", b"{"))]
    if k >= len(events):
        raise IndexError(f"the script has only {len(events)} events")
    return events[k]


def _ending_at(k: int, *end: Step) -> Fault:
    # A moment for what was written to be read, or an RST would take it along.
    return lambda steps: [*steps[: _place(steps, k)], Sleep(0.01), *end]


def reset_at(k: int) -> Fault:
    """RST in place of event k."""
    return _ending_at(k, Reset())


def close_at(k: int) -> Fault:
    """FIN in place of event k, in the middle of the body."""
    return _ending_at(k, Close())


def stall_at(k: int) -> Fault:
    """Silence in place of event k."""
    return _ending_at(k, Stall())


def half_event_at(k: int) -> Fault:
    """The first half of event k, then FIN."""

    def fault(steps: list[Step]) -> list[Step]:
        place = _place(steps, k)
        event = steps[place]
        assert isinstance(event, Write)
        return [*steps[:place], Write(event.data[: len(event.data) // 2], framed=True), Sleep(0.01), Close()]

    return fault


def inject_at(k: int, data: bytes) -> Fault:
    """Bytes before event k; the stream goes on after them."""

    def fault(steps: list[Step]) -> list[Step]:
        place = _place(steps, k)
        return [*steps[:place], Write(data, framed=True), *steps[place:]]

    return fault


def without_done(steps: list[Step]) -> list[Step]:
    """An end without `[DONE]`, or without the event that says it is the last."""
    return [step for step in steps if step != Write(DONE, framed=True) and not _says_last(step)]


def _says_last(step: Step) -> bool:
    return isinstance(step, Write) and any(end in step.data for end in (b'"done": true', b'"stop": true'))


def done_twice(steps: list[Step]) -> list[Step]:
    """The last event, and the last event again."""
    return [*steps, *[step for step in steps if isinstance(step, Write)][-1:]]


def recut(size: int, pause_s: float = 0.0005) -> Fault:
    """The same bytes, `size` of them at a time, wherever events and characters begin."""

    def fault(steps: list[Step]) -> list[Step]:
        body = b"".join(step.data for step in steps if isinstance(step, Write))
        recut: list[Step] = []
        for start in range(0, len(body), size):
            recut += [Write(body[start : start + size], framed=True), Sleep(pause_s)]
        return recut

    return fault


def in_one_write(steps: list[Step]) -> list[Step]:
    """The same bytes at once."""
    return [Write(b"".join(step.data for step in steps if isinstance(step, Write)), framed=True)]


def line_ends(*ends: bytes) -> Fault:
    """Other line ends in place of LF, taking turns."""

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
    """All events from k on but the last three over and over, as fast as the client takes them, until `total` bytes are
    out; then the last three."""

    def fault(steps: list[Step]) -> list[Step]:
        place = _place(steps, k)
        pieces = tuple(step.data for step in steps[place:-3] if isinstance(step, Write))
        return [*steps[:place], Flood(pieces, total), *steps[-3:]]

    return fault
