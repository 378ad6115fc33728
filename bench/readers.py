"""Readers of answers: arrival times, and a byte for byte check against the expected answer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import orjson

from bench.prose import Answer

# Conditions, each with the fault that is reported if it is false.
Checks: TypeAlias = Sequence[tuple[bool, str]]


class Clock:
    """Arrival times of the text of one answer, in seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.first: float | None = None
        self.gaps: list[float] = []
        self._last = 0.0
        self._kind = ""

    def mark(self, kind: str) -> None:
        """Record the arrival of text of `kind`.

        A gap counts only between texts of one kind, because header tokens, which chat clients do not see, separate two
        kinds.
        """
        now = time.perf_counter()
        if self.first is None:
            self.first = now
        elif kind == self._kind:
            self.gaps.append(now - self._last)
        self._last, self._kind = now, kind


class Reader(Protocol):
    clock: Clock

    def feed(self, data: bytes) -> None: ...

    def fault(self, status: int, expected: Answer) -> str | None:
        """Return what is wrong with the answer, in one line, or None."""
        ...


class Events:
    """Parser of server-sent events from reads that may end anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        # The first received bytes, for error messages.
        self.raw = b""

    def split(self, data: bytes) -> list[bytes]:
        """Return the raw events that are complete with `data`."""
        if len(self.raw) < 300:
            self.raw += data[:300]
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return events

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of complete events without a name."""
        return [event[6:] for event in self.split(data) if event.startswith(b"data: ")]


class NamedReader(ABC):
    """Reader of named events with reasoning and content.

    `names` are the names of the two texts in this API.
    """

    names: ClassVar[tuple[str, str]] = ("reasoning", "content")

    def __init__(self) -> None:
        self.clock = Clock()
        self._events = Events()
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._end: dict[str, Any] = {}
        self._error = b""

    def feed(self, data: bytes) -> None:
        kind = ""
        for event in self._events.split(data):
            name, _, body = event.partition(b"\n")
            if name == b"event: error":
                self._error = body
            elif found := self._text(name, body[6:]):
                kind, text = found
                self._texts[kind].append(text)
        if kind:
            self.clock.mark(kind)

    def fault(self, status: int, expected: Answer) -> str | None:
        reasoning, content = self.names
        return _first_fault(
            (status == 200, f"HTTP {status}: {self._events.raw!r}"),
            (not self._error, f"error in the stream: {self._error[:200]!r}"),
            *self._end_checks(expected),
            ("".join(self._texts["reasoning"]) == expected.reasoning, f"{reasoning} differs"),
            ("".join(self._texts["content"]) == expected.content, f"{content} differs"),
        )

    @abstractmethod
    def _text(self, name: bytes, data: bytes) -> tuple[str, str] | None:
        """Return the kind and the text of an event, or None without text."""

    @abstractmethod
    def _end_checks(self, expected: Answer) -> Checks:
        """Return the conditions for the end of the stream."""


class BodyReader:
    """Reader of completions and chat answers without streaming."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._body = b""

    def feed(self, data: bytes) -> None:
        self._body += data

    @property
    def body_start(self) -> bytes:
        """First bytes of the answer, for error messages."""
        return self._body[:300]

    def fault(self, status: int, expected: Answer) -> str | None:
        self.clock.mark("whole")
        return self._check_body(expected) if status == 200 else f"HTTP {status}: {self.body_start!r}"

    def _check_body(self, expected: Answer) -> str | None:
        choice = orjson.loads(self._body)["choices"][0]
        message = choice.get("message")
        if message is None:
            return None if choice["text"] == "".join(expected.texts) else "text differs"
        return _first_fault(
            ((message.get("reasoning_content") or message.get("reasoning")) == expected.reasoning, "reasoning differs"),
            (message["content"] == expected.content, "content differs"),
        )


class VllmReader:
    """Reader of vLLM's completion chunks."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._events = Events()
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._finish: str | None = None
        self._done = False

    def feed(self, data: bytes) -> None:
        visible = False
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._done = True
                continue
            for choice in orjson.loads(event)["choices"]:
                self._tokens += choice["token_ids"]
                self._texts.append(choice["text"])
                # A character of several tokens counts as one arrival, as on the other wires.
                visible = visible or choice["text"] != ""
                self._finish = choice["finish_reason"] or self._finish
        if visible:
            self.clock.mark("token")

    def fault(self, status: int, expected: Answer) -> str | None:
        return _first_fault(
            (status == 200, f"HTTP {status}: {self._events.raw!r}"),
            (self._done, "no [DONE]"),
            (tuple(self._tokens) == expected.tokens, "token ids differ"),
            ("".join(self._texts) == "".join(expected.texts), "text differs"),
            (self._finish == expected.finish, f"finish_reason {self._finish}"),
        )


