"""Fake backend whose model calls a tool several times and then answers.

The number of calls in a prompt determines the step, and the question identifies the loop. The gateway therefore needs
no change to be measured. All of an answer except the last token is sent at once. The last token follows when the
gateway has read the rest, as it does from a real model. The time after it is the time of the gateway.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import orjson
import uvloop

from bench import prose, vllm_wire
from bench.fake_vllm import BackendConnection, BackendState, BackendWire
from bench.prose import Answer, Corpus
from bench.wires import QUESTION_WORDS
from unisono.core.generation import CALL
from unisono.harmony.encoding import Encoding, load_encoding

SERVER_LABEL = "bench"
TOOL_NAME = "echo"
# A request returns and clears the times of all loops, by loop number.
TIMES_PATH = b"/bench/loops"
LAST_TOKEN_S = 0.02
# Tool calls before the answer.
STEPS = 5
ANSWER_TOKENS = 64
CALL_TEMPLATE = (
    "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary to=functions."
    + (f"{SERVER_LABEL}__{TOOL_NAME}" + ' <|constrain|>json<|message|>{{"text":"{text}"}}<|call|>')
)
REASONING = "The harbour office keeps a list of every ship, so I look there before I say anything about this one."


@dataclass(slots=True)
class ToolLoop:
    """One tool loop: its number, which its calls contain, and the times of its prompts.

    Each pair in `times` is when a prompt was received and when its answer was sent, in seconds of `time.monotonic`.
    """

    number: int
    times: list[tuple[float, float]] = field(default_factory=list)


class CallingBackend(BackendState):
    """State shared by all connections of the backend."""

    def __init__(self, corpus: Corpus, encoding: Encoding) -> None:
        super().__init__(corpus)
        self.loops: dict[str, ToolLoop] = {}
        self._encoding = encoding
        self._loop_count = 0
        self._corpus = corpus
        (self.user_token,) = encoding.encode_text("user")
        self.final = lru_cache(maxsize=1)(self._final)

    def _final(self) -> Answer:
        return self._corpus.answer(ANSWER_TOKENS)

    def loop(self, prompt: Sequence[int]) -> ToolLoop:
        """Return the loop of a prompt; a new question starts a new loop."""
        # The words of a prompt start with a space, so none equals the header.
        header = len(prompt) - 1 - prompt[::-1].index(self.user_token)
        question = " ".join(map(str, prompt[header + 2 : header + 2 + QUESTION_WORDS]))
        if question not in self.loops:
            self._loop_count += 1
            self.loops[question] = ToolLoop(self._loop_count)
        return self.loops[question]

    def answer_for(self, loop: ToolLoop, step: int) -> Answer:
        if step >= STEPS:
            return self.final()
        tokens = self._encoding.encode_marked(CALL_TEMPLATE.format(thought=REASONING, text=f"{loop.number}-{step}"))
        texts = [self._encoding.decode_bytes([token]).decode() for token in tokens[:-1]]
        return Answer(tuple(tokens), (*texts, ""), REASONING, "", "stop")


class CallingConnection(BackendConnection):
    """Server connection of the backend."""

    def __init__(self, backend: CallingBackend) -> None:
        super().__init__(backend)
        self._backend = backend

    def on_message_complete(self) -> None:
        self._received_at = time.monotonic()
        if self._url != TIMES_PATH:
            super().on_message_complete()
            return
        loops, self._backend.loops = self._backend.loops, {}
        times = {str(loop.number): loop.times for loop in loops.values()}
        self._transport.write(vllm_wire.json_response(200, times))

    def complete(self, wire: BackendWire, content: bytes) -> bytes:
        body = orjson.loads(content)
        error = wire.refusal(body)
        if error is not None:
            return error
        if (body.get("max_tokens") or 16) <= ANSWER_TOKENS:
            # Requests for so few tokens are probes of the gateway.
            return super().complete(wire, content)
        prompt = wire.prompt(body)
        loop, step = self._backend.loop(prompt), prompt.count(CALL)
        rendered = vllm_wire.render(self._backend.answer_for(loop, step), 1)
        request_id = f"{loop.number:024x}{step:08x}"
        filled = [chunk.fill(request_id.encode()) for chunk in rendered.rest]
        end = filled.pop() + rendered.tail(request_id, len(prompt), counted=True)
        self._transport.write(b"".join([vllm_wire.STREAM_HEAD, rendered.first(request_id, prompt), *filled]))
        asyncio.get_running_loop().call_later(LAST_TOKEN_S, self._end, loop, self._received_at, end)
        return b""

    def _end(self, loop: ToolLoop, received_at: float, end: bytes) -> None:
        self._transport.write(end)
        loop.times.append((received_at, time.monotonic()))


async def main(port: int, path: Path) -> None:
    backend = CallingBackend(prose.load(path), load_encoding())
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: CallingConnection(backend), "127.0.0.1", port, backlog=1024)
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
