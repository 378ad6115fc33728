"""A backend that breaks off its answers after so many tokens, and goes on with those that another one began.

Two of these stand behind one gateway. Whichever is asked first breaks off and notes when; whichever is asked to go on
notes when that was and when its first token went. Each of them knows only its own times, so what is compared between
processes is how long something took.
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

from bench import material, vllm_wire
from bench.fake_vllm import Connection, Server, Wire
from bench.material import Answer, Material

ANSWER_TOKENS = 64
BREAK_AFTER = 40
"""Tokens that come before the break: it is in the middle of what the client reads."""
LOST_AT_MOST = 4
"""Tokens that may have been under way when it broke, and are asked for again."""
FIRST_TOKEN_S = 0.02
INTERVAL_S = 0.004
DYING_S = INTERVAL_S / 2
"""Between the last token and the break, so that it is the stream that is lost and not the token."""
COMPLETIONS = b"/v1/completions"
"""The one path on which answers break off."""
BREAKS = b"/bench/breaks"
"""Where it is told how to break off, and its times are read and forgotten."""


@dataclass(slots=True)
class Times:
    """By question, in seconds of `time.monotonic`: when the last token went and when the stream broke; when the rest
    was asked for and when its first token went."""

    broken: dict[str, tuple[float, float]] = field(default_factory=dict)
    resumed: dict[str, tuple[float, float]] = field(default_factory=dict)


class Model(Server):
    """What all connections share."""

    def __init__(self, stuff: Material) -> None:
        super().__init__(stuff)
        self.how = ""
        self.times = Times()
        self._stuff = stuff
        self.rest = lru_cache(maxsize=2 * LOST_AT_MOST)(self._rest)

    def written(self, prompt: Sequence[int], limit: int) -> int:
        """How many tokens of an answer a prompt ends in."""
        if limit == ANSWER_TOKENS:
            return 0
        began = self._stuff.answer(ANSWER_TOKENS).tokens
        count = ANSWER_TOKENS - limit
        return count if list(prompt[-count:]) == list(began[:count]) else 0

    def _rest(self, written: int) -> vllm_wire.Rendered:
        whole = self._stuff.answer(ANSWER_TOKENS)
        rest = Answer(whole.tokens[written:], whole.texts[written:], "", "", whole.finish)
        return vllm_wire.render(rest, 1)


class Said:
    """An answer on its way out, `written` tokens of which are in its prompt."""

    def __init__(
        self, model: Model, transport: asyncio.Transport, prompt: Sequence[int], written: int, came: float
    ) -> None:
        self._model, self._transport, self._prompt, self._written = model, transport, prompt, written
        self._came, self._question = came, vllm_wire.asked(prompt[: len(prompt) - written])
        self._rendered = model.rest(written)
        self._sent = 0
        self._id = f"{id(self):032x}"
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time() + FIRST_TOKEN_S
        transport.write(vllm_wire.STREAM_HEAD)
        self.timer = self._loop.call_at(self._start, self._first)

    def _first(self) -> None:
        self._transport.write(self._rendered.first(self._id, self._prompt))
        if self._written:
            self._model.times.resumed[self._question] = self._came, time.monotonic()
        self._later()

    def _later(self) -> None:
        self._sent += 1
        if not self._written and self._model.how and self._sent == BREAK_AFTER:
            self.timer = self._loop.call_later(DYING_S, self._break, time.monotonic())
        else:
            self.timer = self._loop.call_at(self._start + self._sent * INTERVAL_S, self._next)

    def _next(self) -> None:
        rest = self._rendered.rest
        self._transport.write(rest[self._sent - 1].fill(self._id.encode()))
        if self._sent < len(rest):
            self._later()
        else:
            self._transport.write(self._rendered.tail(self._id, len(self._prompt), counted=True))

    def _break(self, last_at: float) -> None:
        self._model.times.broken[self._question] = last_at, time.monotonic()
        WAYS[self._model.how](self._transport)


def _reset(transport: asyncio.Transport) -> None:
    # Closed like this, the kernel says RST instead of FIN.
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _end(transport: asyncio.Transport) -> None:
    transport.write(vllm_wire.LAST_CHUNK)


WAYS: dict[str, Callable[[asyncio.Transport], None]] = {"reset": _reset, "end": _end}
"""A connection that is reset, and a stream that ends well as HTTP but has no last token and no end mark."""


class Asked(Connection):
    """A connection to the model."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._model = model
        self._said: Said | None = None

    def on_message_complete(self) -> None:
        self._came = time.monotonic()
        if self._url != BREAKS:
            super().on_message_complete()
            return
        model = self._model
        model.how = orjson.loads(b"".join(self._body))["how"]
        times, model.times = model.times, Times()
        self._transport.write(vllm_wire.json_response(200, {"broken": times.broken, "resumed": times.resumed}))

    def complete(self, wire: Wire, content: bytes) -> bytes:
        body = orjson.loads(content)
        refused = wire.refusal(body)
        if refused is not None:
            return refused
        if self._url != COMPLETIONS:
            return super().complete(wire, content)
        prompt, limit = wire.prompt(body), body.get("max_tokens") or 16
        written = self._model.written(prompt, limit)
        if limit != ANSWER_TOKENS and not BREAK_AFTER - LOST_AT_MOST < written <= BREAK_AFTER:
            # Whoever wants something else wants to know who is there.
            return super().complete(wire, content)
        self._said = Said(self._model, self._transport, prompt, written, self._came)
        return b""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._said is not None:
            self._said.timer.cancel()


async def serve(stuff: Material, port: int) -> asyncio.Server:
    model = Model(stuff)
    return await asyncio.get_running_loop().create_server(lambda: Asked(model), "127.0.0.1", port, backlog=1024)


async def main(port: int, path: Path) -> None:
    listening = await serve(material.load(path), port)
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
