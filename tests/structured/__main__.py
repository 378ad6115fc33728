"""Measure valid answers under schemas and regular expressions: `python -m tests.structured --full`.

The exit status is 1 if an answer is neither valid nor a declared failure, or if fewer answers than `MIN_SHARE_TRAINED`
are valid for the schema that the demo model was trained on.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from functools import partial

from tests.e2e.gateway import gateway
from tests.engines_all.engines import running
from tests.structured.cases import (
    EXPRESSIONS_PER_LEVEL,
    SCHEMAS_PER_LEVEL,
    TRAINED_LEVELS,
    Case,
    expression_cases,
    schema_cases,
    trained_cases,
)
from tests.structured.measure import Figures, measure

# Engines with and without constrained decoding.
WIRES = ("llamacpp", "mlx_server")
MIN_SHARE_TRAINED = 0.9
# Part of the cases in a short run.
SHORT = 10
CURRENT_DATE = "2026-01-02"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true", help="300 schemas and 100 expressions; by default a tenth")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wires", nargs="+", default=WIRES, choices=("llamacpp", "mlx_server", "mlx", "vllm"))
    parser.add_argument("--levels", default="", help="only levels whose name contains this text, such as `regex`")
    options = parser.parse_args()
    part = 1 if options.full else SHORT
    cases = [
        *trained_cases(),
        *schema_cases(options.seed, SCHEMAS_PER_LEVEL // part),
        *expression_cases(options.seed, EXPRESSIONS_PER_LEVEL // part),
    ]
    cases = [case for case in cases if options.levels in case.level]
    faults = [fault for wire in options.wires for fault in asyncio.run(_faults(wire, cases))]
    print("\n".join(faults))
    return bool(faults)


async def _faults(wire: str, cases: list[Case]) -> list[str]:
    """Measure one engine, print the figures, and return the faults."""
    began_s = time.monotonic()
    with running(wire) as engine:
        config = {"model_list": [engine.deployment()], "unisono": {"current_date": CURRENT_DATE}}
        async with gateway(config) as site:
            figures = await measure(site, cases, partial(_report, wire, len(cases)))
    print(f"\n{figures.table(wire)}\n\n{len(cases)} cases in {time.monotonic() - began_s:.0f} s", flush=True)
    return [*_invalid(wire, figures), *_too_few_valid(wire, figures)]


def _report(wire: str, total: int, finished: int, figures: Figures) -> None:
    print(f"\n{finished} of {total} cases\n{figures.table(wire)}", file=sys.stderr, flush=True)


def _invalid(wire: str, figures: Figures) -> list[str]:
    return [f"{wire}, {case.level}: {case.fields} gave {shown!r}" for case, shown in figures.faults]


def _too_few_valid(wire: str, figures: Figures) -> list[str]:
    shares = {level: figures.share_valid(level) for level in TRAINED_LEVELS if level in figures.outcomes}
    return [
        f"{wire}, {level}: {share:.0%} valid, at least {MIN_SHARE_TRAINED:.0%} expected"
        for level, share in shares.items()
        if share < MIN_SHARE_TRAINED
    ]


if __name__ == "__main__":
    sys.exit(main())
