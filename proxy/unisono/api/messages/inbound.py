"""Pure conversion of a Messages request to a generation request, without a clock or new ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import Enum

from unisono.api.automatic_compaction import CompactionPlan, Window, threshold_of, unknown_window
from unisono.api.client_toolbox import Toolbox, to_toolbox
from unisono.api.content_parts import join
from unisono.api.field_types import smallest
from unisono.api.gateway_tools import NOTHING_TO_RUN, SEARCH, RunnableTools, builtin_of, server_tools_of
from unisono.api.messages.content_blocks import (
    BETWEEN,
    CompactionBlock,
    RedactedBlock,
    ServerResultBlock,
    ThinkingBlock,
    ToolChangeBlock,
)
from unisono.api.messages.context_management import last_compaction
from unisono.api.messages.deferred_tools import deferred_tools, is_search, is_searched, notes_on_deferred, with_declared
from unisono.api.messages.history import HistoryReader, SealedBlocks
from unisono.api.messages.mcp_servers import to_mcp_servers
from unisono.api.messages.schema import MessageParam, MessagesInput
from unisono.api.messages.server_tools import (
    builtin_for,
    declared,
    notes_on,
    requested_choice,
    sealed_in,
    to_server_tool_choice,
    to_servers,
    with_server_tools,
)
from unisono.api.model_rules import NO_RULES, ModelRules
from unisono.api.request_options import request_fields, to_sampling
from unisono.api.structured_outputs import SchemaSpec, refuse_forms
from unisono.api.tool_choice import ChoiceMode, ToolChoice
from unisono.api.tool_server_rules import ServerRules
from unisono.api.unused_fields import MAX_NOTES, notes_on_prefill, notes_on_unused
from unisono.core.access import Caller
from unisono.core.conversation import AnswerForm, Conversation, Effort, Item, Preamble
from unisono.core.frozen import dataclass
from unisono.core.tool_host import ToolServer
from unisono.engine.request import AnswerOptions, Choice, GenerationRequest, PromptOptions, RequestOrigin
from unisono.errors import InvalidRequest, ThreadsUnsupported

SURFACE = "messages"
# Prefix of a block in `system` that is not an instruction. The block differs in every request of Claude Code, so each
# prompt with it would miss the backend's cache.
BILLING = "x-anthropic-billing-header:"


class Thinking(Enum):
    """Form of the reasoning in an answer."""

    HIDDEN = "hidden"
    SHOWN = "shown"
    # Blocks without text, whose signature is the sealed text.
    OMITTED = "omitted"


@dataclass(frozen=True, slots=True)
class MessagesModel:
    """Settings of a model for the Messages API: its deployment group, answer options and tools.

    `trained` holds the servers for builtin tools, by tool name. An answer pauses after `pause_after` rounds of server
    tool calls; None means never. `window` returns the context window in tokens, or None if it is unknown.
    """

    group: str
    show_reasoning: bool = True
    stream_tool_arguments: bool = False
    runnable: RunnableTools = NOTHING_TO_RUN
    trained: Mapping[str, ToolServer] = field(default_factory=dict)
    rules: ModelRules = NO_RULES
    pause_after: int | None = None
    window: Window = unknown_window
    servers: ServerRules = field(default_factory=ServerRules)


@dataclass(frozen=True, slots=True)
class MessagesGeneration:
    """Converted request: generation request and output options.

    The answer shows the client the calls to the builtin tools in `server_tool_names`. `session` is the tool server
    session of these calls.
    """

    request: GenerationRequest
    stream: bool
    thinking: Thinking
    server_tool_names: frozenset[str]
    session: str
    notes: tuple[str, ...]
    compaction: CompactionPlan | None = None

    @property
    def mcp_servers(self) -> frozenset[str]:
        """Labels of the MCP servers that the request names."""
        visible = frozenset() if self.request.server_tools is None else self.request.server_tools.visible
        return frozenset(label for label in visible if not builtin_of(label))


def needs_seals(request: MessagesInput) -> bool:
    """Return True if request or answer may contain data that this gateway encrypts or signs."""
    if request.thinking is not None and request.thinking.type != "disabled":
        return True
    if any(builtin_for(tool.type) or is_search(tool.type) for tool in request.tools or ()):
        return True
    if request.mcp_servers or request.compaction is not None or request.compact_edit is not None:
        return True
    sealed = (ThinkingBlock, RedactedBlock, ServerResultBlock, CompactionBlock)
    return any(isinstance(block, sealed) for message in request.messages for block in message.content)


def to_generation_request(
    request: MessagesInput,
    *,
    model: MessagesModel,
    today: str,
    caller: Caller,
    request_id: str,
    seals: SealedBlocks | None = None,
) -> MessagesGeneration:
    """Convert a request; `today` is YYYY-MM-DD. Raises InvalidRequest for invalid requests."""
    _check(request)
    requested = requested_choice(request.tool_choice, request.tools or [])
    forbidden = requested is not None and requested.mode is ChoiceMode.NONE
    session = _last_session(request, caller.tenant, seals) or f"{caller.tenant}\0{request_id}"
    served, hosted = _served(request, model, caller.tenant, session)
    toolbox = to_toolbox(declared(request, hosted), others=bool(served))
    servers = () if forbidden else (*served, *_runnable(request, model, caller.tenant, hosted))
    defaults = model.rules.defaults
    preamble = Preamble(tools=toolbox.tools, effort=defaults.effort_for(_effort(request)), date=today)
    conversation, notes = to_conversation(request, preamble, caller.tenant, seals)
    hosting = with_server_tools(
        server_tools_of(servers), request, toolbox, served, model.pause_after, conversation.removed
    )
    toolbox, (form, form_at) = toolbox.with_added(conversation.items), _form(request, defaults.form)
    generation_request = GenerationRequest(
        model=model.group,
        conversation=conversation,
        server_tools=hosting,
        answer=AnswerOptions(
            sampling=to_sampling(request, model.rules.defaults),
            # A backend reads a prompt only to generate a token. Therefore, one token is requested for `max_tokens` 0.
            max_tokens=None if request.max_tokens is None else max(request.max_tokens, 1),
            stop=tuple(request.stop_sequences or ()) or defaults.stop,
            # If JSON is required and there are no tools, a call invented by the model would replace the JSON.
            calls_allowed=not forbidden and (form is None or bool(toolbox.tools) or hosting is not None),
            parallel_calls=defaults.allows_parallel_calls(_parallel_calls(request)),
            hold_calls=not model.stream_tool_arguments or not request.stream,
            whole=not request.stream,
            choice=_choice(request, requested, toolbox, servers),
            form=form,
            reasoning_budget=smallest((_budget(request), model.rules.reasoning_budget)),
        ),
        origin=RequestOrigin(tenant=caller.tenant, caller=caller, request_id=request_id, surface=SURFACE),
        prompt=PromptOptions(fields=request_fields("messages", request, tool_schema="input_schema")),
    )
    generation_request = model.rules.applied_to(generation_request, request.recoveries)
    every = [*_notes_on(request, generation_request, hosted, form_at), *toolbox.notes, *request.media_notes, *notes]
    return MessagesGeneration(
        generation_request, bool(request.stream), _thinking(request, model), hosted, session, tuple(every[:MAX_NOTES])
    )


def _served(
    request: MessagesInput, model: MessagesModel, tenant: str, session: str
) -> tuple[tuple[ToolServer, ...], frozenset[str]]:
    """Return the servers that run the request's tools, and the names of its builtin tools."""
    builtins = to_servers(request, model.trained, owner=tenant, session=session)
    hosted = frozenset(server.builtin for server in builtins) | ({SEARCH} if is_searched(request) else frozenset())
    named = to_mcp_servers(request.mcp_servers or (), request.toolsets, model.servers, tenant)
    return (*builtins, *named), hosted


