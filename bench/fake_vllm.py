"""Fake vLLM server without a model: completions and chat, at a fixed pace or at full speed.

`max_tokens` is the length of the answer, so that a gateway in front needs no change to be measured. `POST /bench/pace`
sets the pace of all later requests. Paced streams follow an absolute schedule, so that delays do not accumulate.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, cast

import httptools
import orjson
import uvloop

from bench import chat_wire, prose, vllm_wire
from bench.prose import Answer, Corpus


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed and chunk size of the streams.

    `interval_us` is the time of one token; 0 means full speed, with `burst` chunks per write. The field
    `stream_interval` of a request overrides `tokens_per_chunk`, as in vLLM.
    """

    interval_us: int = 0
    tokens_per_chunk: int = 1
    burst: int = 8


@dataclass(slots=True)
class BackendCounters:
    """Counters of this process, returned by `GET /bench/served`."""

    requests: int = 0
    tokens: int = 0
    abandoned: int = 0


class RenderedAnswer(Protocol):
    """Bytes of a streamed answer: the first chunk, the chunks of the tokens, the end."""

    @property
    def answer(self) -> Answer: ...
    @property
    def rest(self) -> Sequence[vllm_wire.Template]: ...
    def first(self, request_id: str, prompt: Sequence[int]) -> bytes: ...
    def tail(self, request_id: str, prompt_tokens: int, counted: bool) -> bytes: ...


class BackendWire(Protocol):
    """Responses of a server on one path, implemented by the modules `vllm_wire` and `chat_wire`."""

    def __hash__(self) -> int: ...
    def refusal(self, body: object, /) -> bytes | None: ...
    def prompt(self, body: dict[str, object], /) -> Sequence[int]: ...
    def render(self, answer: Answer, tokens_per_chunk: int, /) -> RenderedAnswer: ...
    def whole(self, answer: Answer, request_id: str, prompt: Sequence[int], /) -> bytes: ...


class BackendState:
    """State shared by all connections of the backend."""

    def __init__(self, corpus: Corpus) -> None:
        self.pace = Pace()
        self.counters = BackendCounters()
        # When each streamed answer ended, by question key. `POST /bench/ended` returns and clears them.
        self.end_times: dict[str, float] = {}
        self._corpus = corpus
        self.rendered = lru_cache(maxsize=64)(self._render)

    def _render(self, wire: BackendWire, length: int, tokens_per_chunk: int) -> RenderedAnswer:
        return wire.render(self._corpus.answer(length), tokens_per_chunk)


