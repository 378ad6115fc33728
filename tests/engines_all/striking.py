"""Interruption of engines while they generate.

An engine is killed, or frozen so that its stream falls silent. The demo model completes an answer before a client has
read half of it. After the first output, the engine therefore runs in slow motion, a few milliseconds at a time, until
the answer reaches the point of interruption. The engine is interrupted after all of its output has been read.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.e2e.gateway import Gateway
from tests.engines_all.engines import Running, child_pids, running

# Longest run of an engine in slow motion without output, by engine. It is shorter than the generation of a call's
# arguments.
SLOW_RUN_S = {"vllm": 0.06}
DEFAULT_RUN_S = 0.001
# Pause after each run: long enough to read the output.
PAUSE_S = 0.02
READ_S = 0.15


class FinishedTooEarly(AssertionError):
    """The response ended before the engine could be interrupted."""


class Fleet:
    """Running engines by name. Each is started on demand, and again after its death."""

    def __init__(self) -> None:
        self._started: dict[str, tuple[Running, ExitStack]] = {}

    def get(self, name: str) -> Running:
        """Return the running engine."""
        known = self._started.get(name)
        if known is not None and (known[0].pid is None or is_alive(known[0].pid)):
            return known[0]
        return self.restart(name)

    def restart(self, name: str, port: int | None = None) -> Running:
        """Restart the engine, by default on a free port."""
        self._end(name)
        stack = ExitStack()
        engine = stack.enter_context(running(name, port))
        self._started[name] = engine, stack
        return engine

    def end(self) -> None:
        for name in list(self._started):
            self._end(name)

    def _end(self, name: str) -> None:
        if name in self._started:
            _, stack = self._started.pop(name)
            stack.close()


def is_alive(pid: int) -> bool:
    """Return True if a child of this process runs. Do not reap it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


@dataclass(frozen=True)
class EngineProcesses:
    """The processes of an engine.

    `pid` leads a process group, or is the only process of the adapter.
    """

    pid: int
    group: bool
    run_s: float

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        (os.killpg if self.group else os.kill)(self.pid, number)


@contextmanager
def processes_of(engine: Running, before: list[int]) -> Iterator[EngineProcesses]:
    """Yield the processes of an engine, and resume them at the end.

    `before` are the processes of other gateways.
    """
    run_s = SLOW_RUN_S.get(engine.engine.kind, DEFAULT_RUN_S)
    if engine.pid is not None:
        processes = EngineProcesses(engine.pid, True, run_s)
    else:
        [pid] = set(child_pids("mlx.engine")) - set(before)
        processes = EngineProcesses(pid, False, run_s)
    try:
        yield processes
    finally:
        if is_alive(processes.pid):
            processes.resume()


@dataclass(frozen=True)
class ReceivedEvent:
    """An event of a stream, its time in seconds, and its reasoning, text or arguments."""

    at: float
    event: Mapping[str, Any]
    parts: Mapping[str, str]


@dataclass
class ReceivedStream:
    """A stream as a client receives it."""

    received: list[ReceivedEvent] = field(default_factory=list)
    status: int = 0
    done: bool = False

    def text_of(self, kind: str) -> str:
        return "".join(received.parts.get(kind, "") for received in self.received)

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return the fields of all events, the latest value of each: among them usage and `unisono`."""
        fields: dict[str, Any] = {}
        for received in self.received:
            fields |= received.event.get("response") or received.event
        return fields

    def text_before(self, moment: float, kind: str) -> str:
        """Return the output of a kind that arrived before a moment."""
        return "".join(received.parts.get(kind, "") for received in self.received if received.at < moment)

    def gap_after(self, moment: float) -> float:
        """Return the seconds from a moment to the next output.

        Without further output, return the seconds to the next event.
        """
        later = [received for received in self.received if received.at >= moment]
        return next((received.at for received in later if received.parts), later[0].at) - moment


PartsOf = Callable[[Mapping[str, Any]], dict[str, str]]


def chat_parts(event: Mapping[str, Any]) -> dict[str, str]:
    parts: dict[str, str] = {}
    for choice in event["choices"]:
        delta = choice["delta"]
        parts["text"] = delta.get("content") or ""
        parts["reasoning"] = delta.get("reasoning") or ""
        parts["arguments"] = "".join(c["function"].get("arguments") or "" for c in delta.get("tool_calls") or ())
    return {kind: text for kind, text in parts.items() if text}


DELTAS = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "arguments",
}


def responses_parts(event: Mapping[str, Any]) -> dict[str, str]:
    kind = DELTAS.get(event["type"])
    return {} if kind is None else {kind: event["delta"]}


@dataclass(frozen=True)
class StreamRequest:
    """A request for a stream on one of the APIs."""

    path: str
    body: Mapping[str, Any]
    parts: PartsOf

    async def listen(self, gateway: Gateway, stream: ReceivedStream) -> None:
        """Send the request, and read the stream to its end."""
        url = gateway.url + self.path
        async with asyncio.timeout(120), gateway.session.post(url, json=self.body) as response:
            stream.status = response.status
            await self._read(response, stream)

    async def _read(self, response: aiohttp.ClientResponse, stream: ReceivedStream) -> None:
        async for line in response.content:
            if line == b"data: [DONE]\n":
                stream.done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                stream.received.append(ReceivedEvent(time.monotonic(), event, self.parts(event)))

    async def completed(self, gateway: Gateway) -> ReceivedStream:
        stream = ReceivedStream()
        await self.listen(gateway, stream)
        assert (stream.status, stream.done) == (200, True), stream.received
        return stream

    async def interrupted(
        self,
        gateway: Gateway,
        engine: EngineProcesses,
        is_reached: Callable[[ReceivedStream], bool],
        fault: Callable[[], None] | None,
    ) -> tuple[ReceivedStream, float]:
        """Interrupt the engine when the stream reaches a point; return the stream and the moment.

        Without a `fault`, the engine stays frozen. Raise FinishedTooEarly if the response ends first.
        """
        stream = ReceivedStream()
        listening = asyncio.create_task(self.listen(gateway, stream))
        try:
            while not any(received.parts for received in stream.received):
                _check_unfinished(listening, stream)
                await asyncio.sleep(0)
            engine.freeze()
            await asyncio.sleep(READ_S)
            while not is_reached(stream):
                _check_unfinished(listening, stream)
                engine.resume()
                await _wait_for_event(stream, engine.run_s)
                engine.freeze()
                await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(READ_S)
            _check_unfinished(listening, stream)
            moment = time.monotonic()
            if fault is not None:
                fault()
            await listening
        finally:
            listening.cancel()
        assert (stream.status, stream.done) == (200, True), stream.received
        return stream, moment


async def _wait_for_event(stream: ReceivedStream, within_s: float) -> None:
    known, until = len(stream.received), time.monotonic() + within_s
    while len(stream.received) == known and time.monotonic() < until:
        await asyncio.sleep(0)


def _check_unfinished(listening: asyncio.Task[None], stream: ReceivedStream) -> None:
    if listening.done():
        listening.result()
        raise FinishedTooEarly(stream.fields.get("unisono"))
