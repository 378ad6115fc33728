"""Replicas of the gateway as processes of their own on one store, and relays that watch what goes between them and
their servers: a relay can end a process at the very command or chunk a test is about."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import aiohttp

from tests.listening import Listener, connected

UNISONO = str(Path(sys.executable).with_name("unisono"))
STARTING_S = 60.0
LEASE_S = 1.0

Json = dict[str, Any]


@dataclass
class Replica:
    """A `unisono serve` on a free port, with further `arguments` and environment variables. Its log and its
    configuration are in `folder`."""

    folder: Path
    config: Mapping[str, Any]
    arguments: Sequence[str] = ()
    url: str = ""
    process: asyncio.subprocess.Process | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    async def start(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write(self.config)
        command = (UNISONO, "serve", "--port", "0", "--config", str(self.path), *self.arguments)
        with (self.folder / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, env={**os.environ, **self.environment}
            )
        assert self.process.stdout is not None
        async with asyncio.timeout(STARTING_S):
            async for line in self.process.stdout:
                if found := re.search(rb"listens on (http://\S+)/v1", line):
                    self.url = found[1].decode()
                if line.startswith(b"Ctrl-C"):
                    return self
        raise RuntimeError(self.log)

    @property
    def path(self) -> Path:
        return self.folder / "config.json"

    def write(self, config: Mapping[str, Any]) -> None:
        """What it reads when it starts, and when it is told to read again."""
        self.path.write_text(json.dumps(config))

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def logged(self, words: str, times: int = 1) -> None:
        """Return when its log has said so."""
        async with asyncio.timeout(STARTING_S):
            while self.log.count(words) < times:
                await asyncio.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """As a power cut ends it."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)

    async def ended(self) -> int:
        assert self.process is not None
        return await self.process.wait()

    async def end(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            self.kill()
            await self.process.communicate()


@asynccontextmanager
async def replica(folder: Path, config: Mapping[str, Any], *arguments: str) -> AsyncIterator[Replica]:
    one = Replica(folder, config, arguments)
    try:
        yield await one.start()
    finally:
        await one.end()


# -- clients


@dataclass
class Told:
    """What a stream told: its events as bytes and as JSON, and whether `[DONE]` was behind them."""

    raw: list[bytes] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    done: bool = False

    @property
    def id(self) -> str:
        """Of the response; empty before anything was told."""
        return str(self.events[0]["response"]["id"]) if self.events else ""


@dataclass(frozen=True)
class Client:
    """Speaks to one replica."""

    url: str
    session: aiohttp.ClientSession

    async def asks(self, method: str, path: str, body: Json | None = None, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None
        if body is not None:
            data, named["content-type"] = BytesIO(json.dumps(body).encode()), "application/json"
        async with self.session.request(method, self.url + path, data=data, headers=named) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> Any:
        status, body = await self.asks("GET", path)
        assert status == 200, body
        return body

    async def post(self, path: str, body: Json | None = None, **headers: str) -> Any:
        status, answer = await self.asks("POST", path, body or {}, **headers)
        assert status == 200, answer
        return answer

    async def over(self, response_id: str, within_s: float = 30.0, every_s: float = 0.05) -> Json:
        """The response once it is over."""
        async with asyncio.timeout(within_s):
            while True:
                response: Json = await self.get(f"/v1/responses/{response_id}")
                if response["status"] not in ("queued", "in_progress"):
                    return response
                await asyncio.sleep(every_s)

    async def listens(self, told: Told, path: str, body: Json | None = None, *, until: int | None = None) -> Told:
        """Read a stream into `told`, to its end or to the event with number `until`; a connection that breaks is an
        end too."""
        method = "GET" if body is None else "POST"
        async with self.session.request(method, self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line == b"data: [DONE]\n":
                    told.done = True
                elif line.startswith(b"data: "):
                    told.raw.append(line)
                    told.events.append(json.loads(line[6:]))
                    if told.events[-1].get("sequence_number") == until:
                        break
        return told

    async def resumes(self, told: Told, response_id: str, *, until: int | None = None) -> Told:
        """Go on behind what was told."""
        after = f"&starting_after={len(told.events) - 1}" if told.events else ""
        return await self.listens(told, f"/v1/responses/{response_id}?stream=true{after}", until=until)


# -- relays


class Relay:
    """Passes bytes between clients and the server at `port`.

    `up` and `down` see what comes from a client and from the server, each whole unit that `cut_up` and `cut_down` find,
    and say whether it goes on; with None bytes pass unseen. A unit that does not go on ends its connection.
    """

    def __init__(
        self,
        port: int,
        *,
        cut_up: Callable[[bytearray], bytes | None] | None = None,
        up: Callable[[bytes], bool] = lambda unit: True,
        cut_down: Callable[[bytearray], bytes | None] | None = None,
        down: Callable[[bytes], bool] = lambda unit: True,
    ) -> None:
        self._target = port
        self._cuts = (cut_up, cut_down)
        self._sees = (up, down)
        self._listener = Listener(self._joined)

    async def __aenter__(self) -> Self:
        await self._listener.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._listener.aclose()

    @property
    def port(self) -> int:
        return self._listener.port

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with connected(self._target) as (there, beyond):
            await self._passed((reader, beyond, 0), (there, writer, 1))
            writer.transport.abort()

    async def _passed(self, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter, int]) -> None:
        """Return when one of the two has said its last."""
        pumps = [asyncio.create_task(self._pump(*way)) for way in ways]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        cut, sees = self._cuts[way], self._sees[way]
        buffer = bytearray()
        with suppress(OSError):
            while data := await reader.read(65536):
                if cut is None:
                    writer.write(data)
                else:
                    buffer += data
                    while (unit := cut(buffer)) is not None:
                        if not sees(unit):
                            return
                        writer.write(unit)
                await writer.drain()


def one_command(buffer: bytearray) -> bytes | None:
    """A command to Redis off the front: an array of strings."""
    end = buffer.find(b"\r\n")
    if end < 0:
        return None
    assert buffer[:1] == b"*", bytes(buffer[:80])
    at = end + 2
    for _ in range(int(buffer[1:end])):
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return None
        at = end + 2 + int(buffer[at + 1 : end]) + 2
    return _taken(buffer, at) if at <= len(buffer) else None


def one_chunk(buffer: bytearray) -> bytes | None:
    """What a backend says up to the end of one event off the front, or all there is when none ends in it."""
    end = buffer.find(b"\n\n")
    if end < 0:
        return _taken(buffer, len(buffer)) if buffer else None
    return _taken(buffer, end + 2)


def anything(buffer: bytearray) -> bytes | None:
    return _taken(buffer, len(buffer)) if buffer else None


def _taken(buffer: bytearray, count: int) -> bytes:
    unit = bytes(buffer[:count])
    del buffer[:count]
    return unit
