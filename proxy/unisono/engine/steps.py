"""Steps of an answer: their items, and the choice of the next step.

`next_step` is a pure function. Each step appends its generated items to the conversation, with the results of server
tools directly after their calls, and changes no earlier item. If the model must answer now, the prompt of the step ends
with the opened header of a message on `final`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Final, TypeAlias, TypeGuard, assert_never

from unisono.core.conversation import (
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    Conversation,
    Item,
    Phase,
    ToolResult,
)
from unisono.core.events import Closed, Delta, Event, HostedCall, Listing, Opened, Reasoning, Text, ToolCall
from unisono.core.events import Item as EventItem
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason
from unisono.core.recovery_rules import DANGLING_PREAMBLE
from unisono.core.tool_host import ServerToolCall

# Names of rules (see `core.recovery_rules.RULES`).
ANALYSIS_ONLY: Final = "analysis-only"
TOOLS_ENDED: Final = "tools-ended"
LATE_CALL: Final = "late-call"


@dataclass(frozen=True, slots=True)
class AnswerState:
    """State of an answer at the end of a step, or after its calls to server tools were run."""

    reason: FinishReason = FinishReason.STOP
    has_output: bool = False  # the step contains anything but reasoning
    has_final: bool = False  # the step contains text on `final`
    cut_call: bool = False  # the step ends inside a call
    is_dangling: bool = False  # the step ends after a preamble, without the call or answer that should follow
    was_continued: bool = False  # the model already got a step to continue after a preamble
    is_final_open: bool = False  # the gateway opened the step's message on `final`, and does not open another one
    calls: tuple[ServerToolCall, ...] = ()  # complete calls to server tools in the step
    has_run: bool = False  # the step has ended and its calls were run
    needs_client: bool = False  # the client has to run calls to its own tools, or to decide on approval requests
    exhausted: bool = False  # no more tools are run, for example because the limit of calls is reached
    paused: bool = False  # no more tools are run until the client continues the answer

    @property
    def has_cut_tools(self) -> bool:
        """Return whether complete calls to server tools are dropped because the answer was cut off."""
        return self.reason is not FinishReason.STOP and bool(self.calls)

    def after_tools(self, *, needs_approval: bool, exhausted: bool, paused: bool) -> AnswerState:
        """Return the state after the calls of the step were run."""
        needs_client = self.needs_client or needs_approval
        return replace(self, has_run=True, needs_client=needs_client, exhausted=exhausted, paused=paused)


# State of an answer before its first step. `next_step` of this state is `Generate`.
INITIAL_STATE: Final = AnswerState(has_run=True)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Output of the earlier steps of an answer, which the current prompt contains.

    `number` is the number of earlier steps. `items` are their items, including the results of server tools. `results`
    are the results that were already part of a prompt. `is_final_open`: the current prompt ends with the opened header
    of a message on `final`. `was_continued`: the model already got a step to continue after a preamble. `generated` is
    the number of tokens generated in the earlier steps. `closed` is the number of items of the answer that were closed
    before the current step.
    """

    number: int = 0
    is_final_open: bool = False
    was_continued: bool = False
    items: tuple[Item, ...] = ()
    results: tuple[ToolResult, ...] = ()
    generated: int = 0
    closed: int = 0

    def before(self, step: Step) -> StepContext:
        """Return this context with the flags that it has when `step` begins."""
        was_continued = self.was_continued or isinstance(step, ContinueTurn)
        return replace(self, is_final_open=isinstance(step, OpenFinal), was_continued=was_continued)

    def extended(self, conversation: Conversation) -> Conversation:
        """Return the conversation that the current step continues."""
        if not self.number:
            return conversation
        prefill = "" if self.is_final_open else None
        return replace(conversation, items=(*conversation.items, *self.items), prefill=prefill)


FIRST_STEP: Final = StepContext()


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """The answer is complete, or it ends because the client has to act.

    `paused`: the client only has to continue the answer in another request.
    """

    paused: bool = False


ANSWER_DONE: Final = AnswerDone()


@dataclass(frozen=True, slots=True)
class Generate:
    """Let the model continue, without an opened message."""


GENERATE: Final = Generate()


@dataclass(frozen=True, slots=True)
class ContinueTurn:
    """Let the model continue the turn that it ended after a preamble."""

    rule: str = DANGLING_PREAMBLE


@dataclass(frozen=True, slots=True)
class OpenFinal:
    """Open the message on `final` that the model has not written, and let the model continue it."""

    rule: str = ANALYSIS_ONLY


@dataclass(frozen=True, slots=True)
class RunTools:
    """Run `calls` one after the other; then determine the next step again."""

    calls: tuple[ServerToolCall, ...]


