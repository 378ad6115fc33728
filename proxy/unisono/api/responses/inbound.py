"""A Responses request to a turn and to the items that are kept: pure, state, ids and the day come in as arguments.

Instructions, tools and effort are those of the request, also when it continues something: nothing of them is taken
over. What was said before and what is said now are one history, read from the start, so that a continued conversation
begins with the very tokens of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from unisono.api.builtin_tools import builtin_for, builtin_notes, missing_setting
from unisono.api.content_parts import join
from unisono.api.field_types import MAX_MESSAGES, OpenModel, smallest
from unisono.api.model_rules import NO_RULES, ModelRules
from unisono.api.notes import MAX_NOTES, without_effect
from unisono.api.responses.input_conversion import InputConversion, KnownState
from unisono.api.responses.input_items import InputApprovalRequest, InputItem, InputReasoning, InputReference
from unisono.api.responses.items import COMPLETED, NewId, Wire, prefix_of
from unisono.api.responses.schema import INCLUDABLE, ResponsesRequest, ResponsesTool
from unisono.api.responses.server_tools.approval_history import CLIENTS_ID, ServerToolHistory, parted, settled
from unisono.api.responses.server_tools.mcp_spec import MCP, McpSpec
from unisono.api.responses.server_tools.server_tool_choice import on_offer
from unisono.api.responses.server_tools.servers import notes_on
from unisono.api.sampling import to_sampling
from unisono.api.tool_choice import OfferedTools, to_choice
from unisono.api.tools import CallForm, DeclaredTool, Toolbox, to_toolbox
from unisono.core.access import Caller
from unisono.core.conversation import Conversation, DeveloperMessage, Effort, Item, Preamble
from unisono.core.state_store import StoredItem
from unisono.core.tool_names import ToolNames
from unisono.core.tools import ToolServer
from unisono.engine.turn import GenerationRequest, ServerTools
from unisono.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ResponsesTurn:
    """What one request asks: the turn for the engine, its input as it is kept, and how the answer must look."""

    turn: GenerationRequest
    input: tuple[StoredItem, ...]
    toolbox: Toolbox
    notes: tuple[str, ...]


def check(request: ResponsesRequest, *, answered: bool = True) -> None:
    """Raise InvalidRequest for fields that contradict each other. What can be told before any state is read. A request
    that is not `answered` only prepares a later one and may say nothing yet."""
    if request.previous_response_id is not None and request.conversation is not None:
        raise InvalidRequest(
            "'previous_response_id' and 'conversation' cannot both be given.", param="previous_response_id"
        )
    if answered and not request.input and request.previous_response_id is None and request.conversation is None:
        raise InvalidRequest("'input' must hold something when nothing is continued.", param="input")
    if request.background and not request.stored:
        raise InvalidRequest("'background' needs 'store': what runs in the background is fetched later.", param="store")


def wanted_ids(request: ResponsesRequest) -> tuple[str, ...]:
    """Ids under which items may have been kept that this request leans on, each once; `KnownState.kept` is asked for no
    others. An item that is referred to must be there."""
    found = (item.id for item in request.input if item.id)
    return tuple(dict.fromkeys(found))


def references(request: ResponsesRequest) -> tuple[str, ...]:
    """Ids of items that are referred to and not repeated: without them the request cannot be understood."""
    found = (item.id for item in request.input if isinstance(item, InputReference))
    return tuple(dict.fromkeys(found))


def to_turn(
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
) -> ResponsesTurn:
    """`model` is the group's name, `today` the conversation's first day as YYYY-MM-DD, `new_id` makes the ids of the
    input's items; `seed`, `dated`, `sticky` and `servers` are the turn's. Raises InvalidRequest where fields contradict
    each other or ask for what cannot be kept, and NotFound for a reference to nothing."""
    toolbox = to_tools(request, servers)
    reading = InputConversion(known, names=ToolNames(taken=(tool.name for tool in toolbox.tools)))
    reading.add(known.earlier)
    entries = to_entries(request.input, reading, new_id)
    earlier, now = parted(entries, known.hosted)
    now = known.now + now
    hosting = to_hosting(request, earlier, now, servers)
    said = settled(tuple(reading.history), earlier, now)
    turn = GenerationRequest(
        model=model,
        conversation=to_conversation(said, to_preamble(request, toolbox, today)),
        sampling=to_sampling(request),
        max_tokens=request.max_output_tokens,
        parallel_calls=request.parallel_tool_calls is not False,
        hold_calls=hold_calls or not request.stream,
        # A whole answer could begin anew, but what tools have done is done.
        whole=not request.stream and hosting is None,
        tenant=caller.tenant,
        caller=caller,
        request_id=request_id,
        surface="responses",
        seed=seed,
        truncate=request.truncation == "auto",
        dated=dated,
        sticky=sticky,
        hosting=hosting,
        tools_at="tools.{index}",
        history_at="input",
    )
    turn = with_wishes(turn, request, on_offer(request, toolbox, servers), rules)
    return ResponsesTurn(turn, entries, toolbox, notes_of(request, toolbox, reading))


def notes_of(request: ResponsesRequest, toolbox: Toolbox, reading: InputConversion) -> tuple[str, ...]:
    """On what was accepted without effect."""
    return (*notes_on_fields(request), *toolbox.notes, *reading.notes)[:MAX_NOTES]


def with_wishes(
    turn: GenerationRequest, request: ResponsesRequest, offer: OfferedTools, rules: ModelRules
) -> GenerationRequest:
    """The turn with what is asked of calls, answers and thoughts. Raises InvalidRequest for what cannot be kept."""
    form = request.form.asked("text.format") if request.form else None
    callable_ = bool(offer.toolbox.tools) or turn.hosting is not None
    turn = rules.applied_to(turn)
    return replace(
        turn,
        # A made-up call would stand where somebody waits for JSON.
        calls_allowed=not request.calls_nothing and (form is None or callable_),
        choice=to_choice(request.tool_choice, offer),
        form=form,
        reasoning_budget=smallest(
            (request.reasoning.max_tokens if request.reasoning else None, rules.reasoning_budget)
        ),
    )


def to_tools(request: ResponsesRequest, servers: tuple[ToolServer, ...]) -> Toolbox:
    """The client's own tools, with what is to be noted about any."""
    builtins = frozenset(server.builtin for server in servers if server.builtin)
    toolbox = to_toolbox(declared(request.tools or (), "tools", builtins), others=bool(servers))
    on_servers = (*notes_on(mcp_specs(request)), *notes_on_builtins(request, builtins))
    return replace(toolbox, notes=(*on_servers, *toolbox.notes))


