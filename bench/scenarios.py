"""What is measured, as a table: who under which load, and how the result is to compare.

Aims are ratios (or differences) inside one run; a row without an aim is shown and not judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.fake_vllm import Pace
from bench.load import Cold

FULL_SPEED = Pace()
TOKEN_EVERY_20_MS = Pace(interval_us=20_000)


@dataclass(frozen=True, slots=True)
class Work:
    """A load without its address."""

    streams: int
    tokens: int
    requests: int = 1
    stream: bool = True
    spread_s: float = 0.0
    history: int = 0
    fresh: bool = False
    leave_s: float = 0.0
    cold: Cold | None = None
    pace: Pace = FULL_SPEED


@dataclass(frozen=True, slots=True)
class Launch:
    """A process of its own, from nothing to its first healthy answer and its end; meanwhile, with `held`, so many
    streams at once."""

    held: Work | None = None


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation rendered without a server: see `bench.renders`."""

    how: str
    words: int
    times: int


@dataclass(frozen=True, slots=True)
class Arm:
    """One contender under one load."""

    label: str
    contender: str
    work: Work | Launch | Rendering


@dataclass(frozen=True, slots=True)
class Verdict:
    """`column` of the arm `of` against that of the arm `against`: their ratio, or their difference, and the most it
    may be; with `at_least`, the least. `less` names an arm for each whose value is taken off first: what is compared
    then is what they add."""

    column: str
    of: str
    against: str
    difference: bool = False
    aim: float | None = None
    at_least: bool = False
    less: tuple[str, str] | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.of, self.against, *(self.less or ()))


@dataclass(frozen=True, slots=True)
class Scenario:
    title: str
    arms: tuple[Arm, ...]
    columns: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    by_default: bool = True


COLUMNS: dict[str, str] = {
    "cpu_us_per_token": "CPU µs/token",
    "cpu_ms_per_request": "CPU ms/request",
    "tokens_per_s": "tok/s",
    "ttft_p50_ms": "first token p50 ms",
    "ttft_p99_ms": "first token p99 ms",
    "gap_p50_ms": "gap p50 ms",
    "gap_p99_ms": "gap p99 ms",
    "gap_max_ms": "gap max ms",
    "busy": "CPU busy",
    "unaborted": "not aborted",
    "start_s": "seconds to the first healthy answer",
    "start_cpu_s": "CPU s until then",
    "idle_mib": "MiB idle",
    "kib_per_stream": "KiB/stream",
    "render_ms": "render CPU ms",
}
"""Columns a table can show, by the field of a sample; `busy` is the tested process's share of its CPU,
`unaborted` how many clients left without the backend being told."""


def _each(work: Work, *contenders: str) -> tuple[Arm, ...]:
    return tuple(Arm(name, name, work) for name in contenders)


def _per_chunk(tokens: int) -> Arm:
    pace = Pace(interval_us=20_000, tokens_per_chunk=tokens)
    label = f"unisono, {tokens} per chunk"
    return Arm(label, "unisono", Work(streams=24, tokens=256, spread_s=0.02, pace=pace))


