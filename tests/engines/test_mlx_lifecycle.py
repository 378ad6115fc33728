"""How the engine process of the mlx backend begins, frees its batch, breaks and ends; with real processes."""

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
from unisono_adapters.mlx.local import MlxLocalBackend

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

USER, EXPECTED = CHATS["greeting"]
ENDLESS = greedy(prompt_for("Repeat la forever."), 100_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow() -> AsyncIterator[MlxLocalBackend]:
    """One request runs, one waits, any more are refused: whatever is not freed shows at once."""
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


async def greets(backend: MlxLocalBackend, within_s: float = 20.0) -> bool:
    async with asyncio.timeout(within_s):
        chunks = await run(backend, greedy(prompt_for(USER)))
    return ENCODING.decode([token for chunk in chunks for token in chunk.tokens]) == EXPECTED


async def cancelled_after(backend: MlxLocalBackend, job: CompletionJob, delay_s: float) -> None:
    task = asyncio.create_task(run(backend, job))
    await asyncio.sleep(delay_s)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def endless_closed(backend: MlxLocalBackend) -> None:
    stream = backend.complete(ENDLESS)
    for _ in range(5):
        await anext(stream)
    await stream.aclose()


async def endless_cancelled(backend: MlxLocalBackend) -> None:
    await cancelled_after(backend, ENDLESS, 0.5)


async def long_prefill_cancelled(backend: MlxLocalBackend) -> None:
    await cancelled_after(backend, greedy(prompt_for("word " * 60_000)), 0.3)


async def cancelled_at_once(backend: MlxLocalBackend) -> None:
    await cancelled_after(backend, ENDLESS, 0)


async def over_its_time(backend: MlxLocalBackend) -> None:
    with pytest.raises(BackendTimeout, match="complete"):
        await run(backend, greedy(ENDLESS.prompt.tokens, 100_000, Timeouts(total_s=0.5)))


async def no_first_token_in_time(backend: MlxLocalBackend) -> None:
    with pytest.raises(BackendTimeout, match="first token"):
        await run(backend, greedy(prompt_for("word " * 60_000), timeouts=Timeouts(first_token_s=0.3)))


LEAVING = {
    "closing the stream": endless_closed,
    "cancelling between tokens": endless_cancelled,
    "cancelling in a long prefill": long_prefill_cancelled,
    "cancelling before anything was sent": cancelled_at_once,
    "the whole answer takes too long": over_its_time,
    "the first token takes too long": no_first_token_in_time,
}


@pytest.mark.slow
@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
async def test_leaving_frees_the_engine(
    narrow: MlxLocalBackend, leave: Callable[[MlxLocalBackend], Awaitable[None]]
) -> None:
    engine = narrow.engine_pid
    await leave(narrow)

    started = time.monotonic()
    assert await greets(narrow)
    assert time.monotonic() - started < 5
    assert narrow.engine_pid == engine


async def test_a_request_that_leaves_the_queue_makes_room_in_it(narrow: MlxLocalBackend) -> None:
    running = narrow.complete(ENDLESS)
    await anext(running)
    waiting = asyncio.create_task(run(narrow, ENDLESS))
    await asyncio.sleep(0.2)
    with pytest.raises(BackendOverloaded):
        await run(narrow, greedy(prompt_for(USER)))

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    next_one = asyncio.create_task(greets(narrow))
    await asyncio.sleep(0.2)
    assert not next_one.done()
    await running.aclose()
    assert await next_one


@pytest.mark.slow
async def test_a_stopped_engine_times_out_and_one_that_stays_silent_is_replaced(
    narrow: MlxLocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = narrow.engine_pid
    assert stopped is not None
    hurried = greedy(prompt_for(USER), timeouts=Timeouts(first_token_s=0.4))
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(BackendTimeout):
        await run(narrow, hurried)
    os.kill(stopped, signal.SIGCONT)
    assert await greets(narrow)
    assert narrow.engine_pid == stopped

    monkeypatch.setattr("unisono_adapters.mlx.local._STALLED_S", 0.2)
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(BackendTimeout):
        await run(narrow, hurried)
    await until(lambda: narrow.engine_pid is None)
    assert await greets(narrow)
    assert narrow.engine_pid not in (None, stopped)


@pytest.mark.slow
async def test_a_killed_engine_fails_what_runs_and_the_next_request_starts_another(narrow: MlxLocalBackend) -> None:
    stream = narrow.complete(ENDLESS)
    await anext(stream)
    killed = narrow.engine_pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(BackendUnavailable, match="SIGKILL"):
        await drain(stream)
    assert time.monotonic() - started < 2

    answers = await asyncio.gather(greets(narrow), greets(narrow))
    assert answers == [True, True]
    assert narrow.engine_pid not in (None, killed)


async def test_engines_that_die_at_once_are_not_started_again_and_again() -> None:
    backend = MlxLocalBackend(BackendOptions("mlx", "no-such-owner/no-such-model"))
    outcomes: list[tuple[bool, float]] = []
    for _ in range(4):
        started = time.monotonic()
        with pytest.raises(BackendUnavailable, match="download") as raised:
            await backend.probe()
        outcomes.append((raised.value.retry_after_s is None, time.monotonic() - started))
    await backend.aclose()

    assert [tried for tried, _ in outcomes] == [True, True, False, False]
    assert max(took for tried, took in outcomes if not tried) < 0.05


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()[:1_000_000]
    weights.unlink()
    weights.write_bytes(content)


def with_another_tokenizer(folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    content = tokenizer.read_bytes().replace(b'"<|call|>"', b'"<|cull|>"')
    tokenizer.unlink()
    tokenizer.write_bytes(content)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (without_config, "config.json"),
    "no tokenizer": (without_tokenizer, "tokenizer.json"),
    "no weights": (without_weights, "safetensors"),
    "cut weights": (with_cut_weights, "cannot be loaded"),
}


async def damaged(folder: Path, damage: Callable[[Path], None]) -> MlxLocalBackend:
    whole = await asyncio.to_thread(demo.expand, demo.default_folder())
    for file in whole.iterdir():
        (folder / file.name).symlink_to(file)
    damage(folder)
    return MlxLocalBackend(BackendOptions("mlx", str(folder)))


@pytest.mark.slow
async def test_a_model_with_another_tokenizer_is_found_unfit(tmp_path: Path) -> None:
    backend = await damaged(tmp_path, with_another_tokenizer)
    (finding,) = (await backend.probe()).fatal
    await backend.aclose()
    assert (finding.check, finding.ok) == (Check.TOKENIZER, False)
    assert "<|call|>" in finding.detail
    assert str(tmp_path) not in finding.detail


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "says"), BROKEN.values(), ids=BROKEN)
async def test_a_model_that_cannot_be_used_says_why(tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    backend = await damaged(tmp_path, damage)
    with pytest.raises(BackendUnavailable, match=says):
        await backend.probe()
    await backend.aclose()
    assert backend.engine_pid is None


@pytest.mark.slow
async def test_a_downloaded_snapshot_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await asyncio.to_thread(demo.expand, demo.default_folder())
    snapshot = tmp_path / "models--tiny--gpt-oss" / "snapshots" / "0123"
    (snapshot.parents[1] / "refs").mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    snapshot.parent.mkdir()
    snapshot.symlink_to(whole)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "canary-token")
    monkeypatch.setenv("UNISONO_MASTER_KEY", "canary-key")
    backend = MlxLocalBackend(BackendOptions("mlx", "tiny/gpt-oss"))
    assert await greets(backend)
    environment = Path(f"/proc/{backend.engine_pid}/environ")
    if sys.platform == "linux":
        assert b"canary" not in environment.read_bytes()
    await backend.aclose()