def to_preamble(request: ResponsesRequest, toolbox: Toolbox, today: str) -> Preamble:
    effort = request.reasoning.effort if request.reasoning else None
    return Preamble(request.instructions or "", toolbox.tools, effort or Effort.MEDIUM, today)


def to_hosting(
    request: ResponsesRequest, earlier: ServerToolHistory, now: ServerToolHistory, servers: tuple[ToolServer, ...]
) -> ServerTools | None:
    """The tools the gateway runs itself; None where there is nothing of the kind. Where no tool is to be called there
    is none, and what was approved is not run either."""
    servers = () if request.calls_nothing else servers
    if not servers and not now.decisions:
        return None
    # What a builtin tool can do is known to whoever asks for it.
    trained = {server.label for server in servers if server.builtin}
    announced = earlier.announced | now.announced | trained
    return ServerTools(servers, announced, now.decisions, max_calls=request.max_tool_calls)


def mcp_specs(request: ResponsesRequest) -> list[tuple[str, McpSpec]]:
    """The tool servers of a request, each with the field it stands in."""
    tools = enumerate(request.tools or ())
    return [(f"tools.{index}", tool.spec) for index, tool in tools if isinstance(tool.spec, McpSpec)]


def to_conversation(items: Sequence[Item], preamble: Preamble) -> Conversation:
    """Leading developer messages join the instructions: they are one message to the model, on every turn."""
    leading = 0
    texts = [preamble.instructions]
    for item in items:
        if not isinstance(item, DeveloperMessage):
            break
        texts.append(item.text)
        leading += 1
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"There are more than {MAX_MESSAGES:,} messages and calls.", param="input")
    whole = Preamble(join(texts, "\n\n", param="input"), preamble.tools, preamble.effort, preamble.date)
    return Conversation(whole, tuple(items[leading:]))


