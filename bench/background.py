"""Responses that run in the background, many at once: begun, some of them watched, and each seen to its logged end.

A process of its own, driven by lines of JSON: one `Ask` in, one `Told` out. That an answer is logged is read from the
store, past the gateway, and only looked for once the backend has sent all of it: looking costs the store something.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import orjson

from bench import http_client, material, readers, vllm_wire, wires
from bench.http_client import Connection, Lost
from bench.load import quantile
from bench.material import Answer, Material
from bench.tally import Tally, answer_lines
from unisono.access.keys import MASTER_TENANT
from unisono.core.state_store import StoredResponse
from unisono.store.redis import RedisStore

LOOK_EVERY_S = 0.05
LOOKED_AT_ONCE = 50
PATIENT_S = 5.0
"""The deadline of a look: a store that is busy is measured by what it has logged."""


@dataclass(frozen=True, slots=True)
class Ask:
    """`streams` responses of `tokens` tokens begun over `spread_s` seconds; `watched` of them are streamed to the
    client that begins them."""

    port: int
    upstream: int
    store: int
    """The port of the Redis the gateway logs to."""
    key: str
    streams: int
    watched: int
    tokens: int
    spread_s: float
    seed: int
    limit_s: float = 120.0
    """After this what is not over counts as a fault."""


@dataclass(slots=True)
class Told(Tally):
    """Seconds between the backend's last byte and the end in the log (`logged`), or at the client (`watched`)."""

    logged_p50_s: float = 0.0
    logged_max_s: float = 0.0
    watched_p50_s: float = 0.0
    watched_max_s: float = 0.0


class Crowd:
    """The responses of one `Ask`, by what tells their questions apart at the backend."""

    def __init__(self, stuff: Material, ask: Ask, store: RedisStore) -> None:
        self._stuff, self._ask, self._store = stuff, ask, store
        self._told = Told()
        self._ids: dict[str, str] = {}
        self._sent: dict[str, float] = {}
        self._logged: dict[str, float] = {}
        self._shown: dict[str, float] = {}
        self._failed = 0

    async def run(self) -> Told:
        ask, told = self._ask, self._told
        begun, cpu = time.monotonic(), time.process_time()
        try:
            async with asyncio.timeout(ask.limit_s), asyncio.TaskGroup() as group:
                group.create_task(self._see_ends())
                for number in range(ask.streams):
                    group.create_task(self._one(number))
        except TimeoutError:
            told.fault(f"{len(self._logged)} of {ask.streams} logged after {ask.limit_s:.0f} s")
        told.seconds, told.cpu_s = time.monotonic() - begun, time.process_time() - cpu
        logged = [at - self._sent[asked] for asked, at in self._logged.items()]
        shown = [at - self._sent[asked] for asked, at in self._shown.items() if asked in self._sent]
        told.logged_p50_s, told.logged_max_s = quantile(logged, 0.5), quantile(logged, 1.0)
        told.watched_p50_s, told.watched_max_s = quantile(shown, 0.5), quantile(shown, 1.0)
        return told

    async def _one(self, number: int) -> None:
        """Begin a response, and watch it where it is one of those."""
        ask = self._ask
        await asyncio.sleep(ask.spread_s * number / ask.streams)
        # The watched ones are spread over all of them.
        watched = number * ask.watched // ask.streams != (number + 1) * ask.watched // ask.streams
        seed = ask.seed * 1_000_003 + number
        words, _ = self._stuff.prompt(wires.NORMAL_PROMPT, seed)
        asked = " ".join(map(str, words[-vllm_wire.ASKED_WORDS :]))
        question = wires.Question(seed, more={"background": True})
        request = wires.request("responses", self._stuff, question, tokens=ask.tokens, stream=watched, key=ask.key)
        reader = Watching(self._ids, asked) if watched else Beginning(self._ids, asked)
        try:
            status = await http_client.once(ask.port, request, reader.feed)
            fault = reader.fault(status, self._stuff.answer(ask.tokens))
        except (Lost, OSError) as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            self._told.fault(fault)
            self._failed += asked not in self._ids
        elif isinstance(reader, Watching):
            self._shown[asked] = reader.ended_at

    async def _see_ends(self) -> None:
        """Return when every response that was begun is over in the store."""
        ask = self._ask
        upstream = await http_client.connect(ask.upstream)
        try:
            while len(self._logged) + self._failed < ask.streams:
                await asyncio.sleep(LOOK_EVERY_S)
                self._sent |= await _sent(upstream)
                open_ = [asked for asked in self._sent if asked in self._ids and asked not in self._logged]
                for start in range(0, len(open_), LOOKED_AT_ONCE):
                    await self._look(open_[start : start + LOOKED_AT_ONCE])
        finally:
            upstream.close()

    async def _look(self, questions: list[str]) -> None:
        found = await self._store.responses(MASTER_TENANT, [self._ids[asked] for asked in questions])
        now = time.monotonic()
        expected = self._stuff.answer(self._ask.tokens)
        for asked, response in zip(questions, found, strict=True):
            if response is None or response.status.terminal:
                self._logged[asked] = now
                if said := _kept_fault(response, expected):
                    self._told.fault(said)


class Beginning(readers.ResponseReader):
    """Reads the answer to a request for a response in the background."""

    def __init__(self, ids: dict[str, str], asked: str) -> None:
        super().__init__()
        self._ids, self._asked = ids, asked

    def fault(self, status: int, expected: Answer) -> str | None:
        del expected  # it comes later
        if status != 200 or not self.id:
            return f"HTTP {status}: {self.said!r}"
        self._ids[self._asked] = self.id
        return None


class Watching(readers.ResponsesReader):
    """Reads a response's events, and notes its id with the first."""

    def __init__(self, ids: dict[str, str], asked: str) -> None:
        super().__init__()
        self._ids, self._asked = ids, asked

    def began(self, response_id: str) -> None:
        self._ids[self._asked] = response_id


def _kept_fault(response: StoredResponse | None, expected: Answer) -> str | None:
    if response is None:
        return "a response is gone"
    shown = {"status": response.status.value, "output": [item.wire for item in response.output]}
    usage = {"output_tokens": response.usage.completion_tokens} if response.usage else None
    return readers.response_fault({**shown, "usage": usage}, expected)


async def _sent(upstream: Connection) -> dict[str, float]:
    """What the backend has sent to its end since it was asked last."""
    parts = list[bytes]()
    await upstream.request(http_client.message("/bench/ended", b""), parts.append)
    sent: dict[str, float] = orjson.loads(b"".join(parts))
    return sent


async def run(stuff: Material, ask: Ask) -> Told:
    store = RedisStore(f"redis://127.0.0.1:{ask.store}/0", deadline_s=PATIENT_S)
    try:
        return await Crowd(stuff, ask, store).run()
    finally:
        await store.aclose()


def main(path: Path) -> None:
    stuff = material.load(path)
    answer_lines(lambda line: run(stuff, Ask(**orjson.loads(line))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
