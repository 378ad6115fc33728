"""Tests of the mlx engine process: start, cancellation, crashes and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engines.demo_prompts import CHATS, ENCODING, greedy, prompt_for
from unisono.core.generation import Chunk, CompletionJob, Timeouts
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check
from unisono.errors import BackendOverloaded, BackendTimeout, BackendUnavailable
from unisono_adapters import demo
from unisono_adapters.mlx.mlx_backend import MlxLocalBackend

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

USER, EXPECTED = CHATS["greeting"]
ENDLESS_JOB = greedy(prompt_for("Repeat la forever."), 100_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small_backend() -> AsyncIterator[MlxLocalBackend]:
    """Backend with at most one running and one waiting request.

    A slot that is not freed shows immediately.
    """
    extra = {"batch": 1, "waiting": 1, "prefill_chunk": 64}
    backend = MlxLocalBackend(BackendOptions("mlx", "demo", extra=extra))
    await backend.probe()
    yield backend
    await backend.aclose()


async def run(backend: MlxLocalBackend, job: CompletionJob) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(job)]


async def drain(stream: AsyncIterator[Chunk]) -> None:
    async for _ in stream:
        pass


async def answers_greeting(backend: MlxLocalBackend, within_s: float = 20.0) -> bool:
    async with asyncio.timeout(within_s):
        chunks = await run(backend, greedy(prompt_for(USER)))
    return ENCODING.decode([token for chunk in chunks for token in chunk.tokens]) == EXPECTED


async def cancel_after(backend: MlxLocalBackend, job: CompletionJob, delay_s: float) -> None:
    task = asyncio.create_task(run(backend, job))
    await asyncio.sleep(delay_s)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def close_stream(backend: MlxLocalBackend) -> None:
    stream = backend.complete(ENDLESS_JOB)
    for _ in range(5):
        await anext(stream)
    await stream.aclose()


async def cancel_between_tokens(backend: MlxLocalBackend) -> None:
    await cancel_after(backend, ENDLESS_JOB, 0.5)


async def cancel_during_prefill(backend: MlxLocalBackend) -> None:
    await cancel_after(backend, greedy(prompt_for("word " * 60_000)), 0.3)


async def cancel_before_sending(backend: MlxLocalBackend) -> None:
    await cancel_after(backend, ENDLESS_JOB, 0)


async def exceed_total_timeout(backend: MlxLocalBackend) -> None:
    with pytest.raises(BackendTimeout, match="complete"):
        await run(backend, greedy(ENDLESS_JOB.prompt.tokens, 100_000, Timeouts(total_s=0.5)))


async def exceed_first_token_timeout(backend: MlxLocalBackend) -> None:
    with pytest.raises(BackendTimeout, match="first token"):
        await run(backend, greedy(prompt_for("word " * 60_000), timeouts=Timeouts(first_token_s=0.3)))


CANCELLATIONS = {
    "closing the stream": close_stream,
    "cancelling between tokens": cancel_between_tokens,
    "cancelling during a long prefill": cancel_during_prefill,
    "cancelling before the request is sent": cancel_before_sending,
    "total timeout": exceed_total_timeout,
    "first token timeout": exceed_first_token_timeout,
}


@pytest.mark.slow
@pytest.mark.parametrize("cancel", CANCELLATIONS.values(), ids=CANCELLATIONS)
async def test_cancelled_or_late_request_frees_the_engine(
    small_backend: MlxLocalBackend, cancel: Callable[[MlxLocalBackend], Awaitable[None]]
) -> None:
    engine = small_backend.engine_pid
    await cancel(small_backend)

    started = time.monotonic()
    assert await answers_greeting(small_backend)
    assert time.monotonic() - started < 5
    assert small_backend.engine_pid == engine


@pytest.mark.slow
async def test_cancelled_waiting_request_frees_its_queue_position(small_backend: MlxLocalBackend) -> None:
    running = small_backend.complete(ENDLESS_JOB)
    await anext(running)
    waiting = asyncio.create_task(run(small_backend, ENDLESS_JOB))
    await asyncio.sleep(0.2)
    with pytest.raises(BackendOverloaded):
        await run(small_backend, greedy(prompt_for(USER)))

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    next_request = asyncio.create_task(answers_greeting(small_backend))
    await asyncio.sleep(0.2)
    assert not next_request.done()
    await running.aclose()
    assert await next_request


@pytest.mark.slow
async def test_stopped_engine_times_out_and_is_replaced_if_it_stays_silent(
    small_backend: MlxLocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_backend.engine_pid
    assert engine is not None
    short_timeout_job = greedy(prompt_for(USER), timeouts=Timeouts(first_token_s=0.4))
    os.kill(engine, signal.SIGSTOP)
    with pytest.raises(BackendTimeout):
        await run(small_backend, short_timeout_job)
    os.kill(engine, signal.SIGCONT)
    assert await answers_greeting(small_backend)
    assert small_backend.engine_pid == engine

    monkeypatch.setattr("unisono_adapters.mlx.mlx_backend._STALLED_S", 0.2)
    os.kill(engine, signal.SIGSTOP)
    with pytest.raises(BackendTimeout):
        await run(small_backend, short_timeout_job)
    await until(lambda: small_backend.engine_pid is None)
    assert await answers_greeting(small_backend)
    assert small_backend.engine_pid not in (None, engine)


@pytest.mark.slow
async def test_killed_engine_fails_running_requests_and_is_restarted(small_backend: MlxLocalBackend) -> None:
    stream = small_backend.complete(ENDLESS_JOB)
    await anext(stream)
    engine = small_backend.engine_pid
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(BackendUnavailable, match="SIGKILL"):
        await drain(stream)
    assert time.monotonic() - started < 2

    answers = await asyncio.gather(answers_greeting(small_backend), answers_greeting(small_backend))
    assert answers == [True, True]
    assert small_backend.engine_pid not in (None, engine)


async def test_engine_that_keeps_failing_at_start_is_not_restarted_immediately() -> None:
    backend = MlxLocalBackend(BackendOptions("mlx", "no-such-owner/no-such-model"))
    outcomes: list[tuple[bool, float]] = []
    for _ in range(4):
        started = time.monotonic()
        with pytest.raises(BackendUnavailable, match="download") as raised:
            await backend.probe()
        outcomes.append((raised.value.retry_after_s is None, time.monotonic() - started))
    await backend.aclose()

    assert [was_tried for was_tried, _ in outcomes] == [True, True, False, False]
    assert max(duration for was_tried, duration in outcomes if not was_tried) < 0.05


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()[:1_000_000]
    weights.unlink()
    weights.write_bytes(content)


def rename_tokenizer_marker(folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    content = tokenizer.read_bytes().replace(b'"<|call|>"', b'"<|cull|>"')
    tokenizer.unlink()
    tokenizer.write_bytes(content)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove_config, "config.json"),
    "no tokenizer": (remove_tokenizer, "tokenizer.json"),
    "no weights": (remove_weights, "safetensors"),
    "truncated weights": (truncate_weights, "cannot be loaded"),
}


async def damaged_model(folder: Path, damage: Callable[[Path], None]) -> MlxLocalBackend:
    model_folder = await asyncio.to_thread(demo.expand, demo.default_folder())
    for file in model_folder.iterdir():
        (folder / file.name).symlink_to(file)
    damage(folder)
    return MlxLocalBackend(BackendOptions("mlx", str(folder)))


@pytest.mark.slow
async def test_model_with_another_tokenizer_is_a_fatal_finding(tmp_path: Path) -> None:
    backend = await damaged_model(tmp_path, rename_tokenizer_marker)
    (finding,) = (await backend.probe()).fatal
    await backend.aclose()
    assert (finding.check, finding.ok) == (Check.TOKENIZER, False)
    assert "<|call|>" in finding.detail
    assert str(tmp_path) not in finding.detail


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN)
async def test_unusable_model_is_unavailable_with_the_reason(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    backend = await damaged_model(tmp_path, damage)
    with pytest.raises(BackendUnavailable, match=message):
        await backend.probe()
    await backend.aclose()
    assert backend.engine_pid is None


@pytest.mark.slow
async def test_downloaded_snapshot_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder = await asyncio.to_thread(demo.expand, demo.default_folder())
    snapshot = tmp_path / "models--tiny--gpt-oss" / "snapshots" / "0123"
    (snapshot.parents[1] / "refs").mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    snapshot.parent.mkdir()
    snapshot.symlink_to(model_folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "canary-token")
    monkeypatch.setenv("UNISONO_MASTER_KEY", "canary-key")
    backend = MlxLocalBackend(BackendOptions("mlx", "tiny/gpt-oss"))
    assert await answers_greeting(backend)
    environment = Path(f"/proc/{backend.engine_pid}/environ")
    if sys.platform == "linux":
        assert b"canary" not in environment.read_bytes()
    await backend.aclose()


@pytest.mark.slow
async def test_closing_the_backend_ends_the_engine_and_running_requests() -> None:
    backend = MlxLocalBackend(BackendOptions("mlx", "demo"))
    stream = backend.complete(ENDLESS_JOB)
    await anext(stream)
    engine = backend.engine_pid
    assert engine is not None
    await backend.aclose()
    await backend.aclose()

    assert not is_running(engine)
    with pytest.raises(BackendUnavailable):
        await drain(stream)
    with pytest.raises(BackendUnavailable, match="shut down"):
        await backend.probe()


@pytest.mark.slow
async def test_closing_while_the_model_loads_leaves_no_process() -> None:
    earlier = children()
    backend = MlxLocalBackend(BackendOptions("mlx", "demo"))
    probe = asyncio.create_task(backend.probe())
    await until(lambda: children() != earlier)
    await backend.aclose()

    with pytest.raises(BackendUnavailable, match="shut down"):
        await probe
    assert children() == earlier


GATEWAY = """
import asyncio
from unisono.core.ports import BackendOptions
from unisono_adapters.mlx.mlx_backend import MlxLocalBackend

async def main():
    backend = MlxLocalBackend(BackendOptions("mlx", "demo"))
    await backend.probe()
    print(backend.engine_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_engine_ends_with_a_killed_gateway() -> None:
    gateway = subprocess.Popen([sys.executable, "-c", GATEWAY], stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    engine = int(await asyncio.to_thread(gateway.stdout.readline))
    assert is_running(engine)
    gateway.kill()
    gateway.wait()
    gateway.stdout.close()

    await until(lambda: not is_running(engine))


def is_running(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    if sys.platform == "linux":
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def children() -> set[int]:
    listed = subprocess.run(["ps", "-o", "pid=,ppid=,args=", "-A"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {int(pid) for pid, parent, args in rows if int(parent) == os.getpid() and "mlx.engine" in args}


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)