def _at(streams: int) -> Arm:
    work = Work(streams=streams, tokens=512, requests=max(1, 128 // streams))
    return Arm(f"unisono, {streams} streams", "unisono", work)


PACED = Work(streams=24, tokens=256, spread_s=0.02, pace=TOKEN_EVERY_20_MS)
FEW_PACED = replace(PACED, streams=6)
"""What LiteLLM keeps up with on any CPU; at 24 streams it may be at its limit, which its share of the CPU tells."""
SHORT = Work(streams=4, tokens=256, requests=64)
LONG = Work(streams=4, tokens=16_384)
FULL = Work(streams=16, tokens=512, requests=8)
ONE_BY_ONE = Work(streams=1, tokens=16, requests=200)
WHOLE = Work(streams=8, tokens=64, requests=25, stream=False)
FIRST_TURN = Work(streams=1, tokens=16, requests=10, history=100_000, fresh=True)
NEXT_TURN = replace(FIRST_TURN, fresh=False)
COLD = Cold(words=60_000, every_s=0.25, count=28)
CANARY = Work(streams=8, tokens=400, spread_s=0.02, pace=TOKEN_EVERY_20_MS, cold=COLD)
HELD = Work(streams=512, tokens=64, spread_s=2.0, pace=Pace(interval_us=100_000))

SCENARIOS: dict[str, Scenario] = {
    "paced": Scenario(
        "one token per 20 ms and chunk, 256 tokens; 24 streams, and 6",
        (
            *_each(PACED, "relay", "aiohttp", "unisono", "litellm"),
            Arm("unisono, 6 streams", "unisono", FEW_PACED),
            Arm("litellm, 6 streams", "litellm", FEW_PACED),
        ),
        ("cpu_us_per_token", "tokens_per_s", "gap_p99_ms", "busy"),
        (
            Verdict("cpu_us_per_token", "unisono", "relay", aim=6.0),
            Verdict("cpu_us_per_token", "unisono", "aiohttp"),
            Verdict("cpu_us_per_token", "unisono", "litellm", aim=1 / 12),
            Verdict("cpu_us_per_token", "unisono, 6 streams", "litellm, 6 streams"),
        ),
    ),
    "long": Scenario(
        "a 16,384-token answer against 256 tokens, full speed, 4 streams",
        (Arm("unisono, 256", "unisono", SHORT), Arm("unisono, 16384", "unisono", LONG)),
        ("cpu_us_per_token", "tokens_per_s"),
        (Verdict("cpu_us_per_token", "unisono, 16384", "unisono, 256", aim=1.0),),
    ),
    "full": Scenario(
        "full speed, 16 streams, 512 tokens",
        (
            *_each(FULL, "direct", "relay", "aiohttp", "unisono"),
            Arm("litellm", "litellm", replace(FULL, requests=1)),
        ),
        ("tokens_per_s", "cpu_us_per_token", "busy"),
        (
            Verdict("cpu_us_per_token", "unisono", "relay"),
            Verdict("tokens_per_s", "unisono", "relay"),
            Verdict("tokens_per_s", "unisono", "litellm", aim=40.0, at_least=True),
        ),
    ),
    "ttft": Scenario(
        "time to first token, one client, 16 tokens, 200 requests in a row",
        _each(ONE_BY_ONE, "direct", "direct chat", "relay", "aiohttp", "unisono", "litellm"),
        ("ttft_p50_ms", "ttft_p99_ms", "cpu_ms_per_request"),
        (
            Verdict("ttft_p50_ms", "unisono", "direct", difference=True),
            Verdict("ttft_p50_ms", "unisono", "litellm", aim=0.12, less=("direct", "direct chat")),
        ),
    ),
    "whole": Scenario(
        "no streaming, 8 clients, 64 tokens",
        _each(WHOLE, "relay", "aiohttp", "unisono", "litellm"),
        ("cpu_ms_per_request", "ttft_p50_ms"),
        (
            Verdict("cpu_ms_per_request", "unisono", "aiohttp"),
            Verdict("cpu_ms_per_request", "unisono", "litellm", aim=0.15),
        ),
    ),
    "canary": Scenario(
        "8 paced streams while a new 60,000-token prompt arrives every 0.25 s",
        _each(CANARY, "direct", "relay", "aiohttp", "unisono"),
        ("gap_p50_ms", "gap_p99_ms", "gap_max_ms", "busy"),
        (Verdict("gap_p99_ms", "unisono", "direct", difference=True, aim=10.0),),
    ),
    "render": Scenario(
        "rendering alone: a conversation of 100,000 tokens in messages of 250",
        tuple(Arm(how, "unisono", Rendering(how, 100_000, 5)) for how in ("library", "cold", "next")),
        ("render_ms",),
        (
            Verdict("render_ms", "next", "cold", aim=0.03),
            Verdict("render_ms", "next", "library"),
            Verdict("render_ms", "cold", "library"),
        ),
    ),
    "turns": Scenario(
        "the same conversation in whole requests: seen for the first time, and continued",
        (
            Arm("aiohttp", "aiohttp", NEXT_TURN),
            Arm("unisono, first turn", "unisono", FIRST_TURN),
            Arm("unisono, next turn", "unisono", NEXT_TURN),
        ),
        ("ttft_p50_ms", "cpu_ms_per_request"),
        (
            Verdict("cpu_ms_per_request", "unisono, next turn", "unisono, first turn"),
            Verdict("ttft_p50_ms", "unisono, next turn", "aiohttp", difference=True),
        ),
    ),
    "leave": Scenario(
        "40 clients that hang up after 0.6 s of a paced answer",
        _each(Work(streams=40, tokens=1000, leave_s=0.6, pace=TOKEN_EVERY_20_MS), "direct", "relay", "unisono"),
        ("unaborted", "cpu_ms_per_request"),
        (Verdict("unaborted", "unisono", "direct", difference=True, aim=0.0),),
    ),
    "start": Scenario(
        "a process of its own, on one CPU: start, memory before the first request, and of each of 512 slow streams",
        (
            *(Arm(name, name, Launch(HELD)) for name in ("relay", "aiohttp", "unisono")),
            Arm("litellm", "litellm", Launch()),
        ),
        ("start_s", "start_cpu_s", "idle_mib", "kib_per_stream"),
        (
            Verdict("start_s", "unisono", "litellm", aim=0.12),
            Verdict("idle_mib", "unisono", "litellm", aim=0.4),
            Verdict("kib_per_stream", "unisono", "aiohttp"),
        ),
    ),
    "chunks": Scenario(
        "24 paced streams, several tokens per chunk",
        tuple(_per_chunk(tokens) for tokens in (1, 4, 10)),
        ("cpu_us_per_token",),
        (Verdict("cpu_us_per_token", "unisono, 10 per chunk", "unisono, 1 per chunk"),),
        by_default=False,
    ),
    "streams": Scenario(
        "full speed at 1, 64 and 512 streams, 512 tokens",
        tuple(_at(streams) for streams in (1, 64, 512)),
        ("tokens_per_s", "cpu_us_per_token", "ttft_p50_ms"),
        (Verdict("tokens_per_s", "unisono, 512 streams", "unisono, 64 streams"),),
        by_default=False,
    ),
}


def shortened(work: Work | Launch | Rendering) -> Work | Launch | Rendering:
    """A smaller load of the same shape, for a look instead of a measurement."""
    match work:
        case Rendering():
            return replace(work, times=1)
        case Launch(held):
            return work if held is None else Launch(_shortened(held))
        case Work():
            return _shortened(work)


def _shortened(work: Work) -> Work:
    cold = None if work.cold is None else replace(work.cold, count=max(1, work.cold.count // 3))
    tokens = max(12, work.tokens // 3) if work.pace.interval_us else work.tokens
    return replace(work, tokens=tokens, requests=max(1, work.requests // 3), cold=cold)
