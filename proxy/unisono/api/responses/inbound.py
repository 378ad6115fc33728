"""Conversion of a Responses request to a generation request and stored items.

The conversion has no side effects: state, ids and the date are arguments. The current request always determines the
instructions, tools and effort, even if it continues a conversation. Earlier and new items are converted together to one
history, so that a continued conversation begins with exactly the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from unisono.api.automatic_compaction import CompactionPlan, Window, threshold_of, unknown_window
from unisono.api.client_toolbox import Toolbox, to_toolbox
from unisono.api.compaction_summary import pending_calls
from unisono.api.content_parts import join
from unisono.api.field_types import MAX_MESSAGES, smallest
from unisono.api.gateway_tools import builtin_for, builtin_notes
from unisono.api.model_rules import NO_RULES, ModelRules
from unisono.api.request_options import request_fields, to_sampling
from unisono.api.responses.configuration_updates import Configuration
from unisono.api.responses.declared_tools import Searcher, declared, searcher_of
from unisono.api.responses.input_conversion import InputConversion, KnownState
from unisono.api.responses.input_items import (
    InputApprovalRequest,
    InputItem,
    InputReference,
    to_listed,
)
from unisono.api.responses.item_readers import read
from unisono.api.responses.items import NewId, Wire, prefix_of
from unisono.api.responses.schema import INCLUDABLE, ResponsesRequest
from unisono.api.responses.server_tools.approval_history import (
    CLIENTS_ID,
    SEALED,
    parted,
    with_arguments,
    with_call_results,
)
from unisono.api.responses.server_tools.deferred_tools import (
    DeferredTools,
    deferred_tools,
    replacing_tools,
    request_searcher,
    with_replaced,
    without,
)
from unisono.api.responses.server_tools.mcp_spec import McpSpec
from unisono.api.responses.server_tools.servers import on_offer, to_server_tools
from unisono.api.structured_outputs import refuse_forms
from unisono.api.tool_choice import to_choice
from unisono.api.unused_fields import MAX_NOTES, notes_on_unused
from unisono.core.access import Caller
from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    Conversation,
    DeveloperMessage,
    FunctionTool,
    Item,
    Preamble,
)
from unisono.core.frozen import dataclass
from unisono.core.state_store import StoredItem
from unisono.core.tool_host import ToolNames, ToolServer
from unisono.engine.request import (
    AnswerOptions,
    GenerationRequest,
    PromptOptions,
    RequestFields,
    RequestOrigin,
    Resumption,
    RoutingOptions,
    ServerTools,
)
from unisono.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ResponsesGeneration:
    """Converted request: generation request, input as stored, and output options."""

    request: GenerationRequest
    input: tuple[StoredItem, ...]
    toolbox: Toolbox
    notes: tuple[str, ...]
    compaction: CompactionPlan | None = None


def check(request: ResponsesRequest, *, answered: bool = True) -> None:
    """Raise InvalidRequest for contradictory fields, before any state is read.

    If `answered` is False, the request only prepares a later request, and may have no input.
    """
    if request.previous_response_id is not None and request.conversation is not None:
        raise InvalidRequest(
            "'previous_response_id' and 'conversation' cannot be combined; set only one.", param="previous_response_id"
        )
    if answered and not request.input and request.previous_response_id is None and request.conversation is None:
        raise InvalidRequest(
            "'input' must not be empty without 'previous_response_id' or 'conversation'.", param="input"
        )
    if request.background and not request.stored:
        raise InvalidRequest(
            "'background: true' requires 'store: true', because clients retrieve the response later.", param="store"
        )


def referenced_ids(request: ResponsesRequest) -> tuple[str, ...]:
    """Return the distinct ids of all input items; each id may be that of a stored item.

    `KnownState.stored_item` is called only with these ids.
    """
    found = (item.id for item in request.input if item.id)
    return tuple(dict.fromkeys(found))


def references(request: ResponsesRequest) -> tuple[str, ...]:
    """Return the distinct ids in `item_reference` items, whose targets must be in the store."""
    found = (item.id for item in request.input if isinstance(item, InputReference))
    return tuple(dict.fromkeys(found))


def to_generation_request(
    request: ResponsesRequest,
    known: KnownState,
    *,
    model: str,
    today: str,
    caller: Caller,
    request_id: str,
    new_id: NewId,
    hold_calls: bool = True,
    seed: str = "",
    dated: bool = False,
    sticky: str = "",
    servers: tuple[ToolServer, ...] = (),
    rules: ModelRules = NO_RULES,
    window: Window = unknown_window,
) -> ResponsesGeneration:
    """Convert a request; with `dated`, its prompt must state the date `today` (YYYY-MM-DD).

    Raises InvalidRequest for invalid fields, and NotFound for a reference to a missing item.
    """
    searcher, toolbox = request_searcher(request, known.earlier), to_tools(request, servers)
    reading = _conversion(known, toolbox, searcher)
    entries = to_entries(request.input, reading, new_id, has_stored_history=bool(known.earlier))
    hosting, history = _with_approvals(request, reading, entries, servers)
    deferred = deferred_tools(request, toolbox, history, searcher, servers)
    preamble, defaults = _preamble(request, reading.configuration, today, rules), rules.defaults
    to_prompt = partial(_conversation_of, preamble, toolbox.tools, deferred)
    toolbox = toolbox.with_added(history)
    generation = GenerationRequest(
        model=model,
        conversation=to_prompt(history),
        server_tools=deferred.searched(hosting, request),
        answer=AnswerOptions(
            sampling=to_sampling(request, defaults),
            max_tokens=request.max_output_tokens or defaults.max_tokens,
            parallel_calls=defaults.allows_parallel_calls(request.parallel_tool_calls),
            stop=defaults.stop,
            hold_calls=hold_calls or not request.stream,
            whole=not request.stream and hosting is None,  # a restarted answer would run server tools again
        ),
        origin=RequestOrigin(caller.tenant, caller, request_id, "responses", is_streamed=bool(request.stream)),
        resumption=Resumption(seed=seed),
        prompt=PromptOptions(truncate=request.truncation == "auto", keeps_date=dated, fields=_fields(request)),
        routing=RoutingOptions(sticky=sticky),
        logprobs=request.logprobs,
    )
    result = with_output_requirements(generation, request, toolbox, servers, rules, reading.configuration)
    notes = notes_of(request, (*deferred.notes, *toolbox.notes), reading)
    return ResponsesGeneration(result, entries, toolbox, notes, to_compaction_plan(request, history, to_prompt, window))


def _fields(request: ResponsesRequest) -> RequestFields:
    return request_fields("input", request, logprobs="top_logprobs" if request.top_logprobs else "include")


def _with_approvals(
    request: ResponsesRequest,
    reading: InputConversion,
    entries: Sequence[StoredItem],
    servers: tuple[ToolServer, ...],
) -> tuple[ServerTools | None, tuple[Item, ...]]:
    """Return the server tools and the history.

    The history contains a result for each call whose approval was decided before this request, and the current
    definitions of tools.
    """
    earlier, new = parted(entries, reading.known.hosted)
    now = with_arguments(earlier, reading.known.now + new, reading.known.opened)
    items = reading.history.items()
    # A compaction keeps the calls that wait for the user, who may answer them afterwards.
    pending = pending_calls(items) if request.is_compaction else ()
    waiting = {call.call_id for call in pending if isinstance(call, AssistantCall)}
    history = with_replaced(with_call_results(items, earlier, now, waiting=waiting), reading.tools)
    return to_server_tools(request, earlier, now, servers), history


def to_compaction_plan(
    request: ResponsesRequest,
    history: Sequence[Item],
    rebuilt: Callable[[Sequence[Item]], Conversation],
    window: Window,
) -> CompactionPlan | None:
    """Return the compaction that the request asks for, or None.

    The conversation is compacted at once, or as soon as the prompt reaches the lowest of the requested thresholds.
    """
    if request.is_compaction:
        return CompactionPlan(history, rebuilt, threshold_of(None, window), ends_answer=True)
    thresholds = [threshold_of(entry.compact_threshold, window) for entry in request.context_management or ()]
    return CompactionPlan(history, rebuilt, threshold_of(None, window), min(thresholds)) if thresholds else None


def _conversation_of(
    preamble: Preamble, tools: tuple[FunctionTool, ...], deferred: DeferredTools, history: Sequence[Item]
) -> Conversation:
    """Build the model's conversation from a history."""
    hidden = deferred.hidden(history)
    tools = tuple(tool for tool in tools if tool.name not in hidden)
    conversation = to_conversation(without(history, hidden), replace(preamble, tools=tools) if tools else preamble)
    return deferred.added_to(conversation)


