"""Conversion of engine events to Chat Completions, streamed and whole.

The conversion has no side effects, and both forms have the same content. Rules for both forms:

- Visible text, preambles included, is `content` in the order of generation, with a blank line between two messages. If
  the answer must have a form, the engine emits preambles as reasoning, so `content` contains only the answer.
- An answer that violates its required format is a `refusal`, because a client would parse `content` as JSON.
- A chunk with a finish reason contains no reasoning.
- A call is emitted only when complete, unless its arguments are streamed. Emitted calls are numbered from 0.
- `finish_reason` is `tool_calls` exactly when a call is emitted, unless a call emitted early was truncated.

The chunk of a delta is made from a template, which is built once per choice, and the JSON of the delta's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, assert_never

import orjson

from unisono.api.answer_report import to_about
from unisono.api.chat.finish_reason import to_finish_reason
from unisono.api.client_toolbox import CallForm, Toolbox
from unisono.api.collected_answer import CollectedAnswer
from unisono.api.logprobs import to_choice_logprobs, to_entries
from unisono.api.request_options import ReasoningField
from unisono.api.sse import DONE, error_event, event
from unisono.core.conversation import MESSAGE_SEPARATOR, join_messages
from unisono.core.events import (
    Closed,
    Compacted,
    Delta,
    Event,
    Finished,
    HostedCall,
    Item,
    Listed,
    Listing,
    Opened,
    Passed,
    PassedBytes,
    Ran,
    Reasoning,
    Repaired,
    Text,
    ToolCall,
    join_deltas,
)
from unisono.core.frozen import dataclass
from unisono.core.generation import Usage
from unisono.engine.request import GenerationReport
from unisono.errors import UnisonoError


def has_room(calls: Sequence[CallForm], form: CallForm) -> bool:
    """Return True if a message with calls of the forms `calls` can contain another of `form`.

    A call in the legacy form must be the only call of its message.
    """
    return not calls or CallForm.LEGACY not in (calls[0], form)


def to_call(item: ToolCall, arguments: str, form: CallForm) -> dict[str, Any]:
    """Return a complete call as an entry of `tool_calls`.

    In the legacy form, returns the value of `function_call`.
    """
    match form:
        case CallForm.CUSTOM:
            custom = {"name": item.name, "input": arguments}
            return {"id": item.call_id, "type": "custom", "custom": custom}
        case CallForm.LEGACY:
            return {"name": item.name, "arguments": arguments}
        case _:  # the other forms are functions here
            return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Fields common to all chunks of an answer, and output options."""

    id: str
    created: int
    model: str
    fingerprint: str | None = None
    reasoning: ReasoningField = ReasoningField.BOTH
    toolbox: Toolbox = field(default_factory=Toolbox)
    notes: tuple[str, ...] = ()
    include_usage: bool = False
    hold_calls: bool = True
    # Number of alternatives for the log probability of each token; None for no log probabilities.
    logprobs: int | None = None

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def to_usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Return the usage of all choices together. All choices share one prompt, which counts once."""
    prompt = completion = cached = reasoning = 0
    for usage in usages:
        prompt = max(prompt, usage.prompt_tokens)
        completion += usage.completion_tokens
        cached = max(cached, usage.cached_tokens)
        reasoning += usage.reasoning_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def to_choice(index: int, result: CollectedAnswer, report: GenerationReport, frame: ChatFrame) -> dict[str, Any]:
    """Return one choice of a whole answer."""
    entries: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    reasoning: list[str] = []
    content: list[str] = []
    refusal: list[str] = []
    calls: list[dict[str, Any]] = []
    call_forms: list[CallForm] = []
    for closed in result.items:
        match closed.item:
            case Reasoning():
                reasoning.append(closed.text)
            case Text():
                (refusal if closed.item.unfit else content).append(closed.text)
                if frame.logprobs is not None:
                    entries[closed.item.unfit] += to_entries(
                        report.facts.logprobs, closed.item.index, closed.text, frame.logprobs
                    )
            case ToolCall():
                form = frame.toolbox.form_of(closed.item.name)
                if closed.complete and has_room(call_forms, form):
                    calls.append(to_call(closed.item, closed.text, form))
                    call_forms.append(form)
            case HostedCall() | Listing():
                pass  # internal to the gateway
            case _:
                assert_never(closed.item)
    # A Harmony answer may have several final messages; the API has one text.
    text, thoughts, refused = join_messages(content), "".join(reasoning), join_messages(refusal)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not (calls or refused) else None}
    message["refusal"] = refused or None
    message["annotations"] = []
    # Clients read the reasoning under one of two common names, so the default sends both.
    if thoughts:
        message |= dict.fromkeys(frame.reasoning.names, thoughts)
    # `functions` is the API's predecessor of `tools`, and allows one call per message.
    if call_forms and call_forms[0] is CallForm.LEGACY:
        message["function_call"] = calls[0]
    elif calls:
        message["tool_calls"] = calls
    return {
        "index": index,
        "message": message,
        "logprobs": None
        if frame.logprobs is None
        else to_choice_logprobs(entries[False] if content or not refusal else None, entries[True] if refusal else None),
        "finish_reason": to_finish_reason(result.finished, call_forms),
    }


def to_completion(
    results: Sequence[CollectedAnswer], reports: Sequence[GenerationReport], frame: ChatFrame
) -> dict[str, Any]:
    """Return the whole answer, with one choice per result."""
    return frame.head("chat.completion") | {
        "choices": [
            to_choice(index, result, report, frame)
            for index, (result, report) in enumerate(zip(results, reports, strict=True))
        ],
        "usage": to_usage([result.finished.usage for result in results]),
        "unisono": to_about(reports, frame.notes),
    }


class ChoiceChunks:
    """Converter from event batches to bytes for one choice of a stream.

    The converter stores only what it needs to write later chunks.
    """

    def __init__(self, index: int, frame: ChatFrame, report: GenerationReport) -> None:
        self.finished: Finished | None = None
        self._report = report
        self._frame = frame
        self._index = index
        head = orjson.dumps(frame.head("chat.completion.chunk"))[:-1]
        self._head = b"data: " + head + b',"choices":[{"index":%d,"delta":' % index
        self._after = b',"logprobs":null,"finish_reason":null}]' + _usage_field(frame) + b"}\n\n"
        # Fixed parts of chunks. `text_json.join(parts)` inserts the text between the parts.
        end = b"}" + self._after
        self._content = (self._head + b'{"content":', end)
        self._refusal = (self._head + b'{"refusal":', end)
        names = [b'"%s":' % name.encode() for name in frame.reasoning.names]
        self._reasoning = (self._head + b"{" + names[0], *(b"," + name for name in names[1:]), end) if names else ()
        self._last_text: dict[bool, int] = {}
        self._emitted_calls: list[CallForm] = []
        self._streamed_call: tuple[ToolCall, int] | None = None
        self._has_truncated_call = False

    def first_chunk(self) -> bytes:
        """Return the first chunk of the choice."""
        return self._chunk(b'{"role":"assistant","content":""}')

    def write(self, batch: Sequence[Event]) -> bytes:
        """Return the chunks of one batch. Adjacent deltas of one item become one chunk.

        `finish` returns the chunk with the finish reason, because that chunk may depend on other choices.
        """
        chunks: list[bytes] = []
        for entry in join_deltas(batch):
            chunks.append(self.delta(entry.item, entry.text) if isinstance(entry, Delta) else self._entry(entry))
        return b"".join(chunks)

    def finish(self, extra: dict[str, Any]) -> bytes:
        """Return the chunk with the finish reason. `extra` holds further fields of the chunk."""
        assert self.finished is not None
        reason = to_finish_reason(self.finished, self._emitted_calls, has_truncated_call=self._has_truncated_call)
        choice = {"index": self._index, "delta": {}, "logprobs": None, "finish_reason": reason}
        chunk = self._frame.head("chat.completion.chunk") | {"choices": [choice]}
        if self._frame.include_usage:
            chunk["usage"] = None
        return event(orjson.dumps(chunk | extra))

    def _chunk(self, delta: bytes) -> bytes:
        return self._head + delta + self._after

    def delta(self, item: Item, text: str) -> bytes:
        """Return the chunk of a delta."""
        if not text:
            return b""
        match item:
            case Text():
                if self._frame.logprobs is not None:
                    return self._delta_with_logprobs(item, text, self._frame.logprobs)
                if self._last_text.setdefault(item.unfit, item.index) != item.index:
                    self._last_text[item.unfit] = item.index
                    text = MESSAGE_SEPARATOR + text
                return orjson.dumps(text).join(self._refusal if item.unfit else self._content)
            case Reasoning():
                return orjson.dumps(text).join(self._reasoning) if self._reasoning else b""
            case ToolCall():
                if self._streamed_call is None:
                    return b""  # buffered: its Closed event has the complete text
                return self._arguments(self._streamed_call[1], CallForm.FUNCTION, text)
            case HostedCall() | Listing():
                return b""
            case _:
                assert_never(item)

    def _delta_with_logprobs(self, item: Text, text: str, top: int) -> bytes:
        """Return the chunk of a text with the log probabilities of the tokens that it completes."""
        entries = to_entries(self._report.facts.logprobs, item.index, text, top)
        if self._last_text.setdefault(item.unfit, item.index) != item.index:
            self._last_text[item.unfit] = item.index
            text = MESSAGE_SEPARATOR + text
        delta = {"refusal" if item.unfit else "content": text}
        logprobs = to_choice_logprobs(None, entries) if item.unfit else to_choice_logprobs(entries)
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        usage = {"usage": None} if self._frame.include_usage else {}
        return event(orjson.dumps(self._frame.head("chat.completion.chunk") | {"choices": [choice]} | usage))

    def _entry(
        self, entry: Opened | Closed | Ran | Listed | Repaired | Compacted | Finished | Passed | PassedBytes
    ) -> bytes:
        match entry:
            case Opened():
                return self._opened(entry.item)
            case Closed():
                return self._closed(entry)
            case Finished():
                self.finished = entry
                return b""
            case Repaired() | Ran() | Listed() | Compacted() | Passed() | PassedBytes():
                return b""
            case _:
                assert_never(entry)

    def _opened(self, item: Item) -> bytes:
        if self._frame.hold_calls or not isinstance(item, ToolCall):
            return b""
        form = self._frame.toolbox.form_of(item.name)
        if form is not CallForm.FUNCTION or not has_room(self._emitted_calls, form):
            return b""  # the other forms need the whole call
        self._streamed_call = (item, len(self._emitted_calls))
        return self._announce(self._streamed_call[1], item, CallForm.FUNCTION)

    def _closed(self, closed: Closed) -> bytes:
        if not isinstance(closed.item, ToolCall):
            return b""
        if self._streamed_call is not None:
            self._streamed_call = None
            self._emitted_calls.append(CallForm.FUNCTION)
            self._has_truncated_call = self._has_truncated_call or not closed.complete
            return b""
        form = self._frame.toolbox.form_of(closed.item.name)
        if not closed.complete or not has_room(self._emitted_calls, form):
            return b""
        index = len(self._emitted_calls)
        self._emitted_calls.append(form)
        arguments = self._arguments(index, form, closed.text) if closed.text else b""
        return self._announce(index, closed.item, form) + arguments

    def _announce(self, index: int, item: ToolCall, form: CallForm) -> bytes:
        """Return the first chunk of a call: everything but its arguments."""
        match form:
            case CallForm.CUSTOM:
                call = {"type": "custom", "custom": {"name": item.name, "input": ""}}
            case CallForm.LEGACY:
                return self._chunk(orjson.dumps({"function_call": {"name": item.name, "arguments": ""}}))
            case _:
                call = {"type": "function", "function": {"name": item.name, "arguments": ""}}
        return self._chunk(orjson.dumps({"tool_calls": [{"index": index, "id": item.call_id, **call}]}))

    def _arguments(self, index: int, form: CallForm, text: str) -> bytes:
        match form:
            case CallForm.CUSTOM:
                call: dict[str, Any] = {"index": index, "custom": {"input": text}}
            case CallForm.LEGACY:
                return self._chunk(orjson.dumps({"function_call": {"arguments": text}}))
            case _:
                call = {"index": index, "function": {"arguments": text}}
        return self._chunk(orjson.dumps({"tool_calls": [call]}))


def _usage_field(frame: ChatFrame) -> bytes:
    return b',"usage":null' if frame.include_usage else b""


class ChatStreamChunks:
    """Converter from the batches of all choices to the bytes of one stream.

    The last JSON chunk contains the `unisono` object.
    """

    def __init__(self, frame: ChatFrame, reports: Sequence[GenerationReport]) -> None:
        self._frame = frame
        self._reports = reports
        self._choices = [ChoiceChunks(index, frame, report) for index, report in enumerate(reports)]
        self._has_started = False

    def write(self, index: int, batch: Sequence[Event]) -> bytes:
        """Return the chunks of one batch of choice `index`.

        The batch that ends the last choice ends the stream.
        """
        choice = self._choices[index]
        # Nearly all batches are one delta.
        if self._has_started and len(batch) == 1 and isinstance(entry := batch[0], Delta):
            return choice.delta(entry.item, entry.text)
        chunks = choice.write(batch)
        if not self._has_started:
            self._has_started = True
            # Start all choices, in order: readers append each new choice and use its position as the index.
            chunks = b"".join(each.first_chunk() for each in self._choices) + chunks
        if choice.finished is None:
            return chunks
        if any(other.finished is None for other in self._choices):
            return chunks + choice.finish({})
        if not self._frame.include_usage:
            return chunks + choice.finish(self._about()) + DONE
        usages = [other.finished.usage for other in self._choices if other.finished is not None]
        return chunks + choice.finish({}) + self._usage_chunk(usages) + DONE

    def broken(self, error: UnisonoError) -> bytes:
        """Return the last events of a failed stream: the usage so far, if requested, and the error.

        Without `include_usage`, no chunk with empty `choices` is sent.
        """
        if not self._frame.include_usage:
            return error_event(error, self._about())
        return self._usage_chunk([report.facts.usage for report in self._reports]) + error_event(error)

    def _about(self) -> dict[str, Any]:
        return {"unisono": to_about(self._reports, self._frame.notes)}

    def _usage_chunk(self, usages: Sequence[Usage]) -> bytes:
        """Return the chunk with the usage of all choices."""
        last = {"choices": [], "usage": to_usage(usages), **self._about()}
        return event(orjson.dumps(self._frame.head("chat.completion.chunk") | last))