Step: TypeAlias = AnswerDone | Generate | ContinueTurn | OpenFinal | RunTools


def next_step(answer: AnswerState) -> Step:
    """Return the next step of an answer.

    Calls to server tools run while more calls are allowed, and the model continues after their results. If a step ends
    after a preamble, the model gets one more step. The message on `final` is opened at most once: if the step contains
    only reasoning, if no more calls are allowed, or if a second step ends after a preamble. In all other cases the
    answer is complete.
    """
    if answer.has_run:
        return _after_results(answer)
    # An answer that was cut off ends, even if it contains complete calls: the model may have wanted to write more
    # before the results.
    if answer.reason is not FinishReason.STOP:
        return ANSWER_DONE
    if answer.calls and not answer.exhausted:
        return RunTools(answer.calls)
    if answer.is_dangling and not answer.cut_call and not answer.is_final_open:
        return OpenFinal(DANGLING_PREAMBLE) if answer.was_continued else ContinueTurn()
    if answer.has_output or answer.cut_call or answer.is_final_open:
        return ANSWER_DONE
    return OpenFinal(TOOLS_ENDED) if answer.calls else OpenFinal()


def _after_results(answer: AnswerState) -> Step:
    # The model cannot continue before the client sends the results of its own calls.
    if answer.needs_client:
        return ANSWER_DONE
    if answer.exhausted:
        # If the step contains text on `final` besides the calls, this text is the answer, so no message is opened.
        return ANSWER_DONE if answer.has_final else OpenFinal(TOOLS_ENDED)
    return AnswerDone(paused=True) if answer.paused else GENERATE


def to_item(closed: Closed) -> Item | None:
    """Convert a closed item, with the same tokens, to an item of the next step's prompt.

    Returns None if the prompt contains no such item. Text on any channel becomes a preamble (`commentary`). After a
    message on `final`, the renderer would omit earlier reasoning, but this answer is still in progress.
    """
    match closed.item:
        case Reasoning():
            return AssistantReasoning(closed.text, closed.tokens)
        case Text():
            return AssistantMessage(closed.text, Phase.COMMENTARY, closed.tokens)
        case ToolCall(call_id=call_id, name=name) | HostedCall(call_id=call_id, name=name):
            return AssistantCall(call_id, name, closed.text, closed.tokens)
        case Listing():
            return None
        case _:
            assert_never(closed.item)


