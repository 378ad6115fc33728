"""Relay of a pass-through answer: replaces the model's name and reads the usage.

If the backend does not report the usage, it is estimated from the answer, so that no answer is free of charge. The
relay has no side effects.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from json import JSONDecoder
from math import ceil
from typing import Final

from unisono.core.billed_units import NO_UNITS, BilledUnits, reported_units
from unisono.core.conversation import Json
from unisono.core.events import Event, Passed, PassedBytes
from unisono.core.generation import FinishReason, Usage
from unisono.core.passthrough_request import (
    AnswerBytes,
    AnswerPart,
    Api,
    PassthroughRequest,
    answers_bytes,
    transcript_texts,
)
from unisono.errors import BackendProtocolError

CHARACTERS_PER_TOKEN: Final = 4
# Maximum number of tokens that is accepted for one answer. Sums of such numbers fit into the number range of the
# stores.
MAX_TOKENS: Final = 10**9
LENGTH: Final = frozenset({"length", "incomplete"})  # finish values of backends for a reached token limit
FAILED: Final = "failed"
# last events of a Responses API stream, and the status that each implies
ENDS: Final = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": FAILED}


class Relay(ABC):
    """Relay of one answer to a pass-through request."""

    def __init__(self, passthrough: PassthroughRequest) -> None:
        self._passthrough = passthrough
        self.text: list[str] = []  # visible text, as received
        self.characters = 0  # generated characters, including reasoning and calls
        self.pieces = 0  # number of generated pieces
        self.finish = ""  # the backend's finish value; empty until the end
        self._has_begun = False
        self._units = passthrough.units
        # usage reported by the backend, and its field names of prompt and completion tokens
        self._reported_usage: tuple[Mapping[str, Json], str, str] | None = None

    def feed(self, bodies: Sequence[AnswerPart]) -> list[Event]:
        """Return the events to emit for bodies that arrived together.

        Raises BackendProtocolError for an answer that is invalid or incomplete.
        """
        objects = (body for body in bodies if not isinstance(body, AnswerBytes))
        events: list[Event] = [Passed(passed) for body in objects if (passed := self._read(body)) is not None]
        self._has_begun = self._has_begun or bool(events)
        return events

    @property
    def is_complete(self) -> bool:
        """Return whether the backend has ended every choice that it began."""
        return bool(self.finish)

    @property
    def ending(self) -> bool:
        """Return whether the answer has ended, so that only the usage can follow."""
        return self.is_complete

    @property
    def failed(self) -> bool:
        """Return whether the backend reported a failure."""
        return self.finish == FAILED

    @property
    def reason(self) -> FinishReason:
        return FinishReason.LENGTH if self.finish in LENGTH else FinishReason.STOP

    @property
    def usage(self) -> Usage:
        """Return the usage as reported by the backend, or else as estimated."""
        guessed = Usage(self._passthrough.tokens, max(self.pieces, self.characters // CHARACTERS_PER_TOKEN))
        return guessed if self._reported_usage is None else usage_of(*self._reported_usage, guessed)

    @property
    def units(self) -> BilledUnits:
        """Return the billed units other than tokens, or no units if there was no output."""
        return self._units if self._has_begun or self.finish else NO_UNITS

    def _generated(self, text: Json, *, has_output: bool = False) -> None:
        if isinstance(text, str) and text:
            self.characters += len(text)
            self.pieces += 1
            if has_output:
                self.text.append(text)

    @abstractmethod
    def _read(self, body: Mapping[str, Json]) -> Mapping[str, Json] | None:
        """Return the body or event to emit; None if nothing is emitted for it."""


class ChatRelay(Relay):
    """Relay of Chat Completions: one body, or chunks."""

    def __init__(self, passthrough: PassthroughRequest) -> None:
        super().__init__(passthrough)
        # numbers of the choices that have begun, and of those that have ended
        self._begun: set[int] = set()
        self._finished: set[int] = set()

    @property
    def is_complete(self) -> bool:
        # A server may ignore `n` and send fewer choices. But each choice that a stream contains needs a finish reason.
        return bool(self.finish) and (not self._passthrough.stream or self._begun <= self._finished)

    @property
    def ending(self) -> bool:
        return len(self._finished) >= self._passthrough.choices

    def _read(self, body: Mapping[str, Json]) -> Mapping[str, Json] | None:
        passed = {**body, "model": self._passthrough.model}
        usage = body.get("usage")
        if isinstance(usage, Mapping):
            self._reported_usage = usage, "prompt_tokens", "completion_tokens"
        choices = body.get("choices")
        for choice in _objects(choices):
            self._choice(choice)
        if self._passthrough.stream and not self._passthrough.is_usage_requested and "usage" in passed:
            # The usage was requested by the gateway, not by the client.
            del passed["usage"]
            if not choices:
                return None
        return passed

    def _choice(self, choice: Mapping[str, Json]) -> None:
        finish, index = choice.get("finish_reason"), choice.get("index")
        number = index if isinstance(index, int) else 0
        self._begun.add(number)
        if isinstance(finish, str) and finish:
            self.finish = finish
            self._finished.add(number)
        part = choice.get("delta" if self._passthrough.stream else "message")
        if not isinstance(part, Mapping):
            return
        self._generated(part.get("content"), has_output=True)
        self._generated(part.get("reasoning_content") or part.get("reasoning"))
        for call in _objects(part.get("tool_calls")):
            function = call.get("function")
            if isinstance(function, Mapping):
                self._generated(function.get("arguments"))


class ResponsesRelay(Relay):
    """Relay of the Responses API: one response, or events."""

    def _read(self, body: Mapping[str, Json]) -> Mapping[str, Json] | None:
        if not self._passthrough.stream:
            return self._response(body)
        kind = body.get("type")
        if isinstance(kind, str) and kind.endswith(".delta"):
            self._generated(body.get("delta"), has_output=kind == "response.output_text.delta")
        response = body.get("response")
        if not isinstance(response, Mapping):
            if kind == "error":
                self.finish = FAILED
            return body
        if kind in ENDS:
            return {**body, "response": self._response(response)}
        return {**body, "response": self._named(response)}

    def _response(self, response: Mapping[str, Json]) -> dict[str, Json]:
        """Read a whole response, and return it with the client's model name."""
        status, usage = response.get("status"), response.get("usage")
        self.finish = status if isinstance(status, str) and status else "completed"
        if isinstance(usage, Mapping):
            self._reported_usage = usage, "input_tokens", "output_tokens"
        if not self._passthrough.stream:
            for item in _objects(response.get("output")):
                self._generated(item.get("arguments"))
                for part in _objects(item.get("content")):
                    self._generated(part.get("text"), has_output=item.get("type") == "message")
        return self._named(response)

    def _named(self, response: Mapping[str, Json]) -> dict[str, Json]:
        return {**response, "model": self._passthrough.model}


