"""Fake backend that breaks off its answers, and continues answers of another one.

One gateway uses two of these. The first one that is requested breaks off and records when. The one that gets the
continuation records when it received the request and sent its first token. Each process knows only its own times, so
only durations are compared between processes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import orjson
import uvloop

from bench import prose, vllm_wire
from bench.fake_vllm import BackendConnection, BackendState, BackendWire
from bench.prose import Answer, Corpus

ANSWER_TOKENS = 64
# Tokens sent before the break, so that it is in the middle of the visible text.
BREAK_AFTER_TOKENS = 40
# Tokens that the break may lose on the way to the gateway. They are requested again.
MAX_LOST_TOKENS = 4
FIRST_TOKEN_S = 0.02
INTERVAL_S = 0.004
# Time between the last token and the break, so that the stream is lost and not the token.
BREAK_DELAY_S = INTERVAL_S / 2
# Only answers on this path break off.
COMPLETIONS_PATH = b"/v1/completions"
# A POST sets the kind of break, and returns and clears the recorded times.
BREAKS_PATH = b"/bench/breaks"


@dataclass(slots=True)
class BreakTimes:
    """Times by question key, in seconds of `time.monotonic`.

    `broken`: when the last token was sent and when the stream broke. `resumed`: when the continuation was requested and
    when its first token was sent.
    """

    broken: dict[str, tuple[float, float]] = field(default_factory=dict)
    resumed: dict[str, tuple[float, float]] = field(default_factory=dict)


class BreakingBackend(BackendState):
    """State shared by all connections of the backend."""

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(corpus)
        self.variant = ""
        self.times = BreakTimes()
        self._corpus = corpus
        self.rest = lru_cache(maxsize=2 * MAX_LOST_TOKENS)(self._rest)

    def generated(self, prompt: Sequence[int], limit: int) -> int:
        """Return the number of tokens of the answer at the end of the prompt."""
        if limit == ANSWER_TOKENS:
            return 0
        expected = self._corpus.answer(ANSWER_TOKENS).tokens
        count = ANSWER_TOKENS - limit
        return count if list(prompt[-count:]) == list(expected[:count]) else 0

    def _rest(self, generated: int) -> vllm_wire.RenderedCompletion:
        whole = self._corpus.answer(ANSWER_TOKENS)
        rest = Answer(whole.tokens[generated:], whole.texts[generated:], "", "", whole.finish)
        return vllm_wire.render(rest, 1)


class BreakingStream:
    """Answer in progress; `generated` of its tokens are in the prompt."""

    def __init__(
        self,
        backend: BreakingBackend,
        transport: asyncio.Transport,
        prompt: Sequence[int],
        generated: int,
        received_at: float,
    ) -> None:
        self._backend, self._transport, self._prompt, self._generated = backend, transport, prompt, generated
        self._received_at, self._question_key = received_at, vllm_wire.question_key(prompt[: len(prompt) - generated])
        self._rendered = backend.rest(generated)
        self._sent = 0
        self._id = f"{id(self):032x}"
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time() + FIRST_TOKEN_S
        transport.write(vllm_wire.STREAM_HEAD)
        self.timer = self._loop.call_at(self._start, self._first)

    def _first(self) -> None:
        self._transport.write(self._rendered.first(self._id, self._prompt))
        if self._generated:
            self._backend.times.resumed[self._question_key] = self._received_at, time.monotonic()
        self._schedule_next()

    def _schedule_next(self) -> None:
        self._sent += 1
        if not self._generated and self._backend.variant and self._sent == BREAK_AFTER_TOKENS:
            self.timer = self._loop.call_later(BREAK_DELAY_S, self._break, time.monotonic())
        else:
            self.timer = self._loop.call_at(self._start + self._sent * INTERVAL_S, self._next)

    def _next(self) -> None:
        rest = self._rendered.rest
        self._transport.write(rest[self._sent - 1].fill(self._id.encode()))
        if self._sent < len(rest):
            self._schedule_next()
        else:
            self._transport.write(self._rendered.tail(self._id, len(self._prompt), counted=True))

    def _break(self, last_at: float) -> None:
        self._backend.times.broken[self._question_key] = last_at, time.monotonic()
        BREAKERS[self._backend.variant](self._transport)


def _reset(transport: asyncio.Transport) -> None:
    # With SO_LINGER and a timeout of 0 the kernel sends RST instead of FIN.
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _end(transport: asyncio.Transport) -> None:
    transport.write(vllm_wire.LAST_CHUNK)


# `reset` resets the connection. `end` closes the HTTP body correctly, without a last token and `[DONE]`.
BREAKERS: dict[str, Callable[[asyncio.Transport], None]] = {"reset": _reset, "end": _end}


class BreakingConnection(BackendConnection):
    """Server connection of the backend."""

    def __init__(self, backend: BreakingBackend) -> None:
        super().__init__(backend)
        self._backend = backend
        self._breaking: BreakingStream | None = None

    def on_message_complete(self) -> None:
        self._received_at = time.monotonic()
        if self._url != BREAKS_PATH:
            super().on_message_complete()
            return
        backend = self._backend
        backend.variant = orjson.loads(b"".join(self._body))["variant"]
        times, backend.times = backend.times, BreakTimes()
        self._transport.write(vllm_wire.json_response(200, {"broken": times.broken, "resumed": times.resumed}))

    def complete(self, wire: BackendWire, content: bytes) -> bytes:
        body = orjson.loads(content)
        error = wire.refusal(body)
        if error is not None:
            return error
        if self._url != COMPLETIONS_PATH:
            return super().complete(wire, content)
        prompt, limit = wire.prompt(body), body.get("max_tokens") or 16
        generated = self._backend.generated(prompt, limit)
        if limit != ANSWER_TOKENS and not BREAK_AFTER_TOKENS - MAX_LOST_TOKENS < generated <= BREAK_AFTER_TOKENS:
            # Other requests are probes of the gateway.
            return super().complete(wire, content)
        self._breaking = BreakingStream(self._backend, self._transport, prompt, generated, self._received_at)
        return b""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._breaking is not None:
            self._breaking.timer.cancel()


async def serve(corpus: Corpus, port: int) -> asyncio.Server:
    backend = BreakingBackend(corpus)
    return await asyncio.get_running_loop().create_server(
        lambda: BreakingConnection(backend), "127.0.0.1", port, backlog=1024
    )


async def main(port: int, path: Path) -> None:
    listening = await serve(prose.load(path), port)
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