class ServerToolFilter:
    """Filter that removes server tool calls from the events of an answer and collects them.

    The gateway later emits these calls one by one, each with its outcome. The remaining items are renumbered, so that
    the indices that the client sees have no gaps. `server_tools` contains the names of the tools that the gateway runs.
    If `parallel_calls` is False, only the first call to a client's tool is emitted; server tool calls are not limited.
    """

    def __init__(self, server_tools: Container[str], *, parallel_calls: bool) -> None:
        self._server_tools = server_tools
        self._parallel_calls = parallel_calls
        self._open: EventItem | None = None
        self._client_calls = 0
        self.item_count = 0  # number of items emitted so far, and 0-based index of the next item
        self.step_items: list[Item] = []  # all items of the current step, including server tool calls

    @property
    def calls(self) -> tuple[ServerToolCall, ...]:
        """Return the complete calls to server tools in the current step."""
        return tuple(
            ServerToolCall(item.call_id, item.name, item.arguments, item.tokens)
            for item in self.step_items
            if self._is_server_call(item)
        )

    def start_step(self) -> None:
        self.step_items.clear()

    def next_index(self) -> int:
        """Assign and return the index of an item that is emitted without passing through the filter."""
        index, self.item_count = self.item_count, self.item_count + 1
        return index

    def drop_calls(self) -> None:
        """Discard the server tool calls of the current step, because they are not run."""
        self.step_items[:] = [item for item in self.step_items if not self._is_server_call(item)]

    def filter(self, events: Sequence[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            match event:
                case Opened(item):
                    self._open = self._to_emit(item)
                    if self._open is not None:
                        out.append(Opened(self._open))
                case Delta(_, text):
                    if self._open is not None:
                        out.append(Delta(self._open, text))
                case Closed():
                    self._close(event, out)
                case _:
                    out.append(event)
        return out

    def _to_emit(self, item: EventItem) -> EventItem | None:
        """Return the item with the indices that the client sees; None if the item is not emitted."""
        match item:
            case ToolCall():
                if item.name in self._server_tools or (self._client_calls and not self._parallel_calls):
                    return None
                return replace(item, index=self.item_count, call_index=self._client_calls)
            case Reasoning() | Text():
                return replace(item, index=self.item_count)
            case HostedCall() | Listing():
                return item
            case _:
                assert_never(item)

    def _close(self, closed: Closed, out: list[Event]) -> None:
        item = closed.item
        # A truncated call must not become part of the conversation, because no result of it will follow.
        whole_or_text = closed.complete or not isinstance(item, ToolCall)
        if whole_or_text and (own := to_item(closed)) is not None:
            self.step_items.append(own)
        if self._open is not None:
            out.append(replace(closed, item=self._open))
            self.item_count += 1
            self._client_calls += isinstance(item, ToolCall)
        self._open = None

    def _is_server_call(self, item: Item) -> TypeGuard[AssistantCall]:
        return isinstance(item, AssistantCall) and item.name in self._server_tools


class AnswerItems:
    """Items of an answer: the items of the current step, and the items of the earlier steps.

    `step_filter` collects the items of the current step. Without server tools, it is None, and these items are derived
    from `closed`. `rejects_preambles`: a step that contains only preambles is not accepted as an answer.
    """

    def __init__(self, step_filter: ServerToolFilter | None, *, rejects_preambles: bool) -> None:
        self._filter = step_filter
        self._rejects_preambles = rejects_preambles
        self.context = FIRST_STEP  # output of the earlier steps
        self.closed: list[Closed] = []

    def start_generation(self) -> None:
        """Begin a generation; its prompt contains the results of server tools added so far."""
        if self.context.items:
            results = (item for item in self.context.items if isinstance(item, ToolResult))
            self.context = replace(self.context, results=tuple(results))

    def start_step(self, step: Generate | ContinueTurn | OpenFinal) -> None:
        """Record that `step` begins, with its first generation."""
        self.context = self.context.before(step)
        self.start_generation()

    def end_step(self, generated: int) -> None:
        """End the current step. `generated` is the number of tokens generated in the answer so far."""
        items = (*self.context.items, *self._of_step())
        self.context = replace(
            self.context,
            number=self.context.number + 1,
            items=items,
            generated=generated,
            closed=len(self.closed),
        )
        if self._filter is not None:
            self._filter.start_step()

    def end_round(self) -> bool:
        """Exclude server tool calls emitted since `end_step` from the items of the next step.

        Returns whether the client has to approve one of these calls.
        """
        items = [closed.item for closed in self.closed[self.context.closed :]]
        self.context = replace(self.context, closed=len(self.closed))
        return any(isinstance(item, HostedCall) and item.needs_approval for item in items)

    def add_results(self, items: Sequence[Item]) -> None:
        """Insert the result of a server tool, and the tools that it found, after its call.

        When the client continues the conversation, the results of parallel calls have the same order. The model then
        reads an unchanged history, and the prefix caches of backends match.
        """
        answered = {item.call_id for item in items if isinstance(item, ToolResult)}
        known = self.context.items
        calls = (at for at, item in enumerate(known) if isinstance(item, AssistantCall) and item.call_id in answered)
        end = 1 + max(calls, default=len(known) - 1)
        self.context = replace(self.context, items=(*known[:end], *items, *known[end:]))

    @property
    def results_by_call(self) -> dict[str, ToolResult]:
        return {item.call_id: item for item in self.context.items if isinstance(item, ToolResult)}

    def next_context(self, step: Step) -> StepContext:
        """Return the context of `step` if it follows the current step without calls in between."""
        items = (*self.context.items, *self._of_step())
        return replace(self.context, number=self.context.number + 1, items=items).before(step)

    def state(self, reason: FinishReason, *, cut_call: bool, exhausted: bool) -> AnswerState:
        """Return the state of the answer at the end of a step.

        `cut_call`: the step ends inside a call. `exhausted`: no more server tools may run.
        """
        has_output = has_final = needs_client = False
        has_preambles_only = True
        for closed in self.closed[self.context.closed :]:
            item = closed.item
            if isinstance(item, Reasoning):
                continue
            has_output = True
            phase = item.phase if isinstance(item, Text) else None
            has_final = has_final or phase is Phase.FINAL
            has_preambles_only = has_preambles_only and phase is Phase.COMMENTARY
            needs_client = needs_client or (isinstance(item, ToolCall) and closed.complete)
        return AnswerState(
            reason,
            has_output=has_output,
            has_final=has_final,
            cut_call=cut_call,
            is_dangling=self._rejects_preambles and has_output and has_preambles_only,
            was_continued=self.context.was_continued,
            is_final_open=self.context.is_final_open,
            calls=() if self._filter is None else self._filter.calls,
            needs_client=needs_client,
            exhausted=exhausted,
        )

    def _of_step(self) -> list[Item]:
        if self._filter is not None:
            return self._filter.step_items
        return [item for closed in self.closed[self.context.closed :] if (item := to_item(closed)) is not None]
