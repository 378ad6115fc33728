"""Machine instructions and cache misses per request and token, simulated by callgrind.

Run it with `python -m bench.callgrind`; it requires valgrind. `--contender` selects another gateway, such as `floor` or
`aiohttp`. Like `bench.calls`, it hardly depends on the machine, but it also shows what functions of C cost: an error
that is formatted and dropped, an iterator for a single item, code that no longer fits in the first-level cache.

The caches have the sizes of a common server core: 32 KiB each for instructions and data, 1 MiB for both. The profiles
remain in the folder `--keep`, for `callgrind_annotate`. Requests are slow here, so regular work weighs more than in
reality: request records are written four times per second (`--contender unisono-records` writes none).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread

from bench import prose
from bench.calls import TOKENS, CountedGateway
from bench.contenders import CONTENDERS, ContenderSetup
from bench.fake_vllm import Pace
from bench.processes import Process, free_port, http_call
from unisono.harmony.encoding import load_encoding

REQUESTS = 100
WARM_REQUESTS = 120
STREAMS = 12
# A long stream minus a short one leaves this many times the tokens of a short one, without starts and ends.
LONGER = 3
PACED = Pace(interval_us=100_000)
CALLGRIND = (
    "valgrind", "--tool=callgrind", "--instr-atstart=no", "--cache-sim=yes",
    "--I1=32768,8,64", "--D1=32768,8,64", "--LL=1048576,16,64",
)  # fmt: skip
# Sums of the events of callgrind, in the order of its `events:` line: Ir Dr Dw I1mr D1mr D1mw ILmr DLmr DLmw.
COLUMNS = {"instructions": (0,), "misses: code 32 KiB": (3,), "data 32 KiB": (4, 5), "all 1 MiB": (6, 7, 8)}
# Start of a gateway under valgrind.
READY_S = 300.0

Counts = list[int]


class SimulatedGateway:
    """A gateway under callgrind, with one connection per stream."""

    def __init__(self, process: Process, port: int, profile: Path) -> None:
        self._process, self._profile, self._dumps = process, profile, 0
        self._connections = [CountedGateway(process, port, profile) for _ in range(STREAMS)]

    def ask(self, requests: int, *, is_stream: bool) -> None:
        for _ in range(requests):
            self._connections[0].ask(is_stream=is_stream)

    def stream(self, tokens: int) -> None:
        """Read concurrent streams of this length."""
        each = [Thread(target=one.ask, kwargs={"is_stream": True, "max_tokens": tokens}) for one in self._connections]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()

    def control(self, *arguments: str) -> None:
        subprocess.run(["callgrind_control", *arguments, str(self._process.pid)], check=True, capture_output=True)

    def counted(self, work: Callable[[], None]) -> Counts:
        """Return the numbers of all events during `work`."""
        self.control("-z")
        work()
        self.control("-d")
        self._dumps += 1
        lines = Path(f"{self._profile}.{self._dumps}").read_text().splitlines()
        return [int(number) for number in lines[-1].removeprefix("totals:").split()]


def start(stack: ExitStack, contender: str, folder: Path) -> tuple[SimulatedGateway, int]:
    """Start a fake backend and a gateway; return it, and the port of the backend."""
    corpus, upstream, port = folder / "material.json", free_port(), free_port()
    prose.save(prose.build(load_encoding()), corpus)
    command = [sys.executable, "-m", "bench.fake_vllm", str(upstream), str(corpus)]
    stack.enter_context(Process("fake", command, folder, frozenset())).wait_ready(upstream, "/health")
    chosen = CONTENDERS[contender]
    if chosen.command is None:
        raise ValueError("the contender has no command")
    gateway = chosen.command(ContenderSetup(folder, upstream, port))
    # Without an interpreter, the first argument is a script of this environment.
    program = gateway if Path(gateway[0]).resolve() == Path(sys.executable).resolve() else [sys.executable, *gateway]
    profile = folder / f"{contender}.callgrind"
    process = Process("gateway", [*CALLGRIND, f"--callgrind-out-file={profile}", *program], folder, frozenset())
    stack.enter_context(process).wait_ready(port, chosen.ready, READY_S)
    return SimulatedGateway(process, port, profile), upstream


def line(name: str, counts: Counts, divisor: int) -> str:
    totals = (sum(counts[column] for column in columns) / divisor for columns in COLUMNS.values())
    return f"| {name} | {' | '.join(f'{total:,.0f}' for total in totals)} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender", default="unisono")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    options = parser.parse_args(argv)
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        gateway, upstream = start(stack, options.contender, Path(folder))
        gateway.control("-i", "on")
        for is_stream in (False, True):
            gateway.ask(WARM_REQUESTS, is_stream=is_stream)
        print(f"| per | {' | '.join(COLUMNS)} |\n|---|---:|---:|---:|---:|")
        for name, is_stream in (("whole answer", False), ("streamed answer", True)):
            counts = gateway.counted(partial(gateway.ask, REQUESTS, is_stream=is_stream))
            print(line(name, counts, REQUESTS), flush=True)
        http_call(upstream, "POST", "/bench/pace", json.dumps(asdict(PACED)).encode())
        short, long = (gateway.counted(partial(gateway.stream, times * TOKENS)) for times in (1, 1 + LONGER))
        print(
            line(
                "paced token", [more - less for more, less in zip(long, short, strict=True)], LONGER * STREAMS * TOKENS
            )
        )
        if options.keep is not None:
            shutil.copytree(folder, options.keep, dirs_exist_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
