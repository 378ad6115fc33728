"""Replay: reads a recorded journal with today's parser, without a backend.

It uses the reader of live answers, with its interventions and server tool calls. Equal tokens therefore lead to equal
events as long as the reading code is unchanged.

A recording contains the request as plain JSON, with only the fields that affect how tokens are parsed. Of tool servers
it contains the labels, but no address, header or secret. Their offers are in the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.core.conversation import AnswerForm, Conversation, FunctionTool, Json, Preamble
from unisono.core.events import Event
from unisono.core.generation import FinishReason
from unisono.core.ids import DerivedIds
from unisono.core.ports import Violation
from unisono.core.tools import ToolServer
from unisono.engine.journal import noted_in
from unisono.engine.output import OutputReader
from unisono.engine.request import AllowedTools, Choice, ForcedCalls, GenerationRequest, ServerTools
from unisono.engine.server_tools.calls import ToolRound
from unisono.engine.server_tools.tools import OfferedServerTools, offers_in
from unisono.errors import InvalidRequest, StoreUnreadable
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


# fields of a request that are JSON values themselves
PLAIN = ("calls_allowed", "parallel_calls", "hold_calls", "whole", "reasoning_budget", "seed")


def to_asked(turn: GenerationRequest) -> dict[str, Json]:
    """Return the record of a request."""
    asked: dict[str, Json] = {name: getattr(turn, name) for name in PLAIN}
    asked["stop"] = list(turn.stop)
    asked["unmended"] = [*sorted(turn.unmended)]
    asked["prefill"] = turn.conversation.prefill
    asked["tools"] = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": None if tool.parameters is None else dict(tool.parameters),
            "strict": tool.strict,
            "free_text": tool.free_text,
        }
        for tool in turn.conversation.preamble.tools
    ]
    asked["choice"] = None if turn.choice is None else _choice(turn.choice)
    asked["form"] = None if turn.form is None else _form(turn.form)
    asked["hosting"] = None if turn.hosting is None else _hosting(turn.hosting)
    if turn.raw is not None:
        asked["raw"] = True
    return asked


def to_turn(model: str, asked: Mapping[str, Any]) -> GenerationRequest:
    """Return a request whose answer is parsed in the same way.

    Raises InvalidRequest for an invalid record, and for a raw completion.
    """
    if asked.get("raw"):
        raise InvalidRequest("Nothing was read into the tokens of a raw completion.")
    try:
        hosting = asked["hosting"]
        return GenerationRequest(
            model=model,
            conversation=Conversation(
                Preamble(tools=tuple(FunctionTool(**tool) for tool in asked["tools"])), prefill=asked["prefill"]
            ),
            stop=tuple(asked["stop"]),
            unmended=frozenset(asked["unmended"]),
            choice=None if asked["choice"] is None else _to_choice(asked["choice"]),
            form=None if asked["form"] is None else AnswerForm(**asked["form"]),
            hosting=None if hosting is None else _to_hosting(hosting),
            **{name: asked[name] for name in PLAIN},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest("This is no record of what a turn asked for.") from error


def _choice(choice: Choice) -> dict[str, Json]:
    tools: Json = None if choice.tools is None else [*sorted(choice.tools)]
    pairs = sorted(choice.hosted, key=lambda pair: (pair[0], pair[1] or ""))
    hosted: list[Json] = [[server, name] for server, name in pairs]
    return {"kind": "forced" if isinstance(choice, ForcedCalls) else "allowed", "tools": tools, "hosted": hosted}


def _to_choice(choice: Mapping[str, Any]) -> Choice:
    hosted = frozenset((server, name) for server, name in choice["hosted"])
    tools = None if choice["tools"] is None else frozenset(choice["tools"])
    return ForcedCalls(tools, hosted) if choice["kind"] == "forced" else AllowedTools(tools or frozenset(), hosted)


def _form(form: AnswerForm) -> dict[str, Json]:
    schema = None if form.schema is None else dict(form.schema)
    return {"name": form.name, "schema": schema, "description": form.description, "strict": form.strict}


def _hosting(hosting: ServerTools) -> dict[str, Json]:
    return {
        "servers": [{"label": server.label, "builtin": server.builtin} for server in hosting.servers],
        "announced": [*sorted(hosting.announced)],
        "decisions": len(hosting.decisions),
        "max_calls": hosting.max_calls,
        "pause_after": hosting.pause_after,
    }


def _to_hosting(hosting: Mapping[str, Any]) -> ServerTools:
    if hosting["decisions"]:
        raise InvalidRequest("The turn began with calls that somebody had approved; those are in no recording.")
    servers = tuple(ToolServer(label=one["label"], builtin=one["builtin"]) for one in hosting["servers"])
    return ServerTools(
        servers,
        frozenset(hosting["announced"]),
        max_calls=hosting["max_calls"],
        pause_after=hosting.get("pause_after"),
    )