def _conversion(known: KnownState, toolbox: Toolbox, searcher: Searcher | None) -> InputConversion:
    """Create the conversion of the request's input. Its history starts with the earlier items."""
    names = ToolNames(reserved=(tool.name for tool in toolbox.tools))
    reading = InputConversion(known, names=names, searcher=searcher, tools=replacing_tools(toolbox, searcher))
    reading.add(known.earlier)
    return reading


def notes_of(request: ResponsesRequest, on_tools: Sequence[str], reading: InputConversion) -> tuple[str, ...]:
    """Return the notes on fields without effect and the notes on tools."""
    return (*notes_on_fields(request), *on_tools, *request.media_notes, *reading.notes)[:MAX_NOTES]


def with_output_requirements(
    generation_request: GenerationRequest,
    request: ResponsesRequest,
    toolbox: Toolbox,
    servers: Sequence[ToolServer],
    rules: ModelRules,
    configuration: Configuration,
) -> GenerationRequest:
    """Add the requirements on calls, format and reasoning to the generation request.

    An answer that is a compaction has no such requirements. Raises InvalidRequest for requirements that cannot be met.
    """
    if request.is_compaction:
        return rules.applied_to(generation_request, request.recoveries)
    text_format = configuration.form or request.form
    form = (text_format.to_answer_form("text.format") if text_format else None) or rules.defaults.form
    callable_ = bool(toolbox.tools) or generation_request.server_tools is not None
    has_search = generation_request.server_tools is not None and generation_request.server_tools.search is not None
    generation_request = rules.applied_to(generation_request, request.recoveries)
    own_budget = request.reasoning.max_tokens if request.reasoning else None
    answer = replace(
        generation_request.answer,
        # Without tools, the model may invent a call, which would replace the JSON that the client expects.
        calls_allowed=not request.has_no_calls and (form is None or callable_),
        choice=to_choice(request.tool_choice, on_offer(request, toolbox, servers, has_search=has_search)),
        # Clients can tell preambles from the answer, because preambles are messages with the phase `commentary`.
        form=None if form is None else replace(form, keeps_preambles=True),
        reasoning_budget=smallest((own_budget, rules.reasoning_budget)),
    )
    return replace(generation_request, answer=answer)