class ObjectRelay(Relay):
    """Relay of one JSON object that is not generated text, such as embeddings."""

    def _read(self, body: Mapping[str, Json]) -> Mapping[str, Json] | None:
        self.finish = "stop"
        usage, about = body.get("usage"), body.get("meta")
        if usage is None and isinstance(about, Mapping):
            usage = about.get("tokens")  # Cohere's form
        if isinstance(usage, Mapping):
            sent = next((name for name in PROMPT_COUNTS if name in usage), PROMPT_COUNTS[0])
            self._reported_usage = usage, sent, "output_tokens" if "output_tokens" in usage else "completion_tokens"
        self._read_units(body)
        # The model is replaced only if the body has the field; a field is never added.
        return {**body, "model": self._passthrough.model} if "model" in body else body

    def _read_units(self, body: Mapping[str, Json]) -> None:
        """Read the number of images, or Cohere's search units."""
        images, about = body.get("data"), body.get("meta")
        if self._passthrough.api is Api.IMAGES and isinstance(images, list):
            self._units = replace(self._units, images=len(images))
        billed = about.get("billed_units") if isinstance(about, Mapping) else None
        if self._passthrough.api is Api.RERANK and isinstance(billed, Mapping):
            queries = reported_units(billed.get("search_units"), self._units.queries)
            self._units = replace(self._units, queries=ceil(queries))


