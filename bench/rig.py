"""Rig of a run: fake backend, load generator and contenders; measures one sample at a time.

The CPU time of a contender is counted by the kernel from the start of the load to the end of the last answer. A warm-up
over the same connections precedes it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

import orjson

from bench import meter, prose
from bench.background_load import BackgroundJob, BackgroundResult
from bench.contenders import CONTENDERS, KEY, ContenderSetup
from bench.failover_rig import FailoverRig, start_failover_rig
from bench.fake_vllm import Pace
from bench.intervention_timing import InterventionJob, InterventionResult
from bench.load import Load, LoadResult
from bench.prior_turns import PriorTurnsJob
from bench.processes import Cpus, Process, free_port, http_call
from bench.redis_server import start_redis
from bench.render_timing import RenderJob
from bench.sample import Sample
from bench.selection_timing import measure_selection
from bench.tasks import (
    FULL_SPEED,
    Arm,
    BackgroundWork,
    FailoverWork,
    InterventionWork,
    Launch,
    PriorTurns,
    RenderWork,
    SelectionWork,
    ToolLoopWork,
    Work,
)
from bench.team import issue_key, start_monitor
from bench.tool_loop_load import ToolLoopResult
from bench.tool_loop_rig import ToolLoopRig, start_tool_loop_rig
from bench.worker_client import ask_and_measure_growth, ask_worker
from unisono.harmony.encoding import load_encoding

WARM_TOKENS = 64
# A contender is idle below this share of a CPU. It is waited for before each measurement, for at most this time.
IDLE_SHARE = 0.1
IDLE_WITHIN_S = 10.0
IDLE_CHECK_S = 0.2
# Time for aborts to finish after the last disconnect, and for a start to settle.
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class RunningContender:
    """A started contender. `process` is None for the direct connection."""

    port: int
    wire: str
    process: Process | None
    # Key that its clients send.
    key: str = KEY
    # Port of the process that receives its spans and reads its metrics; 0 without one.
    monitor: int = 0

    @property
    def pid(self) -> int:
        """Process id. Raises ValueError for the direct connection."""
        if self.process is None:
            raise ValueError("the direct connection has no process")
        return self.process.pid


class Rig:
    def __init__(self, folder: Path, cpus: Cpus, upstream: int | None = None) -> None:
        self._folder, self._cpus, self._stack = folder, cpus, ExitStack()
        self.upstream = upstream or free_port()
        self.started: dict[str, RunningContender] = {}
        self._corpus = folder / "material.json"
        self._workers: dict[str, Process] = {}
        self._redis: tuple[int, Process] | None = None
        self._tool_loop_rig: ToolLoopRig | None = None
        self._failover_rig: FailoverRig | None = None
        self._seed = 0

    def __enter__(self) -> Rig:
        prose.save(prose.build(load_encoding()), self._corpus)
        modules = [sys.executable, "-m"]
        backend_s = [*modules, "bench.fake_vllm", str(self.upstream), str(self._corpus)]
        self._fake = self._stack.enter_context(Process("fake", backend_s, self._folder, self._cpus.others))
        self._fake.wait_ready(self.upstream, "/health")
        clients = [*modules, "bench.load", str(self._corpus)]
        self._clients = self._stack.enter_context(Process("load", clients, self._folder, self._cpus.others, piped=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, name: str) -> RunningContender:
        """Start a contender if it does not run yet. Raises StartError."""
        if name in self.started:
            return self.started[name]
        contender = CONTENDERS[name]
        if contender.command is None:
            started = RunningContender(self.upstream, contender.wire, None)
        else:
            self._pace(FULL_SPEED)
            started, process = self._prepare(name)
            self._stack.enter_context(process)
            process.wait_ready(started.port, contender.ready)
        self.started[name] = started
        if contender.has_tools:
            self._run_tool_loops(started, ToolLoopWork(4, 5, 250))
            return started
        if contender.has_backend_pair:
            self._measure_failover(started, FailoverWork("reset", 4, 5, 250))
            return started
        self._warm(started, Work(streams=8, tokens=WARM_TOKENS, requests=20))
        return started

    def sample(self, arm: Arm) -> Sample:
        """Measure `arm` once. Raises StartError."""
        match arm.work:
            case Work() as work:
                return self._measure_load(self.start(arm.contender), work)
            case Launch(memory_load):
                return self._measure_start(arm.contender, memory_load)
            case BackgroundWork() as work:
                return self._measure_background(self.start(arm.contender), work)
            case ToolLoopWork() as work:
                return self._measure_tool_loops(self.start(arm.contender), work)
            case RenderWork() as work:
                return self._measure_render(work)
            case InterventionWork() as work:
                return self._measure_interventions(work)
            case SelectionWork() as work:
                return measure_selection(self._worker("selection_timing", self._cpus.tested), work)
            case FailoverWork() as work:
                return self._measure_failover(self.start(arm.contender), work)

    def _prepare(self, name: str) -> tuple[RunningContender, Process]:
        contender = CONTENDERS[name]
        if contender.command is None:
            raise ValueError(f"contender {name} has no command: it is the direct connection")
        redis = self._store()[0] if contender.has_redis else 0
        tool_loops = self._tool_loops() if contender.has_tools else None
        upstream, tools, second = (tool_loops.model, tool_loops.tools, 0) if tool_loops else (self.upstream, 0, 0)
        if contender.has_backend_pair:
            upstream, second = self._failover_backends().backend_ports
        setup = ContenderSetup(self._folder, upstream, free_port(), redis, tools, second)
        if contender.team is not None and contender.team.has_key:
            metrics = free_port()
            spans = start_monitor(self._stack, metrics, self._folder, self._cpus.others)
            setup = replace(setup, metrics=metrics, spans=spans)
        folders = {"XDG_DATA_HOME": str(self._folder / "data"), "XDG_STATE_HOME": str(self._folder / "state")}
        log = f"{name}-{setup.port}"
        command, env = contender.command(setup), {**folders, **contender.env}
        cpus = self._cpus.tested | self._cpus.others if contender.has_all_cpus else self._cpus.tested
        key = issue_key(setup.config) if setup.metrics else KEY
        process = Process(log, command, self._folder, cpus, env=env)
        return RunningContender(setup.port, contender.wire, process, key, setup.spans), process

    def _measure_start(self, name: str, memory_load: Work | BackgroundWork | None) -> Sample:
        # The gateway probes its backend at the start, and must not wait for the pace of the previous arm.
        self._pace(FULL_SPEED)
        started, process = self._prepare(name)
        with process:
            start_s = process.wait_ready(started.port, CONTENDERS[name].ready)
            used_s = meter.cpu_seconds(process.pid)
            time.sleep(SETTLE_S)
            idle = meter.resident_mib(process.pid)
            sample = Sample(start_s=start_s, start_cpu_s=used_s, idle_mib=idle)
            if memory_load is None:
                return sample
            result, grown = (
                self._measure_memory(started, memory_load)
                if isinstance(memory_load, Work)
                else self._measure_background_memory(started, memory_load)
            )
            return replace(
                sample,
                kib_per_stream=1024 * grown / memory_load.streams,
                faults=result.faults,
                examples=tuple(result.examples),
            )

    def _measure_memory(self, started: RunningContender, memory_load: Work) -> tuple[LoadResult, float]:
        """Run a load and return its result and the memory growth of the contender in MiB."""
        # Memory that the first request allocates once does not belong to a stream.
        self._warm(started, replace(memory_load, streams=2, requests=5))
        load = self._load(started, memory_load)
        self._pace(memory_load.pace)
        line, grown = ask_and_measure_growth(self._clients, asdict(load), started.pid)
        return LoadResult(**orjson.loads(line)), grown

    def _measure_background_memory(
        self, started: RunningContender, memory_load: BackgroundWork
    ) -> tuple[BackgroundResult, float]:
        self._warm_background(started, memory_load)
        line, grown = ask_and_measure_growth(
            self._background_clients(), self._background_job(started, memory_load), started.pid
        )
        return BackgroundResult(**orjson.loads(line)), grown

    def _measure_render(self, work: RenderWork) -> Sample:
        worker = self._worker("render_timing", self._cpus.tested, str(self._corpus))
        self._seed += 1
        job = RenderJob(work.variant, work.words, work.times, self._seed)
        return Sample(render_ms=float(ask_worker(worker, asdict(job))))

    def _measure_interventions(self, work: InterventionWork) -> Sample:
        worker = self._worker("intervention_timing", self._cpus.tested)
        result = InterventionResult(
            **orjson.loads(ask_worker(worker, asdict(InterventionJob(work.variant, work.times))))
        )
        return Sample(
            generations=result.generations,
            ms_per_answer=result.ms_per_answer,
            us_per_token=result.us_per_token,
            faults=result.faults,
            examples=tuple(result.examples),
        )

    def _store(self) -> tuple[int, Process]:
        """Return port and process of the run's Redis; the first call starts it."""
        if self._redis is None:
            self._redis = start_redis(self._stack, self._folder, self._cpus.others)
        return self._redis

    def _background_clients(self) -> Process:
        return self._worker("background_load", self._cpus.others, str(self._corpus))

    def _worker(self, module: str, cpus: frozenset[int], *arguments: str) -> Process:
        """Return the worker process of a module; the first call starts it."""
        if module not in self._workers:
            command = [sys.executable, "-m", f"bench.{module}", *arguments]
            process = Process(module, command, self._folder, cpus, piped=True)
            self._workers[module] = self._stack.enter_context(process)
        return self._workers[module]

    def _tool_loops(self) -> ToolLoopRig:
        """Return tool-calling backend, tool server and clients; the first call starts them."""
        if self._tool_loop_rig is None:
            self._tool_loop_rig = start_tool_loop_rig(self._stack, self._folder, self._corpus, self._cpus.others)
        return self._tool_loop_rig

    def _failover_backends(self) -> FailoverRig:
        """Return the two breaking backends and their clients; the first call starts them."""
        if self._failover_rig is None:
            self._failover_rig = start_failover_rig(self._stack, self._folder, self._corpus, self._cpus.others)
        return self._failover_rig

    def _measure_failover(self, started: RunningContender, work: FailoverWork) -> Sample:
        self._seed += 1
        return self._failover_backends().sample(started.port, work, self._seed)

    def _measure_tool_loops(self, started: RunningContender, work: ToolLoopWork) -> Sample:
        pids = (started.pid, *self._tool_loops().pids)
        before = [meter.cpu_seconds(pid) for pid in pids]
        result = self._run_tool_loops(started, work)
        used_s, *rest = (meter.cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True))
        return Sample(
            step_p50_ms=result.step_p50_ms,
            step_p99_ms=result.step_p99_ms,
            tool_p50_ms=result.tool_p50_ms,
            steps_per_s=result.steps / result.seconds,
            cpu_ms_per_step=1e3 * used_s / max(1, result.steps),
            busy=used_s / result.seconds,
            rig_busy=(sum(rest) + result.cpu_s) / result.seconds / max(1, len(self._cpus.others)),
            faults=result.faults,
            examples=tuple(result.examples),
        )

    def _run_tool_loops(self, started: RunningContender, work: ToolLoopWork) -> ToolLoopResult:
        self._seed += 1
        tool_loops = self._tool_loops()
        job = asdict(tool_loops.job(started.port, work, self._seed))
        return ToolLoopResult(**orjson.loads(ask_worker(tool_loops.clients, job)))

    def _warm_background(self, started: RunningContender, work: BackgroundWork) -> None:
        """Run a few responses at full speed, then set the pace of `work`."""
        self._pace(FULL_SPEED)
        warm_up = replace(work, streams=20, watched=min(work.watched, 10), tokens=WARM_TOKENS, spread_s=0.0)
        ask_worker(self._background_clients(), self._background_job(started, warm_up))
        self._pace(work.pace)

    def _measure_background(self, started: RunningContender, work: BackgroundWork) -> Sample:
        self._warm_background(started, work)
        pids = (started.pid, self._store()[1].pid, self._fake.pid)
        before = [meter.cpu_seconds(pid) for pid in pids]
        result = BackgroundResult(
            **orjson.loads(ask_worker(self._background_clients(), self._background_job(started, work)))
        )
        used_s, store_s, backend_s = (meter.cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True))
        tokens = work.streams * work.tokens
        return Sample(
            cpu_us_per_token=1e6 * used_s / tokens,
            tokens_per_s=tokens / result.seconds,
            busy=used_s / result.seconds,
            store_busy=store_s / result.seconds,
            rig_busy=(backend_s + store_s + result.cpu_s) / result.seconds / max(1, len(self._cpus.others)),
            logged_p50_s=result.logged_p50_s,
            logged_max_s=result.logged_max_s,
            watched_p50_s=result.watched_p50_s,
            watched_max_s=result.watched_max_s,
            faults=result.faults,
            examples=tuple(result.examples),
        )

    def _background_job(self, started: RunningContender, work: BackgroundWork) -> dict[str, object]:
        self._seed += 1
        job = BackgroundJob(
            port=started.port,
            upstream=self.upstream,
            store=self._store()[0],
            key=KEY,
            streams=work.streams,
            watched=work.watched,
            tokens=work.tokens,
            spread_s=work.spread_s,
            seed=self._seed,
        )
        return asdict(job)

    def _wait_until_idle(self) -> None:
        """Wait until no contender works on earlier requests, such as scores of their answers."""
        deadline_s = time.monotonic() + IDLE_WITHIN_S
        contenders = [contender for contender in self.started.values() if contender.process is not None]
        while time.monotonic() < deadline_s:
            before_s = sum(map(self._cpu_seconds, contenders))
            time.sleep(IDLE_CHECK_S)
            if sum(map(self._cpu_seconds, contenders)) - before_s < IDLE_SHARE * IDLE_CHECK_S:
                return

    def _measure_load(self, started: RunningContender, work: Work) -> Sample:
        self._wait_until_idle()
        self._warm(started, work)
        load = self._load(started, work)
        self._pace(work.pace)
        abandoned = self._abandoned()
        before, backend_s = self._cpu_seconds(started), meter.cpu_seconds(self._fake.pid)
        result = self._run(load)
        # Include the CPU time for closing the last answer.
        time.sleep(SETTLE_S if result.disconnected else 0.05)
        used_s, backend_s = self._cpu_seconds(started) - before, meter.cpu_seconds(self._fake.pid) - backend_s
        return Sample(
            cpu_us_per_token=1e6 * used_s / max(1, result.tokens),
            cpu_ms_per_request=1e3 * used_s / max(1, result.requests),
            tokens_per_s=result.tokens / result.seconds,
            ttft_p50_ms=result.ttft_p50_ms,
            ttft_p99_ms=result.ttft_p99_ms,
            gap_p50_ms=result.gap_p50_ms,
            gap_p99_ms=result.gap_p99_ms,
            gap_max_ms=result.gap_max_ms,
            busy=used_s / result.seconds,
            rig_busy=(backend_s + result.cpu_s) / result.seconds / max(1, len(self._cpus.others)),
            unaborted=result.disconnected - (self._abandoned() - abandoned),
            faults=result.faults,
            examples=tuple(result.examples),
        )

    def resident_mib(self, name: str) -> float:
        process = self.started[name].process
        return 0.0 if process is None else meter.resident_mib(process.pid)

    def _warm(self, started: RunningContender, work: Work) -> None:
        self._pace(FULL_SPEED)
        tokens = min(work.tokens, WARM_TOKENS)
        prior = None if work.prior is None else replace(work.prior, count=1)
        warm_up = replace(work, tokens=tokens, requests=min(work.requests, 20), prior=prior)
        self._run(self._load(started, replace(warm_up, cold=None, spread_s=0.0, disconnect_after_s=0.0)))

    def _run(self, load: Load) -> LoadResult:
        return LoadResult(**orjson.loads(ask_worker(self._clients, asdict(load))))

    def _create_prior_turns(
        self, started: RunningContender, prior: PriorTurns | None, tokens: int
    ) -> tuple[Mapping[str, str], ...]:
        if prior is None:
            return ()
        self._seed += 1
        job = PriorTurnsJob(prior.variant, started.port, prior.count, prior.turns, tokens, self._seed, started.key)
        return tuple(orjson.loads(ask_worker(self._clients, asdict(job))))

    def _load(self, started: RunningContender, work: Work) -> Load:
        """Return the load for the clients; prior turns are created at full speed."""
        if work.prior is not None:
            self._pace(FULL_SPEED)
        priors = self._create_prior_turns(started, work.prior, work.tokens)
        self._seed += 1
        return Load(
            wire=work.wire or started.wire,
            port=started.port,
            streams=work.streams,
            tokens=work.tokens,
            requests=work.requests,
            stream=work.stream,
            spread_s=work.spread_s,
            seed=self._seed,
            history=work.history,
            fresh=work.fresh,
            disconnect_after_s=work.disconnect_after_s,
            cold=work.cold,
            priors=priors,
            key=started.key,
        )

    def _pace(self, pace: Pace) -> None:
        http_call(self.upstream, "POST", "/bench/pace", orjson.dumps(asdict(pace)))

    def _abandoned(self) -> int:
        return int(orjson.loads(http_call(self.upstream, "GET", "/bench/served")[1])["abandoned"])

    @staticmethod
    def _cpu_seconds(started: RunningContender) -> float:
        return 0.0 if started.process is None else meter.cpu_seconds(started.process.pid)
