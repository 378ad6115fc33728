"""Servers that begin a response in one of several ways and never end it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from tests.fakes import Seen, Sleep, Stall, Step, WireServer, Write

# Maps the steps of a response, head included, to steps that never end.
Hang: TypeAlias = Callable[[list[Step]], list[Step]]

DRIP_S = 0.1
# longer than any test waits
MAX_DRIPS = 200
TOKEN_GAP_S = 0.002
# A chunk with an empty comment.
COMMENT = b"3\r\n:\n\n\r\n"


def silent(steps: list[Step]) -> list[Step]:
    return [Stall()]


def headers_only(steps: list[Step]) -> list[Step]:
    head, _ = _cut(steps)
    return [Write(head), Stall()]


def half_an_event(steps: list[Step]) -> list[Step]:
    head, [first, *_] = _cut(steps)
    return [Write(head), Write(first[: len(first) // 2]), Stall()]


def drips_its_head(steps: list[Step]) -> list[Step]:
    head, _ = _cut(steps)
    return _dripped(_bytes_of(head[:-1]))


def drips_half_an_event(steps: list[Step]) -> list[Step]:
    head, [first, *_] = _cut(steps)
    return [Write(head), *_dripped(_bytes_of(first[: len(first) // 2]))]


def drips_comments(steps: list[Step]) -> list[Step]:
    head, _ = _cut(steps)
    # A response that is not streamed has no comments.
    return [Write(head), *_dripped([COMMENT] * MAX_DRIPS)] if b"chunked" in head else drips_half_an_event(steps)


def drips_empty_events(steps: list[Step]) -> list[Step]:
    head, [first, *_] = _cut(steps)
    if b"chunked" not in head:
        return drips_half_an_event(steps)
    return [Write(head), *_dripped([_emptied(first)] * MAX_DRIPS)]


def stalls_after(events: int) -> Hang:
    return lambda steps: [*_begun(steps, events), Stall()]


def drips_comments_after(events: int) -> Hang:
    return lambda steps: [*_begun(steps, events), *_dripped([COMMENT] * MAX_DRIPS)]


def drips_empty_events_after(events: int) -> Hang:
    def hang(steps: list[Step]) -> list[Step]:
        _, [first, *_] = _cut(steps)
        return [*_begun(steps, events), *_dripped([_emptied(first)] * MAX_DRIPS)]

    return hang


def _emptied(chunk: bytes) -> bytes:
    """Return an event without tokens, made from the first event of a response."""
    event = json.loads(chunk[chunk.index(b"{") : chunk.rindex(b"}") + 1])
    for choice in event.get("choices", ()):
        choice |= {"text": "", "token_ids": []} if "text" in choice else {"delta": {"role": "assistant", "content": ""}}
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def _begun(steps: Iterable[Step], events: int) -> list[Step]:
    head, body = _cut(steps)
    return [Write(head), *_with_pauses(map(Write, body[:events]), TOKEN_GAP_S)]


def _cut(steps: Iterable[Step]) -> tuple[bytes, list[bytes]]:
    """Return the head of a response and the writes of its body."""
    first, *rest = [step.data for step in steps if isinstance(step, Write)]
    head, end, more = first.partition(b"\r\n\r\n")
    return head + end, [data for data in (more, *rest) if data]


def _bytes_of(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def _dripped(pieces: Iterable[bytes]) -> list[Step]:
    return [*_with_pauses(map(Write, pieces), DRIP_S), Stall()]


def _with_pauses(steps: Iterable[Step], pause_s: float) -> list[Step]:
    return [each for step in steps for each in (step, Sleep(pause_s))]


@dataclass
class Hanging:
    """Behaviour of a server whose next `left` requests hang.

    The first of them hangs by `first`, the others by `then`. All other requests are answered, with pauses (except for
    probes) between events, so that the gateway can learn time limits.
    """

    first: Hang
    then: Hang
    left: float = 0
    # Number of requests that hung so far.
    hung: int = field(default=0, init=False)

    def arm(self, *, always: bool) -> None:
        self.left = inf if always else 1

    def govern(self, server: WireServer) -> None:
        """Give the server this behaviour."""
        respond = server.respond

        def respond_or_hang(seen: Seen) -> Iterable[Step]:
            steps = list(respond(seen))
            if seen.is_probe:
                return steps
            if self.left < 1:
                return _with_pauses(steps, TOKEN_GAP_S)
            self.left -= 1
            self.hung += 1
            return self.first(steps) if self.hung == 1 else self.then(steps)

        server.respond = respond_or_hang
