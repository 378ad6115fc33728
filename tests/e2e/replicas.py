"""Gateway replicas in separate processes with a shared store, and relays to their servers.

A relay can kill a process at an exact command or chunk.
"""

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
    """A `unisono serve` process on a free port.

    `arguments` and `environment` are added to its command line and environment. `folder` contains its log and its
    configuration.
    """

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
        """Write the configuration that the process reads at start and at reload."""
        self.path.write_text(json.dumps(config))

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def logged(self, words: str, times: int = 1) -> None:
        """Wait until the log contains `words`."""
        async with asyncio.timeout(STARTING_S):
            while self.log.count(words) < times:
                await asyncio.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process without a shutdown."""
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
    process = Replica(folder, config, arguments)
    try:
        yield await process.start()
    finally:
        await process.end()


# -- clients


@dataclass
class Told:
    """Received part of a stream: events as bytes and as JSON, and whether `[DONE]` followed."""

    raw: list[bytes] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    done: bool = False

    @property
    def id(self) -> str:
        """Id of the response; empty before the first event."""
        return str(self.events[0]["response"]["id"]) if self.events else ""


@dataclass(frozen=True)
class Client:
    """Client of one replica."""

    url: str
    session: aiohttp.ClientSession

    async def asks(self, method: str, path: str, body: Json | None = None, **headers: str) -> tuple[int, Any]:
        all_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        data = None
        if body is not None:
            data, all_headers["content-type"] = BytesIO(json.dumps(body).encode()), "application/json"
        async with self.session.request(method, self.url + path, data=data, headers=all_headers) as answer:
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
        """Wait until the response has ended and return it."""
        async with asyncio.timeout(within_s):
            while True:
                response: Json = await self.get(f"/v1/responses/{response_id}")
                if response["status"] not in ("queued", "in_progress"):
                    return response
                await asyncio.sleep(every_s)

    async def listens(self, received: Told, path: str, body: Json | None = None, *, until: int | None = None) -> Told:
        """Read a stream into `received`, to its end or to the event with number `until`.

        A lost connection counts as the end too.
        """
        method = "GET" if body is None else "POST"
        async with self.session.request(method, self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line == b"data: [DONE]\n":
                    received.done = True
                elif line.startswith(b"data: "):
                    received.raw.append(line)
                    received.events.append(json.loads(line[6:]))
                    if received.events[-1].get("sequence_number") == until:
                        break
        return received

    async def resumes(self, received: Told, response_id: str, *, until: int | None = None) -> Told:
        """Continue a stream after its last received event."""
        after = f"&starting_after={len(received.events) - 1}" if received.events else ""
        return await self.listens(received, f"/v1/responses/{response_id}?stream=true{after}", until=until)


# -- relays


class Relay:
    """Forwards bytes between clients and the server at `port`.

    `up` and `down` see every unit from the client and from the server, and return whether to forward it. `cut_up` and
    `cut_down` split the bytes into units. Without them, bytes are forwarded unseen. A unit that is not forwarded ends
    its connection.
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
        async with connected(self._target) as (upstream_reader, upstream_writer):
            await self._passed((reader, upstream_writer, 0), (upstream_reader, writer, 1))
            writer.transport.abort()

    async def _passed(self, *directions: tuple[asyncio.StreamReader, asyncio.StreamWriter, int]) -> None:
        """Forward in both directions until one side ends."""
        pumps = [asyncio.create_task(self._pump(*direction)) for direction in directions]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int) -> None:
        cut, sees = self._cuts[direction], self._sees[direction]
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
    """Cut one Redis command, an array of strings, from the buffer."""
    end = buffer.find(b"\r\n")
    if end < 0:
        return None
    assert buffer[:1] == b"*", bytes(buffer[:80])
    position = end + 2
    for _ in range(int(buffer[1:end])):
        end = buffer.find(b"\r\n", position)
        if end < 0:
            return None
        position = end + 2 + int(buffer[position + 1 : end]) + 2
    return _cut_off(buffer, position) if position <= len(buffer) else None


def one_chunk(buffer: bytearray) -> bytes | None:
    """Cut one event of a backend from the buffer, or everything if it contains no whole event."""
    end = buffer.find(b"\n\n")
    if end < 0:
        return _cut_off(buffer, len(buffer)) if buffer else None
    return _cut_off(buffer, end + 2)


def anything(buffer: bytearray) -> bytes | None:
    return _cut_off(buffer, len(buffer)) if buffer else None


def _cut_off(buffer: bytearray, count: int) -> bytes:
    unit = bytes(buffer[:count])
    del buffer[:count]
    return unit
