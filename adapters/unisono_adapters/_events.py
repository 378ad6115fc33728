"""Conversion of a backend's event stream to chunks, with at most one chunk per network read.

The adapters of all backend kinds use this module. Each adapter passes a `Fold`, which knows the format of the events.
If a stream ends without a finish reason, the request fails, because the backend may have crashed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, TypeVar

import orjson

from unisono.core.generation import VOCABULARY, Chunk, CompletionJob
from unisono.errors import BackendError, BackendProtocolError, Symptom
from unisono_adapters._constraints import refusal
from unisono_adapters._framing import SSE, Framing
from unisono_adapters._http import BackendAnswer, BackendHttp

T = TypeVar("T")

_MAX_TOKENS = 2**31


class Fold(Protocol):
    """Converter from events to chunks.

    `done` becomes True when `feed` returns the last chunk, which has the finish reason.
    """

    done: bool

    def feed(self, events: list[bytes]) -> Chunk | None:
        """Return the chunk for the events of one network read.

        Returns None if the model produced nothing in these events. Raises BackendError or a subclass if the backend
        reports an error, or if an event is malformed.
        """
        ...


async def generate(
    wire: BackendHttp, path: str, body: bytes, job: CompletionJob, fold: Fold, framing: Framing = SSE
) -> AsyncGenerator[Chunk]:
    """Send `body` to `path` and yield the chunks that `fold` makes of the response.

    Raises BackendError or a subclass.
    """
    try:
        answer = await wire.post(path, body, job, framing)
    except BackendError as error:
        raise refusal(job, error) from error.__cause__
    # Release the request body: with a long prompt, it would be most of the memory that an open stream uses.
    del body
    chunks = _Chunks(answer, fold, job.on_chunk)
    try:
        while not fold.done:
            if answer.is_ended:
                raise BackendProtocolError(
                    "the backend's stream ended before the answer was complete", symptom=Symptom.DISCONNECTED
                )
            # `BackendAnswer.read` inlined, which saves a coroutine per network read. Keep both in step.
            if answer.should_yield:
                await asyncio.sleep(0)
            # The log probabilities of a whole prompt arrive in one event. Their conversion may take a second.
            is_long = job.prompt_logprobs and not chunks.has_started
            while chunks.unread is None and not answer.response.is_readable:
                await answer.next_data(None if is_long else chunks.consume)
            chunk, chunks.unread = chunks.unread, None
            if chunk is None:
                events = answer.read_nowait()
                chunk = chunks.recorded(await asyncio.to_thread(fold.feed, events) if is_long else fold.feed(events))
                del events
            if chunks.are_complete():
                # Readers close this generator at the last chunk, so wait before it for the end of the response.
                await answer.settle()
            if chunk is not None:
                yield chunk
    except BackendError as error:
        raise (error if chunks.has_started else refusal(job, error)) from error.__cause__
    finally:
        answer.close()


class _Chunks:
    """Converter that turns the events of one answer into chunks, inside the network callback.

    Each chunk is passed to `on_chunk`, the callback of the job. If `on_chunk` returns False, the chunk is stored in
    `unread`.
    """

    __slots__ = ("_answer", "_fold", "_on_chunk", "has_started", "unread")

    def __init__(self, answer: BackendAnswer, fold: Fold, on_chunk: Callable[[Chunk], bool] | None) -> None:
        self._answer = answer
        self._fold = fold
        self._on_chunk = on_chunk
        self.has_started = False
        self.unread: Chunk | None = None

    def consume(self, events: list[bytes]) -> bool:
        """Convert the events of one network read to a chunk and offer the chunk to `on_chunk`.

        Returns True if `on_chunk` accepted the chunk, or if the events make no chunk. Returns False if the chunk
        is now in `unread`; the task that reads the answer must then wake up and yield the chunk.
        """
        chunk = self.recorded(self._fold.feed(events))
        if chunk is None or (self._on_chunk is not None and not self._fold.done and self._on_chunk(chunk)):
            return True
        self.unread = chunk
        return False

    def are_complete(self) -> bool:
        return self._fold.done

    def recorded(self, chunk: Chunk | None) -> Chunk | None:
        """Return `chunk`. If there is a chunk, record that the backend has begun its answer."""
        if chunk is not None:
            self._answer.delivered()
            self.has_started = True
        return chunk


def decoded(event: bytes) -> dict[str, Any]:
    """Return the JSON object in an event.

    Raises BackendProtocolError if the event is anything else.
    """
    try:
        data = orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise BackendProtocolError("the backend sent an event that is not JSON") from error
    if not isinstance(data, dict):
        raise BackendProtocolError("the backend sent an event that is not a JSON object")
    return data


def token_ids(ids: object) -> list[int]:
    """Return `ids`, with `VOCABULARY` in place of each id above the vocabulary.

    `VOCABULARY` is itself an invalid id, which the engine drops. Raises BackendProtocolError if `ids` is not a list of
    integers, or if an integer is negative.
    """
    if not isinstance(ids, list):
        raise BackendProtocolError("the backend sent token ids that are not in a list")
    for token in ids:
        if type(token) is not int or token < 0:
            raise BackendProtocolError("the backend sent a token id that is not a non-negative integer")
    # The journal contains marks, which are larger numbers. A large id could be mistaken for a mark.
    return ids if max(ids, default=0) < VOCABULARY else [min(token, VOCABULARY) for token in ids]


def text_of(text: object) -> str:
    """Return `text` unchanged. Raises BackendProtocolError if it is not a string."""
    if not isinstance(text, str):
        raise BackendProtocolError("the backend sent text that is not a string")
    return text


def count(value: object) -> int | None:
    """Return a number of tokens that a backend reports; None if it is not plausible."""
    return value if type(value) is int and 0 <= value < _MAX_TOKENS else None


def field_of(answer: object, name: str, kind: type[T]) -> T | None:
    """Return the field `name` of a JSON object.

    Returns None if the field is missing, or if its value is not of the type `kind`.
    """
    value = answer.get(name) if isinstance(answer, dict) else None
    return value if isinstance(value, kind) else None
