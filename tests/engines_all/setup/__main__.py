"""`python -m tests.engines_all.setup [ENGINE …]`: install or build the engines of the suite.

The default is all engines. Engines that exist already are skipped. If an engine cannot be set up, the command continues
with the others and exits with 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tests.engines_all.setup import llamacpp, mlx, vllm
from tests.engines_all.setup.running import Commands, SetupFailed

ENGINES: dict[str, Callable[[Commands], None]] = {
    "mlx": mlx.set_up,
    "vllm": vllm.set_up,
    "llamacpp": llamacpp.set_up,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines_all.setup", description="Set up real engines.")
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(ENGINES)} (default: all)")
    selected = parser.parse_args().engines or list(ENGINES)
    if unknown := set(selected) - ENGINES.keys():
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    failed = {}
    for engine in selected:
        print(f"setting up {engine}", flush=True)
        try:
            ENGINES[engine](Commands(engine))
        except (SetupFailed, OSError) as error:
            failed[engine] = error
    for engine, reason in failed.items():
        print(f"\n{engine} could not be set up: {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
