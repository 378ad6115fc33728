"""Command `python -m bench`: run scenarios, print their tables, write RESULTS.md."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from bench import report
from bench.contenders import CONTENDERS, gateway_config
from bench.processes import StartError, split_cpus
from bench.report import VerdictResult
from bench.rig import Rig
from bench.sample import Sample
from bench.scenarios import SCENARIOS, shortened
from bench.tasks import Arm, Scenario

RESULTS = Path(__file__).parent / "RESULTS.md"
NOTES = "Conditions, and reasons for missed aims: [NOTES.md](NOTES.md)\n"


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="CPU, latency and throughput as ratios")
    parser.add_argument(
        "scenarios", nargs="*", metavar="scenario", help=f"default: all usual ones; names: {', '.join(SCENARIOS)}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of every scenario (3)")
    parser.add_argument("--quick", action="store_true", help="one round of a third of the load; no RESULTS.md")
    parser.add_argument("--only", metavar="NAME,...", help=f"contenders, of: {', '.join(CONTENDERS)}")
    parser.add_argument("--check", action="store_true", help="exit with 1 when an aim is missed")
    parser.add_argument("--config-only", action="store_true", help="print the gateway's config and exit")
    parser.add_argument("--upstream", type=int, help="port of the fake backend (a free one)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the tables go (bench/RESULTS.md)")
    args = parser.parse_args(argv)
    for kind, named, known in (
        ("scenario", args.scenarios, SCENARIOS),
        ("contender", args.only.split(",") if args.only else [], CONTENDERS),
    ):
        unknown = [name for name in named if name not in known]
        if unknown:
            parser.error(f"no such {kind}: {', '.join(unknown)}")
    return args


def selected(args: argparse.Namespace) -> dict[str, Scenario]:
    return {n: s for n, s in SCENARIOS.items() if (n in args.scenarios if args.scenarios else s.by_default)}


def measure(
    rig: Rig, scenario: Scenario, arms: list[Arm], rounds: int, not_started: set[str]
) -> dict[str, list[Sample]]:
    """Sample all arms of a scenario, round by round.

    A round runs all arms in turn, so that a slow minute affects all of them. A contender that fails to start is
    reported, added to `not_started` and skipped.
    """
    samples: dict[str, list[Sample]] = {arm.label: [] for arm in scenario.arms}
    for _ in range(rounds):
        for arm in arms:
            if arm.contender in not_started:
                continue
            try:
                samples[arm.label].append(rig.sample(arm))
            except StartError as error:
                print(f"{arm.contender} is skipped: {error}", file=sys.stderr)
                not_started.add(arm.contender)
    return samples


def arms_of(scenario: Scenario, args: argparse.Namespace) -> list[Arm]:
    named = args.only.split(",") if args.only else CONTENDERS
    arms = [arm for arm in scenario.arms if arm.contender in named]
    return [replace(arm, work=shortened(arm.work)) for arm in arms] if args.quick else arms


def heading(argv: list[str], load_before: float) -> str:
    return (
        "# Cost of the gateway\n\n"
        "Compare only figures in the same table, because absolute figures depend on the machine. The benchmark\n"
        "compared every answer byte by byte with what the backend sent. A cell shows the median of all rounds, with\n"
        "the minimum and the maximum in parentheses. A ratio is the median of the ratios of the rounds.\n\n"
        f"- command: `{shlex.join(['python', '-m', 'bench', *argv])}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n"
        f"- machine: {report.machine()}; load average before the run {load_before:.1f}\n"
        f"- versions: {report.versions()}; commit {report.revision() or 'unknown'}\n"
    )


def memory(rig: Rig) -> str:
    lines = ["## Memory at the end of the run", "", "| | MiB |", "| --- | ---: |"]
    lines += [f"| {name} | {rig.resident_mib(name):.0f} |" for name, started in rig.started.items() if started.process]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    args = arguments(argv)
    if args.config_only:
        print(gateway_config(args.upstream or 8000), end="")
        return 0
    head, parts = heading(argv, os.getloadavg()[0]), list[str]()
    results, faults, not_started = dict[str, list[VerdictResult]](), False, set[str]()
    print(head)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-bench-")))
        rig = stack.enter_context(Rig(folder, split_cpus(), args.upstream))
        for name, scenario in selected(args).items():
            samples = measure(rig, scenario, arms_of(scenario, args), 1 if args.quick else args.rounds, not_started)
            if not any(samples.values()):
                continue
            parts.append(report.table(name, scenario, samples))
            print(parts[-1], flush=True)
            results[name] = report.judge(scenario, samples)
            faults |= any(sample.faults for rounds in samples.values() for sample in rounds)
        parts.append(memory(rig))
        print(parts[-1])
    parts.insert(0, report.aims(results))
    print(parts[0])
    if not args.quick:
        args.out.write_text("\n".join([head, *parts, NOTES]))
    missed = faults or not all(row.is_met for rows in results.values() for row in rows)
    return int(args.check and missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
