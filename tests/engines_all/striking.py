"""Engines that are struck while they answer: killed without a word, or frozen so that only silence is left of them.

So small a model is through with an answer before anybody has read half of it. From the first words on an engine is
therefore run in slow motion, some milliseconds at a time, until the answer is where it is to be struck; it is struck
when everything it wrote has been read.
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
from tests.engines_all.engines import Running, children_that_run, running

RUNS_S = {"vllm": 0.06}
"""How long an engine in slow motion runs at a time when nothing is heard of it; less than it takes to write a call's
arguments."""
OTHERS_RUN_S = 0.001
RESTS_S = 0.02
"""And then rests: long enough for what it wrote to be read."""
ALL_READ_S = 0.15


class TooLate(AssertionError):
    """An answer was over before it could be struck."""


class Fleet:
    """Engines by name, each started when it is wanted and again when it is dead."""

    def __init__(self) -> None:
        self._started: dict[str, tuple[Running, ExitStack]] = {}

    def well(self, name: str) -> Running:
        """The engine, running."""
        known = self._started.get(name)
        if known is not None and (known[0].pid is None or is_alive(known[0].pid)):
            return known[0]
        return self.again(name)

    def again(self, name: str, port: int | None = None) -> Running:
        """The engine, started anew, on the port it had where that is said."""
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
    """Whether a child of this process runs; one that ended is waited for by whoever started it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


@dataclass(frozen=True)
class Struck:
    """All processes of an engine, as one. `pid` leads a group of its own, or is the adapter's one process."""

    pid: int
    group: bool
    runs_s: float

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        (os.killpg if self.group else os.kill)(self.pid, number)


@contextmanager
def to_strike(engine: Running, before: list[int]) -> Iterator[Struck]:
    """The processes of an engine; `before` are those of other gateways. Whatever was done to them they are not left
    frozen."""
    runs_s = RUNS_S.get(engine.engine.kind, OTHERS_RUN_S)
    if engine.pid is not None:
        struck = Struck(engine.pid, True, runs_s)
    else:
        [pid] = set(children_that_run("mlx.engine")) - set(before)
        struck = Struck(pid, False, runs_s)
    try:
        yield struck
    finally:
        if is_alive(struck.pid):
            struck.go_on()


@dataclass(frozen=True)
class Heard:
    """An event of a stream, when it came, in seconds, and what it shows: thoughts, text or arguments."""

    at: float
    event: Mapping[str, Any]
    shows: Mapping[str, str]


@dataclass
class Story:
    """A stream as a client hears it."""

    heard: list[Heard] = field(default_factory=list)
    status: int = 0
    done: bool = False

    def said(self, what: str) -> str:
        return "".join(heard.shows.get(what, "") for heard in self.heard)

    @property
    def last(self) -> Mapping[str, Any]:
        """What is told at the end: the counts, and how the answer came to be."""
        told: dict[str, Any] = {}
        for heard in self.heard:
            told |= heard.event.get("response") or heard.event
        return told

    def before(self, moment: float, what: str) -> str:
        """What was said until then."""
        return "".join(heard.shows.get(what, "") for heard in self.heard if heard.at < moment)

    def first_after(self, moment: float) -> float:
        """Seconds until something was shown, or told where nothing was left to show."""
        later = [heard for heard in self.heard if heard.at >= moment]
        return next((heard.at for heard in later if heard.shows), later[0].at) - moment


Shows = Callable[[Mapping[str, Any]], dict[str, str]]


def shown_by_chat(event: Mapping[str, Any]) -> dict[str, str]:
    shows: dict[str, str] = {}
    for choice in event["choices"]:
        delta = choice["delta"]
        shows["text"] = delta.get("content") or ""
        shows["thoughts"] = delta.get("reasoning") or ""
        shows["arguments"] = "".join(c["function"].get("arguments") or "" for c in delta.get("tool_calls") or ())
    return {what: said for what, said in shows.items() if said}


DELTAS = {
    "response.output_text.delta": "text",
    "response.reasoning_text.delta": "thoughts",
    "response.function_call_arguments.delta": "arguments",
}


def shown_by_responses(event: Mapping[str, Any]) -> dict[str, str]:
    what = DELTAS.get(event["type"])
    return {} if what is None else {what: event["delta"]}


@dataclass(frozen=True)
class Asked:
    """A request for a stream, on one of the surfaces."""

    path: str
    body: Mapping[str, Any]
    shows: Shows

    async def listen(self, gateway: Gateway, story: Story) -> None:
        """To the end."""
        url = gateway.url + self.path
        async with asyncio.timeout(120), gateway.session.post(url, json=self.body) as response:
            story.status = response.status
            await self._read(response, story)

    async def _read(self, response: aiohttp.ClientResponse, story: Story) -> None:
        async for line in response.content:
            if line == b"data: [DONE]\n":
                story.done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                story.heard.append(Heard(time.monotonic(), event, self.shows(event)))

    async def answered(self, gateway: Gateway) -> Story:
        story = Story()
        await self.listen(gateway, story)
        assert (story.status, story.done) == (200, True), story.heard
        return story

    async def struck(
        self, gateway: Gateway, engine: Struck, here: Callable[[Story], bool], blow: Callable[[], None] | None
    ) -> tuple[Story, float]:
        """The whole answer, and the moment of the blow that its engine got where the story was `here`; without one it
        is left frozen. Raises TooLate."""
        story = Story()
        listening = asyncio.create_task(self.listen(gateway, story))
        try:
            while not any(heard.shows for heard in story.heard):
                _goes_on(listening, story)
                await asyncio.sleep(0)
            engine.stop()
            await asyncio.sleep(ALL_READ_S)
            while not here(story):
                _goes_on(listening, story)
                engine.go_on()
                await _heard_more(story, engine.runs_s)
                engine.stop()
                await asyncio.sleep(RESTS_S)
            await asyncio.sleep(ALL_READ_S)
            _goes_on(listening, story)
            moment = time.monotonic()
            if blow is not None:
                blow()
            await listening
        finally:
            listening.cancel()
        assert (story.status, story.done) == (200, True), story.heard
        return story, moment


async def _heard_more(story: Story, within_s: float) -> None:
    known, until = len(story.heard), time.monotonic() + within_s
    while len(story.heard) == known and time.monotonic() < until:
        await asyncio.sleep(0)


def _goes_on(listening: asyncio.Task[None], story: Story) -> None:
    if listening.done():
        listening.result()
        raise TooLate(story.last.get("unisono"))
