"""The `mlx` backend: mlx-lm in an engine process of its own, token ids in and out.

The process is started by the first request and again by the next one after it died; between deaths that come too fast
there is a growing pause in which requests fail at once. Importing this module imports no mlx: only the process does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from unisono.core.generation import (
    CONSTRAINT_KINDS,
    Capabilities,
    Chunk,
    CompletionJob,
    FinishReason,
    Load,
    OutputForm,
    Timeouts,
)
from unisono.core.ports import BackendOptions
from unisono.core.probe import Check, Probe
from unisono.core.symptom import Symptom
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    ConfigError,
    ConstraintRefused,
    ContextTooLong,
    UnisonoError,
)
from unisono_adapters._constraints import refusal
from unisono_adapters._load import LOAD_S
from unisono_adapters._probe import Subject, examine
from unisono_adapters.mlx.jobs import BatchLimits
from unisono_adapters.mlx.process import EngineProcess, Inbox
from unisono_adapters.mlx.wire import Ready, Reason

_PAUSES_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the next start, by how many lives in a row ended without a finished request; the last for all after it."""

_STALLED_S = 30.0
"""An engine that works says so every second; one that was silent this long when a request times out is ended."""

_LOAD_TIMEOUT_S = 900.0
"""A large model on a slow disk takes minutes; this is not part of any request's own timeouts."""

_MOST_AT_ONCE = 256
"""Tokens of a chunk. A client that was slow has many waiting for it."""

_SHUT_DOWN = "the mlx backend is shut down"

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

REMEDIES = {Check.CONSTRAIN: "Install llguidance beside mlx-lm: pip install 'unisono[mlx]'."}

_REFUSALS: Mapping[Reason, type[UnisonoError]] = {
    "context": ContextTooLong,
    "rejected": BackendRejected,
    "constraint": ConstraintRefused,
    "overloaded": BackendOverloaded,
}


class MlxLocalBackend:
    """Satisfies `core.ports.Backend`. `options.model` is a model folder, the name of a snapshot that was downloaded
    before, or `demo`.

    Options in `extra`, all numbers: `load_timeout_s`, `batch` (requests that run at once), `waiting` (that queue up
    beyond those), `prefill_chunk` (tokens) and `prefix_cache_mb` (0 for none). Raises ConfigError for other values.
    """

    def __init__(self, options: BackendOptions) -> None:
        usual = BatchLimits()
        extra = options.extra
        self._model = options.model
        self._load_timeout_s = _number(extra, "load_timeout_s", _LOAD_TIMEOUT_S)
        self._limits = BatchLimits(
            batch=max(1, int(_number(extra, "batch", usual.batch))),
            waiting=int(_number(extra, "waiting", usual.waiting)),
            prefill_chunk=max(16, int(_number(extra, "prefill_chunk", usual.prefill_chunk))),
            prefix_cache_bytes=int(_number(extra, "prefix_cache_mb", usual.prefix_cache_bytes / 2**20) * 2**20),
        )
        self._start: asyncio.Task[tuple[EngineProcess, Ready]] | None = None
        self._failures = 0
        self._not_before = 0.0
        self._trouble = ""
        self._closed = False

    @property
    def engine_pid(self) -> int | None:
        """The engine process, while there is one that can be asked."""
        if self._start is None or not self._start.done() or self._start.cancelled() or self._start.exception():
            return None
        engine, _ = self._start.result()
        return engine.pid if engine.lost is None else None

    async def probe(self) -> Probe:
        """Start the engine when it does not run, and examine it. Raises BackendUnavailable."""
        engine, ready = await self._running()

        async def encode(text: str) -> Sequence[int]:
            return (await engine.encode((text,)))[0]

        constrain = frozenset(CONSTRAINT_KINDS if ready.guides else ())
        claims = Capabilities(
            prompt=OutputForm.IDS,
            output=OutputForm.IDS,
            stop_visible=True,
            context=ready.context,
            logit_bias=True,
            constrain=constrain,
        )
        return await examine(Subject(self.complete, claims, remedies=REMEDIES, encode=encode, trusted=constrain))

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        """Raises ContextTooLong and the BackendError family. A `max_tokens` beyond the context ends at the context,
        as a finish for length."""
        engine, _ = await self._running()
        asked_at = time.monotonic()
        number, inbox = engine.ask(job)
        prompt_tokens: int | None = len(job.prompt.tokens)
        try:
            while True:
                await _wait(engine, inbox, job.timeouts, asked_at, begun=prompt_tokens is None)
                try:
                    chunk = _take(engine, inbox, prompt_tokens)
                except BackendError as error:
                    raise (error if prompt_tokens is None else refusal(job, error)) from error.__cause__
                yield chunk
                if chunk.finish is not None:
                    return
                prompt_tokens = None
        finally:
            engine.drop(number)

    async def load(self) -> Load | None:
        """Of the engine process, and of every gateway it works for; None while it does not run."""
        if self._start is None or not self._start.done() or self._start.cancelled() or self._start.exception():
            return None
        engine, _ = self._start.result()
        try:
            async with asyncio.timeout(LOAD_S):
                counted = await engine.count()
        except TimeoutError as error:
            raise BackendTimeout("the engine process did not say in time what it has to do") from error
        return Load(counted.running, counted.waiting, counted.tokens)

    async def aclose(self) -> None:
        """End the engine process and every request in it. May be called again."""
        self._closed = True
        start, self._start = self._start, None
        if start is None:
            return
        start.cancel()
        await asyncio.wait({start})
        if not start.cancelled() and start.exception() is None:
            engine, _ = start.result()
            await engine.stop()

    async def _running(self) -> tuple[EngineProcess, Ready]:
        """The engine and its greeting. Concurrent callers share one start, and one that leaves does not end it for the
        others."""
        if self._closed:
            raise BackendUnavailable(_SHUT_DOWN)
        if self._start is not None and self._start.done():
            self._bury(self._start)
        if self._start is None:
            pause = self._not_before - time.monotonic()
            if pause > 0:
                raise BackendUnavailable(self._trouble, retry_after_s=pause)
            self._start = asyncio.create_task(self._begin())
            self._start.add_done_callback(_look_at)
        start = self._start
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            if not start.cancelled():
                raise  # this caller left
            raise BackendUnavailable(_SHUT_DOWN) from None

    def _bury(self, start: asyncio.Task[tuple[EngineProcess, Ready]]) -> None:
        """Forget a life that is over, and decide when the next one may begin."""
        if start.cancelled():
            self._start = None
            return
        error = start.exception()
        if error is None:
            engine, _ = start.result()
            if engine.lost is None:
                return
            self._failures = 1 if engine.served else self._failures + 1
            self._trouble = engine.lost
        else:
            self._failures += 1
            self._trouble = str(error)
        self._start = None
        self._not_before = time.monotonic() + _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]

    async def _begin(self) -> tuple[EngineProcess, Ready]:
        engine = await EngineProcess.start(self._model, self._limits)
        try:
            async with asyncio.timeout(self._load_timeout_s):
                greeting = await engine.ready()
        except TimeoutError as error:
            await engine.stop()
            raise BackendUnavailable(f"the model was not loaded within {self._load_timeout_s:g} s") from error
        except BaseException:
            await engine.stop()
            raise
        return engine, greeting


