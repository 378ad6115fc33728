"""Comparison of two checkouts of the gateway: pairs of quick runs, and their ratio.

python -m bench.compare ../before . --pairs 20 --out bench/FAILOVER.md

Each checkout uses its own environment and its own `bench`. The order alternates from pair to pair, so that a machine
that slows down during the run affects both.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from bench.report import MIN_PAIRS, median_interval

# Scenarios and their options: the gap at a failover, and the CPU time of a token.
SCENARIOS: Mapping[str, tuple[str, ...]] = {
    "gap": ("--only", "unisono+pair"),
    "paced": ("--only", "unisono"),
}
COLUMNS = {"gap": ("added p50 ms", "added p99 ms"), "paced": ("CPU µs/token",)}

Figures = dict[str, float]


def figures_of(report: str, columns: Sequence[str]) -> Figures:
    """Parse the figures of a report, by `row, column`."""
    found: Figures = {}
    header: list[str] = []
    for line in report.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
        else:
            for name, cell in zip(header, cells, strict=False):
                if name in columns and cell[:1].isdigit():
                    found[f"{cells[0]}, {name}"] = float(cell.replace(",", "").split()[0])
    return found


def measure(tree: Path, folder: Path) -> Figures:
    """Run all scenarios quickly in one checkout. Raises CalledProcessError if a run fails."""
    found: Figures = {}
    for scenario, options in SCENARIOS.items():
        out = folder / "report.md"
        command = [tree / ".venv/bin/python", "-m", "bench", scenario, *options, "--quick", "--out", out]
        output = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout
        found |= {f"{scenario}: {name}": value for name, value in figures_of(output, COLUMNS[scenario]).items()}
    return found


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the ratios and its 95 % interval, from resampled pairs."""
    logs = [math.log(ratio) for ratio in ratios]
    low, high = median_interval(logs)
    return math.exp(median(logs)), math.exp(low), math.exp(high)


def commit_of(tree: Path) -> str:
    output = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=tree, check=True, capture_output=True, text=True
    )
    return output.stdout.strip()


def table(before: Sequence[Figures], after: Sequence[Figures]) -> list[str]:
    lines = ["| | before | after | after / before | 95 % interval |", "| --- | ---: | ---: | ---: | ---: |"]
    for name in before[0]:
        pairs = [(old[name], new[name]) for old, new in zip(before, after, strict=True) if name in old and name in new]
        ratio, low, high = interval([new / old for old, new in pairs])
        old, new = (median(each) for each in zip(*pairs, strict=True))
        lines.append(f"| {name} | {old:.4g} | {new:.4g} | **{ratio:.3f}** | {low:.3f} to {high:.3f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compare")
    parser.add_argument("before", type=Path, help="checkout to compare with, set up by its own `make`")
    parser.add_argument("after", type=Path, help="checkout to judge, set up by its own `make`")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs; default 20, at least 6")
    parser.add_argument("--out", type=Path, help="where the table goes as well; raw figures go to the same name .json")
    args = parser.parse_args()
    if args.pairs < MIN_PAIRS:
        parser.error(f"--pairs: at least {MIN_PAIRS} are needed for an interval, not {args.pairs}")
    trees = args.before.resolve(), args.after.resolve()
    found: tuple[list[Figures], list[Figures]] = ([], [])
    with tempfile.TemporaryDirectory(prefix="unisono-compare-") as folder:
        for pair in range(args.pairs):
            for index in (0, 1) if pair % 2 == 0 else (1, 0):
                found[index].append(measure(trees[index], Path(folder)))
            print(f"pair {pair + 1} of {args.pairs}", file=sys.stderr, flush=True)
            if args.out:
                args.out.with_suffix(".json").write_text(json.dumps(found))
    lines = [f"Commits {commit_of(trees[0])} and {commit_of(trees[1])}; {args.pairs} pairs.", "", *table(*found)]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
