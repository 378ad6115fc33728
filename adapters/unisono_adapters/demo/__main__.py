"""Command line of the demo model: `python -m unisono_adapters.demo --out DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

from unisono_adapters.demo import LAYOUTS, DemoError, default_folder, expand


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m unisono_adapters.demo", description="Expand the demo model.")
    parser.add_argument("--out", type=Path, help="folder to write (default: the one `serve` uses)")
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="how expert weights are stored")
    args = parser.parse_args()
    try:
        print(expand(args.out or default_folder(), args.layout))
    except (DemoError, OSError) as error:
        parser.exit(1, f"{error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
