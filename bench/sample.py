"""Result of one measurement: one field per column of the tables, and the faults."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of one arm; values that its kind of work does not measure are NaN.

    `rig_busy` is the share of their CPUs that fake backend and load generator used. At 1 they were the limit, not the
    contender. `unaborted` is the number of disconnects that did not reach the backend.
    """

    cpu_us_per_token: float = nan
    cpu_ms_per_request: float = nan
    tokens_per_s: float = nan
    ttft_p50_ms: float = nan
    ttft_p99_ms: float = nan
    gap_p50_ms: float = nan
    gap_p99_ms: float = nan
    gap_max_ms: float = nan
    busy: float = nan
    rig_busy: float = nan
    unaborted: float = nan
    start_s: float = nan
    start_cpu_s: float = nan
    idle_mib: float = nan
    kib_per_stream: float = nan
    render_ms: float = nan
    store_busy: float = nan
    logged_p50_s: float = nan
    logged_max_s: float = nan
    watched_p50_s: float = nan
    watched_max_s: float = nan
    step_p50_ms: float = nan
    step_p99_ms: float = nan
    tool_p50_ms: float = nan
    steps_per_s: float = nan
    cpu_ms_per_step: float = nan
    generations: float = nan
    ms_per_answer: float = nan
    us_per_token: float = nan
    choose_us: float = nan
    added_p50_ms: float = nan
    added_p99_ms: float = nan
    faults: int = 0
    examples: tuple[str, ...] = ()


# Headers of the columns, by field of a sample. `busy` is the share of its CPU that the tested process used.
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
    "store_busy": "CPU of Redis busy",
    "logged_p50_s": "logged after, p50 s",
    "logged_max_s": "logged after, max s",
    "watched_p50_s": "at the client after, p50 s",
    "watched_max_s": "at the client after, max s",
    "step_p50_ms": "step p50 ms",
    "step_p99_ms": "step p99 ms",
    "tool_p50_ms": "tool p50 ms",
    "steps_per_s": "steps/s",
    "cpu_ms_per_step": "CPU ms/step",
    "generations": "generations/answer",
    "ms_per_answer": "ms/answer",
    "us_per_token": "µs/token",
    "choose_us": "CPU µs to choose",
    "added_p50_ms": "added p50 ms",
    "added_p99_ms": "added p99 ms",
}
