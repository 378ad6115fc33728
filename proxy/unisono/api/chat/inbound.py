"""A Chat Completions request to a conversation: pure, no clock and no ids of its own.

What a client sends back from earlier answers is taken in every form it exists in. The order within one assistant
message is always reasoning, preamble text, calls, each call followed by its result, whatever order the results came in.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.api.body import MAX_RUN, RUN_TOO_LONG, longest_run_reaches
from unisono.api.chat.schema import MAX_MESSAGES, REASONING_PARTS, Call, ChatRequest, Message, Part
from unisono.api.chat.tools import Toolbox, to_toolbox, wrap_input
from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    DeveloperMessage,
    Effort,
    Item,
    Phase,
    Preamble,
    ToolResult,
    UserMessage,
)
from unisono.core.generation import Sampling
from unisono.engine.turn import Turn
from unisono.errors import InvalidRequest

MAX_NOTES = 32
SILENT: tuple[Any, ...] = (None, False, "", [], {})
"""Values of a field without effect that need no note: they ask for nothing."""

_HEADER = re.compile(
    r"\s*(?:<\|start\|>assistant)?<\|channel\|>(analysis|commentary|final)\s*(?:<\|constrain\|>\w+\s*)?<\|message\|>"
)
_TERMINATOR = re.compile(r"<\|(?:end|return|call)\|>|(?=<\|(?:start|channel)\|>)|\Z")


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """What one request asks: the turn for the engine, how many times, and what the answer must look like."""

    turn: Turn
    choices: int
    stream: bool
    include_usage: bool
    toolbox: Toolbox
    notes: tuple[str, ...]

    def turn_of(self, index: int) -> Turn:
        """The turn of choice `index`. Choices differ in their request id and, where the client gave one, in their
        seed: with equal ones they would all be the same answer."""
        if index == 0:
            return self.turn
        seed = self.turn.sampling.seed
        sampling = (
            self.turn.sampling
            if seed is None
            else replace(self.turn.sampling, seed=seed - index if seed > 0 else seed + index)
        )
        return replace(self.turn, sampling=sampling, request_id=f"{self.turn.request_id}-{index}")


def to_turn(
    request: ChatRequest, *, model: str, today: str, tenant: str, request_id: str, hold_calls: bool = True
) -> ChatTurn:
    """`model` is the group's name, `today` is YYYY-MM-DD. Raises InvalidRequest where fields contradict each other."""
    toolbox = to_toolbox(request.tools or (), request.functions or ())
    conversation, notes = to_conversation(request.messages, toolbox, _effort(request), today)
    forbidden = "none" in (request.tool_choice, request.function_call)
    turn = Turn(
        model=model,
        conversation=conversation,
        sampling=_sampling(request),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        stop=tuple(request.stop),
        calls_allowed=not forbidden,
        # The old form has room for one call only.
        parallel_calls=request.parallel_tool_calls is not False and not request.functions,
        hold_calls=hold_calls or not request.stream,
        whole=not request.stream,
        tenant=tenant,
        request_id=request_id,
    )
    all_notes = (*_notes_on_fields(request), *toolbox.notes, *notes)
    return ChatTurn(
        turn=turn,
        choices=request.n or 1,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        toolbox=toolbox,
        notes=all_notes[:MAX_NOTES],
    )


def to_conversation(
    messages: Sequence[Message], toolbox: Toolbox, effort: Effort, today: str
) -> tuple[Conversation, list[str]]:
    """The conversation and the notes on what of it was left out."""
    leading = 0
    while leading < len(messages) and messages[leading].role in {"system", "developer"}:
        leading += 1
    instructions = _join((_text(message.content) for message in messages[:leading]), "\n\n")
    rest = messages[leading:]
    prefill: str | None = None
    history = _History()
    for offset, message in enumerate(rest):
        history.add(leading + offset, message)
    if rest and rest[-1].role == "assistant" and not _has_calls(rest[-1]):
        prefill = history.take_prefill()
    preamble = Preamble(instructions=instructions, tools=toolbox.tools, effort=effort, date=today)
    items = tuple(history.items())
    if len(items) > MAX_MESSAGES:
        raise InvalidRequest(f"There are more than {MAX_MESSAGES:,} messages and calls.", param="messages")
    return Conversation(preamble, items, prefill), history.notes


