"""What choosing a backend costs, and what it costs to leave one: the scenarios of routing."""

from __future__ import annotations

from bench.fake_vllm import Pace
from bench.tasks import Arm, Breaking, Choosing, Scenario, Verdict, Work

CHOOSE_US = 50.0
CHOSEN = {
    "one deployment": None,
    "nobody holds it": CHOOSE_US,
    "one holds it": CHOOSE_US,
    "all hold its beginning, one all of it": CHOOSE_US,
    "each holds it to one of eight turns": None,
    "each holds it to another block": None,
    "one holds it, and a place is taken": None,
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
        "a deployment chosen among 64 busy ones for a prompt of 32,000 tokens, without a server; block numbers come "
        "with the rendered prompt and are no part of it",
        tuple(Arm(how, "unisono", Choosing(how, 60)) for how in CHOSEN),
        ("choose_us",),
        tuple(Verdict("choose_us", how, aim=aim) for how, aim in CHOSEN.items() if aim is not None),
    ),
    "gap": Scenario(
        "a backend that breaks off behind its 40th token of 64, one every 4 ms, while another goes on, which takes "
        "20 ms to its first; 4 streams at once, 104 breaks a round, circuits that never open. Added is the gap at the "
        "client without these 20 ms",
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