def to_tools(request: ResponsesRequest, servers: tuple[ToolServer, ...]) -> Toolbox:
    """Return the client's tools, with the notes on all tools."""
    builtins = frozenset(server.builtin for server in servers if server.builtin)
    tools = request.tools or ()
    can_defer = searcher_of(tools) is not None
    toolbox = to_toolbox(declared(tools, "tools", builtins), others=bool(servers), can_defer=can_defer)
    notes = notes_on_builtins(request, builtins)
    return replace(toolbox, notes=(*notes, *toolbox.notes)) if notes else toolbox


def _preamble(request: ResponsesRequest, configuration: Configuration, today: str, rules: ModelRules) -> Preamble:
    """Return the preamble without tools."""
    requested = configuration.effort or (request.reasoning.effort if request.reasoning else None)
    return Preamble(request.instructions or "", effort=rules.defaults.effort_for(requested), date=today)


def mcp_specs(request: ResponsesRequest) -> list[tuple[str, McpSpec]]:
    """Return the MCP servers of a request, each with the path of its field."""
    tools = enumerate(request.tools or ())
    return [(f"tools.{index}", tool.spec) for index, tool in tools if isinstance(tool.spec, McpSpec)]


def to_conversation(items: Sequence[Item], preamble: Preamble) -> Conversation:
    """Build the conversation; leading developer messages and tools become part of the preamble.

    The model reads the whole preamble as one message.
    """
    leading = 0
    texts = [preamble.instructions]
    tools = {tool.name: tool for tool in preamble.tools}
    # Tools of MCP servers are not added to the preamble, because their schemas are not known yet. They stay in an item,
    # which marks the position where they are declared.
    on_servers: list[FunctionTool] = []
    for item in items:
        if isinstance(item, DeveloperMessage):
            texts.append(item.text)
        elif isinstance(item, AddedTools):
            tools |= {tool.name: tool for tool in item.tools if not tool.server}
            on_servers += (tool for tool in item.tools if tool.server)
        else:
            break
        leading += 1
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(
            f"The conversation has more than {MAX_MESSAGES:,} messages, calls and results; shorten it.", param="input"
        )
    instructions = join(texts, "\n\n", param="input")
    whole = Preamble(instructions, tuple(tools.values()), preamble.effort, preamble.date)
    first = (AddedTools(tuple(on_servers)),) if on_servers else ()
    return Conversation(whole, (*first, *items[leading:]))


