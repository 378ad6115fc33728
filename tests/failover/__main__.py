"""Runs by hand: `python -m tests.failover --topology sentinel --replicas 1 --seeds 0-11`."""

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
    parser.add_argument("--folder", type=Path, help="kept afterwards")
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    replicas = None if given.replicas == "none" else int(given.replicas)
    for seed in range(int(first), int(last or first) + 1):
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.monotonic()
            at = Path(folder) if given.folder is None else given.folder / str(seed)
            outcome = asyncio.run(failover(Setting(given.topology, replicas, PACES[given.pace]), seed, at))
            print(f"{outcome} ({time.monotonic() - began_s:.1f} s)", flush=True)
            for bad in (*outcome.lost, *outcome.unfinished, *outcome.called_twice):
                print("   ", bad)
            for code, message in outcome.samples.items():
                print("   ", code, message)


main()
