"""Replay: reads a recorded journal with today's parser, without a backend.

It uses the reader of live answers, with its interventions and server tool calls. Equal tokens therefore lead to equal
events as long as the reading code is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.core.events import Event
from unisono.core.generation import FinishReason
from unisono.core.ids import DerivedIds
from unisono.engine.hosted import OfferedServerTools, offers_in
from unisono.engine.journal import noted_in
from unisono.engine.reading import OutputReader
from unisono.engine.round import ToolRound
from unisono.engine.turn import GenerationRequest
from unisono.engine.wishes import Violation
from unisono.errors import StoreUnreadable
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tools import plan_tools


@dataclass(frozen=True, slots=True)
class Replay:
    """The events of a replayed journal.

    `fits` is False if the replay led to other steps than the recorded ones. The events are then the items that were
    closed up to that point.
    """

    events: Sequence[Event]
    fits: bool = True


def read_again(
    encoding: Encoding,
    renderer: Renderer,
    turn: GenerationRequest,
    journal: Sequence[int],
    finish: FinishReason | None,
    violation: Violation | None = None,
) -> Replay:
    """Replay the answer to `turn` from its journal.

    `finish` is the reason that ended the last generation; None if the answer is incomplete. Raises the errors of
    invalid tools.
    """
    hosted, conversation = None, turn.conversation
    client = conversation.preamble.tools
    if turn.hosting is not None and turn.hosting.servers:
        hosted = OfferedServerTools(turn.hosting, offers_in(journal) or (), [tool.name for tool in client])
        tools, _ = hosted.plan(client, turn.tools_at, turn.schema_field)
    else:
        tools = plan_tools(client)
    ids = DerivedIds(turn.seed, "call")
    reading = OutputReader(
        encoding,
        tools,
        replace(turn, journal=tuple(journal), noted=noted_in(journal)),
        lambda: ids("call_"),
        [],
        final=lambda: renderer.opening(replace(conversation, prefill="")),
        round_=None if hosted is None else ToolRound(hosted, conversation),
        violation=violation,
    )
    if hosted is not None and not journal:
        return Replay([])
    try:
        events = reading.read_again(journal, renderer.opening(conversation))
    except StoreUnreadable:
        return Replay(reading.closed, fits=False)
    if finish is None or reading.handed_back:
        return Replay(events)
    if reading.ended:
        finish = FinishReason.STOP
    elif reading.broken_off:
        finish = FinishReason.LENGTH
    return Replay([*events, *reading.end(finish)])