def to_entries(
    items: Sequence[InputItem],
    reading: InputConversion,
    new_id: NewId,
    param: str = "input",
    *,
    has_stored_history: bool,
) -> tuple[StoredItem, ...]:
    """Convert the items of a client to stored items, each with a new id.

    The content of the items is added to `reading`. `param` is the field that contains `items`. `has_stored_history` is
    True if the items continue a stored history. Raises InvalidRequest if one of the calls and outputs at the end of the
    history is an output with a wrong call id.
    """
    entries = []
    for position, item in enumerate(items):
        meaning = read(reading, item, f"{param}.{position}")
        wire = _wire_of(item, reading)
        item_id = new_id(prefix_of(str(wire["type"])))
        if isinstance(item, InputApprovalRequest) and item.id:
            wire[CLIENTS_ID] = item.id
            # Client libraries may drop `encrypted_content`, because approval requests of OpenAI do not have this field.
            stored = reading.known.stored_item(item.id)
            if stored is not None and SEALED in stored.wire and not item.encrypted_content:
                wire[SEALED] = stored.wire[SEALED]
        entries.append(StoredItem(item_id, meaning, {**wire, "id": item_id}))
    reading.check()
    reading.history.check_results(has_stored_history=has_stored_history)
    return _without_repeated(entries, reading.history.moved)


def _without_repeated(entries: Sequence[StoredItem], moved: Sequence[Item]) -> tuple[StoredItem, ...]:
    """Return stored items without the content that a later item repeats."""
    if not moved:
        return tuple(entries)
    ids = {id(item) for item in moved}
    return tuple(replace(each, meaning=tuple(item for item in each.meaning if id(item) not in ids)) for each in entries)


def _wire_of(item: InputItem, reading: InputConversion) -> Wire:
    if not isinstance(item, InputReference):
        return to_listed(item)
    stored = reading.known.stored_item(item.id)
    assert stored is not None  # `read` raises NotFound for an unknown id
    return dict(stored.wire)


def notes_on_builtins(request: ResponsesRequest, builtins: frozenset[str]) -> Iterator[str]:
    for index, tool in enumerate(request.tools or ()):
        if builtin_for(tool.type) in builtins:
            yield from builtin_notes(f"tools.{index}", tool.model_extra or {})


def notes_on_fields(request: ResponsesRequest) -> Iterator[str]:
    refuse_forms(request, "use 'text.format', or /v1/chat/completions")
    yield from notes_on_unused(request)
    if request.text and request.text.verbosity not in (None, "medium"):
        yield "text.verbosity: no effect"
    for name in request.include or ():
        if not INCLUDABLE[name]:
            yield f"include: '{name}' has no effect"