def to_entries(
    given: Sequence[InputItem], reading: InputConversion, new_id: NewId, param: str = "input"
) -> tuple[StoredItem, ...]:
    """Items as they are kept and listed, each under an id of its own; what they say is added to `reading`."""
    entries = []
    for position, item in enumerate(given):
        said = reading.read(item, f"{param}.{position}")
        shown = _shown(item, reading)
        item_id = new_id(prefix_of(str(shown["type"])))
        if isinstance(item, InputApprovalRequest) and item.id:
            shown[CLIENTS_ID] = item.id
        entries.append(StoredItem(item_id, said, {**shown, "id": item_id}))
    return tuple(entries)


def _shown(given: InputItem, reading: InputConversion) -> Wire:
    """An item as its author sent it, with every field that strict readers look for."""
    if isinstance(given, InputReference):
        kept = reading.known.kept(given.id)
        assert kept is not None  # the reading refused it otherwise
        return dict(kept.shown)
    if isinstance(given, InputReasoning):
        parts = [{"type": "reasoning_text", "text": text} for text in given.content]
        summary = given.summary if isinstance(given.summary, list) else []
        sealed = {"encrypted_content": given.encrypted_content} if given.encrypted_content else {}
        return {"type": "reasoning", "summary": summary, "content": parts, **sealed}
    shown = given.model_dump(mode="json", exclude_none=True)
    match given.type:
        case "message":
            shown["content"] = [_part(part, shown["role"]) for part in shown["content"]]
        case "function_call_output" | "custom_tool_call_output" | "mcp_call":
            shown["output"] = "".join(part.get("text") or "" for part in shown.get("output", ()))
        case _:
            pass
    return {"status": COMPLETED, **shown}


def _part(part: Wire, role: str) -> Wire:
    """A part under the name OpenAI has for it in a message of that role."""
    if part["type"] == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal") or ""}
    if part["type"] not in ("text", "input_text", "output_text"):
        return part
    if role == "assistant":
        return {"type": "output_text", "text": part["text"], "annotations": part.get("annotations") or []}
    return {"type": "input_text", "text": part["text"]}


def declared(
    tools: Sequence[ResponsesTool], path: str, builtins: frozenset[str] = frozenset()
) -> Iterator[DeclaredTool]:
    """The tools that are functions to the model, or that are not there; `builtins` are there and no functions."""
    for position, tool in enumerate(tools):
        at = f"{path}.{position}"
        if path == "tools" and (tool.type == MCP or builtin_for(tool.type) in builtins):
            continue
        form = CallForm.CUSTOM if tool.type == "custom" else CallForm.FUNCTION
        spec = None if isinstance(tool.spec, McpSpec) else tool.spec
        inner = tuple(declared(tool.tools or (), f"{at}.tools"))
        yield DeclaredTool(tool.type, at, at, spec, tool.name or "", inner, form, missing_setting(tool.type))


def notes_on_builtins(request: ResponsesRequest, builtins: frozenset[str]) -> Iterator[str]:
    for index, tool in enumerate(request.tools or ()):
        if builtin_for(tool.type) in builtins:
            yield from builtin_notes(f"tools.{index}", tool.model_extra or {})


def notes_on_fields(request: ResponsesRequest) -> Iterator[str]:
    nested: tuple[tuple[str, OpenModel | None], ...] = (
        ("", request),
        ("reasoning.", request.reasoning),
        ("text.", request.text),
        ("text.format.", request.form),
        ("stream_options.", request.stream_options),
    )
    for prefix, fields in nested:
        yield from without_effect(prefix, (fields.model_extra if fields is not None else None) or {})
    if request.text and request.text.verbosity not in (None, "medium"):
        yield "text.verbosity: no effect"
    if request.reasoning and request.reasoning.summary not in (None, "none"):
        yield "reasoning.summary: no effect, the reasoning itself is shown"
    for name in request.include or ():
        if not INCLUDABLE[name]:
            yield f"include: '{name}' has no effect"
