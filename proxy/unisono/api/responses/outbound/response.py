"""Response objects, stored and sent, with every field that strict clients require."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, assert_never, cast

from unisono.api.client_toolbox import CallForm, Toolbox
from unisono.api.responses.client_tools import TOOLS, call_fields, started_call
from unisono.api.responses.declared_tools import tool_echo
from unisono.api.responses.items import (
    CALL_TYPES,
    IN_PROGRESS,
    MAX_STORED_LOGPROBS,
    NewId,
    Wire,
    annotated,
    call,
    exceeds_storage,
    message,
    prefix_of,
    reasoning,
    reasoning_part,
    refusal_part,
    served_id,
    text_part,
    to_item,
)
from unisono.api.responses.outbound.citations import CitedPages
from unisono.api.responses.outbound.dialects import OPENAI, Dialect
from unisono.api.responses.outbound.failures import failure_note
from unisono.api.responses.outbound.item_lifecycle import (
    CALLS,
    REASONING,
    REFUSAL,
    TEXT,
    WEB_SEARCH,
    ItemLifecycle,
    OpenItem,
)
from unisono.api.responses.outbound.server_tool_items import (
    BuiltinCalls,
    kind_of,
    listing,
    request_type,
    started_item,
    to_stored_call,
    to_stored_listing,
)
from unisono.api.responses.schema import LOGPROBS, OUTPUTS, SOURCES, ResponsesRequest
from unisono.core.conversation import Effort, Item, Phase
from unisono.core.events import Closed, Delta, Event, Finished, HostedCall, Listing, Reasoning, Text, ToolCall
from unisono.core.events import Item as Made
from unisono.core.frozen import dataclass
from unisono.core.generation import FinishReason, Sampling, Usage
from unisono.core.state_store import Status, StoredItem, StoredResponse
from unisono.errors import UnisonoError

MAX_OUTPUT_TOKENS = "max_output_tokens"
CONTAINER = "cntr_"
LOGPROBS_NOT_STORED = (
    f"log probabilities are not stored for an item of the answer that has more than {MAX_STORED_LOGPROBS:,} of them; "
    "later requests return this item without log probabilities"
)
LOGPROBS_LOST = "log probabilities are missing for the text before another process continued the response"

# Function that encrypts an item, so that only this gateway can decrypt it.
Seal = Callable[[Item], str]
SealHistory = Callable[[Sequence[Item]], str]

# Last events of a stream by status. OpenAI has none for a cancelled response.
LAST_EVENTS = {
    Status.COMPLETED: "response.completed",
    Status.INCOMPLETE: "response.incomplete",
    Status.FAILED: "response.failed",
    Status.CANCELLED: "response.incomplete",
}


@dataclass(frozen=True, slots=True)
class ResponseFrame:
    """Data of an answer that is known before generation and does not change.

    `request` is the echo of the request (`to_echo`), and `created_at` is in seconds since the epoch. If
    `show_reasoning` is False, the text of the reasoning is omitted. `seal` encrypts reasoning for the client; None if
    the client did not request this.
    """

    id: str
    created_at: int
    model: str
    request: Mapping[str, Any]
    toolbox: Toolbox = field(default_factory=Toolbox)
    notes: tuple[str, ...] = ()
    dialect: Dialect = OPENAI
    hold_calls: bool = True
    show_reasoning: bool = True
    seal: Seal | None = None
    first_day: str = ""
    ancestors: tuple[str, ...] = ()
    conversation: str | None = None
    # Number of items that were added to the conversation before the response; None without a conversation.
    seen: int | None = None
    include: frozenset[str] = frozenset()
    # Results of the browser in earlier responses, each with the address of its page.
    browsed: tuple[tuple[str, str], ...] = ()
    # Maximum characters of the summary of a reasoning item; 0 for no summary.
    summary_chars: int = 0
    # Function that encrypts the conversation for a compaction item; None if the answer contains no compaction.
    seal_history: SealHistory | None = None
    # Number of alternative tokens with log probabilities for each token; None without log probabilities.
    logprobs: int | None = None

    def trained(self) -> BuiltinCalls:
        """Return the renderer of builtin tool calls, in its initial state."""
        container = CONTAINER + self.id.rpartition("_")[2]
        return BuiltinCalls(SOURCES in self.include, OUTPUTS in self.include, container, CitedPages(self.browsed))

    def stored(self, status: Status, **more: Any) -> StoredResponse:
        """Return the record of the response for the store; `more` are its remaining fields."""
        return StoredResponse(
            id=self.id,
            status=status,
            model=self.model,
            created_at=self.created_at,
            first_day=self.first_day,
            request=self.request,
            ancestors=self.ancestors,
            conversation=self.conversation,
            seen=self.seen,
            **more,
        )

    def notes_on(self, output: Sequence[StoredItem]) -> tuple[str, ...]:
        """Return the notes for the client on an answer with the items `output`.

        If log probabilities of an item are not stored, an additional note reports this.
        """
        is_stored = bool(self.request.get("store")) or self.conversation is not None
        if not is_stored or not any(map(exceeds_storage, output)):
            return self.notes
        return (*self.notes, self._note_on_logprobs(LOGPROBS_NOT_STORED))

    def resumed(self, batch: Sequence[Event]) -> ResponseFrame:
        """Return the frame of a response that another process began with the events `batch`."""
        has_text = any(isinstance(event, Delta | Closed) and isinstance(event.item, Text) for event in batch)
        if self.logprobs is None or not has_text:
            return self
        return replace(self, notes=(*self.notes, self._note_on_logprobs(LOGPROBS_LOST)))

    def _note_on_logprobs(self, note: str) -> str:
        return f"{'include' if LOGPROBS in self.include else 'top_logprobs'}: {note}"

    def output(self, closed: Closed, item_id: str, status: str, so_far: OpenItem | None = None) -> StoredItem:
        """Return an item of the answer in its stored form. `so_far` is the item as emitted so far."""
        meaning = to_item(closed)
        before = so_far.silent_items if so_far is not None else ()
        all_said = (*before, *(() if meaning is None else (meaning,)))
        item = closed.item
        match item:
            case Reasoning():
                parts = [reasoning_part(closed.text)] if closed.text and self.show_reasoning else []
                sealed = self.seal(meaning) if self.seal is not None and meaning is not None else None
                summary = so_far.summary.parts if so_far is not None and so_far.summary is not None else ()
                wire = reasoning(item_id, parts, status, sealed, summary)
            case Text():
                part = refusal_part(closed.text) if item.unfit else text_part(closed.text)
                if so_far is not None and so_far.logprobs:
                    part["logprobs"] = so_far.logprobs
                wire = message(
                    item_id, item.phase, [annotated(part, so_far.annotations if so_far is not None else ())], status
                )
            case ToolCall():
                wire = call(item_id, item.call_id, item.name, closed.text, self.toolbox, status)
            case HostedCall():
                return to_stored_call(closed, item_id, None, before, self.trained())
            case Listing():
                return to_stored_listing(item, item_id, None)
            case _:
                assert_never(item)
        return StoredItem(item_id, all_said, wire)

    def lifecycle(self, item: Made) -> ItemLifecycle:
        """Return the event names and fields for an item."""
        match item:
            case Reasoning():
                return REASONING
            case Text():
                return REFUSAL if item.unfit else TEXT
            case ToolCall():
                return CALLS[self.toolbox.form_of(item.name)]
            case HostedCall() | Listing():
                return kind_of(item).lifecycle
            case _:
                assert_never(item)

    def added(self, item: Made, item_id: str, text: str, trained: BuiltinCalls) -> Wire:
        """Return an item as it is when it is added, in progress.

        `text` is the complete text of the item, or "" if it is not known yet.
        """
        if isinstance(item, HostedCall):
            return started_item(item, item_id, trained)
        if isinstance(item, Listing):
            return listing(item, item_id)
        form = self.toolbox.form_of(item.name) if isinstance(item, ToolCall) else CallForm.FUNCTION
        if form in TOOLS:
            # All fields of these calls are required, so an empty call would be invalid.
            return started_call(form, dict(self.output(Closed(item, text), item_id, IN_PROGRESS).wire))
        empty = self.output(Closed(item, ""), item_id, IN_PROGRESS).wire
        added = {**empty, "content": []} if "content" in empty else dict(empty)
        added.pop("encrypted_content", None)
        return added

    def presentable(self, closed: Closed) -> Closed:
        """Return the item, or a text if the item is a call that its tool's form cannot represent."""
        item = closed.item
        if not isinstance(item, ToolCall) or not closed.complete:
            return closed
        form = self.toolbox.form_of(item.name)
        if form not in TOOLS or call_fields(form, closed.text) is not None:
            return closed
        return Closed(Text(item.index, Phase.FINAL), f"{item.name}({closed.text})")

    def item_id(self, item: Made, new_id: NewId) -> str:
        match item:
            case Reasoning():
                return new_id(prefix_of("reasoning"))
            case Text():
                return new_id(prefix_of("message"))
            case ToolCall():
                return new_id(prefix_of(CALL_TYPES[self.toolbox.form_of(item.name)]))
            case HostedCall() if kind_of(item) is not WEB_SEARCH and not item.needs_approval:
                return served_id(item.call_id, kind_of(item).type)
            case HostedCall():
                return new_id(prefix_of(request_type(item) if item.needs_approval else kind_of(item).type))
            case Listing():
                return new_id(prefix_of("mcp_list_tools"))
            case _:
                assert_never(item)