def _check(request: MessagesInput) -> None:
    if request.thread:
        raise ThreadsUnsupported("'thread' is not supported: send all messages of the conversation.", param="thread")
    if request.compaction is not None and request.context_management is not None:
        raise InvalidRequest("'compaction' and 'context_management' cannot be combined; omit one.", param="compaction")
    if request.max_tokens == 0:
        _check_without_answer(request)


def _check_without_answer(request: MessagesInput) -> None:
    """Raise InvalidRequest for fields that require a positive `max_tokens`, as Anthropic does."""
    thinking, choice, output = request.thinking, request.tool_choice, request.output_config
    refused = {
        "stream": request.stream,
        "thinking": thinking is not None and thinking.type != "disabled",
        "tool_choice": choice is not None and choice.type in ("any", "tool"),
        "output_config.format": output is not None and output.format is not None,
        "output_format": request.output_format is not None,
    }
    for field_name, is_set in refused.items():
        if is_set:
            raise InvalidRequest(
                f"'{field_name}' cannot be combined with a 'max_tokens' of 0, which generates no answer; omit "
                f"'{field_name}', or increase 'max_tokens'.",
                param=field_name,
            )


def to_conversation(
    request: MessagesInput, preamble: Preamble, tenant: str, seals: SealedBlocks | None
) -> tuple[Conversation, list[str]]:
    """Return the conversation, and notes on blocks and fields without effect.

    `preamble` contains all tools of the request. In the returned conversation, a deferred tool is declared at the
    position where a search found the tool.
    """
    tools = preamble.tools
    deferred = deferred_tools(request, tools)
    reading = HistoryReader(tenant, seals, deferred, (tool.name for tool in tools))
    messages = request.messages
    leading = next((at for at, message in enumerate(messages) if not _is_preface(message)), len(messages))
    instructions = [_without_billing(block.text) for block in request.system]
    instructions += [reading.instructions(position, message) for position, message in enumerate(messages[:leading])]
    compacted = last_compaction(messages)
    for position, message in enumerate(messages[leading:], leading):
        if compacted is None or position > compacted[0]:
            reading.add(position, message)
        elif position == compacted[0]:
            reading.add_compacted(messages, *compacted)
    # If the client requests a summary, an assistant message at the end is a finished answer and not a prefill.
    has_prefill = messages[-1].role == "assistant" and request.compaction is None
    prefill = reading.history.pop_prefill() if has_prefill else None
    preamble = replace(preamble, instructions=join(instructions, BETWEEN, param="system"), tools=())
    conversation = Conversation(preamble, reading.items(), prefill, removed=frozenset(reading.removed))
    notes = [*notes_on_deferred(request, deferred), *reading.notes]
    return with_declared(request, conversation, tools, deferred), notes