class AnswerStream:
    """Streamed answer in progress."""

    def __init__(
        self, server: BackendState, wire: BackendWire, transport: asyncio.Transport, body: dict[str, object]
    ) -> None:
        prompt, limit = wire.prompt(body), body.get("max_tokens") or 16
        if not isinstance(limit, int):
            raise TypeError("`max_tokens` is not an integer; check the request with `refusal` first")
        self._server, self._transport = server, transport
        self._pace = server.pace
        requested_interval = body.get("stream_interval")
        self._per_chunk = (
            requested_interval
            if isinstance(requested_interval, int) and requested_interval > 0
            else self._pace.tokens_per_chunk
        )
        self._answer = server.rendered(wire, limit, self._per_chunk)
        request_id = uuid.uuid4().hex
        self._id = request_id.encode()
        options = body.get("stream_options")
        counted = isinstance(options, dict) and bool(options.get("include_usage"))
        self._tail = self._answer.tail(request_id, len(prompt), counted)
        self._question_key = vllm_wire.question_key(prompt)
        self._sent = 0
        self._timer: asyncio.Handle | None = None
        self._is_paused = False
        self.finished = False
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        if body.get("echo"):
            alternatives = cast("int", body["logprobs"])
            scores = vllm_wire.scored(self._answer.answer, request_id, prompt, alternatives)
            transport.write(vllm_wire.STREAM_HEAD + scores)
            self.finished = True
            return
        transport.write(vllm_wire.STREAM_HEAD + self._answer.first(request_id, prompt))
        self._next()

    def _next(self) -> None:
        rest = self._answer.rest
        if self._sent >= len(rest):
            self._transport.write(self._tail)
            self.finished = True
            self._timer = None
            self._server.counters.tokens += len(self._answer.answer.tokens)
            self._server.end_times[self._question_key] = time.monotonic()
        elif self._pace.interval_us:
            due = self._start + (self._sent + 1) * self._per_chunk * self._pace.interval_us / 1e6
            self._timer = self._loop.call_at(due, self._step, 1)
        elif not self._is_paused:
            self._timer = self._loop.call_soon(self._step, self._pace.burst)

    def _step(self, count: int) -> None:
        chunks = self._answer.rest[self._sent : self._sent + count]
        self._sent += len(chunks)
        self._transport.write(b"".join([chunk.fill(self._id) for chunk in chunks]))
        self._next()

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        if not self._pace.interval_us and not self.finished:
            self.cancel()
            self._next()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BackendConnection(asyncio.Protocol):
    """Server connection with HTTP/1.1 and keep-alive; a disconnect ends its answer."""

    def __init__(self, server: BackendState) -> None:
        self._server = server
        self._stream: AnswerStream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop are no subclasses of those of asyncio.
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url = b""
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        route = (self._parser.get_method().decode(), self._url.decode().partition("?")[0])
        answer = ROUTES.get(route)
        if answer is None:
            self._transport.write(vllm_wire.failure(404, "NotFoundError", "Not Found"))
            return
        reply = answer(self, b"".join(self._body))
        if reply:
            self._transport.write(reply)

    def pause_writing(self) -> None:
        if self._stream is not None:
            self._stream.pause()

    def resume_writing(self) -> None:
        if self._stream is not None:
            self._stream.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None and not self._stream.finished:
            self._stream.cancel()
            self._server.counters.abandoned += 1

    def complete(self, wire: BackendWire, content: bytes) -> bytes:
        body = orjson.loads(content)
        error = wire.refusal(body)
        if error is not None:
            return error
        self._server.counters.requests += 1
        if not body.get("stream"):
            answer = self._server.rendered(wire, body.get("max_tokens") or 16, 1).answer
            self._server.counters.tokens += len(answer.tokens)
            return wire.whole(answer, uuid.uuid4().hex, wire.prompt(body))
        self._stream = AnswerStream(self._server, wire, self._transport, body)
        return b""

    def completions(self, content: bytes) -> bytes:
        return self.complete(vllm_wire, content)

    def chat(self, content: bytes) -> bytes:
        return self.complete(chat_wire, content)

    def set_pace(self, content: bytes) -> bytes:
        self._server.pace = Pace(**orjson.loads(content))
        return vllm_wire.json_response(200, asdict(self._server.pace))

    def show_counters(self, content: bytes) -> bytes:
        return vllm_wire.json_response(200, asdict(self._server.counters))

    def pop_end_times(self, content: bytes) -> bytes:
        end_times, self._server.end_times = self._server.end_times, {}
        return vllm_wire.json_response(200, end_times)

    def models(self, content: bytes) -> bytes:
        model = {
            "id": vllm_wire.MODEL,
            "object": "model",
            "created": vllm_wire.CREATED,
            "owned_by": "vllm",
            "root": vllm_wire.MODEL,
            "parent": None,
            "max_model_len": vllm_wire.CONTEXT,
        }
        return vllm_wire.json_response(200, {"object": "list", "data": [model]})

    def health(self, content: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: 0\r\n\r\n"

    def version(self, content: bytes) -> bytes:
        return vllm_wire.json_response(200, {"version": "0.32.0"})


ROUTES: dict[tuple[str, str], Callable[[BackendConnection, bytes], bytes]] = {
    ("POST", "/v1/completions"): BackendConnection.completions,
    ("POST", "/v1/chat/completions"): BackendConnection.chat,
    ("GET", "/v1/models"): BackendConnection.models,
    ("GET", "/health"): BackendConnection.health,
    ("GET", "/version"): BackendConnection.version,
    ("POST", "/bench/pace"): BackendConnection.set_pace,
    ("GET", "/bench/served"): BackendConnection.show_counters,
    ("POST", "/bench/ended"): BackendConnection.pop_end_times,
}


async def serve(corpus: Corpus, port: int) -> asyncio.Server:
    server = BackendState(corpus)
    return await asyncio.get_running_loop().create_server(
        lambda: BackendConnection(server), "127.0.0.1", port, backlog=1024
    )


async def main(port: int, path: Path) -> None:
    listening = await serve(prose.load(path), port)
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
