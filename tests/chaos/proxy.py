"""TCP relay in front of one backend that injects faults.

A fault occurs at the k-th event of a generation. The talk that the generation belongs to determines the fault.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from tests.chaos.talks import ENCODING, talk_in
from tests.fakes.wire import PROBE
from tests.listening import Listener

# Start of an event; it does not occur inside of an event.
EVENT = re.compile(rb'data: \{"|\{"model"')
GENERATIONS = ("/v1/completions", "/completion", "/api/generate")
ERROR = b'{"error": {"message": "the engine fell over", "type": "server_error", "code": 500}}'
SLOW_S = 0.03
# Time for the client to read the written bytes, because an RST discards unread bytes.
MOMENT_S = 0.01


@dataclass(frozen=True)
class Fault:
    """Fault of one generation.

    It occurs in front of event `at` of the response, counted from 0. `retry_after_s` applies to refusals.
    """

    kind: str
    at: int = 0
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}@{self.at}"


REFUSALS: Mapping[str, int] = {"http500": 500, "http503": 503, "http429": 429}
ENDINGS = ("reset", "close", "half", "stall", "garbage", "error200")
# Faults of the process; the connection itself is not broken.
GRIPS = ("kill", "stop")


@dataclass
class _Answer:
    """Response that is being relayed."""

    fault: Fault | None
    # The response is not streamed; it counts as one event.
    whole: bool = False
    events: int = 0
    tail: bytes = b""


@dataclass
class Proxy:
    """Relay to the port that `target` returns for each connection.

    A port of None means that no process runs. `next_fault` returns the fault for each generation, by the name of its
    talk.
    """

    kind: str
    target: Callable[[], int | None]
    next_fault: Callable[[str], Fault | None]
    grip: Callable[[str], None]
    open: int = 0
    generations: int = 0
    failures: list[BaseException] = field(default_factory=list)
    _listener: Listener = field(init=False)

    async def __aenter__(self) -> Self:
        self._listener = Listener(self._accepted)
        await self._listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.aclose()

    @property
    def url(self) -> str:
        return self._listener.url

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            await _Relay(self, reader, writer).run()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            _reset(writer)
            raise
        finally:
            self.open -= 1


class _Relay:
    """One connection from the gateway."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._up: asyncio.StreamWriter | None = None
        self._pump: asyncio.Task[None] | None = None
        self._answer = _Answer(None)

    async def run(self) -> None:
        try:
            while (request := await self._read_request()) is not None:
                if not await self._forward(*request):
                    return
        finally:
            if self._pump is not None:
                self._pump.cancel()
                await asyncio.gather(self._pump, return_exceptions=True)
            if self._up is not None:
                self._up.close()

    async def _read_request(self) -> tuple[bytes, bytes] | None:
        """Read head and body of the next request; None after the gateway disconnected."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as end:
            if end.partial:
                raise
            return None
        length = re.search(rb"content-length: *(\d+)", head, re.I)
        return head, await self._reader.readexactly(int(length[1])) if length else b""

    async def _forward(self, head: bytes, body: bytes) -> bool:
        """Forward a request, or refuse it; return whether the connection stays open."""
        fault = self._fault(head, body)
        if fault is not None and fault.kind in REFUSALS:
            self._writer.write(_refusal(fault))
            return True
        if fault is not None and fault.kind == "mute":
            # The request is accepted and never answered.
            await self._reader.read()
            return False
        self._answer = _Answer(fault, whole=b'"stream":false' in body.replace(b" ", b""))
        if self._up is None:
            port = self._proxy.target()
            if port is None:
                _reset(self._writer)
                return False
            down, self._up = await asyncio.open_connection("127.0.0.1", port)
            self._pump = asyncio.create_task(self._relay(down))
        self._up.write(head + body)
        return True

    def _fault(self, head: bytes, body: bytes) -> Fault | None:
        path = head.split(b" ", 2)[1].decode()
        probe = re.search(rb"x-request-id: *" + PROBE.encode(), head, re.I)
        if not body or path not in GENERATIONS or probe:
            return None
        prompt = json.loads(body)["prompt"]
        talk = talk_in(prompt if isinstance(prompt, str) else ENCODING.decode(prompt))
        if talk is None:
            return None
        self._proxy.generations += 1
        return self._proxy.next_fault(talk.name)

    async def _relay(self, down: asyncio.StreamReader) -> None:
        try:
            while data := await down.read(65536):
                if not await self._relay_data(data):
                    return
        except OSError:
            _reset(self._writer)
            return
        self._writer.close()

    async def _relay_data(self, data: bytes) -> bool:
        """Relay data up to the fault; return whether more data is to be relayed."""
        answer = self._answer
        fault = answer.fault
        if fault is None:
            self._writer.write(data)
            return True
        if answer.whole and fault.at == 0 and fault.kind != "slow":
            answer.fault = None
            return await self._break(fault, data)
        start = 0
        for event in EVENT.finditer(data):
            if answer.events == fault.at:
                if fault.kind == "slow":
                    await asyncio.sleep(SLOW_S)
                    continue
                answer.fault = None
                self._writer.write(data[start : event.start()])
                return await self._break(fault, data[event.start() :])
            answer.events += 1
        self._writer.write(data)
        return True

    async def _break(self, fault: Fault, rest: bytes) -> bool:
        match fault.kind:
            case "reset":
                await asyncio.sleep(MOMENT_S)
                _reset(self._writer)
            case "close":
                self._writer.close()
            case "half":
                self._writer.write(rest[: max(len(rest) // 2, 1)])
                await asyncio.sleep(MOMENT_S)
                self._writer.close()
            case "stall":
                await asyncio.Event().wait()
            case "garbage":
                self._writer.write(
                    self._framed(b'data: {"choices": [{"te\xff\x00\n\n' if self._sse else b'{"respo\xff\n')
                )
                self._writer.write(rest)
                return True
            case "error200":
                self._writer.write(self._framed(b"data: " + ERROR + b"\n\n" if self._sse else ERROR + b"\n"))
                await asyncio.sleep(MOMENT_S)
                self._writer.close()
            case "kill" | "stop":
                self._writer.write(rest)
                self._proxy.grip(fault.kind)
                return True
            case _:
                raise AssertionError(fault)
        return False

    @property
    def _sse(self) -> bool:
        return self._proxy.kind != "ollama"

    def _framed(self, data: bytes) -> bytes:
        return data if self._proxy.kind == "mlx_server" else b"%x\r\n%s\r\n" % (len(data), data)


def _refusal(fault: Fault) -> bytes:
    after = "" if fault.retry_after_s is None else f"Retry-After: {fault.retry_after_s:g}\r\n"
    head = f"HTTP/1.1 {REFUSALS[fault.kind]} No\r\nContent-Type: application/json\r\n{after}"
    return f"{head}Content-Length: {len(ERROR)}\r\n\r\n".encode() + ERROR


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: Any = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
