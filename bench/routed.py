"""What choosing a backend costs, and what it costs to leave one: the scenarios of routing."""

from __future__ import annotations

from bench.fake_vllm import Pace
from bench.tasks import Arm, Breaking, Choosing, Scenario, Verdict, Work

CHOOSE_US = 50.0
CHOSEN = {
    "one deployment": None,
    "none holds it": CHOOSE_US,
    "one holds it": CHOOSE_US,
    "all hold its beginning, one all of it": CHOOSE_US,
    "each holds it to one of eight turns": None,
    "each holds it to another block": None,
    "one holds it, and a slot is reserved": None,
    "numbering its blocks, with the render": None,
}
"""The cases of `bench.choosing`, and what they may take."""

GAP_MS = 50.0
CADENCE = Work(streams=4, tokens=64, requests=26, pace=Pace(interval_us=4_000))
BREAKS = {
    f"{name}, {words or 'short'}{' tokens' if words else ''}": Breaking(how, streams=4, requests=26, words=words)
    for words in (0, 8_000)
    for how, name in (("reset", "reset"), ("end", "end without a finish"))
}

SCENARIOS: dict[str, Scenario] = {
    "choosing": Scenario(
        "choice among 64 busy deployments for a prompt of 32,000 tokens, without a server; block numbers come with the "
        "rendered prompt and are not part of it",
        tuple(Arm(how, "unisono", Choosing(how, 60)) for how in CHOSEN),
        ("choose_us",),
        tuple(Verdict("choose_us", how, aim=aim) for how, aim in CHOSEN.items() if aim is not None),
    ),
    "gap": Scenario(
        "a backend breaks off after its 40th token of 64, one every 4 ms, and another one continues, which needs 20 ms "
        "for its first token; 4 streams at once, 104 breaks per round, circuits never open. Added: the gap at the "
        "client minus these 20 ms",
        (
            Arm("undisturbed, direct", "direct", CADENCE),
            Arm("undisturbed", "unisono", CADENCE),
            *(Arm(name, "unisono+pair", breaking) for name, breaking in BREAKS.items()),
        ),
        ("gap_p50_ms", "gap_p99_ms", "added_p50_ms", "added_p99_ms"),
        (
            *(Verdict("added_p99_ms", name, aim=GAP_MS) for name in BREAKS),
            Verdict("gap_p50_ms", "reset, short", "undisturbed, direct"),
        ),
    ),
}
