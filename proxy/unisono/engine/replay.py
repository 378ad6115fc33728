"""Replay: reads a recorded journal with the current parser, without a backend.

A replay uses the same reader as live answers, including interventions and server tool calls. The same tokens therefore
produce the same events, as long as the code of the reader is unchanged.

A recording contains the request as plain JSON, with only the fields that affect how tokens are parsed. It contains the
labels of tool servers, but no address, header or secret. The journal contains the tools that the servers offered, and
the results of tool searches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from unisono.core.conversation import AddedTools, AnswerForm, Conversation, Json, Preamble, TextGrammar
from unisono.core.events import Event
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason
from unisono.core.ids import DerivedIds
from unisono.core.item_records import to_tool, tool_record
from unisono.core.ports import Violation
from unisono.core.tool_host import SEARCH_LABEL, HostedTool, ToolOutcome, ToolSearch, ToolServer
from unisono.engine.journal import noted_in
from unisono.engine.output import OutputReader, replay
from unisono.engine.request import (
    AllowedTools,
    AnswerOptions,
    Choice,
    ForcedCalls,
    GenerationRequest,
    RequestOrigin,
    Resumption,
    ServerTools,
)
from unisono.engine.server_tools.tools import OfferedServerTools, offers_in
from unisono.errors import InvalidRequest, StoreUnreadable
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tool_declarations import plan_tools


@dataclass(frozen=True, slots=True)
class Replay:
    """The events of a replayed journal.

    `fits` is False if the steps of the replay differ from the recorded steps. `events` then contains only the `Closed`
    events of the items before the first difference.
    """

    events: Sequence[Event]
    fits: bool = True


def replay_answer(
    encoding: Encoding,
    renderer: Renderer,
    request: GenerationRequest,
    journal: Sequence[int],
    finish: FinishReason | None,
    violation: Violation | None = None,
) -> Replay:
    """Replay the answer to `request` from its journal.

    `finish` is the finish reason of the last generation; None if the recorded answer is incomplete. Raises
    InvalidRequest or a related error if a tool of the request is invalid.
    """
    hosted, conversation = None, request.conversation
    client = conversation.all_tools
    if request.server_tools is not None and request.server_tools.servers:
        hosted = OfferedServerTools(request.server_tools, offers_in(journal) or (), [tool.name for tool in client])
        tools, _ = hosted.plan(client, request.prompt.fields.tool, request.prompt.fields.tool_schema)
    else:
        tools = plan_tools(client)
    ids = DerivedIds(request.resumption.seed, "call")
    reader = OutputReader(
        encoding,
        tools,
        replace(
            request, resumption=replace(request.resumption, journal=tuple(journal), journal_note=noted_in(journal))
        ),
        lambda: ids("call_"),
        [],
        final_header=lambda: renderer.opening(replace(conversation, prefill="")),
        conversation=conversation,
        hosted=hosted,
        violation=violation,
    )
    if hosted is not None and not journal:
        return Replay([])
    try:
        events = replay(reader, journal, renderer.opening(conversation))
    except StoreUnreadable:
        return Replay(reader.items.closed, fits=False)
    if finish is None or reader.is_handed_back:
        return Replay(events)
    if reader.transcript.journal.is_ended:
        finish = FinishReason.STOP
    elif reader.transcript.is_broken_off:
        finish = FinishReason.LENGTH
    return Replay([*events, *reader.end_generation(finish)])


# fields of `AnswerOptions` whose values are JSON values already
PLAIN_OPTIONS = ("calls_allowed", "parallel_calls", "hold_calls", "whole", "reasoning_budget")


def to_record(request: GenerationRequest) -> dict[str, Json]:
    """Return the fields of a request that affect how its answer is parsed, as plain JSON."""
    record: dict[str, Json] = {name: getattr(request.answer, name) for name in PLAIN_OPTIONS}
    record["streamed"] = request.origin.is_streamed
    record["seed"] = request.resumption.seed
    record["stop"] = list(request.answer.stop)
    record["unmended"] = [*sorted(request.answer.disabled_rules)]
    record["prefill"] = request.conversation.prefill
    record["tools"] = [tool_record(tool) for tool in request.conversation.tools]
    record["deferred"] = [tool_record(tool) for tool in request.conversation.deferred]
    if request.conversation.removed:
        record["removed"] = [*sorted(request.conversation.removed)]
    # A forced choice may name a tool that a search found earlier, so these tools are recorded too.
    added = [tool for item in request.conversation.items if isinstance(item, AddedTools) for tool in item.tools]
    if found := [tool_record(tool) for tool in added if tool.server]:
        record["found"] = [*found]
    record["choice"] = None if request.answer.choice is None else _choice(request.answer.choice)
    record["form"] = None if request.answer.form is None else _form(request.answer.form)
    record["hosting"] = None if request.server_tools is None else _hosting(request.server_tools)
    if request.raw is not None:
        record["raw"] = True
    return record


def to_request(model: str, record: Mapping[str, Any]) -> GenerationRequest:
    """Return a request whose answer is parsed in the same way as that of the recorded request.

    Raises InvalidRequest if the record is invalid, or if it belongs to a raw completion, whose tokens are never parsed.
    """
    if record.get("raw"):
        raise InvalidRequest("'raw': a raw completion has no messages to parse; use a recording of a different API.")
    try:
        hosting = record["hosting"]
        found = tuple(map(to_tool, record.get("found", ())))
        return GenerationRequest(
            model=model,
            conversation=Conversation(
                Preamble(tools=tuple(map(to_tool, record["tools"]))),
                (AddedTools(found),) if found else (),
                prefill=record["prefill"],
                deferred=tuple(map(to_tool, record.get("deferred", ()))),
                removed=frozenset(record.get("removed", ())),
            ),
            server_tools=None if hosting is None else _to_hosting(hosting),
            # Earlier versions did not record this field.
            origin=RequestOrigin(is_streamed=record.get("streamed", True)),
            resumption=Resumption(seed=record["seed"]),
            answer=AnswerOptions(
                **{name: record[name] for name in PLAIN_OPTIONS},
                stop=tuple(record["stop"]),
                disabled_rules=frozenset(record["unmended"]),
                choice=None if record["choice"] is None else _to_choice(record["choice"]),
                form=None if record["form"] is None else _to_form(record["form"]),
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest("The recording does not contain a valid request.") from error


def _choice(choice: Choice) -> dict[str, Json]:
    tools: Json = None if choice.tools is None else [*sorted(choice.tools)]
    pairs = sorted(choice.hosted, key=lambda pair: (pair[0], pair[1] or ""))
    hosted: list[Json] = [[server, name] for server, name in pairs]
    if isinstance(choice, AllowedTools):
        return {"kind": "allowed", "tools": tools, "hosted": hosted}
    return {"kind": "forced", "tools": tools, "hosted": hosted, "exclusive": choice.exclusive}


def _to_choice(choice: Mapping[str, Any]) -> Choice:
    hosted = frozenset((server, name) for server, name in choice["hosted"])
    tools = None if choice["tools"] is None else frozenset(choice["tools"])
    if choice["kind"] != "forced":
        return AllowedTools(tools or frozenset(), hosted)
    # Recordings of earlier versions do not have the field `exclusive`.
    return ForcedCalls(tools, hosted, choice.get("exclusive", False))


def _form(form: AnswerForm) -> dict[str, Json]:
    schema = None if form.schema is None else dict(form.schema)
    record: dict[str, Json] = {
        "name": form.name,
        "schema": schema,
        "description": form.description,
        "strict": form.strict,
        "keeps_preambles": form.keeps_preambles,
    }
    if form.choices:
        record["choices"] = [*form.choices]
    if form.grammar is not None:
        record["grammar"] = asdict(form.grammar)
    return record


def _to_form(record: Mapping[str, Any]) -> AnswerForm:
    grammar = record.get("grammar")
    return AnswerForm(
        record["name"],
        record["schema"],
        record["description"],
        record["strict"],
        tuple(record.get("choices", ())),
        None if grammar is None else TextGrammar(**grammar),
        record.get("keeps_preambles", True),
    )


def _hosting(server_tools: ServerTools) -> dict[str, Json]:
    is_searched = server_tools.search is not None
    deferred: list[Json] = [server.label for server in server_tools.servers if is_searched and server.deferred]
    return {
        "servers": [{"label": server.label, "builtin": server.builtin} for server in server_tools.servers],
        **({"deferred": deferred} if deferred else {}),
        "announced": [*sorted(server_tools.announced)],
        "decisions": len(server_tools.decisions),
        "max_calls": server_tools.max_calls,
        "pause_after": server_tools.pause_after,
    }


def _to_hosting(hosting: Mapping[str, Any]) -> ServerTools:
    if hosting["decisions"]:
        raise InvalidRequest(
            "This recording cannot be replayed: the answer began with tool calls that the user had approved or denied, "
            "and recordings do not contain these decisions."
        )
    deferred = hosting.get("deferred", ())
    servers = tuple(
        ToolServer(label=one["label"], builtin=one["builtin"], deferred=one["label"] in deferred)
        for one in hosting["servers"]
    )
    search = ToolSearch(HostedTool(SEARCH_LABEL, ""), lambda *_: ToolOutcome("")) if deferred else None
    return ServerTools(
        servers,
        frozenset(hosting["announced"]),
        max_calls=hosting["max_calls"],
        pause_after=hosting.get("pause_after"),
        search=search,
    )