@pytest.mark.slow
async def test_closing_ends_the_engine_and_what_runs_in_it() -> None:
    backend = MlxLocalBackend(BackendOptions("mlx", "demo"))
    stream = backend.complete(ENDLESS)
    await anext(stream)
    engine = backend.engine_pid
    assert engine is not None
    await backend.aclose()
    await backend.aclose()

    assert not alive(engine)
    with pytest.raises(BackendUnavailable):
        await drain(stream)
    with pytest.raises(BackendUnavailable, match="shut down"):
        await backend.probe()


async def test_closing_while_the_model_loads_leaves_no_process() -> None:
    others = children()
    backend = MlxLocalBackend(BackendOptions("mlx", "demo"))
    probe = asyncio.create_task(backend.probe())
    await until(lambda: children() != others)
    await backend.aclose()

    with pytest.raises(BackendUnavailable, match="shut down"):
        await probe
    assert children() == others


GATEWAY = """
import asyncio
from unisono.core.ports import BackendOptions
from unisono_adapters.mlx.local import MlxLocalBackend

async def main():
    backend = MlxLocalBackend(BackendOptions("mlx", "demo"))
    await backend.probe()
    print(backend.engine_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_an_engine_does_not_outlive_a_killed_gateway() -> None:
    gateway = subprocess.Popen([sys.executable, "-c", GATEWAY], stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    engine = int(await asyncio.to_thread(gateway.stdout.readline))
    assert alive(engine)
    gateway.kill()
    gateway.wait()
    gateway.stdout.close()

    await until(lambda: not alive(engine))


def alive(process: int) -> bool:
    """Whether it runs; one that ended and waits to be collected does not."""
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