class EmbeddingsRelay(ObjectRelay):
    """Relay of embeddings. The answer must contain one embedding for each input."""

    def _read(self, body: Mapping[str, Json]) -> Mapping[str, Json] | None:
        data, inputs = body.get("data"), self._passthrough.inputs
        if not isinstance(data, list) or (inputs is not None and len(data) != inputs):
            raise BackendProtocolError("the backend did not return one embedding for each input")
        if not all(isinstance(one, Mapping) for one in data):
            raise BackendProtocolError("the backend returned an embedding that is not an object")
        return super()._read(body)


class BytesRelay(Relay):
    """Relay of bytes such as audio. Tokens are estimated from the number of bytes.

    Only an answer that consists of events can report the usage, in its last event.
    """

    def __init__(self, passthrough: PassthroughRequest) -> None:
        super().__init__(passthrough)
        self._bytes = 0
        self._end = b""

    def feed(self, bodies: Sequence[AnswerPart]) -> list[Event]:
        parts = [body for body in bodies if isinstance(body, AnswerBytes)]
        for part in parts:
            self._check(part)
            self._bytes += len(part.data)
            self._end = (self._end + part.data)[-MAX_END_BYTES:]
        self.pieces = self._bytes // AUDIO_BYTES_PER_TOKEN
        if any(part.is_last for part in parts):
            self.finish = "stop"
            if any(part.media_type.lower().startswith(EVENTS_TYPE) for part in parts):
                self._read_usage()
        events: list[Event] = [PassedBytes(part.data, part.media_type) for part in parts if part.data]
        self._has_begun = self._has_begun or bool(events)
        return events

    def _read(self, body: Mapping[str, Json]) -> Mapping[str, Json] | None:
        return None

    def _check(self, part: AnswerBytes) -> None:
        """Raise BackendProtocolError for an HTML page, and for an empty answer that is not text.

        An HTML page is an error page of a proxy in front of the server. An empty text is valid: it is the transcript of
        silence.
        """
        kind = part.media_type.lower()
        if not self._bytes and kind.startswith("text/html"):
            raise BackendProtocolError("the backend returned an HTML page instead of an answer")
        if not self._bytes and part.is_last and not part.data and not kind.startswith("text/"):
            raise BackendProtocolError("the backend's answer is empty")

    def _read_usage(self) -> None:
        start = self._end.rfind(b'"usage"')
        try:
            usage, _ = JSONDecoder().raw_decode(self._end[start + 7 :].decode("utf-8", "replace").lstrip(" :\r\n\t"))
        except (ValueError, RecursionError):
            return
        if start < 0 or not isinstance(usage, Mapping):
            return
        seconds = usage.get("seconds")
        self._units = replace(self._units, seconds=reported_units(seconds, self._units.seconds))
        if isinstance(seconds, (int, float)) and 0 <= seconds < MAX_TOKENS:
            usage = {**usage, "input_tokens": ceil(seconds * AUDIO_TOKENS_PER_SECOND)}
        self._reported_usage = usage, "input_tokens", "output_tokens"