async def _wait(engine: EngineProcess, inbox: Inbox, timeouts: Timeouts, asked_at: float, *, begun: bool) -> None:
    """Until something has arrived. Raises BackendTimeout, and ends an engine that is not even alive."""
    total_left = asked_at + timeouts.total_s - time.monotonic()
    patience = timeouts.silence_s if begun else timeouts.first_token_s
    try:
        async with asyncio.timeout(min(patience, total_left)):
            await inbox.arrived.wait()
    except TimeoutError as error:
        if engine.silent_since(asked_at) > _STALLED_S:
            engine.kill()
        if total_left < patience:
            raise BackendTimeout(f"the answer was not complete within {timeouts.total_s:g} s") from error
        what = "token" if begun else "first token"
        raise BackendTimeout(f"no {what} came within {patience:g} s") from error


def _take(engine: EngineProcess, inbox: Inbox, prompt_tokens: int | None) -> Chunk:
    """What has arrived, as one chunk; of very much, what can be read at once. Tokens that came before an engine died
    are given first."""
    inbox.arrived.clear()
    if not inbox.tokens:
        if inbox.refused is not None:
            if inbox.refused.reason == "failed":
                raise BackendError(inbox.refused.message, symptom=Symptom.SERVER_ERROR)
            raise _REFUSALS[inbox.refused.reason](inbox.refused.message)
        raise BackendUnavailable(engine.lost or "the engine process gave no answer", symptom=Symptom.DISCONNECTED)
    tokens = inbox.tokens[:_MOST_AT_ONCE].tolist()
    del inbox.tokens[:_MOST_AT_ONCE]
    if inbox.tokens or inbox.refused is not None or engine.lost is not None:
        inbox.arrived.set()
    return Chunk(
        tokens=tokens,
        finish=None if inbox.finish is None or inbox.tokens else _FINISH[inbox.finish],
        prompt_tokens=prompt_tokens,
        cached_tokens=None if prompt_tokens is None else inbox.cached,
    )


def _look_at(start: asyncio.Task[tuple[EngineProcess, Ready]]) -> None:
    """A failed start whose callers have all left is no error of the event loop's."""
    if not start.cancelled():
        start.exception()


def _number(extra: Mapping[str, object], name: str, default: float) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"{name}: must be a number that is not negative, not {value!r}")
    return value
