"""Run failovers from the command line: `python -m tests.failover --topology sentinel --replicas 1 --seeds 0-11`."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from tests.failover.run import PACES, Setting, failover


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--topology", default="sentinel")
    parser.add_argument("--replicas", default="1")
    parser.add_argument("--pace", default="quick", choices=PACES)
    parser.add_argument("--seeds", default="0-5")
    parser.add_argument("--folder", type=Path, help="folder of the runs; not deleted afterwards")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    replicas = None if options.replicas == "none" else int(options.replicas)
    for seed in range(int(first), int(last or first) + 1):
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.monotonic()
            run_folder = Path(folder) if options.folder is None else options.folder / str(seed)
            outcome = asyncio.run(failover(Setting(options.topology, replicas, PACES[options.pace]), seed, run_folder))
            print(f"{outcome} ({time.monotonic() - began_s:.1f} s)", flush=True)
            for finding in (*outcome.lost, *outcome.unfinished, *outcome.called_twice):
                print("   ", finding)
            for code, message in outcome.samples.items():
                print("   ", code, message)


main()
