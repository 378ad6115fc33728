"""The `mlx` backend: mlx-lm in its own engine process, token ids in and out.

The first request starts the process, and the next one restarts it after a crash. After frequent crashes there
is a growing pause in which requests fail at once. Importing this module does not import mlx: only the process
does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence

from unisono.core.error_texts import incomplete, no_first_token, silent
from unisono.core.generation import (
    CONSTRAINT_KINDS,
    TEXT_KINDS,
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
from unisono.core.scoring import ScoreJob, TokenScore
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    ConfigError,
    ConstraintRefused,
    ContextTooLong,
    Symptom,
    UnisonoError,
)
from unisono_adapters._constraints import refusal
from unisono_adapters._load import LOAD_S
from unisono_adapters._probe import Subject, examine
from unisono_adapters._scoring import score_prompt
from unisono_adapters.mlx.jobs import BatchLimits
from unisono_adapters.mlx.process import EngineProcess, Inbox
from unisono_adapters.mlx.wire import Ready, Reason

# Pauses before a restart, by consecutive processes without a finished request. The last value is used for all further
# ones.
_PAUSES_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)

# Silence in seconds after which an engine is killed when a request times out. A working engine sends a sign of life
# every second.
_STALLED_S = 30.0

# Limit for loading, in seconds; a large model on a slow disk takes minutes. Not part of any request's own timeouts.
_LOAD_TIMEOUT_S = 900.0

# Maximum number of tokens in a chunk; a slow client may have many waiting.
_MAX_CHUNK_TOKENS = 256

_SHUT_DOWN = "the mlx backend was shut down"

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

REMEDIES = {Check.CONSTRAIN: "Install llguidance beside mlx-lm: pip install llguidance."}

_REFUSALS: Mapping[Reason, type[UnisonoError]] = {
    "context": ContextTooLong,
    "rejected": BackendRejected,
    "constraint": ConstraintRefused,
    "overloaded": BackendOverloaded,
}


class MlxLocalBackend:
    """Backend (`core.ports.Backend`) for a model folder, a downloaded snapshot or `demo`.

    Options in `extra`, all numbers: `load_timeout_s`, `batch` (concurrent requests), `waiting` (queued
    requests), `prefill_chunk` (tokens) and `prefix_cache_mb` (0 for none). Raises ConfigError for other values.
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
        self._restart_at = 0.0
        self._last_error = ""
        self._closed = False

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine while it accepts requests."""
        if self._start is None or not self._start.done() or self._start.cancelled() or self._start.exception():
            return None
        engine, _ = self._start.result()
        return engine.pid if engine.lost is None else None

    async def probe(self) -> Probe:
        """Start the engine if necessary and probe it.

        Raises BackendUnavailable if the engine cannot start or load its model.
        """
        engine, ready = await self._running()

        async def encode(text: str) -> Sequence[int]:
            return (await engine.encode((text,)))[0]

        constrain = frozenset((*CONSTRAINT_KINDS, *TEXT_KINDS) if ready.guides else ())
        claims = Capabilities(
            prompt=OutputForm.IDS,
            output=OutputForm.IDS,
            stop_visible=True,
            context=ready.context,
            logit_bias=True,
            logprobs=True,
            prompt_logprobs=True,
            scores=True,
            constrain=constrain,
        )
        subject = Subject(self.complete, claims, remedies=REMEDIES, encode=encode, trusted=constrain, score=self.score)
        return await examine(subject)

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        """Generate an answer. Raises ContextTooLong and the BackendError family.

        A `max_tokens` beyond the context ends at the context with a finish for length.
        """
        engine, _ = await self._running()
        asked_at = time.monotonic()
        number, inbox = engine.start_generation(job)
        prompt_tokens: int | None = len(job.prompt.tokens)
        try:
            while True:
                await _wait(engine, inbox, job.timeouts, asked_at, has_started=prompt_tokens is None)
                try:
                    chunk = _to_chunk(engine, inbox, prompt_tokens)
                except BackendError as error:
                    raise (error if prompt_tokens is None else refusal(job, error)) from error.__cause__
                yield chunk
                if chunk.finish is not None:
                    return
                prompt_tokens = None
        finally:
            engine.drop(number)

    async def score(self, job: ScoreJob) -> Sequence[TokenScore | None]:
        return await score_prompt(self.complete, job)

    async def load(self) -> Load | None:
        """Return the load of the engine process from all gateways; None while it does not run."""
        if self._start is None or not self._start.done() or self._start.cancelled() or self._start.exception():
            return None
        engine, _ = self._start.result()
        try:
            async with asyncio.timeout(LOAD_S):
                counted = await engine.count()
        except TimeoutError as error:
            raise BackendTimeout(f"the engine process did not report its load within {LOAD_S:g} s") from error
        return Load(counted.running, counted.waiting, counted.tokens)

    async def aclose(self) -> None:
        """End the engine process and all of its requests. Repeatable."""
        self._closed = True
        start, self._start = self._start, None
        if start is None:
            return
        # The start may still be loading the model, which takes minutes.
        start.cancel()
        await asyncio.wait({start})
        if not start.cancelled() and start.exception() is None:
            engine, _ = start.result()
            await engine.stop()

    async def _running(self) -> tuple[EngineProcess, Ready]:
        """Return the engine and its greeting.

        Concurrent callers share one start; cancelling one caller does not cancel it for the others.
        """
        if self._closed:
            raise BackendUnavailable(_SHUT_DOWN)
        if self._start is not None and self._start.done():
            self._discard(self._start)
        if self._start is None:
            pause = self._restart_at - time.monotonic()
            if pause > 0:
                raise BackendUnavailable(self._last_error, retry_after_s=pause)
            self._start = asyncio.create_task(self._start_engine())
            # Every caller may be cancelled, and asyncio logs an error that was never retrieved.
            self._start.add_done_callback(_retrieve_error)
        start = self._start
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            if not start.cancelled():
                raise  # this caller was cancelled
            raise BackendUnavailable(_SHUT_DOWN) from None

    def _discard(self, start: asyncio.Task[tuple[EngineProcess, Ready]]) -> None:
        """Discard an ended process and determine the earliest time of a restart."""
        if start.cancelled():
            self._start = None
            return
        error = start.exception()
        if error is None:
            engine, _ = start.result()
            if engine.lost is None:
                return
            # An engine that finished a request was healthy, so the pause starts small again.
            self._failures = 1 if engine.served else self._failures + 1
            self._last_error = engine.lost
        else:
            self._failures += 1
            self._last_error = str(error)
        self._start = None
        self._restart_at = time.monotonic() + _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]

    async def _start_engine(self) -> tuple[EngineProcess, Ready]:
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


async def _wait(engine: EngineProcess, inbox: Inbox, timeouts: Timeouts, asked_at: float, *, has_started: bool) -> None:
    """Wait for data. Raises BackendTimeout, and kills an engine without a sign of life."""
    total_left = asked_at + timeouts.total_s - time.monotonic()
    patience = timeouts.silence_s if has_started else timeouts.first_token_s
    try:
        async with asyncio.timeout(min(patience, total_left)):
            await inbox.arrived.wait()
    except TimeoutError as error:
        # The engine sends pulses even while it is busy, so silence means that it hangs.
        if engine.silent_since(asked_at) > _STALLED_S:
            engine.kill()
        if total_left < patience:
            raise BackendTimeout(incomplete(timeouts)) from error
        text = silent if has_started else no_first_token
        raise BackendTimeout(text("the engine process", timeouts)) from error


def _to_chunk(engine: EngineProcess, inbox: Inbox, prompt_tokens: int | None) -> Chunk:
    """Return the received data as one chunk of limited size.

    Tokens received before a crash are returned first.
    """
    inbox.arrived.clear()
    if not inbox.tokens:
        if inbox.refused is not None:
            if inbox.refused.reason == "failed":
                raise BackendError(inbox.refused.message, symptom=Symptom.SERVER_ERROR)
            raise _REFUSALS[inbox.refused.reason](inbox.refused.message)
        raise BackendUnavailable(engine.lost or "the engine process did not answer", symptom=Symptom.DISCONNECTED)
    tokens = inbox.tokens[:_MAX_CHUNK_TOKENS].tolist()
    del inbox.tokens[:_MAX_CHUNK_TOKENS]
    logprobs, inbox.logprobs = inbox.logprobs[:_MAX_CHUNK_TOKENS], inbox.logprobs[_MAX_CHUNK_TOKENS:]
    prompt_logprobs, inbox.prompt_logprobs = inbox.prompt_logprobs, []
    if inbox.tokens or inbox.refused is not None or engine.lost is not None:
        inbox.arrived.set()
    return Chunk(
        tokens=tokens,
        finish=None if inbox.finish is None or inbox.tokens else _FINISH[inbox.finish],
        prompt_tokens=prompt_tokens,
        cached_tokens=None if prompt_tokens is None else inbox.cached,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _retrieve_error(start: asyncio.Task[tuple[EngineProcess, Ready]]) -> None:
    """Retrieve the error of a failed start, so that the event loop does not report it."""
    if not start.cancelled():
        start.exception()


def _number(extra: Mapping[str, object], name: str, default: float) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"{name}: must be a number of at least 0, not {value!r}")
    return value
