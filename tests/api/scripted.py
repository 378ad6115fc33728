"""Generation service that plays scripts, for tests of API surfaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from unisono.core.conversation import Phase
from unisono.core.events import (
    Closed,
    Delta,
    Event,
    Finished,
    HostedCall,
    Listed,
    Listing,
    Opened,
    Ran,
    Reasoning,
    Text,
    ToolCall,
)
from unisono.core.generation import FinishReason, Usage
from unisono.core.tool_host import HostedTool, ToolOutcome
from unisono.engine.request import GenerationReport, GenerationRequest

# A batch of events, a pause in seconds, an exception to raise, or a barrier that several streams wait for.
Step = list[Event] | float | BaseException | asyncio.Barrier

USAGE = Usage(prompt_tokens=11, completion_tokens=7, reasoning_tokens=3, cached_tokens=5)


class ScriptedRun:
    def __init__(self, steps: Sequence[Step], report: GenerationReport) -> None:
        self.report = report
        self.closed = 0
        self.cancelled = False
        self.taken = 0
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        try:
            for step in self._steps:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, list):
                    self.taken += 1
                    yield step
                elif isinstance(step, asyncio.Barrier):
                    await step.wait()
                else:
                    await asyncio.sleep(step)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled = True
            raise

    async def aclose(self) -> None:
        self.closed += 1


class ScriptedTurns:
    """Generation service that answers request k with script k.

    The last script answers all further requests.
    """

    def __init__(self, *scripts: Sequence[Step], report: Callable[[], GenerationReport] = GenerationReport) -> None:
        self.turns: list[GenerationRequest] = []
        self.runs: list[ScriptedRun] = []
        self._scripts = scripts
        self._report = report

    def start(self, turn: GenerationRequest) -> ScriptedRun:
        script = self._scripts[min(len(self.runs), len(self._scripts) - 1)]
        self.turns.append(turn)
        self.runs.append(ScriptedRun(script, self._report()))
        return self.runs[-1]


def reasoning(index: int, *pieces: str) -> list[Event]:
    return _item_events(Reasoning(index), pieces)


def final(index: int, *pieces: str) -> list[Event]:
    return _item_events(Text(index, Phase.FINAL), pieces)


def unfit(index: int, *pieces: str) -> list[Event]:
    """Return a final message that does not satisfy the required form."""
    return _item_events(Text(index, Phase.FINAL, unfit=True), pieces)


def commentary(index: int, *pieces: str) -> list[Event]:
    return _item_events(Text(index, Phase.COMMENTARY), pieces)


def call(index: int, call_index: int, name: str, *pieces: str, complete: bool = True) -> list[Event]:
    return _item_events(ToolCall(index, call_index, f"call_{call_index}", name), pieces, complete)


def hosted(index: int, *pieces: str, said: str = "ok", error: bool = False, approval: str = "") -> list[Event]:
    """Return a call of the server tool `find` of `docs`, with its result."""
    item = HostedCall(index, f"call_h{index}", "docs__find", "docs", "find", approval=approval)
    deltas = [Delta(item, piece) for piece in pieces]
    closed = Closed(item, "".join(pieces), () if approval else (200006, index))
    return [Opened(item), *deltas, closed, Ran(item, ToolOutcome(said, error), said)]


def request(index: int, *pieces: str) -> list[Event]:
    """Return a call of the server tool `find` of `docs` that needs approval."""
    item = HostedCall(index, f"call_h{index}", "docs__find", "docs", "find", needs_approval=True)
    return [Opened(item), *(Delta(item, piece) for piece in pieces), Closed(item, "".join(pieces), (200006, index))]


def listing(index: int, *names: str, error: str | None = None) -> list[Event]:
    """Return the tool list of the server `docs`."""
    item = Listing(index, "docs")
    return [Opened(item), Listed(item, tuple(HostedTool("docs", name) for name in names), error)]


def finished(reason: FinishReason = FinishReason.STOP, *, cut_call: bool = False) -> Finished:
    return Finished(reason, USAGE, cut_call=cut_call)


def _item_events(item: Reasoning | Text | ToolCall, pieces: Sequence[str], complete: bool = True) -> list[Event]:
    deltas = [Delta(item, piece) for piece in pieces]
    return [Opened(item), *deltas, Closed(item, "".join(pieces), complete=complete)]