class TranscriptRelay(BytesRelay):
    """Relay of a transcript: JSON, text, subtitles or events.

    The usage is at the end of a JSON answer, or in the last event.
    """

    def __init__(self, passthrough: PassthroughRequest) -> None:
        super().__init__(passthrough)
        self._data = bytearray()

    def feed(self, bodies: Sequence[AnswerPart]) -> list[Event]:
        events = super().feed(bodies)
        for event in events:
            if isinstance(event, PassedBytes):
                self._data += event.data[: MAX_TRANSCRIPT_BYTES - len(self._data)]
        self.pieces = self._bytes // CHARACTERS_PER_TOKEN
        if self.is_complete:
            self._read_usage()
            self._read_duration()
            self.text.append("\n".join(self._texts()))
        return events

    def _texts(self) -> list[str]:
        return transcript_texts(bytes(self._data))

    def _read_duration(self) -> None:
        """Read the exact duration from `verbose_json`; the usage has only whole seconds."""
        if not self._data.startswith(b"{"):
            return
        # A quote within a JSON string follows a backslash, so the pattern matches only a field.
        found = DURATION.search(self._data, 0, MAX_END_BYTES) or DURATION.search(self._end)
        if found is not None:
            self._units = replace(self._units, seconds=reported_units(float(found[1]), self._units.seconds))


class ImageEventsRelay(TranscriptRelay):
    """Relay of the events of an image stream.

    Tokens cannot be estimated from the number of bytes. The usage is known only if the last event contains it.
    """

    def feed(self, bodies: Sequence[AnswerPart]) -> list[Event]:
        events = super().feed(bodies)
        self.pieces = 0
        return events

    def _texts(self) -> list[str]:
        return []


EVENTS_TYPE: Final = "text/event-stream"
# Maximum bytes of a transcript that hooks receive after the answer. The transcript of an hour has about 60,000 bytes.
MAX_TRANSCRIPT_BYTES: Final = 4 << 20
# Number of bytes at the end of an answer in which the usage is searched.
MAX_END_BYTES: Final = 4_096
DURATION: Final = re.compile(rb'[{,]\s*"duration"\s*:\s*"?(\d{1,9}(?:\.\d{1,9})?)\b')
AUDIO_TOKENS_PER_SECOND: Final = 10
# MP3 of 128 kbit/s has 16,000 bytes a second, and OpenAI's models count about 10 tokens a second.
AUDIO_BYTES_PER_TOKEN: Final = 1_600
# Field names for the number of input tokens in different APIs. The first name that is present is used.
PROMPT_COUNTS: Final = ("prompt_tokens", "input_tokens", "total_tokens")
KINDS: Final[Mapping[Api, type[Relay]]] = {
    Api.CHAT: ChatRelay,
    Api.RESPONSES: ResponsesRelay,
    Api.EMBEDDINGS: EmbeddingsRelay,
    Api.SPEECH: BytesRelay,
    Api.TRANSCRIPTIONS: TranscriptRelay,
    Api.TRANSLATIONS: TranscriptRelay,
}


def relay_for(passthrough: PassthroughRequest) -> Relay:
    if passthrough.api is Api.IMAGES and answers_bytes(passthrough.api, passthrough.body):
        return ImageEventsRelay(passthrough)
    return KINDS.get(passthrough.api, ObjectRelay)(passthrough)


def usage_of(usage: Mapping[str, Json], sent: str, made: str, guessed: Usage) -> Usage:
    """Return the usage reported by an OpenAI API.

    `sent` and `made` are the field names of the prompt tokens and the completion tokens. Invalid counts are replaced by
    those of `guessed`. Cached and reasoning tokens are limited to the total that includes them.
    """

    def count(of: object, name: str, otherwise: int) -> int:
        number = of.get(name) if isinstance(of, Mapping) else None
        return number if type(number) is int and 0 <= number <= MAX_TOKENS else otherwise

    prompt, completion = count(usage, sent, guessed.prompt_tokens), count(usage, made, guessed.completion_tokens)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        reasoning_tokens=min(count(usage.get(f"{made}_details"), "reasoning_tokens", 0), completion),
        cached_tokens=min(count(usage.get(f"{sent}_details"), "cached_tokens", 0), prompt),
    )


def _objects(value: Json) -> Iterator[Mapping[str, Json]]:
    for one in value if isinstance(value, list) else ():
        if isinstance(one, Mapping):
            yield one