def to_echo(request: ResponsesRequest, sampling: Sampling) -> Wire:
    """Return the echo of the request, with defaults for absent fields."""
    reasoning = request.reasoning
    effort = (reasoning.effort if reasoning else None) or Effort.MEDIUM
    budget = {"max_tokens": reasoning.max_tokens} if reasoning and reasoning.max_tokens is not None else {}
    form = request.form.written() if request.form else {"type": "text"}
    return {
        "background": bool(request.background),
        "conversation": {"id": request.conversation.id} if request.conversation else None,
        "frequency_penalty": sampling.frequency_penalty,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": dict(request.metadata or {}),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": effort.value, "summary": request.summary} | budget,
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.stored,
        "temperature": sampling.temperature,
        "text": {"format": form, "verbosity": (request.text and request.text.verbosity) or "medium"},
        "tool_choice": request.tool_choice.written() if request.tool_choice else "auto",
        "tools": [tool_echo(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def to_usage(usage: Usage) -> Wire:
    ran = {"tool_output_tokens": usage.tool_output_tokens} if usage.tool_output_tokens else {}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens} | ran,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def to_response(stored: StoredResponse, dialect: Dialect = OPENAI) -> Wire:
    """Return the response object, as used by POST, GET, and the first and last events."""
    request = dict(stored.request)
    tools = cast("list[Wire]", request.get("tools") or [])
    notes = dict(stored.notes)
    about = {"unisono": notes["unisono"]} if "unisono" in notes else {}
    return {
        "id": stored.id,
        "object": "response",
        "created_at": stored.created_at,
        "status": stored.status.value,
        "completed_at": notes.get("completed_at"),
        "error": None if stored.error is None else dict(stored.error),
        "incomplete_details": notes.get("incomplete_details"),
        "model": stored.model,
        "output": [dialect.item(item.wire) for item in stored.output],
        "usage": None if stored.usage is None else to_usage(stored.usage),
        **request,
        "tools": [dialect.tool(tool) for tool in tools],
        **about,
    }


def to_status(finished: Finished, *, calls: int, has_truncated_call: bool = False) -> Status:
    """Return the final status.

    `calls` is the number of complete calls in the answer. `has_truncated_call` is True if a truncated call was emitted;
    the status is then incomplete. Otherwise, an answer with calls is complete, because the client can act on the calls.
    """
    if has_truncated_call:
        return Status.INCOMPLETE
    if calls:
        return Status.COMPLETED
    if finished.cut_call:
        return Status.INCOMPLETE
    match finished.reason:
        case FinishReason.STOP:
            return Status.COMPLETED
        case FinishReason.LENGTH:
            return Status.INCOMPLETE
        case _:
            assert_never(finished.reason)


def to_notes(status: Status, about: Mapping[str, Any], now: float, error: UnisonoError | None = None) -> Wire:
    """Return the `notes` of a stored response, which contain further fields of the response.

    `about` is the object `unisono`, `now` is the time in seconds since the epoch, and `error` is the error of a failed
    response.
    """
    return {
        "completed_at": int(now) if status is Status.COMPLETED else None,
        "incomplete_details": {"reason": MAX_OUTPUT_TOKENS} if status is Status.INCOMPLETE else None,
        "unisono": dict(about),
        **failure_note(error),
    }


def is_in_answer(closed: Closed) -> bool:
    """Return True if an ended item that was not emitted yet belongs to the answer.

    Returns False for empty reasoning, truncated calls and items of server tools.
    """
    match closed.item:
        case Reasoning():
            return bool(closed.text)
        case Text():
            return True
        case ToolCall():
            return closed.complete
        case HostedCall() | Listing():
            return False
        case _:
            assert_never(closed.item)


def silent_items(closed: Closed) -> tuple[Item, ...]:
    """Return the content of an item that is not emitted; () if the item has no tokens.

    The tokens of empty reasoning are in the backend's prefix cache, so later prompts must contain them.
    """
    item = to_item(closed)
    return (item,) if item is not None and closed.tokens else ()
