"""What one measurement says, whatever was measured: a field for each column a table can show, and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of one arm; NaN for what its kind of work does not measure. `rig_busy` is the share of their CPU
    the fake and the load generator used: at 1 they were the limit, not the contender. `unaborted` counts the clients
    that left without the backend being told."""

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
    faults: int = 0
    examples: tuple[str, ...] = ()
