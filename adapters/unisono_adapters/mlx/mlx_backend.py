"""The `mlx` backend: mlx-lm in its own engine process, token ids in and out.

The first request starts the process. After a crash, the next request starts it again. If the process keeps crashing,
a restart is possible only after a pause, which grows with each crash; requests during a pause fail at once. Importing
this module does not import mlx; only the engine process imports mlx.
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
from unisono_adapters._load_metrics import LOAD_S
from unisono_adapters._probe import Subject, examine
from unisono_adapters._scoring import score_prompt
from unisono_adapters.mlx.process import EngineProcess, Inbox
from unisono_adapters.mlx.wire import BatchLimits, Ready, Reason

# Seconds to wait before a restart. The index is the number of consecutive processes that ended without finishing a
# request; beyond the end of the list, the last value is used.
_PAUSES_S = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 30.0)

# When a request times out and the engine has sent nothing for this number of seconds, the engine is killed. An engine
# that works sends a message every second.
_STALLED_S = 30.0

# Time limit for loading the model, in seconds. Loading a large model from a slow disk takes minutes. The timeouts of a
# request do not include this time.
_LOAD_TIMEOUT_S = 900.0

# Maximum number of tokens in a chunk. Many tokens may be waiting for a slow client.
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
    """Backend for a model folder, the name of a downloaded model, or `demo`.

    `extra` may contain `load_timeout_s` (seconds), `batch` (maximum number of concurrent requests), `waiting` (maximum
    number of queued requests), `prefill_chunk` (tokens per step of reading a prompt) and `prefix_cache_mb` (size of the
    prefix cache; 0 turns it off). Raises ConfigError if one of these values is not a number, or is negative.
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
        """Process id of the engine, or None while the engine does not accept requests."""
        if self._start is None or not self._start.done() or self._start.cancelled() or self._start.exception():
            return None
        engine, _ = self._start.result()
        return engine.pid if engine.lost is None else None

    async def probe(self) -> Probe:
        """Start the engine if it does not run, and probe it.

        Raises BackendUnavailable if the engine cannot start or cannot load its model.
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
        """Generate an answer. Raises ContextTooLong, BackendError, or a subclass of BackendError.

        If prompt and `max_tokens` exceed the context, the answer ends where the context is full, with the finish
        reason "length".
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
        """Return the load of the engine process, including the requests of other gateways.

        Returns None while the process does not run.
        """
        if self._start is None or not self._start.done() or self._start.cancelled() or self._start.exception():
            return None
        engine, _ = self._start.result()
        try:
            async with asyncio.timeout(LOAD_S):
                counted = await engine.count()
        except TimeoutError as error:
            raise BackendTimeout(f"the engine process did not report its load within {LOAD_S:g} seconds") from error
        return Load(counted.running, counted.waiting, counted.tokens)

    async def aclose(self) -> None:
        """Release the engine process; the running requests of this gateway fail.

        May be called repeatedly.
        """
        self._closed = True
        start, self._start = self._start, None
        if start is None:
            return
        # The task may still be waiting for the model to load, which can take minutes.
        start.cancel()
        await asyncio.wait({start})
        if not start.cancelled() and start.exception() is None:
            engine, _ = start.result()
            await engine.stop()

    async def _running(self) -> tuple[EngineProcess, Ready]:
        """Return the running engine and its greeting; start the engine if it does not run.

        Concurrent callers wait for the same start. Cancelling one caller does not cancel the start for the others.
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
            # If every caller is cancelled, nobody awaits the task, and asyncio would log its error as not retrieved.
            self._start.add_done_callback(_retrieve_error)
        start = self._start
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            if not start.cancelled():
                raise  # this caller was cancelled
            raise BackendUnavailable(_SHUT_DOWN) from None

    def _discard(self, start: asyncio.Task[tuple[EngineProcess, Ready]]) -> None:
        """If the process has ended, discard it and set the earliest time of a restart."""
        if start.cancelled():
            self._start = None
            return
        error = start.exception()
        if error is None:
            engine, _ = start.result()
            if engine.lost is None:
                return
            # An engine that finished a request was healthy, so the pauses start at the beginning again.
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
            raise BackendUnavailable(
                f"the model was not loaded within {self._load_timeout_s:g} seconds; raise `load_timeout_s`"
            ) from error
        except BaseException:
            await engine.stop()
            raise
        return engine, greeting


async def _wait(engine: EngineProcess, inbox: Inbox, timeouts: Timeouts, asked_at: float, *, has_started: bool) -> None:
    """Wait until the inbox has new data.

    `asked_at` is the monotonic time of the request. `has_started` is True if the request has already received a chunk.
    Raises BackendTimeout when a time limit of the request expires. If the engine has also sent no message for
    `_STALLED_S` seconds, the engine is killed.
    """
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
    """Take up to `_MAX_CHUNK_TOKENS` received tokens from the inbox and return them as a chunk.

    `prompt_tokens` is the number of prompt tokens to report, and None for every chunk but the first. Raises the error
    of the request only after all received tokens were returned, so that no token that arrived before a crash is lost.
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
    """Retrieve the error of a failed start, so that asyncio does not log it."""
    if not start.cancelled():
        start.exception()


def _number(extra: Mapping[str, object], name: str, default: float) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"{name}: must be a number of at least 0, not {value!r}")
    return value
