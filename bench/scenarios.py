"""Table of scenarios: contenders, loads, and verdicts.

Aims are ratios or differences within one run. A verdict without an aim is printed and not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench import routing_scenarios
from bench.fake_vllm import Pace
from bench.load import ColdPrompts
from bench.tasks import (
    Arm,
    BackgroundWork,
    FailoverWork,
    InterventionWork,
    Launch,
    PriorTurns,
    RenderWork,
    Scenario,
    SelectionWork,
    Task,
    ToolLoopWork,
    Verdict,
    Work,
)

TOKEN_EVERY_20_MS = Pace(interval_us=20_000)


def _arms(work: Work, *contenders: str) -> tuple[Arm, ...]:
    return tuple(Arm(name, name, work) for name in contenders)


def _per_chunk(tokens: int) -> Arm:
    pace = Pace(interval_us=20_000, tokens_per_chunk=tokens)
    label = f"unisono, {tokens} per chunk"
    return Arm(label, "unisono", Work(streams=24, tokens=256, spread_s=0.02, pace=pace))


def _arm_at(streams: int) -> Arm:
    work = Work(streams=streams, tokens=512, requests=max(1, 128 // streams))
    return Arm(f"unisono, {streams} streams", "unisono", work)


def _surfaces(speed: str, work: Work) -> tuple[Arm, ...]:
    wires = {"chat": "chat", "responses": "responses", "responses not stored": "responses, not stored"}
    return tuple(Arm(f"{speed}, {name}", "unisono+redis", replace(work, wire=wire)) for name, wire in wires.items())


TEAM = {"bare": "team+bare", "off": "team+store", "keys": "team+keys", "all": "team+all"}


def _arms_by_load(loads: Mapping[str, Work], contenders: Mapping[str, str]) -> tuple[Arm, ...]:
    """Return an arm for each contender under each load, one load after the other."""
    return tuple(
        Arm(f"{load}, {name}", contender, work)
        for load, work in loads.items()
        for name, contender in contenders.items()
    )


def _overhead(column: str, load: str, aim: float | None, *, difference: bool = False) -> tuple[Verdict, ...]:
    """Return the verdicts for all features, and for keys, limits and metrics alone."""
    return (
        Verdict(column, f"{load}, all", f"{load}, off", difference=difference, aim=aim),
        Verdict(column, f"{load}, keys", f"{load}, off", difference=difference),
    )


def _intervention_arms(*names: str) -> tuple[Arm, ...]:
    return tuple(Arm(name, "unisono", InterventionWork(name, 60)) for name in names)


def _generation_verdicts(max_extra: dict[str, int]) -> tuple[Verdict, ...]:
    """Return verdicts for additional generations, and for the time next to a plain answer."""
    counts = (Verdict("generations", name, "plain", difference=True, aim=float(aim)) for name, aim in max_extra.items())
    return (*counts, *(Verdict("ms_per_answer", name, "plain", difference=True) for name in max_extra))


# Cases, and the additional generations that an answer may need.
FORCED_CALLS = {
    "named": 1, "named, guided": 1, "required, one tool": 1, "required, several": 2, "required, several, guided": 2,
}  # fmt: skip
SCHEMA_ANSWERS = {"schema": 0, "schema, guided": 1, "schema, wrong once": 1}
PACED = Work(streams=24, tokens=256, spread_s=0.02, pace=TOKEN_EVERY_20_MS)
# A load that LiteLLM can serve on any CPU. At 24 streams its CPU share shows if it is at its limit.
FEW_PACED = replace(PACED, streams=6)
SHORT = Work(streams=4, tokens=256, requests=64)
LONG = Work(streams=4, tokens=16_384)
FULL = Work(streams=16, tokens=512, requests=8)
# Long enough to measure differences of a few percent.
LONG_FULL = replace(FULL, requests=24)
ONE_BY_ONE = Work(streams=1, tokens=16, requests=200)
WHOLE = Work(streams=8, tokens=64, requests=25, stream=False)
SEQUENTIAL = Work(streams=1, tokens=64, requests=400, stream=False)
FIRST_TURN = Work(streams=1, tokens=16, requests=10, history=100_000, fresh=True)
NEXT_TURN = replace(FIRST_TURN, fresh=False)
COLD = ColdPrompts(words=100_000, every_s=0.4, count=18)
COLD_PROMPTS_LOAD = Work(streams=8, tokens=400, spread_s=0.02, pace=TOKEN_EVERY_20_MS, cold=COLD)
# All streams run concurrently for a third of the time.
MANY_STREAMS = Work(streams=1000, tokens=60, spread_s=8.0, pace=Pace(interval_us=200_000))
# A token of each stream every 250 ms. All streams run concurrently for a third of the time.
SLOW_STREAMS = Work(streams=2000, tokens=48, spread_s=8.0, pace=Pace(interval_us=250_000))
# Continued after ten chains or conversations of fifty turns. The fourth request on a conversation finds three turns
# more.
CONTINUED = Work(streams=1, tokens=64, requests=40, wire="responses")
# All responses run concurrently for half of the time. Fifty start per second; start and end cost as much as forty
# tokens.
BACKGROUND = BackgroundWork(streams=500, watched=100, tokens=200, spread_s=10.0, pace=Pace(interval_us=100_000))
BACKGROUND_MEMORY = replace(BACKGROUND, streams=512, watched=0, tokens=100, spread_s=8.0)
STREAM_MEMORY = Work(streams=512, tokens=64, spread_s=2.0, pace=Pace(interval_us=100_000))

SCENARIOS: dict[str, Scenario] = {
    "paced": Scenario(
        "one token per 20 ms and chunk, 256 tokens; 24 streams, and 6",
        (
            *_arms(PACED, "relay", "aiohttp", "smg", "floor", "unisono", "litellm"),
            Arm("unisono, 6 streams", "unisono", FEW_PACED),
            Arm("litellm, 6 streams", "litellm", FEW_PACED),
        ),
        ("cpu_us_per_token", "tokens_per_s", "gap_p99_ms", "busy"),
        (
            Verdict("cpu_us_per_token", "unisono", "relay", aim=6.0),
            Verdict("cpu_us_per_token", "unisono", "aiohttp", aim=1.6),
            Verdict("cpu_us_per_token", "unisono", "smg", aim=2.1),
            Verdict("cpu_us_per_token", "unisono", "floor"),
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
            *_arms(FULL, "direct", "relay", "aiohttp", "smg", "floor", "unisono"),
            Arm("litellm", "litellm", replace(FULL, requests=1)),
        ),
        ("tokens_per_s", "cpu_us_per_token", "busy"),
        (
            Verdict("cpu_us_per_token", "unisono", "relay"),
            Verdict("tokens_per_s", "unisono", "relay"),
            Verdict("tokens_per_s", "unisono", "floor", aim=0.65, at_least=True),
            Verdict("tokens_per_s", "unisono", "litellm", aim=40.0, at_least=True),
        ),
    ),
    "ttft": Scenario(
        "time to first token, one client, 16 tokens, 200 requests in a row",
        _arms(ONE_BY_ONE, "direct", "direct chat", "relay", "aiohttp", "smg", "floor", "unisono", "litellm"),
        ("ttft_p50_ms", "ttft_p99_ms", "cpu_ms_per_request"),
        (
            Verdict("ttft_p50_ms", "unisono", "direct", difference=True, aim=0.8),
            Verdict("cpu_ms_per_request", "unisono", "floor", aim=1.4),
            Verdict("ttft_p50_ms", "unisono", "litellm", aim=0.12, baselines=("direct", "direct chat")),
        ),
    ),
    "whole": Scenario(
        "no streaming, 8 clients, 64 tokens",
        _arms(WHOLE, "relay", "aiohttp", "floor", "unisono", "litellm"),
        ("cpu_ms_per_request", "ttft_p50_ms"),
        (
            Verdict("cpu_ms_per_request", "unisono", "aiohttp"),
            Verdict("cpu_ms_per_request", "unisono", "floor", aim=1.3),
            Verdict("cpu_ms_per_request", "unisono", "litellm", aim=0.15),
        ),
    ),
    "records": Scenario(
        "request records in Redis, and none: no streaming, 64 tokens, 8 clients and one",
        _arms_by_load({"whole": WHOLE, "lone": SEQUENTIAL}, {"records": "unisono+redis", "none": "unisono-records"}),
        ("cpu_ms_per_request", "ttft_p50_ms"),
        (
            Verdict("cpu_ms_per_request", "whole, records", "whole, none", aim=1.05),
            Verdict("cpu_ms_per_request", "lone, records", "lone, none", aim=1.05),
            Verdict("ttft_p50_ms", "lone, records", "lone, none"),
        ),
        by_default=False,
    ),
    "sampling": Scenario(
        "a tenth of the answers, all and none scored by a second deployment: one client, and 6 paced streams",
        _arms_by_load(
            {"lone": ONE_BY_ONE, "paced": FEW_PACED},
            {"tenth": "unisono+fidelity", "all": "unisono+fidelity-all", "none": "unisono-fidelity"},
        ),
        ("ttft_p50_ms", "ttft_p99_ms", "cpu_ms_per_request"),
        (
            Verdict("ttft_p50_ms", "lone, tenth", "lone, none", aim=1.05),
            Verdict("ttft_p50_ms", "lone, all", "lone, none"),
            Verdict("ttft_p50_ms", "paced, tenth", "paced, none", aim=1.05),
            Verdict("ttft_p50_ms", "paced, all", "paced, none", aim=1.05),
            Verdict("cpu_ms_per_request", "lone, tenth", "lone, none"),
        ),
        by_default=False,
    ),
    "canary": Scenario(
        "8 paced streams while a new 100,000-token prompt arrives every 0.4 s",
        _arms(COLD_PROMPTS_LOAD, "direct", "relay", "aiohttp", "unisono"),
        ("gap_p50_ms", "gap_p99_ms", "gap_max_ms", "busy"),
        (Verdict("gap_p99_ms", "unisono", "direct", difference=True, aim=5.0),),
    ),
    "render": Scenario(
        "rendering alone: a conversation of 100,000 tokens in messages of 250",
        tuple(Arm(variant, "unisono", RenderWork(variant, 100_000, 5)) for variant in ("library", "cold", "next")),
        ("render_ms",),
        (
            Verdict("render_ms", "next", "cold", aim=0.03),
            Verdict("render_ms", "next", "library", aim=0.02),
            Verdict("render_ms", "cold", "library"),
        ),
    ),
    "turns": Scenario(
        "the same conversation in whole requests: its first turn, and the next one",
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
        "40 clients that disconnect after 0.6 s of a paced answer",
        _arms(
            Work(streams=40, tokens=1000, disconnect_after_s=0.6, pace=TOKEN_EVERY_20_MS), "direct", "relay", "unisono"
        ),
        ("unaborted", "cpu_ms_per_request"),
        (Verdict("unaborted", "unisono", "direct", difference=True, aim=0.0),),
    ),
    "start": Scenario(
        "a separate process on one CPU: start, memory before the first request, and memory of each of 512 slow "
        "streams; with Redis, of as many background responses",
        (
            *(Arm(name, name, Launch(STREAM_MEMORY)) for name in ("relay", "aiohttp", "unisono")),
            Arm("unisono+redis", "unisono+redis", Launch(BACKGROUND_MEMORY)),
            Arm("litellm", "litellm", Launch()),
        ),
        ("start_s", "start_cpu_s", "idle_mib", "kib_per_stream"),
        (
            Verdict("start_s", "unisono", "litellm", aim=0.12),
            Verdict("idle_mib", "unisono", "litellm", aim=0.27),
            Verdict("kib_per_stream", "unisono", "aiohttp"),
            Verdict("start_s", "unisono+redis", "unisono"),
            Verdict("kib_per_stream", "unisono+redis", "unisono"),
        ),
    ),
    "responses": Scenario(
        "streams of Responses against streams of Chat on the same gateway: 24 paced, and 16 at full speed",
        (*_surfaces("paced", PACED), *_surfaces("full", replace(FULL, requests=4))),
        ("cpu_us_per_token", "gap_p99_ms", "tokens_per_s"),
        tuple(
            Verdict("cpu_us_per_token", f"{speed}, responses{stored}", f"{speed}, chat", aim=aim)
            for speed in ("paced", "full")
            for stored, aim in (("", 1.15), (" not stored", None))
        ),
    ),
    "messages": Scenario(
        "streams of Messages with reasoning against streams of Chat on the same gateway: 24 paced, and 16 at full "
        "speed",
        tuple(
            Arm(f"{speed}, {wire}", "unisono", replace(work, wire=wire))
            for speed, work in (("paced", PACED), ("full", replace(FULL, requests=4)))
            for wire in ("chat", "messages")
        ),
        ("cpu_us_per_token", "gap_p99_ms", "tokens_per_s"),
        tuple(
            Verdict("cpu_us_per_token", f"{speed}, messages", f"{speed}, chat", aim=1.15) for speed in ("paced", "full")
        ),
    ),
    "continued": Scenario(
        "a stored response without history and after fifty stored turns, one client, 64 tokens each",
        (
            Arm("fresh", "unisono+redis", CONTINUED),
            Arm("chain of 50", "unisono+redis", replace(CONTINUED, prior=PriorTurns("chain", 50, 10))),
            Arm("conversation of 50", "unisono+redis", replace(CONTINUED, prior=PriorTurns("conversation", 50, 10))),
        ),
        ("ttft_p50_ms", "ttft_p99_ms", "cpu_ms_per_request"),
        (
            Verdict("ttft_p50_ms", "chain of 50", "fresh", difference=True, aim=10.0),
            Verdict("ttft_p50_ms", "conversation of 50", "fresh", difference=True, aim=10.0),
        ),
    ),
    "workers": Scenario(
        "1,000 streams at 5 tokens per second each, 60 tokens, on two workers and on one process; clients and backend "
        "share the CPUs with them",
        (Arm("two workers", "unisono+two", MANY_STREAMS), Arm("one process", "unisono+one", MANY_STREAMS)),
        ("gap_p50_ms", "gap_p99_ms", "tokens_per_s", "cpu_us_per_token", "busy"),
        (
            Verdict("gap_p99_ms", "two workers", aim=250.0),
            Verdict("cpu_us_per_token", "two workers", "one process", aim=1.1),
        ),
    ),
    "scale": Scenario(
        "streams at 4 tokens per second each, 48 tokens: 2,000 on two workers that share the CPUs with clients and "
        "backend, and 1,000 and 24 on one process with a CPU of its own",
        (
            Arm("direct, 2,000", "direct", SLOW_STREAMS),
            Arm("two workers, 2,000", "unisono+two", SLOW_STREAMS),
            Arm("one process, 1,000", "unisono", replace(SLOW_STREAMS, streams=1000)),
            Arm("one process, 24", "unisono", replace(SLOW_STREAMS, streams=24)),
        ),
        ("gap_p50_ms", "gap_p99_ms", "tokens_per_s", "cpu_us_per_token", "busy"),
        (
            Verdict("gap_p99_ms", "two workers, 2,000", "direct, 2,000", difference=True, aim=100.0),
            Verdict("cpu_us_per_token", "one process, 1,000", "one process, 24", aim=1.1),
        ),
        by_default=False,
    ),
    "background": Scenario(
        "500 background responses at 10 tokens per second each, 200 tokens, 100 of them streamed to clients",
        (Arm("unisono+redis", "unisono+redis", BACKGROUND),),
        (
            *("logged_p50_s", "logged_max_s", "watched_p50_s", "watched_max_s"),
            *("tokens_per_s", "cpu_us_per_token", "busy", "store_busy"),
        ),
        (
            Verdict("logged_max_s", "unisono+redis", aim=2.0),
            Verdict("watched_max_s", "unisono+redis", aim=2.0),
        ),
    ),
    "loops": Scenario(
        "five tool calls, then an answer, after 8,000 tokens; one turn at a time and 100 at once; a step is the time "
        "from a call to the next prompt, without the tool's own time",
        (
            Arm("one", "unisono+tools", ToolLoopWork(1, 20, 8_000)),
            Arm("100 at once", "unisono+tools", ToolLoopWork(100, 4, 8_000)),
        ),
        ("step_p50_ms", "step_p99_ms", "tool_p50_ms", "steps_per_s", "cpu_ms_per_step", "busy"),
        (Verdict("step_p50_ms", "one", aim=3.0), Verdict("steps_per_s", "100 at once", aim=200.0, at_least=True)),
    ),
    "team": Scenario(
        "features that a team enables: none, with state in memory (bare) and in Redis (off); a virtual key with limits "
        "and budgets, and metrics read every second (keys); also recordings and spans of all answers (all). 24 paced "
        "streams of 256 tokens, 16 of 512 at full speed, whole answers of 64 tokens for 8 clients and for one",
        _arms_by_load({"paced": PACED, "full": LONG_FULL, "whole": WHOLE, "lone": SEQUENTIAL}, TEAM),
        ("cpu_us_per_token", "cpu_ms_per_request", "ttft_p50_ms"),
        (
            *_overhead("cpu_us_per_token", "paced", 1.1),
            *_overhead("cpu_us_per_token", "full", 1.1),
            *_overhead("cpu_ms_per_request", "whole", None, difference=True),
            *_overhead("ttft_p50_ms", "lone", 0.6, difference=True),
        ),
        by_default=False,
    ),
    "forced": Scenario(
        "tools that must be called, with a scripted model: generations per answer and the engine's time",
        _intervention_arms("plain", *FORCED_CALLS),
        ("generations", "ms_per_answer"),
        _generation_verdicts(FORCED_CALLS),
    ),
    "schema": Scenario(
        "JSON of a schema, with a scripted model: generations per answer and the engine's time",
        _intervention_arms("plain", *SCHEMA_ANSWERS),
        ("generations", "ms_per_answer"),
        _generation_verdicts(SCHEMA_ANSWERS),
    ),
    "plan": Scenario(
        "tokens of an answer without requirements, one at a time: the router alone, and the router with the plan",
        tuple(Arm(variant, "unisono", InterventionWork(variant, 5)) for variant in ("router alone", "with the plan")),
        ("us_per_token",),
        (Verdict("us_per_token", "with the plan", "router alone", aim=1.06),),
    ),
    **routing_scenarios.SCENARIOS,
    "chunks": Scenario(
        "24 paced streams, several tokens per chunk",
        tuple(_per_chunk(tokens) for tokens in (1, 4, 10)),
        ("cpu_us_per_token",),
        (Verdict("cpu_us_per_token", "unisono, 10 per chunk", "unisono, 1 per chunk"),),
        by_default=False,
    ),
    "streams": Scenario(
        "full speed at 1, 64 and 512 streams, 512 tokens",
        tuple(_arm_at(streams) for streams in (1, 64, 512)),
        ("tokens_per_s", "cpu_us_per_token", "ttft_p50_ms"),
        (Verdict("tokens_per_s", "unisono, 512 streams", "unisono, 64 streams"),),
        by_default=False,
    ),
}


def shortened(work: Task) -> Task:
    """Return a smaller load of the same shape, for quick runs."""
    match work:
        case RenderWork():
            return replace(work, times=1)
        case BackgroundWork():
            return replace(work, tokens=max(12, work.tokens // 3))
        case InterventionWork() | SelectionWork():
            return replace(work, times=max(1, work.times // 3))
        case ToolLoopWork() | FailoverWork():
            return replace(work, requests=max(1, work.requests // 3))
        case Launch(memory_load):
            return Launch(_shortened(memory_load) if isinstance(memory_load, Work) else memory_load)
        case Work():
            return _shortened(work)


def _shortened(work: Work) -> Work:
    cold = None if work.cold is None else replace(work.cold, count=max(1, work.cold.count // 3))
    prior = None if work.prior is None else replace(work.prior, count=max(1, work.prior.count // 3))
    tokens = max(12, work.tokens // 3) if work.pace.interval_us else work.tokens
    return replace(work, tokens=tokens, requests=max(1, work.requests // 3), cold=cold, prior=prior)
