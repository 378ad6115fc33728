"""Scenarios of routing: time to select a deployment, and gaps at a failover."""

from __future__ import annotations

from bench.fake_vllm import Pace
from bench.tasks import Arm, FailoverWork, Scenario, SelectionWork, Verdict, Work

MAX_SELECTION_US = 50.0
# Cases of `bench.selection_timing`, and their aims.
SELECTION_AIMS_US = {
    "one deployment": None,
    "none holds it": MAX_SELECTION_US,
    "one holds it": MAX_SELECTION_US,
    "all hold its beginning, one all of it": MAX_SELECTION_US,
    "each holds it to one of eight turns": None,
    "each holds it to another block": None,
    "one holds it, and a slot is reserved": None,
    "numbering its blocks, with the render": None,
}

MAX_ADDED_MS = 50.0
UNDISTURBED = Work(streams=4, tokens=64, requests=26, pace=Pace(interval_us=4_000))
FAILOVERS = {
    f"{name}, {words or 'short'}{' tokens' if words else ''}": FailoverWork(
        variant, streams=4, requests=26, words=words
    )
    for words in (0, 8_000)
    for variant, name in (("reset", "reset"), ("end", "end without a finish"))
}

SCENARIOS: dict[str, Scenario] = {
    "choosing": Scenario(
        "choice among 64 busy deployments for a prompt of 32,000 tokens, without a server; block numbers come with the "
        "rendered prompt and are not part of it",
        tuple(Arm(variant, "unisono", SelectionWork(variant, 60)) for variant in SELECTION_AIMS_US),
        ("choose_us",),
        tuple(Verdict("choose_us", variant, aim=aim) for variant, aim in SELECTION_AIMS_US.items() if aim is not None),
    ),
    "gap": Scenario(
        "a backend breaks off after its 40th token of 64, one every 4 ms, and another one continues, which needs 20 ms "
        "for its first token; 4 streams at once, 104 breaks per round, circuits never open. Added: the gap at the "
        "client minus these 20 ms",
        (
            Arm("undisturbed, direct", "direct", UNDISTURBED),
            Arm("undisturbed", "unisono", UNDISTURBED),
            *(Arm(name, "unisono+pair", work) for name, work in FAILOVERS.items()),
        ),
        ("gap_p50_ms", "gap_p99_ms", "added_p50_ms", "added_p99_ms"),
        (
            *(Verdict("added_p99_ms", name, aim=MAX_ADDED_MS) for name in FAILOVERS),
            Verdict("gap_p50_ms", "reset, short", "undisturbed, direct"),
        ),
    ),
}