@dataclass(slots=True)
class _Pending:
    """A call of the history with what answers it so far."""

    call: AssistantCall
    results: list[str]


class _History:
    """Items in the order the model must see them. Results go behind their calls when both belong to one exchange."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._entries: list[Item | _Pending] = []
        self._exchange: dict[str, deque[_Pending]] = {}
        self._names: dict[str, str] = {}
        self._legacy: dict[str, deque[str]] = {}

    def items(self) -> Iterator[Item]:
        for entry in self._entries:
            if isinstance(entry, _Pending):
                yield entry.call
                yield from (ToolResult(entry.call.call_id, entry.call.name, output) for output in entry.results)
            else:
                yield entry

    def add(self, position: int, message: Message) -> None:
        if message.name is not None and message.role not in {"function", "tool"}:
            self.notes.append(f"messages.{position}.name: no effect")
        match message.role:
            case "system" | "developer":
                self._say(DeveloperMessage(_text(message.content)))
            case "user":
                self._say(UserMessage(_text(message.content)))
            case "assistant":
                self._add_assistant(position, message)
            case "tool":
                assert message.tool_call_id is not None
                self._add_result(message.tool_call_id, _text(message.content), f"messages.{position}.tool_call_id")
            case "function":
                assert message.name is not None
                call_id = self._legacy_call(message.name, f"messages.{position}.name")
                self._add_result(call_id, _text(message.content), f"messages.{position}.name")

    def take_prefill(self) -> str | None:
        """The last assistant message's visible answer, taken out of the history: the model goes on from it."""
        if self._entries:
            last = self._entries[-1]
            if isinstance(last, AssistantMessage) and last.phase is Phase.FINAL:
                self._entries.pop()
                return last.text
        return None

    def _say(self, item: Item) -> None:
        self._exchange = {}
        self._entries.append(item)

    def _add_assistant(self, position: int, message: Message) -> None:
        self._exchange = {}
        reasoning = _reasoning(message)
        if reasoning:
            self._entries.append(AssistantReasoning(reasoning))
        visible = Phase.COMMENTARY if _has_calls(message) or message.phase == Phase.COMMENTARY else Phase.FINAL
        self._entries += split_markers(_text(message.content) or message.refusal or "", visible)
        for call in message.tool_calls or ():
            self._add_call(_to_call(call))
        if message.function_call is not None:
            call_id = f"function_call_{position}"
            self._legacy.setdefault(message.function_call.name, deque()).append(call_id)
            self._add_call(AssistantCall(call_id, message.function_call.name, message.function_call.arguments))

    def _add_call(self, call: AssistantCall) -> None:
        pending = _Pending(call, [])
        self._names[call.call_id] = call.name
        self._exchange.setdefault(call.call_id, deque()).append(pending)
        self._entries.append(pending)

    def _add_result(self, call_id: str, output: str, param: str) -> None:
        name = self._names.get(call_id)
        if name is None:
            raise InvalidRequest(
                f"'{param}': no assistant message before it has a tool call with the id '{call_id[:128]}'.", param=param
            )
        same = self._exchange.get(call_id)
        if same is None:
            self._entries.append(ToolResult(call_id, name, output))
            return
        # Some clients give every call of a message the same id: then the results come in the calls' order, and what is
        # too many belongs to the last.
        (same.popleft() if len(same) > 1 else same[0]).results.append(output)

    def _legacy_call(self, name: str, param: str) -> str:
        unanswered = self._legacy.get(name)
        if unanswered:
            return unanswered.popleft()
        raise InvalidRequest(
            f"'{param}': no assistant message before it has an unanswered call of '{name[:128]}'.", param=param
        )