def _without_billing(text: str) -> str:
    """Remove the first line from a text of `system` if it is Claude Code's billing header."""
    # Some proxies join the blocks of Claude Code's system prompt, so instructions may follow the header.
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING) else text


def _is_preface(message: MessageParam) -> bool:
    """Return whether a message contains only instructions, and neither adds nor removes tools."""
    return message.role == "system" and not any(isinstance(block, ToolChangeBlock) for block in message.content)


def to_compaction_plan(request: MessagesInput, conversation: Conversation, window: Window) -> CompactionPlan | None:
    """Return the compaction that the request asks for, with or without a threshold, or None."""

    def rebuilt(items: Sequence[Item]) -> Conversation:
        return replace(conversation, items=tuple(items), reasoning_from=0)

    on_demand, edit = request.compaction, request.compact_edit
    if on_demand is None and edit is None:
        return None
    plan = CompactionPlan(conversation.items, rebuilt, threshold_of(None, window))
    if on_demand is not None:
        return replace(plan, ends_answer=True, instructions=(on_demand.instructions or "").strip())
    assert edit is not None
    threshold = threshold_of(edit.trigger.value if edit.trigger else None, window)
    pauses, instructions = bool(edit.pause_after_compaction), (edit.instructions or "").strip()
    return replace(plan, threshold=threshold, ends_answer=pauses, instructions=instructions)


