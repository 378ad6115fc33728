"""The apparatus of a run: the fake backend, the load generator and the contenders, and one sample from them.

The CPU figure is what the kernel charged the contender between the moment the load began and the moment the last
answer was complete; a warm-up through the same connections comes before it.
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

from bench import material, meter
from bench.background import Ask as AskBehind
from bench.background import Told
from bench.choosing import chosen
from bench.contenders import CONTENDERS, KEY, Setting
from bench.fake_vllm import Pace
from bench.lines import answered, weighed
from bench.load import Load, Outcome
from bench.loops import Told as ToldLoops
from bench.moves import Ask as AskMoves
from bench.moves import Told as ToldMoves
from bench.paired import Paired, start_paired
from bench.pasts import Lived
from bench.processes import Cpus, Process, call, free_port
from bench.renders import Ask
from bench.sample import Sample
from bench.stored import start_redis
from bench.tasks import (
    FULL_SPEED,
    Arm,
    Behind,
    Breaking,
    Choosing,
    Launch,
    Looping,
    Moving,
    Past,
    Rendering,
    Work,
)
from bench.team import issue_key, start_monitor
from bench.tooled import Tooled, start_tooled
from unisono.harmony.encoding import load_encoding

WARM_TOKENS = 64
SETTLE_S = 0.5
"""How long after the last client left every abort has to be done, and a start be over."""


@dataclass(frozen=True, slots=True)
class Started:
    """A contender at work. `process` None is the direct connection."""

    port: int
    wire: str
    process: Process | None
    key: str = KEY
    """What its clients send."""
    monitor: int = 0
    """The port of whoever takes its spans and reads its metrics; 0 for nobody."""

    @property
    def pid(self) -> int:
        """Raises ValueError for the direct connection."""
        if self.process is None:
            raise ValueError("there is no process to look at")
        return self.process.pid


class Rig:
    def __init__(self, folder: Path, cpus: Cpus, upstream: int | None = None) -> None:
        self._folder, self._cpus, self._stack = folder, cpus, ExitStack()
        self.upstream = upstream or free_port()
        self.started: dict[str, Started] = {}
        self._stuff = folder / "material.json"
        self._makers: dict[str, Process] = {}
        self._redis: tuple[int, Process] | None = None
        self._tooled: Tooled | None = None
        self._paired: Paired | None = None
        self._seed = 0

    def __enter__(self) -> Rig:
        material.save(material.build(load_encoding()), self._stuff)
        modules = [sys.executable, "-m"]
        fake = [*modules, "bench.fake_vllm", str(self.upstream), str(self._stuff)]
        self._fake = self._stack.enter_context(Process("fake", fake, self._folder, self._cpus.others))
        self._fake.wait_ready(self.upstream, "/health")
        clients = [*modules, "bench.load", str(self._stuff)]
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
            started = Started(self.upstream, contender.wire, None)
        else:
            self._pace(FULL_SPEED)
            started, process = self._launch(name)
            self._stack.enter_context(process)
            process.wait_ready(started.port, contender.ready)
        self.started[name] = started
        if contender.tools:
            self._ask_loops(started, Looping(4, 5, 250))
            return started
        if contender.paired:
            self._broken(started, Breaking("reset", 4, 5, 250))
            return started
        self._warm(started, Work(streams=8, tokens=WARM_TOKENS, requests=20))
        return started

    def sample(self, arm: Arm) -> Sample:
        """Measure `arm` once. Raises DidNotStart."""
        match arm.work:
            case Work() as work:
                return self._loaded(self.start(arm.contender), work)
            case Launch(held):
                return self._launched(arm.contender, held)
            case Behind() as behind:
                return self._behind(self.start(arm.contender), behind)
            case Looping() as looping:
                return self._looped(self.start(arm.contender), looping)
            case Rendering() as rendering:
                return self._rendered(rendering)
            case Moving() as moving:
                return self._moved(moving)
            case Choosing() as choosing:
                return chosen(self._maker("choosing", self._cpus.tested), choosing)
            case Breaking() as breaking:
                return self._broken(self.start(arm.contender), breaking)

    def _launch(self, name: str) -> tuple[Started, Process]:
        contender = CONTENDERS[name]
        if contender.command is None:
            raise ValueError(f"{name} is no process")
        redis = self._store()[0] if contender.redis else 0
        tooled = self._tools() if contender.tools else None
        upstream, tools, second = (tooled.model, tooled.tools, 0) if tooled else (self.upstream, 0, 0)
        if contender.paired:
            upstream, second = self._pair().models
        setting = Setting(self._folder, upstream, free_port(), redis, tools, second)
        if contender.team is not None and contender.team.keyed:
            metrics = free_port()
            spans = start_monitor(self._stack, metrics, self._folder, self._cpus.others)
            setting = replace(setting, metrics=metrics, spans=spans)
        home = {"XDG_DATA_HOME": str(self._folder / "data"), "XDG_STATE_HOME": str(self._folder / "state")}
        log = f"{name}-{setting.port}"
        command, env = contender.command(setting), {**home, **contender.env}
        cpus = self._cpus.tested | self._cpus.others if contender.everywhere else self._cpus.tested
        key = issue_key(setting.config) if setting.metrics else KEY
        process = Process(log, command, self._folder, cpus, env=env)
        return Started(setting.port, contender.wire, process, key, setting.spans), process

    def _launched(self, name: str, held: Work | Behind | None) -> Sample:
        # A gateway that examines its backend first is not to wait for the pace of the arm before.
        self._pace(FULL_SPEED)
        started, process = self._launch(name)
        with process:
            took = process.wait_ready(started.port, CONTENDERS[name].ready)
            used = meter.cpu_seconds(process.pid)
            time.sleep(SETTLE_S)
            idle = meter.resident_mib(process.pid)
            sample = Sample(start_s=took, start_cpu_s=used, idle_mib=idle)
            if held is None:
                return sample
            outcome, grown = self._held(started, held) if isinstance(held, Work) else self._held_behind(started, held)
            return replace(
                sample,
                kib_per_stream=1024 * grown / held.streams,
                faults=outcome.faults,
                examples=tuple(outcome.examples),
            )

    def _held(self, started: Started, held: Work) -> tuple[Outcome, float]:
        """What came of streams, and by how many MiB their process grew."""
        # What is made once, at the first request, is no stream's.
        self._warm(started, replace(held, streams=2, requests=5))
        load = self._load(started, held)
        self._pace(held.pace)
        line, grown = weighed(self._clients, asdict(load), started.pid)
        return Outcome(**orjson.loads(line)), grown

    def _held_behind(self, started: Started, held: Behind) -> tuple[Told, float]:
        self._warm_behind(started, held)
        line, grown = weighed(self._crowd(), self._ask_behind(started, held), started.pid)
        return Told(**orjson.loads(line)), grown

    def _rendered(self, rendering: Rendering) -> Sample:
        renders = self._maker("renders", self._cpus.tested, str(self._stuff))
        self._seed += 1
        ask = Ask(rendering.how, rendering.words, rendering.times, self._seed)
        return Sample(render_ms=float(answered(renders, asdict(ask))))

    def _moved(self, moving: Moving) -> Sample:
        moves = self._maker("moves", self._cpus.tested)
        told = ToldMoves(**orjson.loads(answered(moves, asdict(AskMoves(moving.how, moving.times)))))
        return Sample(
            generations=told.generations,
            ms_per_answer=told.ms_per_answer,
            us_per_token=told.us_per_token,
            faults=told.faults,
            examples=tuple(told.examples),
        )

    def _store(self) -> tuple[int, Process]:
        """The run's one Redis, started when it is first needed: its port and its process."""
        if self._redis is None:
            self._redis = start_redis(self._stack, self._folder, self._cpus.others)
        return self._redis

    def _crowd(self) -> Process:
        return self._maker("background", self._cpus.others, str(self._stuff))

    def _maker(self, module: str, cpus: frozenset[int], *arguments: str) -> Process:
        """A process that is asked by lines, started when it is first needed."""
        if module not in self._makers:
            command = [sys.executable, "-m", f"bench.{module}", *arguments]
            process = Process(module, command, self._folder, cpus, piped=True)
            self._makers[module] = self._stack.enter_context(process)
        return self._makers[module]

    def _tools(self) -> Tooled:
        """A model that calls tools, their server, and clients for them; started when they are first needed."""
        if self._tooled is None:
            self._tooled = start_tooled(self._stack, self._folder, self._stuff, self._cpus.others)
        return self._tooled

    def _pair(self) -> Paired:
        """Two backends that break off, and clients for them; started when they are first needed."""
        if self._paired is None:
            self._paired = start_paired(self._stack, self._folder, self._stuff, self._cpus.others)
        return self._paired

    def _broken(self, started: Started, breaking: Breaking) -> Sample:
        self._seed += 1
        return self._pair().sample(started.port, breaking, self._seed)

    def _looped(self, started: Started, looping: Looping) -> Sample:
        pids = (started.pid, *self._tools().pids)
        before = [meter.cpu_seconds(pid) for pid in pids]
        told = self._ask_loops(started, looping)
        used, *rest = (meter.cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True))
        return Sample(
            step_p50_ms=told.step_p50_ms,
            step_p99_ms=told.step_p99_ms,
            tool_p50_ms=told.tool_p50_ms,
            steps_per_s=told.steps / told.seconds,
            cpu_ms_per_step=1e3 * used / max(1, told.steps),
            busy=used / told.seconds,
            rig_busy=(sum(rest) + told.cpu_s) / told.seconds / max(1, len(self._cpus.others)),
            faults=told.faults,
            examples=tuple(told.examples),
        )

    def _ask_loops(self, started: Started, looping: Looping) -> ToldLoops:
        self._seed += 1
        tooled = self._tools()
        ask = asdict(tooled.ask(started.port, looping, self._seed))
        return ToldLoops(**orjson.loads(answered(tooled.clients, ask)))

    def _warm_behind(self, started: Started, behind: Behind) -> None:
        """A few at full speed; then the backend is at the pace of `behind`."""
        self._pace(FULL_SPEED)
        few = replace(behind, streams=20, watched=min(behind.watched, 10), tokens=WARM_TOKENS, spread_s=0.0)
        answered(self._crowd(), self._ask_behind(started, few))
        self._pace(behind.pace)

    def _behind(self, started: Started, behind: Behind) -> Sample:
        self._warm_behind(started, behind)
        pids = (started.pid, self._store()[1].pid, self._fake.pid)
        before = [meter.cpu_seconds(pid) for pid in pids]
        told = Told(**orjson.loads(answered(self._crowd(), self._ask_behind(started, behind))))
        used, stored, faked = (meter.cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True))
        tokens = behind.streams * behind.tokens
        return Sample(
            cpu_us_per_token=1e6 * used / tokens,
            tokens_per_s=tokens / told.seconds,
            busy=used / told.seconds,
            store_busy=stored / told.seconds,
            rig_busy=(faked + stored + told.cpu_s) / told.seconds / max(1, len(self._cpus.others)),
            logged_p50_s=told.logged_p50_s,
            logged_max_s=told.logged_max_s,
            watched_p50_s=told.watched_p50_s,
            watched_max_s=told.watched_max_s,
            faults=told.faults,
            examples=tuple(told.examples),
        )

    def _ask_behind(self, started: Started, behind: Behind) -> dict[str, object]:
        self._seed += 1
        ask = AskBehind(
            port=started.port,
            upstream=self.upstream,
            store=self._store()[0],
            key=KEY,
            streams=behind.streams,
            watched=behind.watched,
            tokens=behind.tokens,
            spread_s=behind.spread_s,
            seed=self._seed,
        )
        return asdict(ask)

    def _loaded(self, started: Started, work: Work) -> Sample:
        self._warm(started, work)
        load = self._load(started, work)
        self._pace(work.pace)
        abandoned = self._abandoned()
        before, fake = self._cpu(started), meter.cpu_seconds(self._fake.pid)
        outcome = self._run(load)
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
        past = None if work.past is None else replace(work.past, count=1)
        few = replace(work, tokens=tokens, requests=min(work.requests, 20), past=past)
        self._run(self._load(started, replace(few, cold=None, spread_s=0.0, leave_s=0.0)))

    def _run(self, load: Load) -> Outcome:
        return Outcome(**orjson.loads(answered(self._clients, asdict(load))))

    def _pasts(self, started: Started, past: Past | None, tokens: int) -> tuple[Mapping[str, str], ...]:
        if past is None:
            return ()
        self._seed += 1
        lived = Lived(past.how, started.port, past.count, past.turns, tokens, self._seed, started.key)
        return tuple(orjson.loads(answered(self._clients, asdict(lived))))

    def _load(self, started: Started, work: Work) -> Load:
        """What the clients are told, with the past it needs made at full speed."""
        if work.past is not None:
            self._pace(FULL_SPEED)
        pasts = self._pasts(started, work.past, work.tokens)
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
            leave_s=work.leave_s,
            cold=work.cold,
            pasts=pasts,
            key=started.key,
        )

    def _pace(self, pace: Pace) -> None:
        call(self.upstream, "POST", "/bench/pace", orjson.dumps(asdict(pace)))

    def _abandoned(self) -> int:
        return int(orjson.loads(call(self.upstream, "GET", "/bench/served")[1])["abandoned"])

    @staticmethod
    def _cpu(started: Started) -> float:
        return 0.0 if started.process is None else meter.cpu_seconds(started.process.pid)
