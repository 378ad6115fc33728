"""Gateway's side of an engine process: start, requests, crash detection, end.

Waiting for the process never blocks the gateway's event loop. A process that is not shared never outlives the gateway:
it ends when the pipe on its standard input closes. The last output of the process is quoted in the error after a crash.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unisono.core.generation import CompletionJob, TokenLogprob
from unisono.errors import BackendUnavailable
from unisono_adapters.mlx.launch import ProcessHandle, joined, start_own
from unisono_adapters.mlx.wire import (
    LINE_LIMIT,
    BatchLimits,
    Cancel,
    Count,
    CountAnswer,
    Encoded,
    Failed,
    GenerateCommand,
    Logprob,
    PromptLogprobs,
    Pulse,
    Ready,
    RequestRefused,
    ToEngine,
    ToGateway,
    Tokenize,
    TokenOutput,
    WireError,
    from_line,
    to_line,
)

# Environment variable with the folder in which the workers of a gateway find the engines that they share.
SHARED = "UNISONO_ENGINES"


@dataclass(slots=True)
class Inbox:
    """Data that was received for one request and not yet read.

    Its size is limited by the request's `max_tokens`; each token takes four bytes. `logprobs` has an entry for each
    entry of `tokens` if the job requests log probabilities. `prompt_logprobs` is complete before the first token
    arrives.
    """

    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish: str | None = None
    cached: int | None = None
    refused: RequestRefused | None = None
    encoded: Encoded | None = None
    # Tokens of the prompt, if the job requests log probabilities of the prompt.
    prompt: Sequence[int] = ()
    counted: CountAnswer | None = None


class EngineProcess:
    """Connection to a started engine process. Belongs to one event loop.

    `lost` is None while the process accepts requests, and afterwards the reason why it no longer does. When `lost`
    is set, all waiting requests wake up.
    """

    def __init__(self, handle: ProcessHandle, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.lost: str | None = None
        # True once the engine has finished a request: it then not only starts, but also works.
        self.served = False
        self._handle = handle
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count()
        self._inboxes: dict[int, Inbox] = {}
        self._ready: asyncio.Future[Ready | Failed] = asyncio.get_running_loop().create_future()
        self._heard_at = time.monotonic()
        self._ending = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, model: str, limits: BatchLimits) -> EngineProcess:
        """Start an engine process for this worker, or connect to the process that all workers share.

        Returns before the model is loaded; `ready` waits for that. Raises BackendUnavailable if the process cannot
        be started.
        """
        spawning = asyncio.create_task(asyncio.to_thread(_spawn, model, limits))
        try:
            handle, connection = await asyncio.shield(spawning)
        except OSError as error:
            raise BackendUnavailable(f"the engine process cannot be started: {error}") from error
        except asyncio.CancelledError:
            handle, connection = await spawning  # the thread cannot be cancelled, and its process must not remain
            connection.close()
            await asyncio.to_thread(handle.leave)
            raise
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LINE_LIMIT)
        return cls(handle, reader, writer)

    @property
    def pid(self) -> int:
        """Process id; 0 for a shared process that has not reported it yet."""
        return self._handle.pid

    async def ready(self) -> Ready:
        """Wait until the model is loaded. Raises BackendUnavailable if the model cannot be loaded."""
        greeting = await asyncio.shield(self._ready)
        if isinstance(greeting, Failed):
            raise BackendUnavailable(greeting.message)
        return greeting

    def start_generation(self, job: CompletionJob) -> tuple[int, Inbox]:
        """Send a generation request; return its number and inbox.

        The caller must finally pass the number to `drop`, even after a failure. Raises BackendUnavailable if the engine
        is lost.
        """
        number, inbox = self._open()
        if job.prompt_logprobs:
            # The first token of a prompt has no log probability.
            inbox.prompt, inbox.prompt_logprobs = job.prompt.tokens, [None]
        self._writer.write(
            to_line(
                GenerateCommand(
                    number,
                    job.prompt.tokens,
                    job.max_tokens,
                    job.sampling,
                    job.cache_salt,
                    job.constraint,
                    job.logprobs,
                    job.prompt_logprobs,
                )
            )
        )
        return number, inbox

    def drop(self, number: int) -> None:
        """Discard the inbox of a request; cancel the request unless it has finished."""
        inbox = self._inboxes.pop(number)
        # Sending Cancel for a finished request would be harmless, but wasted work for the engine.
        over = inbox.finish is not None or inbox.refused is not None
        if not over and self.lost is None:
            self._writer.write(to_line(Cancel(number)))

    async def encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the token ids of each text, made by the model's own tokenizer.

        Raises BackendUnavailable if the engine process is lost.
        """
        number, inbox = self._open()
        try:
            self._writer.write(to_line(Tokenize(number, texts)))
            await inbox.arrived.wait()
            if inbox.encoded is None:
                raise BackendUnavailable(self.lost or "the engine process did not answer")
            return inbox.encoded.ids
        finally:
            del self._inboxes[number]

    async def count(self) -> CountAnswer:
        """Return the engine's load. Raises BackendUnavailable if the engine process is lost."""
        number, inbox = self._open()
        try:
            self._writer.write(to_line(Count(number)))
            await inbox.arrived.wait()
            if inbox.counted is None:
                raise BackendUnavailable(self.lost or "the engine process did not answer")
            return inbox.counted
        finally:
            del self._inboxes[number]

    def silent_since(self, moment: float) -> float:
        """Return the seconds since the engine's last message or since `moment`, whichever is later.

        `moment` is a time of the monotonic clock.
        """
        return time.monotonic() - max(self._heard_at, moment)

    def kill(self) -> None:
        """Kill the process; `lost` is set afterwards."""
        self._handle.kill()

    async def stop(self) -> None:
        """Close the connection and release the process. Running requests fail.

        May be called repeatedly.
        """
        self._ending = True
        self._set_lost("the engine process was shut down")
        self._writer.close()
        await asyncio.to_thread(self._handle.leave)
        await self._listening

    def _open(self) -> tuple[int, Inbox]:
        if self.lost is not None:
            raise BackendUnavailable(self.lost)
        number, inbox = next(self._ids), Inbox()
        self._inboxes[number] = inbox
        return number, inbox

    async def _listen(self) -> None:
        trouble = ""
        try:
            while line := await self._reader.readline():
                self._heard_at = time.monotonic()
                self._deliver(from_line(line))
        except (OSError, ValueError, WireError) as error:
            trouble = f"; its connection was lost: {error}"
        self._writer.close()
        if self._ending:
            return
        # In a thread, because waiting for the process blocks. Its last output often explains the crash.
        how, last_words = await asyncio.to_thread(self._handle.ended)
        self._set_lost(f"the engine process ended{how}{trouble}{last_words}")

    def _deliver(self, message: ToGateway | ToEngine) -> None:
        match message:
            case Ready() | Failed():
                if isinstance(message, Ready):
                    self._handle.pid = message.pid
                if not self._ready.done():
                    self._ready.set_result(message)
            case TokenOutput(number, tokens, finish, cached, logprobs):
                if inbox := self._inboxes.get(number):
                    inbox.tokens.extend(tokens)
                    if logprobs is not None:
                        inbox.logprobs += _named(tokens, logprobs)
                    inbox.finish = finish
                    # The first output reports the cached tokens of the prompt.
                    inbox.cached = cached if inbox.cached is None else inbox.cached
                    inbox.arrived.set()
                    self.served = self.served or finish is not None
            case PromptLogprobs(number, logprobs):
                # The request wakes with its first token.
                if inbox := self._inboxes.get(number):
                    begin = len(inbox.prompt_logprobs)
                    inbox.prompt_logprobs += _named(inbox.prompt[begin : begin + len(logprobs)], logprobs)
            case RequestRefused(number):
                if inbox := self._inboxes.get(number):
                    inbox.refused = message
                    inbox.arrived.set()
            case Encoded(number):
                if inbox := self._inboxes.get(number):
                    inbox.encoded = message
                    inbox.arrived.set()
            case CountAnswer(number):
                if inbox := self._inboxes.get(number):
                    inbox.counted = message
                    inbox.arrived.set()
            case Pulse():
                pass
            case GenerateCommand() | Cancel() | Tokenize() | Count():
                raise WireError(f"a gateway does not accept {type(message).__name__} messages")

    def _set_lost(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
        if not self._ready.done():
            self._ready.set_result(Failed(why))
        # Wake all requests: no data will arrive any more.
        for inbox in self._inboxes.values():
            inbox.arrived.set()


def _named(tokens: Sequence[int], logprobs: Sequence[Logprob]) -> Iterator[TokenLogprob]:
    for token, (value, top) in zip(tokens, logprobs, strict=True):
        yield TokenLogprob(token, value, tuple((each, one) for each, one in top))


def _spawn(model: str, limits: BatchLimits) -> tuple[ProcessHandle, socket.socket]:
    folder = os.environ.get(SHARED)
    if folder is None:
        return start_own(model, limits)
    return joined(Path(folder), model, limits)
