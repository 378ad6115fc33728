"""Conversion of a Chat Completions request to a conversation, without side effects.

Assistant messages are accepted in every form in which the gateway may have sent them in earlier answers. In the
conversation, the items of one assistant message are always in the order reasoning, preamble text, calls. The result of
a call directly follows the call, even if the request lists the results in a different order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from unisono.api.chat.answer_options import (
    RequestedEfforts,
    budgets,
    notes_on_effort,
    requested_efforts,
    requested_form,
    requested_logprobs,
    shows_reasoning,
)
from unisono.api.chat.schema import ChatMessage, ChatRequest, ChatTool, ChatToolCall
from unisono.api.client_toolbox import CallForm, DeclaredTool, Toolbox, to_toolbox
from unisono.api.content_parts import REASONING_PARTS, ContentPart, join, text_of
from unisono.api.field_types import MAX_MESSAGES, shortened, smallest
from unisono.api.gateway_tools import NOTHING_TO_RUN, RunnableTools, server_tools_of
from unisono.api.harmony_in_history import split_markers
from unisono.api.history_builder import History
from unisono.api.model_rules import NO_RULES, ModelRules
from unisono.api.request_options import request_fields, to_sampling
from unisono.api.structured_outputs import form_field
from unisono.api.tool_choice import ChoiceMode, NamedTool, OfferedTools, ToolChoice, not_declared, to_choice
from unisono.api.unused_fields import MAX_NOTES, notes_on_prefill, notes_on_unused, without_effect
from unisono.core.access import Caller
from unisono.core.conversation import (
    AssistantCall,
    AssistantReasoning,
    Conversation,
    DeveloperMessage,
    Effort,
    Phase,
    Preamble,
    ToolResult,
    UserMessage,
)
from unisono.core.frozen import dataclass
from unisono.engine.request import (
    AnswerOptions,
    GenerationRequest,
    PromptOptions,
    RequestOrigin,
    RoutingOptions,
    ServerTools,
)
from unisono.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ChatGeneration:
    """Converted Chat Completions request.

    `request` is the generation request of the first choice, and `choices` the number of choices. `stream` and
    `include_usage` are the values that the client requested. `toolbox` contains the client's tools. `notes` are sent in
    `unisono.notes`. If `shows_reasoning` is False, the answer contains no reasoning.
    """

    request: GenerationRequest
    choices: int
    stream: bool
    include_usage: bool
    toolbox: Toolbox
    notes: tuple[str, ...]
    shows_reasoning: bool = True

    @property
    def requests(self) -> Iterator[GenerationRequest]:
        """Yield one generation request for each choice."""
        return map(self.request_of, range(self.choices))

    def request_of(self, index: int) -> GenerationRequest:
        """Return the generation request of the choice with the 0-based index `index`.

        Each choice has a different request id and, if the client set a seed, a different seed. With equal seeds, all
        choices would be the same.
        """
        if index == 0:
            return self.request
        answer = self.request.answer
        return replace(
            self.request,
            answer=replace(answer, sampling=answer.sampling.with_next_seed(index)),
            origin=replace(self.request.origin, request_id=f"{self.request.origin.request_id}-{index}"),
        )


def to_generation_request(
    request: ChatRequest,
    *,
    model: str,
    today: str,
    caller: Caller,
    request_id: str,
    hold_calls: bool = True,
    runnable: RunnableTools = NOTHING_TO_RUN,
    rules: ModelRules = NO_RULES,
) -> ChatGeneration:
    """Convert a request; `today` is YYYY-MM-DD. Raises InvalidRequest for unsupported fields."""
    toolbox, efforts = to_toolbox(declared(request), can_defer=False), requested_efforts(request)
    effort = rules.defaults.effort_for(efforts[0][1] if efforts else None)
    conversation, notes = to_conversation(request.messages, toolbox, effort, today, continues=_continues(request))
    requested, requested_at = _requested_choice(request)
    forbidden = requested is not None and requested.mode is ChoiceMode.NONE
    hosting = None if forbidden else to_server_tools(request, runnable, caller.tenant)
    defaults, form = rules.defaults, requested_form(request) or rules.defaults.form
    generation_request = GenerationRequest(
        model=model,
        conversation=conversation,
        server_tools=hosting,
        prompt=PromptOptions(fields=request_fields("messages", request, tool="tools.{index}.function")),
        answer=AnswerOptions(
            sampling=to_sampling(request, defaults),
            max_tokens=request.max_completion_tokens or request.max_tokens or defaults.max_tokens,
            stop=tuple(request.stop) or defaults.stop,
            # Without tools, the model may invent a call, which would replace the JSON that the client expects.
            calls_allowed=not forbidden and (form is None or bool(toolbox.tools) or hosting is not None),
            parallel_calls=defaults.allows_parallel_calls(request.parallel_tool_calls) and not request.functions,
            hold_calls=hold_calls or not request.stream,
            whole=not request.stream,
            choice=to_choice(requested, _on_offer(request, toolbox, hosting is not None, requested_at), requested_at),
            form=form,
            reasoning_budget=smallest((*budgets(request), rules.reasoning_budget)),
        ),
        origin=RequestOrigin(tenant=caller.tenant, caller=caller, request_id=request_id, surface="chat"),
        routing=RoutingOptions(sticky=_sticky(request, caller)),
        logprobs=requested_logprobs(request),
    )
    return ChatGeneration(
        request=(generation_request := rules.applied_to(generation_request, request.recoveries)),
        choices=request.n or 1,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        toolbox=toolbox,
        notes=(*_notes_on(request, generation_request, requested_at, efforts), *toolbox.notes, *notes)[:MAX_NOTES],
        shows_reasoning=shows_reasoning(request),
    )


def _continues(request: ChatRequest) -> bool:
    """Return whether the model must continue an assistant message at the conversation's end.

    Raises InvalidRequest if `continue_final_message` contradicts another field or the last message.
    """
    is_open = request.messages[-1].role == "assistant" and not _has_calls(request.messages[-1])
    if request.continue_final_message and request.add_generation_prompt:
        at = "add_generation_prompt"
        raise InvalidRequest(f"'{at}' and 'continue_final_message' cannot be combined; send only one.", param=at)
    if request.continue_final_message and not is_open:
        at = "continue_final_message"
        raise InvalidRequest(f"'{at}': the last message must be an assistant message without tool calls.", param=at)
    # By default the message is continued, as Anthropic's API and most local servers do.
    return request.continue_final_message is not False and not request.add_generation_prompt


def _sticky(request: ChatRequest, caller: Caller) -> str:
    """Return the key that routes a conversation to one backend; "" without `prompt_cache_key`.

    The client sends the same `prompt_cache_key` with all requests of a conversation.
    """
    # The tenant is part of the key, so equal keys of two tenants are different conversations.
    return f"{caller.tenant}\0key {request.prompt_cache_key}" if request.prompt_cache_key else ""


def _requested_choice(request: ChatRequest) -> tuple[ToolChoice | None, str]:
    """Return the requested tool choice and the name of the field that holds it."""
    if request.tool_choice is None and request.function_call is not None:
        return request.function_call, "function_call"
    return request.tool_choice, "tool_choice"


def to_server_tools(request: ChatRequest, runnable: RunnableTools, tenant: str) -> ServerTools | None:
    """Return the server tools of the request, or None.

    A request with several choices has no server tools, because each choice would run them.
    """
    browser = () if request.web_search_options is None else runnable.browser_for("web_search_options", tenant)
    if (request.n or 1) > 1:
        return None
    servers = runnable.servers_for(request.unisono.run_tools if request.unisono else None, tenant)
    if not servers and not browser:
        return None
    labels = {server.label for server in servers}
    return server_tools_of((*servers, *(server for server in browser if server.label not in labels)))


def _on_offer(request: ChatRequest, toolbox: Toolbox, hosts: bool, param: str) -> OfferedTools:
    """Return the tools that the field `param` can name, which are never server tools."""

    def hosted(tool: NamedTool) -> None:
        if tool.kind not in {each.type for each in request.tools or ()}:
            raise not_declared(tool, param)

    return OfferedTools(toolbox, hosts=hosts, hosted=hosted)


def _notes_on(
    request: ChatRequest, generation_request: GenerationRequest, choice_at: str, efforts: RequestedEfforts
) -> list[str]:
    notes = [*notes_on_unused(request)]
    if request.tool_choice is not None and request.function_call is not None:
        notes.append("function_call: no effect, because 'tool_choice' is set")
    if len(efforts) > 1:
        notes += notes_on_effort(efforts)
    if request.web_search_options:
        notes += without_effect("web_search_options.", request.web_search_options)
    notes += request.media_notes
    if request.unisono and request.unisono.run_tools and generation_request.server_tools is None:
        notes.append(
            "unisono.run_tools: no effect, because there are no tools to run, or because of 'tool_choice' or 'n'"
        )
    if generation_request.conversation.prefill is not None:
        notes += notes_on_prefill(generation_request, choice_at=choice_at, form_at=form_field(request))
    return notes


def declared(request: ChatRequest) -> Iterator[DeclaredTool]:
    """Yield the tools of `tools` and `functions`, in order."""
    for position, spec in enumerate(request.tools or ()):
        yield _declared(spec, f"tools.{position}")
    for position, function in enumerate(request.functions or ()):
        path = f"functions.{position}"
        yield DeclaredTool("function", path, path, function, form=CallForm.LEGACY)


def _declared(spec: ChatTool, path: str) -> DeclaredTool:
    at = f"{path}.{spec.type}"
    match spec.type:
        case "function":
            return DeclaredTool(spec.type, path, at, spec.function)
        case "custom":
            return DeclaredTool(spec.type, path, at, spec.custom, form=CallForm.CUSTOM)
        case _:
            inner = [_declared(tool, f"{path}.tools.{position}") for position, tool in enumerate(spec.tools or ())]
            return DeclaredTool(spec.type, path, name=spec.name or "", inner=tuple(inner))


def to_conversation(
    messages: Sequence[ChatMessage], toolbox: Toolbox, effort: Effort, today: str, *, continues: bool = True
) -> tuple[Conversation, list[str]]:
    """Return the conversation, and notes on messages and fields that have no effect.

    If `continues` is True, an assistant message at the end becomes the prefill, which the model continues.
    """
    leading = 0
    # The model reads the leading instructions as one message. Later system messages stay at their positions.
    while leading < len(messages) and messages[leading].role in {"system", "developer"}:
        leading += 1
    leading_texts = [_text(message.content) for message in messages[:leading]] if leading else ()
    names = [f"messages.{at}.name: no effect" for at in range(leading) if messages[at].name is not None]
    instructions = join(leading_texts, "\n\n", param="messages") if leading else ""
    rest = messages[leading:]
    prefill: str | None = None
    history = _History()
    history.notes += names
    for offset, message in enumerate(rest):
        history.add(leading + offset, message)
    history.history.check_results()
    if continues and rest and rest[-1].role == "assistant" and not _has_calls(rest[-1]):
        prefill = history.history.pop_prefill()
    preamble = Preamble(instructions=instructions, tools=toolbox.tools, effort=effort, date=today)
    items = history.history.items()
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(
            f"'messages' has more than {MAX_MESSAGES:,} messages, calls and results; shorten it.", param="messages"
        )
    return Conversation(preamble, items, prefill), history.notes


class _History:
    """Converter of messages to the model's history, with a rule for each role."""

    def __init__(self) -> None:
        self.history = History()
        self.notes = self.history.notes
        self._legacy: dict[str, deque[str]] = {}

    def add(self, position: int, message: ChatMessage) -> None:
        if message.name is not None and message.role not in {"function", "tool"}:
            self.notes.append(f"messages.{position}.name: no effect")
        if message.__pydantic_extra__ and message.__pydantic_extra__.get("audio") is not None:
            self.notes.append(f"messages.{position}.audio: no effect, because the model does not support audio input")
        match message.role:
            case "system" | "developer":
                self.history.add(DeveloperMessage(_text(message.content)))
            case "user":
                self.history.add(UserMessage(_text(message.content)))
            case "assistant":
                self._add_assistant(position, message)
            case "tool":
                assert message.tool_call_id is not None
                name = self.history.name_of(message.tool_call_id, f"messages.{position}.tool_call_id")
                self.history.result(ToolResult(message.tool_call_id, name, _text(message.content)))
            case "function":
                assert message.name is not None
                unanswered = self._legacy.get(message.name)
                call_id = unanswered.popleft() if unanswered else f"function_{position}"
                missing = f"no earlier assistant message has an unanswered call of '{shortened(message.name)}'"
                at = f"messages.{position}.name"
                name = self.history.name_of(call_id, at, default=message.name, missing=missing)
                self.history.result(ToolResult(call_id, name, _text(message.content)))

    def _add_assistant(self, position: int, message: ChatMessage) -> None:
        reasoning = _reasoning(message)
        self.history.add(*([AssistantReasoning(reasoning)] if reasoning else []))
        # The model wrote text next to calls as a preamble. As a `final` message, this text would end the turn in the
        # prompt, and the renderer would drop the reasoning before it.
        visible = Phase.COMMENTARY if _has_calls(message) or message.phase == Phase.COMMENTARY else Phase.FINAL
        self.history.add(*split_markers(_text(message.content) or message.refusal or "", visible))
        for call in message.tool_calls or ():
            self.history.call(_to_call(call))
        if message.function_call is not None:
            # The legacy form has no call ids. A result names only its function, so it is matched with the oldest
            # unanswered call of that function.
            call_id = f"function_call_{position}"
            self._legacy.setdefault(message.function_call.name, deque()).append(call_id)
            self.history.call(AssistantCall(call_id, message.function_call.name, message.function_call.arguments))


def _has_calls(message: ChatMessage) -> bool:
    return bool(message.tool_calls) or message.function_call is not None


def _text(content: str | Sequence[ContentPart]) -> str:
    return content if isinstance(content, str) else text_of(content, param="messages")


def _reasoning(message: ChatMessage) -> str:
    """Return the reasoning of an earlier answer, from the first field that contains reasoning.

    Answers of this gateway have the same reasoning in two fields, and some clients send both fields back.
    """
    in_details = join((detail.text or "" for detail in message.reasoning_details or ()), param="messages")
    parts = () if isinstance(message.content, str) else message.content
    in_content = join(
        (part.thinking or part.text or "" for part in parts if part.type in REASONING_PARTS), param="messages"
    )
    forms = (message.reasoning, message.reasoning_content, message.thinking, in_details, in_content)
    return next(filter(None, forms), "")


def _to_call(call: ChatToolCall) -> AssistantCall:
    if call.type == "custom":
        assert call.custom is not None
        return AssistantCall(call.id, call.custom.name, call.custom.input)
    assert call.function is not None
    return AssistantCall(call.id, call.function.name, call.function.arguments)
