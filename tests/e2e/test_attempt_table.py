"""Every kind of hang on every API surface: the client's answer, and its time.

`EXPECTED` is the complete table. No hang outlasts the total time. An idle deployment takes over from one that hangs,
and an only deployment is retried. All cells of a surface run concurrently, each with its own model. Option `-s` prints
the measured times.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import pytest

from tests.e2e import hanging
from tests.e2e.gateway import Answer, Gateway, gateway
from tests.e2e.hanging import Hang, Hanging
from tests.e2e.playing import ENCODING, Play
from tests.e2e.surfaces import SURFACES
from tests.fakes import FakeVllm, WireServer
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript
from unisono.routing.deployment import LiveDeployment

TOTAL_S = 6.0
PARAMS: dict[str, Any] = {"timeout": TOTAL_S, "stream_timeout": 2.0}
LIMITS: dict[str, Any] = {
    "first_token_timeout_s": 2.0,
    "min_first_token_timeout_s": 0.4,
    "min_silence_timeout_s": 0.4,
}
SETTINGS: dict[str, Any] = {"router_settings": {"num_retries": 2}, "unisono": {"raw_completions": True}}

# Outcomes, each with its earliest and latest second:
#   answer   status 200, the whole text, a normal end
#   timeout  status 504, an error body in the format of the API
#   broken   status 200, the beginning of the text, then an error event in the format of the API
# Deployments:
#   two      the first one always hangs, the second one is healthy
#   once     only one, which hangs once
#   always   only one, which always hangs
# The lower bounds are the time limits of an attempt: 3 * 0.4 s if another deployment can take over from a cold one, 2 s
# (the configured limit) if none can, and 0.4 s and 3 * 0.4 s with learned limits. A pause of at least 0.375 s comes
# before a retry of the same deployment. The upper bounds leave time for a busy machine.
# Pass-through: an answer without streaming may use the total time; a stream that the client has seen cannot continue.
EXPECTED = """
hang    surface       way     two              two, learned     once             once, learned    always           always, learned
before  gpt-oss       stream  answer 1.1-5.0   answer 0.35-5.0  answer 2.3-5.8   answer 1.5-5.8   timeout 4.4-8.0  timeout 4.4-8.0
before  gpt-oss       whole   answer 1.1-5.0   answer 0.35-5.0  answer 2.3-5.8   answer 1.5-5.8   timeout 4.4-8.0  timeout 4.4-8.0
amid    gpt-oss       stream  answer 1.1-5.0   answer 0.35-5.0  answer 2.3-5.8   answer 1.5-5.8   broken 4.4-8.0   broken 4.4-8.0
amid    gpt-oss       whole   answer 1.1-5.0   answer 0.35-5.0  answer 2.3-5.8   answer 1.5-5.8   timeout 4.4-8.0  timeout 4.4-8.0
before  pass-through  stream  answer 1.1-5.0   answer 0.35-5.0  answer 2.3-5.8   answer 1.5-5.8   timeout 4.4-8.0  timeout 4.4-8.0
before  pass-through  whole   timeout 5.9-8.0  timeout 5.9-8.0  timeout 5.9-8.0  timeout 5.9-8.0  timeout 5.9-8.0  timeout 5.9-8.0
amid    pass-through  stream  broken 1.9-5.8   broken 1.9-5.8   broken 1.9-5.8   broken 1.9-5.8   broken 1.9-5.8   broken 1.9-5.8
"""  # noqa: E501 - a table

TEXT = "One, two, three, four, five, six."
OPENING = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
# within the visible answer
TOKENS_BEFORE_HANG = len(ENCODING.encode_marked(OPENING)) + 4
CHUNKS_BEFORE_HANG = 5

# How the first attempt hangs, and how later ones hang.
BEFORE: dict[str, tuple[Hang, Hang]] = {
    "silent": (hanging.silent, hanging.silent),
    "headers only": (hanging.headers_only, hanging.headers_only),
    "half an event": (hanging.half_an_event, hanging.half_an_event),
    "dripped head": (hanging.drips_its_head, hanging.drips_its_head),
    "dripped comments": (hanging.drips_comments, hanging.drips_comments),
    "dripped empty events": (hanging.drips_empty_events, hanging.drips_empty_events),
    "dripped half an event": (hanging.drips_half_an_event, hanging.drips_half_an_event),
}
AMID: dict[str, tuple[Callable[[int], Hang], Hang]] = {
    "stall in the text": (hanging.stalls_after, hanging.headers_only),
    "comments in the text": (hanging.drips_comments_after, hanging.drips_comments),
    "empty events in the text": (hanging.drips_empty_events_after, hanging.drips_empty_events),
}


CONCURRENT_SURFACES = (
    ("chat",),
    ("responses",),
    ("messages",),
    ("completions",),
    ("pass-through", "pass-through responses"),
)
COLUMNS = tuple(product(("two", "once", "always"), (False, True)))


@dataclass(frozen=True)
class Cell:
    hang: str
    surface: str
    stream: bool
    deployments: str
    learned: bool

    @property
    def model(self) -> str:
        words = (*self.row, self.deployments, "learned" if self.learned else "cold")
        return "-".join(words).replace(" ", "-")

    @property
    def row(self) -> tuple[str, str, str]:
        return self.hang, self.surface, "stream" if self.stream else "whole"

    @property
    def expected(self) -> tuple[str, float, float]:
        """The outcome, and the earliest and latest second of it."""
        when = "before" if self.hang in BEFORE else "amid"
        kind = "pass-through" if self.passes else "gpt-oss"
        key = when, kind, self.row[2]
        [row] = [cells[3:] for cells in rows() if tuple(cells[:3]) == key]
        outcome, seconds = row[COLUMNS.index((self.deployments, self.learned))].split()
        earliest, latest = seconds.split("-")
        return outcome, float(earliest), float(latest)

    @property
    def passes(self) -> bool:
        return self.surface.startswith("pass-through")


def rows() -> Iterator[list[str]]:
    for line in EXPECTED.strip().splitlines()[1:]:
        yield re.split(r" {2,}", line)


def cells_of(surface: str, *, hangs: Sequence[str] = (*BEFORE, *AMID)) -> list[Cell]:
    all_cells = (
        Cell(hang, surface, stream, *column) for hang, stream, column in product(hangs, (True, False), COLUMNS)
    )
    # A pass-through answer without streaming comes in one piece.
    return [cell for cell in all_cells if cell.hang in BEFORE or cell.stream or not cell.passes]


@dataclass
class Table:
    """All cells on one gateway, each with its own model and deployments."""

    running: Gateway
    hangs: dict[Cell, Hanging]

    async def ask(self, cell: Cell, *, stream: bool) -> Answer:
        surface = SURFACES[cell.surface]
        body = {"model": cell.model, "stream": stream, **surface.fields}
        return await self.running.post(surface.path, json.dumps(body).encode())

    async def learn(self, cell: Cell, at_once: asyncio.Semaphore) -> None:
        """Let the deployment that will hang learn its limits."""
        for _ in range(3 * cell.learned):
            async with at_once:
                assert (await self.ask(cell, stream=True)).status == 200
        live = self.deployments(cell)[0]
        assert live.times.learned(live.clock()).is_warm is cell.learned

    def deployments(self, cell: Cell) -> Sequence[LiveDeployment]:
        assert self.running.app is not None
        found: Sequence[LiveDeployment] = self.running.app.state.gateway.pool.members()[cell.model]
        return found

    async def until_examined(self) -> None:
        """Wait until every deployment was probed.

        On a busy machine, some of so many probes time out and are repeated.
        """
        assert self.running.app is not None
        async with asyncio.timeout(30):
            while any(live.known is None for cell in self.hangs for live in self.deployments(cell)):
                await self.running.app.state.gateway.pool.wait_for_probes(5)
                await asyncio.sleep(0.1)

    async def measure(self, cell: Cell) -> tuple[str, float]:
        """Return the outcome of the cell and the seconds until it came."""
        self.hangs[cell].arm(always=cell.deployments != "once")
        began = time.monotonic()
        answer = await self.ask(cell, stream=cell.stream)
        return outcome_of(cell, answer), time.monotonic() - began


def outcome_of(cell: Cell, answer: Answer) -> str:
    surface = SURFACES[cell.surface]
    if answer.status == 504:
        return "timeout" if surface.error(answer.body) == surface.fails else f"wrong error {answer.raw!r}"
    if answer.status != 200:
        return f"status {answer.status}"
    text, finish = surface.text(answer), surface.finish(answer)
    if (text, finish) == (TEXT, surface.finishes):
        return "answer"
    if not answer.events or not text or not TEXT.startswith(text):
        return f"wrong answer {str(answer.events[-1:])[-700:]}"
    breaks = surface.error(answer.events[-1]) == surface.breaks and finish in (None, "", "failed")
    return "broken" if breaks else f"wrong end {str(answer.events[-1])[-700:]}"


def server_of(cell: Cell) -> WireServer:
    if cell.passes:
        return FakeOpenAi(OpenAiScript(words=re.findall(r"\w+\W*", TEXT)))
    fake = FakeVllm()
    Play(f"{OPENING}{TEXT}<|return|>").serve("vllm", fake)
    return fake


def hanging_of(cell: Cell) -> Hanging:
    if cell.hang in BEFORE:
        return Hanging(*BEFORE[cell.hang])
    after, then = AMID[cell.hang]
    return Hanging(after(CHUNKS_BEFORE_HANG if cell.passes else TOKENS_BEFORE_HANG), then)


def entry_of(cell: Cell, server: WireServer, order: int) -> dict[str, Any]:
    model = "vllm/qwen" if cell.passes else "vllm/tiny"
    return {
        "model_name": cell.model,
        "litellm_params": {"model": model, "api_base": server.url, "order": order, **PARAMS},
        "model_info": {"harmony": not cell.passes},
        "unisono": LIMITS,
    }


@asynccontextmanager
async def table(cells: Iterable[Cell]) -> AsyncIterator[Table]:
    entries: list[dict[str, Any]] = []
    hangs = {cell: hanging_of(cell) for cell in cells}
    async with AsyncExitStack() as stack:
        for cell, hang in hangs.items():
            for order in range(2 if cell.deployments == "two" else 1):
                server = await stack.enter_async_context(server_of(cell))
                if order == 0:
                    hang.govern(server)
                entries.append(entry_of(cell, server, order))
        running = await stack.enter_async_context(gateway({"model_list": entries, **SETTINGS}))
        harness = Table(running, hangs)
        await harness.until_examined()
        yield harness


async def check(cells: Sequence[Cell]) -> None:
    async with table(cells) as harness:
        semaphore = asyncio.Semaphore(4)
        await asyncio.gather(*(harness.learn(cell, semaphore) for cell in cells))
        found = dict(zip(cells, await asyncio.gather(*map(harness.measure, cells)), strict=True))
    for (hang, surface, mode), row in groupby(found, lambda cell: cell.row):
        measured = (f"{found[cell][0]} {found[cell][1]:.1f}" for cell in row)
        print(f"{hang:25}{surface:23}{mode:7}", *(f"{each:12}" for each in measured))
    wrong = {
        cell.model: (outcome, round(took_s, 2), cell.expected)
        for cell, (outcome, took_s) in found.items()
        if outcome != cell.expected[0] or not cell.expected[1] <= took_s <= cell.expected[2]
    }
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("surfaces", CONCURRENT_SURFACES, ids=" and ".join)
async def test_every_hang_has_the_expected_outcome_and_time(surfaces: Sequence[str]) -> None:
    await check([cell for surface in surfaces for cell in cells_of(surface)])


ONE_OF_EACH = {
    "chat": "comments in the text",
    "responses": "stall in the text",
    "messages": "half an event",
    "completions": "dripped comments",
    "pass-through": "silent",
    "pass-through responses": "dripped empty events",
}


@pytest.mark.slow
async def test_one_hang_of_each_surface_has_the_expected_outcome() -> None:
    cells = (cell for surface in SURFACES for cell in cells_of(surface, hangs=[ONE_OF_EACH[surface]]))
    await check([cell for cell in cells if cell.stream])


def test_table_has_exactly_one_row_for_every_cell() -> None:
    assert all(cell.expected for surface in SURFACES for cell in cells_of(surface))
    assert all(len(row) == 3 + len(COLUMNS) for row in rows())
    assert [surface for surfaces in CONCURRENT_SURFACES for surface in surfaces] == list(SURFACES)