def split_markers(text: str, visible: Phase) -> list[Item]:
    """An assistant's text as items. A client that once showed raw Harmony sends it back as content: the leading
    messages of such a text become what they were, and whatever does not begin like one is text."""
    items: list[Item] = []
    position = 0
    while header := _HEADER.match(text, position):
        end = _TERMINATOR.search(text, header.end())
        assert end is not None
        body, position = text[header.end() : end.start()], end.end()
        match header[1]:
            case "analysis":
                items += [AssistantReasoning(body)] if body else []
            case "commentary":
                items += [AssistantMessage(body, Phase.COMMENTARY)] if body else []
            case _:
                rest = body + text[position:]
                return [*items, AssistantMessage(rest, visible)] if rest else items
    rest = text[position:]
    return [*items, AssistantMessage(rest, visible)] if rest else items


def _has_calls(message: Message) -> bool:
    return bool(message.tool_calls) or message.function_call is not None


def _text(parts: Sequence[Part]) -> str:
    visible = (part for part in parts if part.type not in REASONING_PARTS)
    return _join((part.refusal if part.type == "refusal" else part.text) or "" for part in visible)


def _join(texts: Iterable[str], between: str = "") -> str:
    """Texts in order, the empty ones left out. Raises InvalidRequest for what the tokenizer cannot take: the parts
    were judged one by one, and only together they may be a run too long."""
    some = [text for text in texts if text]
    joined = between.join(some)
    if len(some) > 1 and longest_run_reaches(joined, MAX_RUN):
        raise InvalidRequest(RUN_TOO_LONG, param="messages")
    return joined


def _reasoning(message: Message) -> str:
    """The reasoning of a replayed answer, from the first field that has it: our own answers carry it under two names,
    and some clients send both back."""
    in_details = _join(detail.text or "" for detail in message.reasoning_details or ())
    in_content = _join(part.thinking or part.text or "" for part in message.content if part.type in REASONING_PARTS)
    forms = (message.reasoning, message.reasoning_content, message.thinking, in_details, in_content)
    return next(filter(None, forms), "")


def _to_call(call: Call) -> AssistantCall:
    if call.type == "custom":
        assert call.custom is not None
        return AssistantCall(call.id, call.custom.name, wrap_input(call.custom.input))
    assert call.function is not None
    return AssistantCall(call.id, call.function.name, call.function.arguments)


def _effort(request: ChatRequest) -> Effort:
    spelled = (
        request.reasoning_effort,
        request.reasoning.effort if request.reasoning else None,
        request.think,
        request.chat_template_kwargs.reasoning_effort if request.chat_template_kwargs else None,
        request.output_config.effort if request.output_config else None,
    )
    return next((effort for effort in spelled if effort is not None), Effort.MEDIUM)


def _sampling(request: ChatRequest) -> Sampling:
    """Every field explicitly; what the client left out has the model's recommended value."""
    given: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": None if request.top_k is None else max(0, request.top_k),
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "seed": request.seed,
        "logit_bias": request.logit_bias,
    }
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def _notes_on_fields(request: ChatRequest) -> Iterator[str]:
    nested = (
        ("", request.model_extra),
        ("stream_options.", request.stream_options and request.stream_options.model_extra),
        ("reasoning.", request.reasoning and request.reasoning.model_extra),
        ("chat_template_kwargs.", request.chat_template_kwargs and request.chat_template_kwargs.model_extra),
        ("output_config.", request.output_config and request.output_config.model_extra),
    )
    for prefix, fields in nested:
        yield from _without_effect(prefix, fields or {})


def _without_effect(prefix: str, fields: Mapping[str, Any]) -> Iterator[str]:
    return (f"{prefix}{name[:64]}: no effect" for name, value in fields.items() if value not in SILENT)
