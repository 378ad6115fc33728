"""An answer read again from its journal, with no backend: what today's parser makes of tokens that were recorded.

The very reader that an answer goes through as it comes, its plan and the calls of hosted tools included, so that equal
tokens give equal events for as long as nothing that reads them is changed.
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
    """`fits` is False where the reading came to other steps than those that were recorded: the events are then what was
    closed on the way."""

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
    """`finish` is what ended the last generation, None where the answer did not come to its end. Raises what tools are
    refused with."""
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
