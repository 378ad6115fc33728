"""Function calls and bytecode instructions per request and per paced token.

Run it with `python -m bench.calls`. Unlike times, these counts hardly depend on the machine: they show what a change
adds or removes. Resumed coroutines and generators count as calls.

The gateway runs in a child process, which counts between two signals. `--top N` prints the N functions with the most
instructions, and those of C with the most calls. `--redis` stores the state in Redis.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from bench import prose
from bench.contenders import CONTENDERS, KEY, ContenderSetup
from bench.fake_vllm import Pace
from bench.processes import Process, free_port, http_call
from bench.redis_server import start_redis
from bench.vllm_wire import MODEL
from unisono.harmony.encoding import load_encoding

REQUESTS = 100
WARM_REQUESTS = 300
TOKENS = 64
PACED = Pace(interval_us=5_000)
SETTLE_S = 0.3

# Numbers of calls and of instructions by function.
FunctionCounts = dict[str, dict[str, int]]
KINDS = {"python": "Python calls", "instructions": "instructions", "c": "C calls"}


def serve(counts: Path, argv: Sequence[str]) -> None:
    """Run a program; SIGUSR1 starts the count, and SIGUSR2 writes it to `counts`."""
    python: Counter[CodeType] = Counter()
    instructions: Counter[CodeType] = Counter()
    c_functions: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            python[frame.f_code] += 1
        elif event == "c_call":
            c_functions[getattr(argument, "__qualname__", repr(argument))] += 1

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            instructions[frame.f_code] += 1
        return trace

    def start(*_: object) -> None:
        for counter in (python, instructions, c_functions):
            counter.clear()
        sys.setprofile(profile)
        sys.settrace(trace)

    def end(*_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)
        part = counts.with_suffix(".part")
        named = {"python": _named(python), "instructions": _named(instructions), "c": c_functions}
        part.write_text(json.dumps(named))
        part.rename(counts)

    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, end)
    sys.argv = list(argv)
    runpy.run_path(argv[0], run_name="__main__")


def _named(counter: Counter[CodeType]) -> dict[str, int]:
    named: Counter[str] = Counter()
    # Generated methods, such as those of dataclasses, share a name.
    for code, number in counter.items():
        named[f"{code.co_qualname} {code.co_filename}:{code.co_firstlineno}"] += number
    return named


class CountedGateway:
    """A gateway in a child process that counts, and a connection to it."""

    def __init__(self, process: Process, port: int, counts: Path) -> None:
        self._process, self._counts = process, counts
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, *, is_stream: bool, max_tokens: int = TOKENS) -> None:
        messages = [{"role": "user", "content": "Tell me a story."}]
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": max_tokens}
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"the gateway answered {answer.status}: {text[:500]!r}")

    def counted(self, requests: int, *, is_stream: bool, max_tokens: int = TOKENS) -> FunctionCounts:
        """Return the calls of some requests, with what follows them: records and settlements."""
        self._counts.unlink(missing_ok=True)
        time.sleep(SETTLE_S)
        os.kill(self._process.pid, signal.SIGUSR1)
        for _ in range(requests):
            self.ask(is_stream=is_stream, max_tokens=max_tokens)
        time.sleep(SETTLE_S)
        os.kill(self._process.pid, signal.SIGUSR2)
        while not self._counts.exists():
            time.sleep(0.02)
        counts: FunctionCounts = json.loads(self._counts.read_bytes())
        return counts


def start(stack: ExitStack, folder: Path, *, has_redis: bool) -> tuple[CountedGateway, int]:
    """Start a fake backend and a gateway; return it, and the port of the backend."""
    corpus, upstream, port = folder / "material.json", free_port(), free_port()
    prose.save(prose.build(load_encoding()), corpus)
    command = [sys.executable, "-m", "bench.fake_vllm", str(upstream), str(corpus)]
    stack.enter_context(Process("fake", command, folder, frozenset())).wait_ready(upstream, "/health")
    redis = start_redis(stack, folder, frozenset(os.sched_getaffinity(0)))[0] if has_redis else 0
    contender = CONTENDERS["unisono+redis" if has_redis else "unisono"]
    if contender.command is None:
        raise ValueError("the contender has no command")
    gateway = contender.command(ContenderSetup(folder, upstream, port, redis))
    counts = folder / "counts.json"
    process = Process(
        "gateway", [sys.executable, "-m", "bench.calls", "--serve", str(counts), *gateway], folder, frozenset()
    )
    stack.enter_context(process).wait_ready(port, contender.ready)
    return CountedGateway(process, port, counts), upstream


def difference(counts: FunctionCounts, base: FunctionCounts) -> FunctionCounts:
    found = {kind: Counter(counts[kind]) for kind in KINDS}
    for kind in KINDS:
        found[kind].subtract(base[kind])
    return {kind: dict(each) for kind, each in found.items()}


def line(name: str, counts: FunctionCounts, divisor: int) -> str:
    totals = [sum(counts[kind].values()) for kind in KINDS]
    return f"| {name} | {' | '.join(f'{total / divisor:,.1f}' for total in totals)} |"


def top(name: str, counts: FunctionCounts, divisor: int, number: int) -> None:
    for kind in ("instructions", "c"):
        print(f"\n{name}, {KINDS[kind]}:")
        for function, calls in Counter(counts[kind]).most_common(number):
            print(f"{calls / divisor:8.2f} {function}")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--serve"]:
        serve(Path(argv[1]), argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--redis", action="store_true")
    parser.add_argument("--top", type=int, default=0, metavar="N")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        gateway, upstream = start(stack, Path(folder), has_redis=options.redis)
        for number in range(WARM_REQUESTS):
            gateway.ask(is_stream=number % 2 == 0)
        print(f"| per | {' | '.join(KINDS.values())} |\n|---|---|---|---|")
        for name, is_stream in (("whole answer", False), ("streamed answer", True)):
            counts = gateway.counted(REQUESTS, is_stream=is_stream)
            print(line(name, counts, REQUESTS), flush=True)
            if options.top:
                top(name, counts, REQUESTS, options.top)
        http_call(upstream, "POST", "/bench/pace", json.dumps(asdict(PACED)).encode())
        short = gateway.counted(10, is_stream=True, max_tokens=TOKENS)
        long = gateway.counted(10, is_stream=True, max_tokens=3 * TOKENS)
        counts = difference(long, short)
        print(line("paced token", counts, 20 * TOKENS))
        if options.top:
            top("paced token", counts, 20 * TOKENS, options.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
