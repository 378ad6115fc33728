"""The apparatus of a run: the fake backend, the load generator and the contenders, and one sample from them.

The CPU figure is what the kernel charged the contender between the moment the load began and the moment the last
answer was complete; a warm-up through the same connections comes before it.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

import orjson

from bench import material, meter
from bench.contenders import CONTENDERS, Setting
from bench.fake_vllm import Pace
from bench.load import Load, Outcome
from bench.processes import Cpus, Process, call, free_port
from bench.scenarios import FULL_SPEED, Arm, Work
from unisono.harmony.encoding import load_encoding

WARM_TOKENS = 64
SETTLE_S = 0.5
"""How long after the last client left every abort has to be done."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one arm. `rig_busy` is the share of their CPU the fake and the load generator used: at 1 they
    were the limit, not the contender. `unaborted` counts the clients that left without the backend being told."""

    cpu_us_per_token: float
    cpu_ms_per_request: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    busy: float
    rig_busy: float
    unaborted: float
    faults: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """A contender at work. `process` None is the direct connection."""

    port: int
    wire: str
    process: Process | None
    start_s: float
    idle_mib: float


class Rig:
    def __init__(self, folder: Path, cpus: Cpus, upstream: int | None = None) -> None:
        self._folder, self._cpus, self._stack = folder, cpus, ExitStack()
        self.upstream = upstream or free_port()
        self.started: dict[str, Started] = {}
        self._seed = 0

    def __enter__(self) -> Rig:
        stuff = self._folder / "material.json"
        material.save(material.build(load_encoding()), stuff)
        modules = [sys.executable, "-m"]
        fake = [*modules, "bench.fake_vllm", str(self.upstream), str(stuff)]
        self._fake = self._stack.enter_context(Process("fake", fake, self._folder, self._cpus.others))
        self._fake.wait_ready(self.upstream, "/health")
        clients = [*modules, "bench.load", str(stuff)]
        self._clients = self._stack.enter_context(Process("load", clients, self._folder, self._cpus.others, piped=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, name: str) -> Started:
        """Start a contender, once. Raises DidNotStart."""
        if name in self.started:
            return self.started[name]
        contender = CONTENDERS[name]
        if contender.command is None:
            started = Started(self.upstream, contender.wire, None, 0.0, 0.0)
        else:
            setting = Setting(self._folder, self.upstream, free_port())
            home = {"XDG_DATA_HOME": str(self._folder / "data"), "XDG_STATE_HOME": str(self._folder / "state")}
            process = Process(name, contender.command(setting), self._folder, self._cpus.tested, env=home)
            self._stack.enter_context(process)
            took = process.wait_ready(setting.port, contender.ready)
            started = Started(setting.port, contender.wire, process, took, meter.resident_mib(process.pid))
        self.started[name] = started
        self._warm(started, Work(streams=8, tokens=WARM_TOKENS, requests=20))
        return started

    def sample(self, arm: Arm) -> Sample:
        """Measure `arm` once. Raises DidNotStart."""
        started = self.start(arm.contender)
        self._warm(started, arm.work)
        self._pace(arm.work.pace)
        abandoned = self._abandoned()
        before, fake = self._cpu(started), meter.cpu_seconds(self._fake.pid)
        outcome = self._run(started, arm.work)
        # Closing what belongs to the last answer is work, too.
        time.sleep(SETTLE_S if outcome.left else 0.05)
        used, fake = self._cpu(started) - before, meter.cpu_seconds(self._fake.pid) - fake
        return Sample(
            cpu_us_per_token=1e6 * used / max(1, outcome.tokens),
            cpu_ms_per_request=1e3 * used / max(1, outcome.requests),
            tokens_per_s=outcome.tokens / outcome.seconds,
            ttft_p50_ms=outcome.ttft_p50_ms,
            ttft_p99_ms=outcome.ttft_p99_ms,
            gap_p50_ms=outcome.gap_p50_ms,
            gap_p99_ms=outcome.gap_p99_ms,
            gap_max_ms=outcome.gap_max_ms,
            busy=used / outcome.seconds,
            rig_busy=(fake + outcome.cpu_s) / outcome.seconds / max(1, len(self._cpus.others)),
            unaborted=outcome.left - (self._abandoned() - abandoned),
            faults=outcome.faults,
            examples=tuple(outcome.examples),
        )

    def resident_mib(self, name: str) -> float:
        process = self.started[name].process
        return 0.0 if process is None else meter.resident_mib(process.pid)

    def _warm(self, started: Started, work: Work) -> None:
        self._pace(FULL_SPEED)
        tokens = min(work.tokens, WARM_TOKENS)
        self._run(
            started, replace(work, tokens=tokens, requests=min(work.requests, 20), cold=None, spread_s=0.0, leave_s=0.0)
        )

    def _run(self, started: Started, work: Work) -> Outcome:
        self._seed += 1
        load = Load(
            wire=started.wire,
            port=started.port,
            streams=work.streams,
            tokens=work.tokens,
            requests=work.requests,
            stream=work.stream,
            spread_s=work.spread_s,
            seed=self._seed,
            history=work.history,
            fresh=work.fresh,
            leave_s=work.leave_s,
            cold=work.cold,
        )
        question, answer = self._clients.pipes
        question.write(orjson.dumps(asdict(load)) + b"\n")
        question.flush()
        line = answer.readline()
        if not line:
            raise RuntimeError(f"the load generator ended:\n{self._clients.log_end()}")
        return Outcome(**orjson.loads(line))

    def _pace(self, pace: Pace) -> None:
        call(self.upstream, "POST", "/bench/pace", orjson.dumps(asdict(pace)))

    def _abandoned(self) -> int:
        return int(orjson.loads(call(self.upstream, "GET", "/bench/served")[1])["abandoned"])

    @staticmethod
    def _cpu(started: Started) -> float:
        return 0.0 if started.process is None else meter.cpu_seconds(started.process.pid)