def _runnable(
    request: MessagesInput, model: MessagesModel, tenant: str, hosted: frozenset[str]
) -> Iterator[ToolServer]:
    """Yield the operator's servers whose tools the gateway runs although the request names none.

    Servers of builtin tools in `hosted` are skipped, because the request names these tools.
    """
    requested = request.unisono.run_tools if request.unisono else None
    for server in model.runnable.servers_for(requested, tenant):
        if server.builtin not in hosted or not server.builtin:
            yield server


def _thinking(request: MessagesInput, model: MessagesModel) -> Thinking:
    thinking = request.thinking
    if thinking is None or thinking.type == "disabled":
        return Thinking.HIDDEN
    return Thinking.OMITTED if thinking.display == "omitted" or not model.show_reasoning else Thinking.SHOWN


def _parallel_calls(request: MessagesInput) -> bool | None:
    """Return whether the answer may have several calls; None if the request does not specify it."""
    disabled = request.tool_choice.disable_parallel_tool_use if request.tool_choice is not None else None
    return None if disabled is None else not disabled


def _effort(request: MessagesInput) -> Effort | None:
    if request.output_config is not None and request.output_config.effort is not None:
        return request.output_config.effort
    return Effort.LOW if request.thinking is not None and request.thinking.type == "disabled" else None


def _budget(request: MessagesInput) -> int | None:
    return request.thinking.budget_tokens if request.thinking and request.thinking.type == "enabled" else None


def _choice(
    request: MessagesInput, requested: ToolChoice | None, toolbox: Toolbox, servers: Sequence[ToolServer]
) -> Choice | None:
    """Return the engine's constraint on calls, or None.

    Returns None if this request continues a paused answer after a server tool's result, because the answer made the
    required call before the pause.
    """
    choice = to_server_tool_choice(requested, toolbox, servers, has_search=is_searched(request))
    last = request.messages[-1]
    continues = last.role == "assistant" and bool(last.content) and isinstance(last.content[-1], ServerResultBlock)
    return None if continues else choice


def _last_session(request: MessagesInput, tenant: str, seals: SealedBlocks | None) -> str:
    """Return the tool server session of the last server tool call, or "" if there is none.

    The new request continues this session, so that the session's resources stay available.
    """
    if seals is None:
        return ""
    blocks = (block for message in reversed(request.messages) for block in reversed(message.content))
    results = (sealed_in(block) for block in blocks if isinstance(block, ServerResultBlock))
    return next(filter(None, (seals.session(tenant, sealed) for sealed in results if sealed)), "")


def _form(request: MessagesInput, default: AnswerForm | None) -> tuple[AnswerForm | None, str]:
    """Return the required format or `default`, and the name of the field for the format."""
    format = request.output_config.format if request.output_config else None
    at = "output_config.format" if format is not None else "output_format"
    format = format or request.output_format
    return (SchemaSpec(schema=format.schema_).form(f"{at}.schema") if format is not None else default), at


def _notes_on(
    request: MessagesInput, generation_request: GenerationRequest, hosted: frozenset[str], form_at: str
) -> Iterator[str]:
    refuse_forms(request, "use 'output_config.format', or /v1/chat/completions")
    yield from notes_on_unused(request)
    hosting = generation_request.server_tools
    yield from notes_on(request.tools or (), hosted, is_bounded=hosting is not None and hosting.max_calls is not None)
    yield from _notes_on_running(request, generation_request)
    yield from notes_on_prefill(generation_request, choice_at="tool_choice", form_at=form_at)


def _notes_on_running(request: MessagesInput, generation_request: GenerationRequest) -> Iterator[str]:
    if request.unisono and request.unisono.run_tools and generation_request.server_tools is None:
        yield "unisono.run_tools: no effect, because there are no tools to run, or because of 'tool_choice'"