class ChatReader:
    """Reader of chat completion chunks; of two fields with reasoning, it reads one."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._events = Events()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._finish: str | None = None
        self._completion_tokens: int | None = None
        self._done = False
        self._error = b""

    def feed(self, data: bytes) -> None:
        kind = ""
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._done = True
                continue
            chunk = orjson.loads(event)
            if "error" in chunk:
                self._error = event
                continue
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if text := delta.get("content"):
                    self._content.append(text)
                    kind = "content"
                if text := delta.get("reasoning_content") or delta.get("reasoning"):
                    self._reasoning.append(text)
                    kind = "reasoning"
                self._finish = choice.get("finish_reason") or self._finish
            if counted := chunk.get("usage"):
                self._completion_tokens = counted["completion_tokens"]
        if kind:
            self.clock.mark(kind)

    def fault(self, status: int, expected: Answer) -> str | None:
        return _first_fault(
            (status == 200, f"HTTP {status}: {self._events.raw!r}"),
            (not self._error, f"error in the stream: {self._error[:200]!r}"),
            (self._done, "no [DONE]"),
            ("".join(self._reasoning) == expected.reasoning, "reasoning differs"),
            ("".join(self._content) == expected.content, "content differs"),
            (self._finish == expected.finish, f"finish_reason {self._finish}"),
            (self._completion_tokens == len(expected.tokens), f"usage says {self._completion_tokens} tokens"),
        )


class ResponseStreamReader(NamedReader):
    """Reader of the events of a response."""

    def __init__(self) -> None:
        super().__init__()
        # Arrival of the last event, in seconds of `time.monotonic`, which all processes share.
        self.ended_at = 0.0

    def fault(self, status: int, expected: Answer) -> str | None:
        return super().fault(status, expected) or response_fault(self._end, expected)

    def on_created(self, response_id: str) -> None:
        """Handle the first event."""

    def _text(self, name: bytes, data: bytes) -> tuple[str, str] | None:
        if kind := DELTA_EVENTS.get(name):
            return kind, orjson.loads(data)["delta"]
        if name in END_EVENTS:
            self._end, self.ended_at = orjson.loads(data)["response"], time.monotonic()
        elif name == CREATED_EVENT:
            self.on_created(orjson.loads(data)["response"]["id"])
        return None

    def _end_checks(self, expected: Answer) -> Checks:
        return [(bool(self._end), "no last event")]


CREATED_EVENT = b"event: response.created"
DELTA_EVENTS = {
    b"event: response.reasoning_text.delta": "reasoning",
    b"event: response.output_text.delta": "content",
}
END_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")


def response_fault(response: Mapping[str, Any], expected: Answer) -> str | None:
    """Return what is wrong with a finished response, in one line, or None."""
    texts = {item["type"]: item["content"][0]["text"] for item in response.get("output", ())}
    counted = (response.get("usage") or {}).get("output_tokens")
    return _first_fault(
        (response.get("status") == "completed", f"the response is {response.get('status')}"),
        (texts.get("reasoning") == expected.reasoning, "the whole reasoning differs"),
        (texts.get("message") == expected.content, "the whole content differs"),
        (counted == len(expected.tokens), f"usage says {counted} tokens"),
    )


class ResponseBodyReader(BodyReader):
    """Reader of a response without streaming."""

    @property
    def id(self) -> str:
        """Id in a body with status 200; empty if it has none."""
        return str(orjson.loads(self._body).get("id") or "")

    def _check_body(self, expected: Answer) -> str | None:
        return response_fault(orjson.loads(self._body), expected)


class MessageStreamReader(NamedReader):
    """Reader of the events of a message."""

    names = ("thinking", "text")

    def __init__(self) -> None:
        super().__init__()
        self._stopped = False

    def _text(self, name: bytes, data: bytes) -> tuple[str, str] | None:
        if name == b"event: content_block_delta":
            delta = orjson.loads(data)["delta"]
            if text := delta.get("text"):
                return "content", text
            if text := delta.get("thinking"):
                return "reasoning", text
        elif name == b"event: message_delta":
            self._end = orjson.loads(data)
        elif name == b"event: message_stop":
            self._stopped = True
        return None

    def _end_checks(self, expected: Answer) -> Checks:
        counted = self._end.get("usage", {}).get("output_tokens")
        return [
            (self._stopped, "no message_stop"),
            (counted == len(expected.tokens), f"usage says {counted} tokens"),
        ]


def _first_fault(*checks: tuple[bool, str]) -> str | None:
    return next((fault for passed, fault in checks if not passed), None)
