"""A backend whose model calls a tool so many times and then answers, and notes when it was asked and had answered.

Which step a prompt is for is the number of calls in it, and whose loop it belongs to is told by its question, so that
a gateway needs no change to be measured. An answer goes out at once but for its last token, which comes when the rest
has been read, as it does from a model: what follows that is the gateway's time.
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

from bench import material, vllm_wire
from bench.fake_vllm import Connection, Server, Wire
from bench.material import Answer, Material
from bench.wires import NORMAL_PROMPT
from unisono.core.generation import CALL
from unisono.harmony.encoding import Encoding, load_encoding

LABEL = "bench"
TOOL = "echo"
TIMES = b"/bench/loops"
"""Where the times of all loops are read, by their numbers, and forgotten."""
LAST_TOKEN_S = 0.02
STEPS = 5
"""Calls before the answer."""
ANSWER_TOKENS = 64
SAID = "<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary to=functions." + (
    f"{LABEL}__{TOOL}" + ' <|constrain|>json<|message|>{{"text":"{text}"}}<|call|>'
)
THOUGHT = "The harbour office keeps a list of every ship, so I look there before I say anything about this one."


@dataclass(slots=True)
class Loop:
    """One turn: the number its calls carry, and for each of its prompts when it came and when its answer was sent,
    in seconds of `time.monotonic`."""

    number: int
    times: list[tuple[float, float]] = field(default_factory=list)


class Model(Server):
    """What all connections share."""

    def __init__(self, stuff: Material, encoding: Encoding) -> None:
        super().__init__(stuff)
        self.loops: dict[str, Loop] = {}
        self._encoding = encoding
        self._numbered = 0
        self._stuff = stuff
        (self.user,) = encoding.encode_text("user")
        self.final = lru_cache(maxsize=1)(self._final)

    def _final(self) -> Answer:
        return self._stuff.answer(ANSWER_TOKENS)

    def loop(self, prompt: Sequence[int]) -> Loop:
        """The loop a prompt belongs to, which may begin with it."""
        # No word of a prompt is spelled like the header, which has no space in front.
        header = len(prompt) - 1 - prompt[::-1].index(self.user)
        question = " ".join(map(str, prompt[header + 2 : header + 2 + NORMAL_PROMPT]))
        if question not in self.loops:
            self._numbered += 1
            self.loops[question] = Loop(self._numbered)
        return self.loops[question]

    def says(self, loop: Loop, step: int) -> Answer:
        if step >= STEPS:
            return self.final()
        tokens = self._encoding.encode_marked(SAID.format(thought=THOUGHT, text=f"{loop.number}-{step}"))
        texts = [self._encoding.decode_bytes([token]).decode() for token in tokens[:-1]]
        return Answer(tuple(tokens), (*texts, ""), THOUGHT, "", "stop")


class Asked(Connection):
    """A connection to the model."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._model = model

    def on_message_complete(self) -> None:
        self._came = time.monotonic()
        if self._url != TIMES:
            super().on_message_complete()
            return
        loops, self._model.loops = self._model.loops, {}
        times = {str(loop.number): loop.times for loop in loops.values()}
        self._transport.write(vllm_wire.json_response(200, times))

    def complete(self, wire: Wire, content: bytes) -> bytes:
        body = orjson.loads(content)
        refused = wire.refusal(body)
        if refused is not None:
            return refused
        if (body.get("max_tokens") or 16) <= ANSWER_TOKENS:
            # Whoever wants so little wants to know who is there.
            return super().complete(wire, content)
        prompt = wire.prompt(body)
        loop, step = self._model.loop(prompt), prompt.count(CALL)
        rendered = vllm_wire.render(self._model.says(loop, step), 1)
        request_id = f"{loop.number:024x}{step:08x}"
        filled = [chunk.fill(request_id.encode()) for chunk in rendered.rest]
        end = filled.pop() + rendered.tail(request_id, len(prompt), counted=True)
        self._transport.write(b"".join([vllm_wire.STREAM_HEAD, rendered.first(request_id, prompt), *filled]))
        asyncio.get_running_loop().call_later(LAST_TOKEN_S, self._end, loop, self._came, end)
        return b""

    def _end(self, loop: Loop, came: float, end: bytes) -> None:
        self._transport.write(end)
        loop.times.append((came, time.monotonic()))


async def main(port: int, path: Path) -> None:
    model = Model(material.load(path), load_encoding())
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Asked(model), "127.0.0.1", port, backlog=1024)
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
