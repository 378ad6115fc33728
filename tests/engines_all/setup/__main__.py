"""`python -m tests.engines_all.setup [ENGINE …]`: install or build the engines of the suite, all of them by default.

What is there already is left alone, so it is done in a moment the second time. Ends with 1 when an engine could not be
set up, after the others have been.
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
    wanted = parser.parse_args().engines or list(ENGINES)
    if unknown := set(wanted) - ENGINES.keys():
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    failed = {}
    for engine in wanted:
        print(f"setting up {engine}", flush=True)
        try:
            ENGINES[engine](Commands(engine))
        except (SetupFailed, OSError) as error:
            failed[engine] = error
    for engine, why in failed.items():
        print(f"\n{engine} could not be set up: {why}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
