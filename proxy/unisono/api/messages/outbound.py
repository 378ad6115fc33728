"""Pure conversion of events to a message, either as a stream or as one JSON object.

Rules for both forms, which have the same content:

- Each text of the model is a block, in the order of generation. No block is empty.
- A call is emitted only when complete, unless its arguments are streamed.
- `stop_reason` is `tool_use` if client calls were emitted and none of them was truncated.

The bytes of a delta are made from a template, which is built once per block, and the JSON of the delta's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, assert_never

import orjson

from unisono.api.answer_report import to_about
from unisono.api.collected_answer import CollectedAnswer
from unisono.api.gateway_tools import builtin_of
from unisono.api.messages.content_blocks import TOOL_REMOVAL
from unisono.api.messages.error_format import to_body
from unisono.api.messages.inbound import Thinking
from unisono.api.messages.server_tools import name_of, to_call_block, to_result
from unisono.api.messages.stop_reason_and_usage import ShownBlocks, stop_fields, to_usage
from unisono.api.messages.tool_input import to_json, to_wire
from unisono.api.sse import named_event
from unisono.api.tool_calls import to_messages_id
from unisono.core.conversation import AssistantCall, AssistantReasoning, ToolResult
from unisono.core.conversation import Item as Said
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
from unisono.engine.request import GenerationReport
from unisono.errors import UnisonoError

# -- templates of the stream
# Only the JSON of the text differs between the deltas of one block.

PING: Final = named_event(b"ping", b'{"type":"ping"}')
_DELTA: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b:'
_TEXT, _THINKING, _JSON = b'"text_delta","text"', b'"thinking_delta","thinking"', b'"input_json_delta","partial_json"'
_SIGNATURE: Final = b'"signature_delta","signature"'
_END: Final = b"}}\n\n"
_STOP: Final = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'


def _nothing(*_: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class MessageFrame:
    """Fields common to streamed and whole answers, and output options.

    The client sees the calls to the builtin tools in `server_tool_names`, and to the servers with the labels
    `mcp_servers`. `session` is the tool server session of these calls. `sign` returns the signature of a text. `seal`
    encrypts items with their session, and `seal_history` encrypts the items of a compaction. `removed` contains the
    names of the tools that the model must not call any more.
    """

    id: str
    model: str
    request_id: str = ""
    thinking: Thinking = Thinking.HIDDEN
    server_tool_names: frozenset[str] = frozenset()
    mcp_servers: frozenset[str] = frozenset()
    session: str = ""
    notes: tuple[str, ...] = ()
    max_tokens: int | None = None
    hold_calls: bool = True
    # Reports on the context edits that were applied; None if the request has no `context_management`.
    applied_edits: Sequence[dict[str, Any]] | None = None
    sign: Callable[[str], str] = _nothing
    seal_history: Callable[[Sequence[Said]], str] = _nothing
    seal: Callable[[Sequence[Said], str], str] = _nothing
    removed: frozenset[str] = frozenset()

    def message(self, content: Sequence[Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def end(self, report: GenerationReport) -> dict[str, Any]:
        """Return the fields that follow the usage: applied edits, and the `unisono` object."""
        edits = {} if self.applied_edits is None else {"context_management": {"applied_edits": [*self.applied_edits]}}
        return {**edits, "unisono": to_about([report], self.notes)}

    def compaction(self, compacted: Compacted) -> dict[str, Any]:
        """Return the block of a compaction, without content if the model wrote no summary."""
        sealed = self.seal_history(compacted.items) if compacted.summary else None
        block: dict[str, Any] = {
            "type": "compaction",
            "content": compacted.summary or None,
            "encrypted_content": sealed,
        }
        # A client may drop the messages before the block, and with them the blocks that removed tools.
        if compacted.summary and self.removed:
            block["tool_changes"] = [
                {"type": TOOL_REMOVAL, "tool": {"type": "tool_reference", "name": name}}
                for name in sorted(self.removed)
            ]
        return block

    def is_emitted(self, item: HostedCall) -> bool:
        if item.server in self.mcp_servers:
            return True
        return builtin_of(item.server) in self.server_tool_names and bool(name_of(item))

    def signature(self, closed: Closed) -> str:
        """Return the signature of a reasoning block.

        If the reasoning is omitted, the signature is the sealed reasoning itself.
        """
        # The client sends the block back with the next request, and the gateway reads the reasoning from the signature.
        if self.thinking is Thinking.OMITTED:
            return self.seal([AssistantReasoning(closed.text, closed.tokens)], "")
        return self.sign(closed.text)

    def result(self, closed: Closed, ran: Ran) -> dict[str, Any]:
        """Return the result block of an emitted call."""
        # The seal contains the exact tokens of the call. The block itself contains only the call's JSON.
        item = ran.item
        call = AssistantCall(item.call_id, item.name, closed.text, closed.tokens)
        return to_result(ran, self.seal([call, ToolResult(item.call_id, item.name, ran.text_for_model)], self.session))


def to_message(result: CollectedAnswer, report: GenerationReport, frame: MessageFrame) -> dict[str, Any]:
    """Return the whole answer."""
    content: list[dict[str, Any]] = []
    blocks = ShownBlocks(compacted=result.compacted)
    if result.compacted is not None:
        content.append(frame.compaction(result.compacted))
    ran = {each.item.call_id: each for each in result.ran}
    # With `max_tokens` 0, the backend generated one token, which the client did not ask for.
    for closed in result.items if frame.max_tokens != 0 else ():
        item = closed.item
        match item:
            case Text():
                if closed.text:
                    content.append({"type": "text", "text": closed.text})
                    blocks.refused = blocks.refused or item.unfit
            case Reasoning():
                if closed.text and frame.thinking is not Thinking.HIDDEN:
                    text = closed.text if frame.thinking is Thinking.SHOWN else ""
                    content.append({"type": "thinking", "thinking": text, "signature": frame.signature(closed)})
            case ToolCall():
                if closed.complete:
                    content.append(_call(item, to_wire(closed.text)))
                    blocks.calls += 1
            case HostedCall():
                if frame.is_emitted(item):
                    content.append(to_call_block(item))
                    blocks.has_server_call |= bool(name_of(item))
                    if (result_of := ran.get(item.call_id)) is not None:
                        content.append(frame.result(closed, result_of))
                        blocks.add_result(result_of)
            case Listing():
                pass
            case _:
                assert_never(item)
    message = frame.message(content, to_usage(result.finished.usage, blocks))
    ending = stop_fields(result.finished, blocks, report, frame.max_tokens)
    return message | ending | frame.end(report)


def _call(item: ToolCall, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": to_messages_id(item.call_id), "name": item.name, "input": arguments}


class MessageEvents:
    """Converter of event batches to the bytes of a stream.

    Stores only the state that is needed to write later events.
    """

    def __init__(self, frame: MessageFrame, report: GenerationReport) -> None:
        self._frame = frame
        self._report = report
        self._has_started = False
        self._index = 0
        # True while the current item has a block without its stop event.
        self._open = False
        self._delta = b""
        # Beginning of streamed arguments, buffered until they are known to be an object; None if nothing is buffered.
        self._before_object: str | None = None
        self._blocks = ShownBlocks()
        # Emitted server tool calls that have no result yet, by call id.
        self._server_calls: dict[str, Closed] = {}

    def write(self, batch: Sequence[Event]) -> bytes:
        """Return the events of one batch.

        Adjacent deltas of one item are joined. For the batch with Finished, these are the last events of the stream.
        """
        # Nearly all batches are one delta.
        if self._has_started and len(batch) == 1 and isinstance(only := batch[0], Delta):
            return self._text(only.item, only.text)
        events: list[bytes] = [] if self._has_started else [self._message_start()]
        for entry in join_deltas(batch):
            events.append(self._text(entry.item, entry.text) if isinstance(entry, Delta) else self._entry(entry))
        return b"".join(events)

    def keep_alive(self) -> bytes:
        """Return a keep-alive event, after `message_start` if `message_start` was not sent yet."""
        # Clients expect `message_start` as the first event.
        return PING if self._has_started else self._message_start() + PING

    def broken(self, error: UnisonoError) -> bytes:
        """Return the last event of a failed stream.

        An open block stays open, because it is incomplete.
        """
        error_body = {**to_body(error, self._frame.request_id), "unisono": to_about([self._report], self._frame.notes)}
        return named_event(b"error", orjson.dumps(error_body))

    def _message_start(self) -> bytes:
        self._has_started = True
        # The number of cached tokens is unknown before the answer. `message_delta` has the final numbers.
        usage = {
            "input_tokens": self._report.facts.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        start = {"type": "message_start", "message": self._frame.message([], usage)}
        return named_event(b"message_start", orjson.dumps(start))

    def _text(self, item: Item, text: str) -> bytes:
        if not text:
            return b""
        if self._open and self._before_object is None:
            return self._delta + orjson.dumps(text) + _END
        if self._before_object is not None:
            return self._arguments_delta(text)
        match item:
            case Text():
                start = self._start({"type": "text", "text": ""}, _TEXT)
                self._blocks.refused = self._blocks.refused or item.unfit
            case Reasoning():
                if self._frame.thinking is not Thinking.SHOWN:
                    return b""
                start = self._start({"type": "thinking", "thinking": "", "signature": ""}, _THINKING)
            case ToolCall() | HostedCall() | Listing():
                return b""  # its Closed event has the complete text
            case _:
                assert_never(item)
        return start + self._delta + orjson.dumps(text) + _END

    def _start(self, block: dict[str, Any], delta: bytes) -> bytes:
        self._open = True
        self._delta = _DELTA % (self._index, delta)
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return named_event(b"content_block_start", orjson.dumps(start))

    def _stop(self) -> bytes:
        stop = _STOP % self._index
        self._open = False
        self._index += 1
        return stop

    def _entry(
        self, entry: Opened | Closed | Ran | Listed | Repaired | Compacted | Finished | Passed | PassedBytes
    ) -> bytes:
        match entry:
            case Opened():
                if self._frame.hold_calls or not isinstance(entry.item, ToolCall):
                    return b""
                self._before_object = ""
                return self._start_call(entry.item)
            case Closed():
                return self._closed(entry)
            case Ran():
                closed = self._server_calls.pop(entry.item.call_id, None)
                if closed is None:
                    return b""
                self._blocks.add_result(entry)
                return self._whole_block(self._frame.result(closed, entry))
            case Compacted():
                return self._compacted(entry)
            case Finished():
                return self._finish(entry)
            case Repaired() | Listed() | Passed() | PassedBytes():
                return b""
            case _:
                assert_never(entry)

    def _start_call(self, item: ToolCall) -> bytes:
        self._blocks.calls += 1
        # As in Anthropic's own streams, the first delta of the input is empty.
        return self._start(_call(item, {}), _JSON) + self._delta + b'""' + _END

    def _arguments_delta(self, text: str) -> bytes:
        """Return the delta of streamed arguments; empty until the arguments begin with `{`.

        Clients fail if arguments are not an object.
        """
        arguments = f"{self._before_object}{text}"
        begins = arguments.lstrip().startswith("{")
        self._before_object = None if begins else arguments
        return self._delta + orjson.dumps(arguments) + _END if begins else b""

    def _closed(self, closed: Closed) -> bytes:
        item = closed.item
        match item:
            case Text():
                return self._stop() if self._open else b""
            case Reasoning():
                return self._reasoning(closed)
            case ToolCall():
                return self._called(item, closed)
            case HostedCall():
                if not self._frame.is_emitted(item):
                    return b""
                self._server_calls[item.call_id] = closed
                use = to_call_block(item)
                self._blocks.has_server_call |= bool(name_of(item))
                # In a stream, a block starts with an empty input. Deltas contain the JSON of the input.
                start = self._start({**use, "input": {}}, _JSON)
                return start + self._delta + orjson.dumps(orjson.dumps(use["input"]).decode()) + _END + self._stop()
            case Listing():
                return b""
            case _:
                assert_never(item)

    def _reasoning(self, closed: Closed) -> bytes:
        if not closed.text or self._frame.thinking is Thinking.HIDDEN:
            return b""
        start = b"" if self._open else self._start({"type": "thinking", "thinking": "", "signature": ""}, _THINKING)
        signed = _DELTA % (self._index, _SIGNATURE) + orjson.dumps(self._frame.signature(closed)) + _END
        return start + signed + self._stop()

    def _called(self, item: ToolCall, closed: Closed) -> bytes:
        if self._open:
            before_object, self._before_object = self._before_object, None
            self._blocks.cut = self._blocks.cut or not closed.complete
            rest = to_json(closed.text) if before_object and closed.complete else ""
            return (self._delta + orjson.dumps(rest) + _END if rest else b"") + self._stop()
        if not closed.complete:
            return b""
        start = self._start_call(item)
        arguments = to_json(closed.text)
        return start + (self._delta + orjson.dumps(arguments) + _END if arguments else b"") + self._stop()

    def _whole_block(self, block: dict[str, Any]) -> bytes:
        """Return the start and the stop event of a block that is sent without deltas."""
        return self._start(block, _TEXT) + self._stop()

    def _compacted(self, compacted: Compacted) -> bytes:
        self._blocks.compacted = compacted
        block = self._frame.compaction(compacted)
        late = {"content": block["content"], "encrypted_content": block["encrypted_content"]}
        start = self._start({**block, **dict.fromkeys(late)}, b"")
        delta = {"type": "content_block_delta", "index": self._index, "delta": {"type": "compaction_delta", **late}}
        return start + named_event(b"content_block_delta", orjson.dumps(delta)) + self._stop()

    def _finish(self, finished: Finished) -> bytes:
        ending = stop_fields(finished, self._blocks, self._report, self._frame.max_tokens)
        last = {
            "type": "message_delta",
            "delta": ending,
            "usage": to_usage(finished.usage, self._blocks),
            **self._frame.end(self._report),
        }
        return named_event(b"message_delta", orjson.dumps(last)) + named_event(
            b"message_stop", b'{"type":"message_stop"}'
        )
